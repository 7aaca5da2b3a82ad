"""Pages and charts of reports: nothing that they are given becomes markup, and what is drawn stays in the picture."""

import re
from html import unescape
from itertools import pairwise

import pytest

from diptych.report.pages import Report, Section, render
from diptych.report.plots import Layer, Line, LineChart, Rule, Scale, StackedChart, linear_scale
from diptych.report.text import Table

HOSTILE = "<b onload='x'>\"&"
SECONDS = Scale(0.0, 10.0, HOSTILE)


def chart(rules: tuple[Rule, ...] = (), y_unit: str = "") -> LineChart:
    lines = [Line(HOSTILE, [(0.0, 1.0), (10.0, 3.0)], "s-prefill", markers=True), Line("", [(0.0, 2.0)], "s-mixed")]
    return LineChart(HOSTILE, HOSTILE, HOSTILE, lines, SECONDS, linear_scale([3.0], y_unit), rules)


def report(*sections: Section) -> Report:
    return Report(
        maker=HOSTILE,
        title=HOSTILE,
        lead=HOSTILE,
        warnings=[(HOSTILE, HOSTILE)],
        cards=[(HOSTILE, HOSTILE)],
        sections=sections,
        notes=[HOSTILE],
        command=f"diptych {HOSTILE} --a {HOSTILE}",
        details=(HOSTILE, HOSTILE),
        foot=HOSTILE,
    )


def test_nothing_that_a_page_is_given_becomes_markup() -> None:
    stacked = StackedChart(HOSTILE, HOSTILE, HOSTILE, [Layer(HOSTILE, [0.5], "s-decode")] * 2, [0.0, 1.0], HOSTILE)
    table = Table(HOSTILE, ("", HOSTILE), ((HOSTILE, HOSTILE),))
    charts = [chart((Rule(4.0, HOSTILE, "s-prefill"),), HOSTILE), stacked]
    text = render(report(Section(heading=HOSTILE, charts=charts, tables=[table], narrow=[table])))
    assert "<b" not in text.replace("<body>", "") and "<script" not in text
    assert unescape(text).count(HOSTILE) > 35
    assert render(report()) != text


def test_the_same_report_gives_the_same_page() -> None:
    whole = report(Section(heading="Charts", charts=[chart()]))
    assert render(whole) == render(whole)


def test_a_command_is_shown_as_it_was_typed_and_breaks_between_its_options() -> None:
    text = render(report())
    shown = re.search(r"<pre>(diptych.*?)</pre>", text)
    assert shown is not None
    assert unescape(re.sub(r"<[^>]*>", "", shown[1])) == f"diptych {HOSTILE} --a {HOSTILE}"
    assert '<span class="word">--a</span>' in shown[1]


def test_points_that_do_not_follow_one_another_are_dots_without_a_line_between_them() -> None:
    line = Line("gaps", [(0.0, 1.0), (2.0, 9.0), (2.1, 1.0)], "s-mixed", is_joined=False)
    drawn = LineChart("t", "c", "f", [line], SECONDS, linear_scale([9.0], "")).svg()
    assert drawn.count('<circle class="dot s-mixed"') == 3 and '<path class="line' not in drawn


def test_the_grid_lies_under_the_bands() -> None:
    drawn = StackedChart("t", "c", "f", [Layer("a", [0.5], "s-decode")], [0.0, 1.0], "seconds").svg()
    assert drawn.index('class="grid-line"') < drawn.index('class="band')


def test_a_legend_is_shown_when_there_is_something_to_tell_apart() -> None:
    several = LineChart("t", "c", "f", [Line(name, [(0, 0)], "s-whole") for name in "ab"], SECONDS, SECONDS)
    assert '<ul class="legend">' in render(report(Section(heading="h", charts=[several])))
    assert '<ul class="legend">' not in render(report(Section(heading="h", charts=[chart()])))


@pytest.mark.parametrize("places", [(0.0,), (10.0,), (5.0,), (0.0, 0.1), (9.8, 9.9), (5.0, 5.2), (0.0, 10.0)])
@pytest.mark.parametrize("unit", ["", "milliseconds"])
def test_words_of_rules_are_inside_the_picture_and_do_not_touch(places: tuple[float, ...], unit: str) -> None:
    rules = tuple(Rule(place, "TTFT <= 2s", "s-prefill") for place in places)
    drawn = chart(rules, unit).svg()
    box = re.search(r'viewBox="0 (\S+) (\d+) (\d+)"', drawn)
    assert box is not None
    top, width = float(box[1]), float(box[2])
    words = re.findall(r'<text class="note (\w+)" x="(\S+)" y="(\S+)">([^<]*)<', drawn)
    letters = 7.0 * len("TTFT <= 2s")
    spans = sorted(
        (float(x) - letters, float(x)) if anchor == "end" else (float(x), float(x) + letters)
        for anchor, x, _, _ in words
    )
    assert len(spans) == len(places)
    assert spans[0][0] >= 0 and spans[-1][1] <= width
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    heights = [float(y) for _, _, y, _ in words] + [
        float(y) for y in re.findall(r'class="unit" x="4" y="(\S+)"', drawn)
    ]
    assert min(heights) > top + 8
    assert not unit or min(heights) + 12 <= max(heights)

"""The rule that plan, advise and chapter 6 of the guide share."""

import pytest

from diptych.advisor.layout_preference import LayoutOffer, preferred


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        pytest.param([LayoutOffer("split", 1.0, 40), LayoutOffer("chunked", 1.0, 39)], "chunked", id="a tie"),
        pytest.param(
            [LayoutOffer("split", 1.0, 50), LayoutOffer("chunked", 1.0, 39)], "split", id="it earns its place"
        ),
        pytest.param(
            [LayoutOffer("split", 1.0, 50, headroom=2.5), LayoutOffer("chunked", 0.95, 26, headroom=1.3)],
            "chunked",
            id="the simpler one holds the load at ease",
        ),
        pytest.param(
            [LayoutOffer("split", 1.0, 50, 4.0, 2.5), LayoutOffer("chunked", 1.0, 26, 8.0, 1.3)],
            "split",
            id="at ease, and for half the cost",
        ),
        pytest.param(
            [LayoutOffer("unified", 0.5, 60, 1.0, 0.6), LayoutOffer("split", 0.93, 21, 4.0, 1.05)],
            "split",
            id="it alone holds the load",
        ),
        pytest.param([LayoutOffer("unified", 0.2), LayoutOffer("split", 0.6)], "split", id="none holds it"),
        pytest.param([LayoutOffer("unified", 0.0), LayoutOffer("chunked", 0.0)], "chunked", id="nothing finished"),
    ],
)
def test_a_more_complex_shape_must_earn_its_place(offers: list[LayoutOffer], expected: str) -> None:
    assert offers[preferred(offers, 0.9)].shape == expected

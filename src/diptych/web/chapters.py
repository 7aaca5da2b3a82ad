"""The chapters of the guide: their order, their words around the panels, and what computes each panel.

Owns the list and the rendering of pages. panels/ computes the panels; guide_app.py serves them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from diptych.report.pages import environment
from diptych.web.panels import choose, chunked, disaggregated, transfer
from diptych.web.panels import interference_panel as interference
from diptych.web.panels import roofline_panel as roofline
from diptych.web.panels.machine import catalogue
from diptych.web.panels.query import Query, controls

PAGES = Path(__file__).parent / "pages"
STATIC = Path(__file__).parent / "static"
IMPORT = re.compile(r'^import .* from "(\.\.?/[^"]+)";$', re.MULTILINE)

Panel = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Chapter:
    """name: in addresses. panel: None where its answer is a stream."""

    name: str
    title: str
    about: str
    query: type[Query]
    panel: Panel | None


CHAPTERS = (
    Chapter(
        "phases",
        "Two phases, one roof",
        "Why prefill and decode need different things from a GPU.",
        roofline.RooflineQuery,
        roofline.panel,
    ),
    Chapter(
        "interference",
        "Interference",
        "What a long prompt does to the other requests of its worker.",
        interference.InterferenceQuery,
        interference.panel,
    ),
    Chapter(
        "chunked",
        "Chunked prefill",
        "Prompts in pieces, between the tokens of running streams.",
        chunked.ChunkedQuery,
        chunked.panel,
    ),
    Chapter(
        "disaggregated",
        "Two pools",
        "Prefill and decode on workers of their own, and what happens when one dies.",
        disaggregated.DisaggregatedQuery,
        disaggregated.panel,
    ),
    Chapter(
        "transfer",
        "The KV transfer",
        "How large the KV cache is, how long it travels, and when that hurts.",
        transfer.TransferQuery,
        transfer.panel,
    ),
    Chapter(
        "choose",
        "When to use what",
        "Your load, your objectives, your GPUs: all three shapes, simulated.",
        choose.ChooseQuery,
        None,
    ),
)
BY_NAME = {chapter.name: chapter for chapter in CHAPTERS}


@cache
def page(name: str, *, live: bool = False) -> str:
    """The HTML of ``index``, ``compare`` or a chapter. live: with a way to the live page of the same server."""
    chapter = BY_NAME.get(name)
    number = CHAPTERS.index(chapter) if chapter else -1
    template = environment(PAGES).get_template(f"{name}.html")
    script = "compare/compare.js" if name == "compare" else f"guide/{name}.js"
    return template.render(
        chapters=CHAPTERS,
        chapter=chapter,
        number=number + 1,
        before=CHAPTERS[number - 1] if number > 0 else None,
        after=CHAPTERS[number + 1] if 0 <= number < len(CHAPTERS) - 1 else None,
        controls=controls(chapter.query) if chapter else {},
        catalogue=catalogue(),
        live=live,
        script=script,
        modules=imported_modules(script),
    )


def imported_modules(script: str) -> list[str]:
    """Modules under ``static/`` that a script imports, at any depth, nearest first: a page preloads them all, so that
    the browser does not find them one after the other."""
    found = [script]
    for name in found:
        folder = STATIC.joinpath(name).parent
        for relative in IMPORT.findall(STATIC.joinpath(name).read_text()):
            module = folder.joinpath(relative).resolve().relative_to(STATIC.resolve()).as_posix()
            if module not in found:
                found.append(module)
    return found[1:]

"""A diagnosis as a report page: one self-contained file (report/pages.py lays it out)."""

import json
from collections.abc import Sequence

from diptych.diagnosis.diagnosis import Diagnosis
from diptych.diagnosis.diagnosis_words import (
    advice_table,
    as_json,
    cause_table,
    headline,
    sentences,
    waterfall_table,
)
from diptych.diagnosis.engine_advice import Advice
from diptych.report import pages
from diptych.report.pages import Report, Section


def render(diagnosis: Diagnosis, advice: Sequence[Advice], command: str) -> str:
    """The whole file as text."""
    falls = [waterfall_table(waterfall) for waterfall in diagnosis.waterfalls]
    sections = [Section(heading="Where the time goes", tables=falls)] if falls else []
    if diagnosis.causes:
        sections.insert(0, Section(heading="Causes", tables=[cause_table(diagnosis)]))
    if advice:
        sections.append(Section(heading="Advice", tables=[advice_table(advice)]))
    missed = "-" if diagnosis.miss_share is None else f"{diagnosis.miss_share:.1%}"
    report = Report(
        maker="Diptych diagnosis",
        title=diagnosis.sentence,
        lead=headline(diagnosis),
        cards=[
            ("Verdict", diagnosis.verdict),
            ("Requests", f"{diagnosis.num_requests:,}"),
            ("Missed objectives", missed),
            *[(f"Mean {fall.latency.upper()}, ms", f"{fall.measured_s * 1000:,.1f}") for fall in diagnosis.waterfalls],
        ],
        sections=sections,
        notes=[f"{said}." for said in sentences(diagnosis, advice)],
        command=command,
        details=("The diagnosis as data", json.dumps(as_json(diagnosis, advice), indent=2)),
        foot="Seconds of a request are exact where every request was seen, else estimated from sums and buckets.",
    )
    return pages.render(report)

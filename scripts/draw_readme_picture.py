"""Draw docs/images/diptych.svg: what a long prompt does to running streams under two presets, as the simulator has it.

usage: python scripts/draw_readme_picture.py
"""

from pathlib import Path

from diptych.control.config import CacheConfig, EngineConfig, PresetName, shape_preset
from diptych.control.events import StepFinished
from diptych.control.slo import NS_PER_MS, Slo
from diptych.report.pages import picture
from diptych.report.plots import ChartLane, LaneChart, Scale
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.event_log import EventLog
from diptych.simulation.run import simulate_with_log
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "diptych.svg"
LABEL = (
    "Unified: one long prefill freezes every stream. Chunked: the prompt is cut into pieces that fit beside the "
    "streams."
)
NUM_STREAMS = 3
PROMPT_TOKENS, SHORT_TOKENS, OUTPUT_TOKENS = 1500, 8, 60
SLO = Slo(tpot_ns=30 * NS_PER_MS)
COST = StepTermsCost(12.0 * NS_PER_MS, 0.08 * NS_PER_MS, 0.0, 1.0 * NS_PER_MS, 0.0)
BEGIN_MS, ARRIVAL_MS, SHOWN_MS = 60.0, 120, 450.0
LEGEND = (("prefill", "s-prefill"), ("decode", "s-decode"), ("a stream stands still", "s-stall"))
SHAPES: tuple[tuple[PresetName, str, str], ...] = (
    (
        "unified",
        "Unified: prefill first",
        "one long prompt, and every running stream stands still until it is read",
    ),
    (
        "chunked",
        "Chunked by time",
        "each step takes as much of the prompt as the streams' objective allows",
    ),
)


def log_of(shape: PresetName) -> EventLog:
    """Streams that run, and a long prompt that comes: every step of one simulated worker."""
    cache = CacheConfig(num_blocks=1024, block_size=16)
    scenario = Scenario(
        engine=EngineConfig(cache, shape_preset(shape), SLO, 16_384),
        cost=COST,
        workload=[
            *(_request(0, SHORT_TOKENS) for _ in range(NUM_STREAMS)),
            _request(ARRIVAL_MS, PROMPT_TOKENS),
        ],
        record_events=True,
        fast_forward=False,
    )
    _, log = simulate_with_log(scenario)
    assert log is not None
    return log


def _request(at_ms: int, prompt_tokens: int) -> RequestSpec:
    return RequestSpec(arrival_ns=at_ms * NS_PER_MS, prompt_tokens=prompt_tokens, output_tokens=OUTPUT_TOKENS, slo=SLO)


def lanes_of(log: EventLog) -> list[ChartLane]:
    """A lane for each stream, and one for the long prompt, from BEGIN_MS on."""
    streams: list[tuple[float, float, str]] = []
    long: list[tuple[float, float, str]] = []
    for _, event in log:
        if not isinstance(event, StepFinished):
            continue
        each_ns = (event.end_ns - event.start_ns) // event.num_steps
        for number in range(event.num_steps):
            start = (event.start_ns + number * each_ns) / NS_PER_MS - BEGIN_MS
            end = min(SHOWN_MS, start + each_ns / NS_PER_MS)
            if start < 0 or start >= SHOWN_MS:
                continue
            if event.prefills:
                long.append((start, end, "s-prefill"))
            elif event.num_decodes > NUM_STREAMS:
                long.append((start, end, "s-decode"))
            streams.append((start, end, "s-decode" if event.num_decodes else "s-stall"))
    return [
        *(ChartLane(f"stream {number}", streams) for number in range(1, NUM_STREAMS + 1)),
        ChartLane("long prompt", long),
    ]


def draw() -> str:
    """The picture, as text."""
    x = Scale(0.0, SHOWN_MS, "milliseconds")
    charts = [
        LaneChart(title, caption, caption, lanes_of(log_of(shape)), x, LEGEND) for shape, title, caption in SHAPES
    ]
    return picture(charts, LABEL)


if __name__ == "__main__":
    PICTURE.write_text(draw())

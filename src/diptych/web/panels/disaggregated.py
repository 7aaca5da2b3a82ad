"""Chapter 4: prefill and decode on separate workers, one pool each, and what happens when a worker dies.

Owns the mixed load of the page. Placement, handoff and recovery are diptych.control's, as in the server.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import settings_from
from diptych.web.panels.cast import Cast, requests_of_kind, scenario_of, worst
from diptych.web.panels.formula import Formula, formula, milliseconds, percent, scaled
from diptych.web.panels.machine import Machine, about, machine
from diptych.web.panels.query import Query
from diptych.workload.synthetic import SyntheticWorkload

MAX_WORKERS = 4
NUM_REQUESTS = 32
LONG_SHARE = 0.2
DOWN_S = 0.5  # a killed worker is back after that long
IDLE_NS = 50 * NS_PER_MS  # a worker without a step for so long has nothing to do
NOBODY = "nobody"

Victim = Literal[
    "nobody", "prefill-1", "prefill-2", "prefill-3", "prefill-4", "decode-1", "decode-2", "decode-3", "decode-4"
]


class DisaggregatedQuery(Query, frozen=True, kw_only=True):
    """prefill, decode: workers. kill: the worker to kill, by its name on the page, and ``kill_ms`` when. rate:
    requests a second; one in five brings a document of ``document`` tokens."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    prefill: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    link: str = "ib400"
    disaggregate: Literal["auto", "always"] = "always"
    rate: Annotated[float, Meta(ge=1, le=80)] = 16.0
    document: Annotated[int, Meta(ge=256, le=16384)] = 6000
    kill: Victim = "nobody"
    kill_ms: Annotated[float, Meta(ge=0, le=10_000)] = 600.0
    ttft_ms: Annotated[float, Meta(ge=10, le=60_000)] = 500.0
    tpot_ms: Annotated[float, Meta(ge=1, le=1000)] = 8.0
    seed: Annotated[int, Meta(ge=0, le=9999)] = 1


def panel(query: DisaggregatedQuery) -> dict[str, Any]:
    """``play`` with two pools, ``together`` the same load on as many chunked workers, ``measures`` of both. Raises
    ConfigError."""
    chosen = machine(query.model, query.hardware)
    num_workers = query.prefill + query.decode
    victim(query)
    people = load(chosen, query)
    play = people.play(_scenario(chosen, query, {"prefill": query.prefill, "decode": query.decode, "link": query.link}))
    together = people.play(_scenario(chosen, query, {"both": num_workers, "link": query.link}, disaggregate="never"))
    data, other = play.to_json(), together.to_json()
    measures = {"apart": measure(data), "together": measure(other)}
    return {
        "machine": about(chosen),
        "play": data,
        "together": other,
        "measures": measures,
        "formulas": _formulas(chosen, query, data),
        "notes": _notes(query, data, measures),
    }


def victim(query: DisaggregatedQuery) -> int | None:
    """The number of the worker to kill; None if none is. Raises ConfigError when there is no such worker."""
    if query.kill == NOBODY:
        return None
    role, _, place = query.kill.partition("-")
    there = query.prefill if role == "prefill" else query.decode
    if int(place) > there:
        raise ConfigError(
            f"kill is {query.kill!r}; there {'is' if there == 1 else 'are'} {there} {role} worker{'s' * (there > 1)}",
            param="kill",
        )
    return int(place) - 1 + (query.prefill if role == "decode" else 0)


def load(chosen: Machine, query: DisaggregatedQuery) -> Cast:
    """Chats and documents as the load generator draws them, from the seed."""
    chat = {"prompt": {"kind": "lognormal", "mean": 300, "sigma": 0.5, "max": 1000}, "output": {"mean": 60}}
    document = {"prompt": {"mean": query.document}, "output": {"mean": 30}}
    settings = settings_from(
        {
            "model": chosen.model.name,
            "hardware": chosen.hardware.name,
            "tensor_parallel": chosen.num_gpus,
            "weight_bits": chosen.weight_bits,
            "seed": query.seed,
            "workload": {
                "rate": query.rate,
                "num_requests": NUM_REQUESTS,
                "slo": {"ttft_ms": query.ttft_ms, "tpot_ms": query.tpot_ms},
                "classes": [
                    {"kind": "chat", "share": 1 - LONG_SHARE, "lengths": chat},
                    {"kind": "document", "share": LONG_SHARE, "lengths": document},
                ],
            },
        }
    )
    specs = tuple(SyntheticWorkload(settings.workload, settings.seed))
    counts: dict[str, int] = {}
    names = []
    for spec in specs:
        counts[spec.kind] = counts.get(spec.kind, 0) + 1
        names.append(f"{spec.kind} {counts[spec.kind]}")
    return Cast(tuple(names), specs)


def _scenario(chosen: Machine, query: DisaggregatedQuery, pools: dict[str, Any], **settings: Any) -> Scenario:
    faults = []
    if (number := victim(query)) is not None:
        faults = [{"kind": "crash", "replica": number, "at_s": query.kill_ms / 1000, "duration_s": DOWN_S}]
    return scenario_of(
        chosen,
        shape="chunked",
        pools=pools,
        faults=faults,
        seed=query.seed,
        routing="kv_aware",
        **{"disaggregate": query.disaggregate, **settings},
    )


def measure(data: dict[str, Any]) -> dict[str, Any]:
    """What the clients felt."""
    requests = data["requests"]
    done = [request for request in requests if request["completed"]]
    met = sum(request["slo_met"] is True for request in requests)
    ttfts = sorted(request["ttft_ms"] for request in done)
    return {
        "attainment": met / len(requests) if requests else 0.0,
        "met": met,
        "requests": len(requests),
        "completed": len(done),
        "goodput_rps": met / data["end_ns"] * NS_PER_S if data["end_ns"] else 0.0,
        "gap_ms": worst([request["longest_gap_ms"] for request in done]),
        "handoff_ms": worst([request["handoff_pause_ms"] for request in done]),
        "stalled_ms": worst([request["stalled_ms"] for request in done]),
        "tpot_ms": worst([request["tpot_ms"] for request in done]),
        "ttft_median_ms": ttfts[len(ttfts) // 2] if ttfts else None,
        "ttft_ms": worst(ttfts),
        "ttft_chat_ms": worst([request["ttft_ms"] for request in requests_of_kind(data, "chat")]),
        "ttft_document_ms": worst([request["ttft_ms"] for request in requests_of_kind(data, "document")]),
    }


def _back(query: DisaggregatedQuery, number: int, data: dict[str, Any]) -> list[str]:
    """When the killed worker was there again, and when it had something to do."""
    back_ns = round((query.kill_ms + DOWN_S * 1000) * NS_PER_MS)
    steps = [record for record in data["records"] if record["kind"] == "step"]
    own = [step["start_ns"] for step in steps if step["worker"] == number and step["start_ns"] >= back_ns]
    if not own or not any(step["end_ns"] > back_ns for step in steps):
        return []
    text = f"A new process took its place at {milliseconds(back_ns / NS_PER_MS)}"
    if own[0] - back_ns < IDLE_NS:
        return [f"{text} and had work at once."]
    return [
        f"{text}, but had its first step at {milliseconds(own[0] / NS_PER_MS)}: what the others were given meanwhile "
        "stays with them to its end, and what came later had to wait behind it."
    ]


def _formulas(chosen: Machine, query: DisaggregatedQuery, data: dict[str, Any]) -> list[Formula]:
    transfers = [record for record in data["records"] if record["kind"] == "transfer"]
    lines: list[Formula] = []
    if transfers:
        largest = max(transfers, key=lambda record: record["num_bytes"])
        per_token = chosen.model.kv_bytes_per_token()
        took_ns, exposed_ns = largest["end_ns"] - largest["start_ns"], largest["exposed_ns"]
        lines.append(
            formula(
                f"KV of {largest['request_id']}",
                "prompt tokens × bytes per token",
                f"{largest['num_bytes'] // per_token:,} × {scaled(per_token, 'B')}",
                scaled(largest["num_bytes"], "B"),
            )
        )
        lines.append(
            formula(
                "of its transfer, not hidden behind the prefill",
                "end of the transfer − end of the prefill",
                f"{milliseconds(took_ns / 1e6)} of transfer, {milliseconds((took_ns - exposed_ns) / 1e6)} meanwhile",
                milliseconds(exposed_ns / 1e6),
            )
        )
    slowest = max(
        (request for request in data["requests"] if request["completed"]),
        key=lambda request: request["ttft_ms"],
        default=None,
    )
    if slowest:
        lines.append(
            formula(
                f"time to first token of {slowest['name']} (the slowest)",
                "queue + prefill",
                f"{milliseconds(slowest['queue_ms'])} + {milliseconds(slowest['prefill_ms'])}",
                milliseconds(slowest["ttft_ms"]),
            )
        )
    return lines


def _notes(query: DisaggregatedQuery, data: dict[str, Any], measures: dict[str, Any]) -> list[str]:
    apart, together = measures["apart"], measures["together"]
    workers = query.prefill + query.decode
    notes = [
        f"{query.prefill} prefill + {query.decode} decode: {apart['met']} of {apart['requests']} requests meet their "
        f"objectives ({percent(apart['attainment'])}). {workers} chunked workers that do both: {together['met']} "
        f"({percent(together['attainment'])}).",
        f"The longest gap in a stream: {milliseconds(apart['gap_ms'] or 0)} with separate pools, "
        f"{milliseconds(together['gap_ms'] or 0)} with chunked workers."
        + (
            f" Not in it: the pause after the first token of each stream, while its KV cache is handed over, at most "
            f"{milliseconds(apart['handoff_ms'])}."
            if apart["handoff_ms"]
            else ""
        ),
    ]
    if (number := victim(query)) is not None:
        again = sum(record["kind"] == "request" and record.get("epoch", 0) > 0 and record["what"] == "first_token"
                    for record in data["records"])  # fmt: skip
        name = query.kill.replace("-", " ").capitalize()
        notes.append(
            f"{name} was killed at {milliseconds(query.kill_ms)}: {apart['completed']} of {apart['requests']} answers "
            f"were completed all the same, {again} of them after another attempt with the tokens that the client "
            "already had. Its streams paused; they did not break."
        )
        notes += _back(query, number, data)
    elif apart["attainment"] < together["attainment"]:
        notes.append(
            "Here the pools are no gain: one of them has too much to do while the other idles. Add a worker to the "
            "busy one, or change the load."
        )
    return notes

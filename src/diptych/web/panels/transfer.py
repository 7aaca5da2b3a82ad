"""Chapter 5: how large the KV cache of a prompt is, and how long it travels.

Owns the arithmetic of one transfer. Sizes of models come from the catalogue, rates of links from fleet/links.py,
durations of steps from the simulator's cost model.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from diptych.control.config import QuantizeName
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.fleet.links import GB, LINKS
from diptych.simulation.models import ModelSpec
from diptych.web.panels.formula import Formula, duration, formula, percent, scaled, significant
from diptych.web.panels.machine import TEXTS, Machine, about, machine, step_ns
from diptych.web.panels.query import Query

# One direction on paper, bytes per second: what a name promises. (NVLink's usual figures count both directions.)
ON_PAPER = {
    "pcie4": 32 * GB,
    "pcie5": 64 * GB,
    "eth100": 12_500_000_000,
    "eth200": 25 * GB,
    "eth400": 50 * GB,
    "ib100": 12_500_000_000,
    "ib200": 25 * GB,
    "ib400": 50 * GB,
    "nvlink3": 300 * GB,
    "nvlink4": 450 * GB,
    "nvlink5": 900 * GB,
}
BYTES_OF = {"fp32": 4, "bf16": 2, "fp8": 1}
# Bits per value of the codec with its scales, K and V averaged (9 and 8.5; 5 and 4.5): runtime/transfer/codec.
CODEC_BITS = {"int8": 8.75, "int4": 4.75}
DEEPSEEK_RANK, DEEPSEEK_ROPE = 512, 64  # numbers per token and layer of DeepSeek-V2 and V3

AttentionKind = Literal["own", "mha", "gqa", "mqa", "mla"]


class TransferQuery(Query, frozen=True, kw_only=True):
    """attention: as the model has it, or as if it had one KV head per head, ``kv_heads`` of them, one, or a latent.
    rate: what a link carries in practice or on paper; gbytes above 0 replaces it (GB/s). batch: sequences in the decode
    step that the transfer is compared with."""

    model: str = "llama-3.1-70b"
    hardware: str = "h100-sxm"
    tokens: Annotated[int, Meta(ge=16, le=131_072)] = 8192
    attention: AttentionKind = "own"
    kv_heads: Literal[1, 2, 4, 8, 16, 32] = 8
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    codec: QuantizeName = "none"
    link: str = "ib400"
    rate: Literal["usable", "paper"] = "usable"
    gbytes: Annotated[float, Meta(ge=0, le=2000)] = 0.0
    streamed: Literal["on", "off"] = "on"
    chunk: Annotated[int, Meta(ge=64, le=8192)] = 1024
    batch: Annotated[int, Meta(ge=1, le=256)] = 32


@dataclass(frozen=True, slots=True)
class Streamed:
    """Times at which each chunk is computed, begins to be sent and has arrived, in nanoseconds from the start of the
    prefill."""

    computed_ns: tuple[int, ...]
    sending_ns: tuple[int, ...]
    arrived_ns: tuple[int, ...]

    @property
    def exposed_ns(self) -> int:
        """Time from the end of the prefill to the arrival of the last chunk."""
        return self.arrived_ns[-1] - self.computed_ns[-1]


def kv_width(model: ModelSpec, attention: AttentionKind, kv_heads: int) -> int:
    """Numbers cached per token and layer. Raises ConfigError when the heads cannot be grouped like that."""
    if attention == "own":
        return model.kv_width
    if attention == "mla":
        return model.kv_width if model.mla else DEEPSEEK_RANK + DEEPSEEK_ROPE
    heads = {"mha": model.heads, "mqa": 1}.get(attention, kv_heads)
    if model.heads % heads:
        raise ConfigError(
            f"kv_heads is {heads}; it must divide the {model.heads} heads of {model.name}", param="kv_heads"
        )
    return 2 * heads * model.head_dim


def kv_bytes(model: ModelSpec, width: int, num_tokens: int, bits: float) -> int:
    """layers * numbers per token and layer * tokens * bits / 8."""
    return round(model.layers * width * num_tokens * bits / 8)


def link_rate(query: TransferQuery) -> tuple[int, int]:
    """(bytes per second, latency in ns). Raises ConfigError."""
    if query.link not in LINKS:
        raise ConfigError(f"link is {query.link!r}; one of {', '.join(LINKS)}", param="link")
    usable, latency_ns = LINKS[query.link]
    if query.gbytes > 0:
        return round(query.gbytes * GB), latency_ns
    return (ON_PAPER.get(query.link, usable) if query.rate == "paper" else usable), latency_ns


def transfer_ns(num_bytes: int, rate: int, latency_ns: int) -> int:
    """Alone on its link."""
    return latency_ns + -(-num_bytes * NS_PER_S // rate)


def stream(chosen: Machine, query: TransferQuery, bytes_per_token: float, rate: int, latency_ns: int) -> Streamed:
    """Each chunk travels as soon as it is computed and the link is free."""
    cost, size = chosen.choice.cost, query.chunk if query.streamed == "on" else query.tokens
    computed, sending, arrived = [], [], []
    now = free_ns = start = 0
    while start < query.tokens:
        num_tokens = min(size, query.tokens - start)
        now += step_ns(cost, (start, num_tokens), 0, 0)
        computed.append(now)
        sending.append(max(now, free_ns))
        free_ns = sending[-1] + -(-round(bytes_per_token * num_tokens) * NS_PER_S // rate)
        arrived.append(free_ns + latency_ns)
        start += num_tokens
    return Streamed(tuple(computed), tuple(sending), tuple(arrived))


def panel(query: TransferQuery) -> dict[str, Any]:
    """``size`` of the cache and on the wire, ``times``, ``chunks`` of the streamed transfer, ``ways`` to send (each
    codec, streamed or not), ``links`` to compare, ``verdict`` and ``formulas``. Raises ConfigError."""
    chosen = machine(query.model, query.hardware)
    if query.tokens > chosen.model.max_context:
        raise ConfigError(
            f"tokens is {query.tokens:,}; {chosen.model.name} reads at most {chosen.model.max_context:,}",
            param="tokens",
        )
    width = kv_width(chosen.model, query.attention, query.kv_heads)
    cache_bits = 8 * BYTES_OF[query.dtype]
    wire_bits = bits_on_wire(query.codec, cache_bits)
    cached = kv_bytes(chosen.model, width, query.tokens, cache_bits)
    sent = kv_bytes(chosen.model, width, query.tokens, wire_bits)
    rate, latency_ns = link_rate(query)
    streamed = stream(chosen, query, chosen.model.layers * width * wire_bits / 8, rate, latency_ns)
    times = {
        "transfer_ms": transfer_ns(sent, rate, latency_ns) / 1e6,
        "prefill_ms": streamed.computed_ns[-1] / 1e6,
        "exposed_ms": streamed.exposed_ns / 1e6,
        "decode_step_ms": step_ns(chosen.choice.cost, None, query.batch, query.batch * query.tokens) / 1e6,
    }
    return {
        "machine": about(chosen),
        "size": {
            "cache_bytes": cached,
            "wire_bytes": sent,
            "width": width,
            "cache_bits": cache_bits,
            "wire_bits": wire_bits,
        },
        "times": times,
        "chunks": [
            {"computed_ms": done / 1e6, "sending_ms": begun / 1e6, "arrived_ms": there / 1e6}
            for done, begun, there in zip(*(each[:256] for each in _times_of(streamed)), strict=True)
        ],
        "ways": _ways(chosen, query, width, cache_bits),
        "links": _links(sent, times["decode_step_ms"]),
        "verdict": _verdict(query, sent, rate, times),
        "formulas": _formulas(chosen, query, width, (cached, sent), (rate, latency_ns), times),
    }


def bits_on_wire(codec: str, cache_bits: int) -> float:
    """Bits of one number on the wire. A codec that would make it larger is not used."""
    return min(CODEC_BITS.get(codec, cache_bits), cache_bits)


def _ways(chosen: Machine, query: TransferQuery, width: int, cache_bits: int) -> list[dict[str, Any]]:
    """What is left after the prefill, by codec, with chunks sent as they are computed and all at the end."""
    rate, latency_ns = link_rate(query)
    rows = []
    for codec in ("none", *CODEC_BITS):
        bits = bits_on_wire(codec, cache_bits)
        left = {
            how: stream(
                chosen, replace(query, streamed=how), chosen.model.layers * width * bits / 8, rate, latency_ns
            ).exposed_ns
            for how in ("on", "off")
        }
        rows.append(
            {
                "codec": codec,
                "wire_bytes": kv_bytes(chosen.model, width, query.tokens, bits),
                "streamed_ms": left["on"] / 1e6,
                "at_end_ms": left["off"] / 1e6,
            }
        )
    return rows


def _times_of(streamed: Streamed) -> tuple[tuple[int, ...], ...]:
    return streamed.computed_ns, streamed.sending_ns, streamed.arrived_ns


def _links(num_bytes: int, decode_step_ms: float) -> list[dict[str, Any]]:
    rows = []
    for name, (usable, latency_ns) in LINKS.items():
        paper, usable_ms = ON_PAPER.get(name), transfer_ns(num_bytes, usable, latency_ns) / 1e6
        rows.append(
            {
                "link": name,
                "text": TEXTS.get(name, name),
                "usable": usable,
                "usable_ms": usable_ms,
                "decode_steps": usable_ms / decode_step_ms,
                "paper": paper,
                "paper_ms": None if paper is None else num_bytes / paper * 1e3,
            }
        )
    return rows


def _verdict(query: TransferQuery, sent: int, rate: int, times: dict[str, float]) -> dict[str, str]:
    """level: good, warn or bad, and why."""
    exposed, step, prefill, whole = (
        times[name] for name in ("exposed_ms", "decode_step_ms", "prefill_ms", "transfer_ms")
    )
    ms = 1e6
    if whole > prefill:
        return {
            "level": "bad",
            "text": f"The link is the bottleneck: the KV of this prompt takes {duration(whole * ms)} to send and only "
            f"{duration(prefill * ms)} to compute: a busy prefill worker produces it faster than the link carries it. "
            f"It needs at least {scaled(sent / prefill * 1e3, 'B/s')}; there is {scaled(rate, 'B/s')}. Take a faster "
            "link or a codec, or let long prompts be computed where they are answered.",
        }
    if exposed > step:
        return {
            "level": "warn",
            "text": f"The stream pauses after its first token: {duration(exposed * ms)} of the transfer are not hidden "
            f"behind the prefill, as long as {significant(exposed / step)} decode steps of {duration(step * ms)}."
            + (" Streaming each chunk would hide most of it." if query.streamed == "off" else " Smaller chunks help."),
        }
    return {
        "level": "good",
        "text": f"Nobody notices: {duration(exposed * ms)} of the transfer are left after the prefill, less than one "
        f"decode step ({duration(step * ms)}). The link is busy for {percent(whole / prefill)} of the prefill's time.",
    }


def _formulas(
    chosen: Machine,
    query: TransferQuery,
    width: int,
    sizes: tuple[int, int],
    link: tuple[int, int],
    times: dict[str, float],
) -> list[Formula]:
    model, (cached, sent), (rate, latency_ns) = chosen.model, sizes, link
    size = BYTES_OF[query.dtype]
    if query.attention == "mla" or (query.attention == "own" and model.mla):
        words, numbers = "layers × (latent + rotary part) × tokens × bytes", f"{model.layers} × {width}"
    else:
        heads = width // (2 * model.head_dim)
        words = "2 × layers × KV heads × head size × tokens × bytes"
        numbers = f"2 × {model.layers} × {heads} × {model.head_dim}"
    lines = [formula("KV cache of the prompt", words, f"{numbers} × {query.tokens:,} × {size}", scaled(cached, "B"))]
    if sent != cached:
        lines.append(
            formula(
                f"on the wire as {query.codec.upper()}",
                "KV cache × (bits with scales ÷ bits)",
                f"{scaled(cached, 'B')} × ({CODEC_BITS[query.codec]} ÷ {8 * size})",
                scaled(sent, "B"),
            )
        )
    lines.append(
        formula(
            "transfer",
            "bytes ÷ bytes per second + latency",
            f"{scaled(sent, 'B')} ÷ {scaled(rate, 'B/s')} + {duration(latency_ns)}",
            duration(times["transfer_ms"] * 1e6),
        )
    )
    lines.append(
        formula(
            "left after the prefill" + (" (streamed)" if query.streamed == "on" else " (sent at the end)"),
            "arrival of the last byte − end of the prefill",
            f"{duration((times['prefill_ms'] + times['exposed_ms']) * 1e6)} − {duration(times['prefill_ms'] * 1e6)}",
            duration(times["exposed_ms"] * 1e6),
        )
    )
    lines.append(
        formula(
            "against one decode step",
            "what is left ÷ decode step",
            f"{duration(times['exposed_ms'] * 1e6)} ÷ {duration(times['decode_step_ms'] * 1e6)}",
            f"{significant(times['exposed_ms'] / times['decode_step_ms'])} steps",
        )
    )
    return lines

"""The effect of a long prompt on running streams, and on a short prompt behind it.

S streams decode; after a quiet time a long prompt is sent, a little later a short prompt. Gaps of the streams before
that and during the long prompt's prefill (those that overlap the time from its sending to its first token) are
compared; the same is repeated without the long prompt, for what machine and server do by themselves. Then, with nothing
else running, the short prompt alone, the long prompt alone, and the short behind the long. No prompt is in any cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, repeat
from statistics import median
from typing import Any

from diptych.bench import summary
from diptych.bench.clock import now_ns
from diptych.bench.health import HealthWatch
from diptych.bench.prompts import PromptMaker
from diptych.bench.session import Session
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import distribution_ms, percentile
from diptych.report.text import Table, milliseconds, number
from diptych.workload.spec import RequestSpec


@dataclass(frozen=True, kw_only=True)
class InterferenceConfig:
    """quiet_s: the measured time before the long prompt; settle_s: the streams' time before that. behind_s: from the
    long prompt to the short. stream_limit: tokens that a stream may have; its connection is closed at the end.
    ahead_tokens: the long prompt of the part without streams; None: long_tokens there too."""

    streams: int = 4
    stream_tokens: int = 512
    stream_limit: int = 3000
    long_tokens: int = 4096
    short_tokens: int = 32
    ahead_tokens: int | None = None
    repetitions: int = 3
    settle_s: float = 1.0
    quiet_s: float = 4.0
    behind_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("streams", "stream_tokens", "long_tokens", "short_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        if self.stream_limit < 2:
            raise ConfigError(f"stream_limit is {self.stream_limit}; it must be at least 2", param="stream_limit")
        if self.ahead_tokens is not None and self.ahead_tokens < 1:
            raise ConfigError(f"ahead_tokens is {self.ahead_tokens}; it must be at least 1", param="ahead_tokens")

    @property
    def ahead(self) -> int:
        """Tokens of the prompt that the short prompt waits behind on the idle server."""
        return self.ahead_tokens or self.long_tokens


@dataclass(kw_only=True)
class Repetition:
    """The scenario once; nanoseconds, rates in tokens per second of all streams together. control: gaps in as long a
    time without a long prompt. idle_long, idle_short, behind_short: without streams."""

    before: list[int] = field(default_factory=list)
    during: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    rate_before: float = 0.0
    rate_during: float = 0.0
    long_ttft: int = 0
    short_ttft: int = 0
    idle_short: int = 0
    idle_long: int = 0
    behind_short: int = 0
    around: list[tuple[float, float]] = field(default_factory=list)
    streams_ended: bool = False  # before the long prompt's first token: then "during" is cut short


Say = Callable[[str], None]


async def interference(session: Session, config: InterferenceConfig, say: Say = lambda _: None) -> dict[str, Any]:
    """The scenario, ``repetitions`` times; the results as plain data. A request that fails ends it: with a ConfigError
    in the first repetition; later the error is ``session.broken``, and the repetitions before it count."""
    kept: list[Repetition] = []
    limit = session.target.facts.max_model_len
    if limit is not None:
        longest = max(config.long_tokens + 4, config.ahead + 4, config.stream_tokens + config.stream_limit)
        if longest > limit:
            message = (
                f"the scenario needs a context of {longest:,} tokens; the server has {limit:,} (--long-tokens and "
                "--ahead-tokens are prompts; --stream-tokens and --stream-limit together are a stream)"
            )
            raise ConfigError(message, param="long_tokens")
    watch = HealthWatch()
    watch.start()
    for index in range(config.repetitions):
        if session.stop.is_set():
            break
        maker = session.target.prompt_maker(f"{session.salt}/interference/{index}")
        try:
            repetition = await _Scene(session, config, maker).play()
        except ConfigError as error:
            if not kept:
                raise
            session.broken = error
            break
        if session.stop.is_set():
            break
        kept.append(repetition)
        say(_sentence(index, repetition))
    client = summary.client(watch.stop(0, []))
    if not kept:
        raise ConfigError("stopped before the first repetition was over", param="interference")
    return {**outcome(kept, config), "client": client}


class _Scene:
    """The requests of a repetition."""

    def __init__(self, session: Session, config: InterferenceConfig, maker: PromptMaker) -> None:
        self._session = session
        self._target = session.target
        self._config = config
        self._maker = maker

    async def play(self) -> Repetition:
        """All of them once."""
        repetition = Repetition()
        await self._with_streams(repetition)
        await self._session.settle()
        await self._control(repetition)
        await self._session.settle()
        await self._alone(repetition)
        return repetition

    async def _with_streams(self, repetition: Repetition) -> None:
        """Streams, a long prompt, a short prompt behind it."""
        config = self._config
        streams = await self._start_streams("with")
        quiet = now_ns()
        await self._pause(config.quiet_s)
        self._check(streams)
        long = self._send("long", config.long_tokens, 4)
        await self._pause(config.behind_s)
        short = self._send("short", config.short_tokens, 4)
        await self._wait(long, short)
        repetition.streams_ended = any(stream.done.done() for stream in streams)
        self._hang_up(streams)
        if self._session.stop.is_set():
            return
        repetition.long_ttft, repetition.short_ttft = _ttft(long), _ttft(short)
        repetition.before = _gaps(streams, quiet, long.sent_ns, whole=True)
        repetition.during = _gaps(streams, long.sent_ns, long.stamps[0], whole=False)
        repetition.around = _around(streams, quiet, long.sent_ns)
        repetition.rate_before = _tokens_per_s(streams, quiet, long.sent_ns)
        repetition.rate_during = _tokens_per_s(streams, long.sent_ns, long.stamps[0])

    async def _control(self, repetition: Repetition) -> None:
        """Streams and nothing else, for as long."""
        streams = await self._start_streams("control")
        await self._pause(self._config.quiet_s)
        start = now_ns()
        await self._pause(repetition.long_ttft / NS_PER_S)
        repetition.control = _gaps(streams, start, now_ns(), whole=False)
        self._hang_up(streams)

    async def _alone(self, repetition: Repetition) -> None:
        """The short prompt alone, the long prompt alone, and the short behind the long."""
        config = self._config
        short = self._send("short/alone", config.short_tokens, 4)
        await self._wait(short)
        long = self._send("long/alone", config.long_tokens, 4)
        await self._wait(long)
        first = self._send("long/first", config.ahead, 2)
        await self._pause(config.behind_s)
        behind = self._send("short/behind", config.short_tokens, 4)
        await self._wait(first, behind)
        if not self._session.stop.is_set():
            repetition.idle_short, repetition.idle_long = _ttft(short), _ttft(long)
            repetition.behind_short = _ttft(behind)

    async def _start_streams(self, name: str) -> list[TokenStream]:
        config = self._config
        numbers = range(config.streams)
        streams = [self._send(f"{name}/{number}", config.stream_tokens, config.stream_limit) for number in numbers]
        while not all(stream.stamps or stream.done.done() for stream in streams):
            await asyncio.sleep(0.01)
        await self._pause(config.settle_s)
        self._check(streams)
        return streams

    def _check(self, streams: Sequence[TokenStream]) -> None:
        """All must still be running, or there is nothing to compare."""
        for stream in streams:
            if stream.error:
                raise ConfigError(f"a stream failed: {stream.error}", param="url")
            if stream.done.done() and not self._session.stop.is_set():
                message = (
                    f"a stream ended after {stream.output_tokens:,} tokens, before the long prompt came: give it a "
                    "higher --stream-limit, or a shorter --quiet"
                )
                raise ConfigError(message, param="stream_limit")

    def _send(self, name: str, prompt_tokens: int, output_tokens: int) -> TokenStream:
        spec = RequestSpec(arrival_ns=0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        body = self._target.body(self._maker.fresh(name, prompt_tokens), spec)
        stream = TokenStream(now_ns())
        self._target.send(body, stream)
        return stream

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._session.stop.wait(), seconds)
        except TimeoutError:
            return

    async def _wait(self, *streams: TokenStream) -> None:
        """Wait until all streams are over, or the measurement is stopped."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._session.stop.wait())
        over: asyncio.Future[Any] = asyncio.gather(*(stream.done for stream in streams))
        await asyncio.wait({stop, over}, timeout=self._target.config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._session.stop.is_set():
            self._hang_up(streams)
        for stream in streams:
            if not self._session.stop.is_set() and (stream.error or not stream.stamps):
                raise ConfigError(f"a prompt failed: {stream.error or 'no answer in time'}", param="url")

    def _hang_up(self, streams: Sequence[TokenStream]) -> None:
        for stream in streams:
            stream.cancel(now_ns(), "the measurement is over")


def outcome(kept: Sequence[Repetition], config: InterferenceConfig) -> dict[str, Any]:
    """All repetitions as plain data, milliseconds. factor: p99 of the gaps during over p99 before, the median over the
    repetitions; control_factor: the same without a long prompt; ttft_factor: short behind long over short alone."""
    factors = [_factor(repetition.during, repetition.before) for repetition in kept]
    controls = [_factor(repetition.control, repetition.before) for repetition in kept]
    behind = [repetition.behind_short / repetition.idle_short for repetition in kept]

    def middle(name: str) -> float:
        return float(median(getattr(repetition, name) for repetition in kept)) / NS_PER_MS

    gaps = {
        name: [gap for repetition in kept for gap in getattr(repetition, name)]
        for name in ("before", "during", "control")
    }
    return {
        **{f"{name}_ms": distribution_ms(values) for name, values in gaps.items()},
        "factor": median(factors),
        "factors": factors,
        "control_factor": median(controls),
        "control_factors": controls,
        "gaps_ms": {name: [round(gap / NS_PER_MS, 3) for gap in values] for name, values in gaps.items()},
        "around": {"gaps": kept[0].around, "long_ttft_s": kept[0].long_ttft / NS_PER_S},
        "stream_tokens_per_s": {
            "before": median(repetition.rate_before for repetition in kept),
            "during": median(repetition.rate_during for repetition in kept),
        },
        "ttft_ms": {
            "long": middle("long_ttft"),
            "long_alone": middle("idle_long"),
            "short_behind_long_among_streams": middle("short_ttft"),
            "short_alone": middle("idle_short"),
            "short_behind_long": middle("behind_short"),
        },
        "ttft_factor": median(behind),
        "ttft_factors": behind,
        "streams_ended": any(repetition.streams_ended for repetition in kept),
        "config": asdict(config),
        "repetitions": len(kept),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The outcome in words."""
    config = result["config"]
    names = ("p50", "p90", "p99", "max")
    rows = [
        (label, *(milliseconds(result[key][name]) for name in names))
        for label, key in (
            ("before", "before_ms"),
            (f"while {config['long_tokens']:,} tokens are prefilled", "during_ms"),
            ("as long, without that prompt", "control_ms"),
        )
    ]
    ttft = result["ttft_ms"]
    long, short = f"{config['long_tokens']:,}", f"{config['short_tokens']:,}"
    behind = milliseconds(ttft["short_behind_long"])
    waits = (
        (f"{long} tokens, alone", milliseconds(ttft["long_alone"])),
        (f"{long} tokens, among the streams", milliseconds(ttft["long"])),
        (f"{short} tokens, alone", milliseconds(ttft["short_alone"])),
        (f"{short} tokens behind {config['ahead_tokens'] or config['long_tokens']:,}", behind),
        (f"{short} tokens behind {long}, among the streams", milliseconds(ttft["short_behind_long_among_streams"])),
    )
    pace = result["stream_tokens_per_s"]
    factors = (
        ("gaps: p99 during / before", number(result["factor"], 2), _each(result["factors"])),
        ("the same without a long prompt", number(result["control_factor"], 2), _each(result["control_factors"])),
        ("TTFT of the short prompt: behind / alone", number(result["ttft_factor"], 2), _each(result["ttft_factors"])),
        ("tokens/s of the streams: before", number(pace["before"], 0), ""),
        ("tokens/s of the streams: during", number(pace["during"], 0), ""),
    )
    return [
        Table(f"Gaps of {config['streams']} streams, ms", ("", *names), tuple(rows)),
        Table("Time to first token, ms (median)", ("", "ms"), waits),
        Table("Interference", ("", "median", "each"), factors),
    ]


def _each(values: Sequence[float]) -> str:
    return ", ".join(number(value, 2) for value in values)


def _sentence(index: int, repetition: Repetition) -> str:
    factor = _factor(repetition.during, repetition.before)
    return (
        f"repetition {index + 1}: gaps p99 {percentile(sorted(repetition.before), 99) / NS_PER_MS:.1f} -> "
        f"{percentile(sorted(repetition.during), 99) / NS_PER_MS:.1f} ms (x {factor:.2f}), TTFT long "
        f"{repetition.long_ttft / NS_PER_MS:,.0f} ms, short behind it {repetition.behind_short / NS_PER_MS:,.0f} ms"
    )


def _factor(during: list[int], before: list[int]) -> float:
    quiet = percentile(sorted(before), 99)
    return percentile(sorted(during), 99) / quiet if quiet else 0.0


def _gaps(streams: Sequence[TokenStream], start: int, end: int, *, whole: bool) -> list[int]:
    """Gaps that lie in [start, end] (whole) or touch it."""
    pairs = (pair for stream in streams for pair in pairwise(stream.stamps))
    if whole:
        return [later - earlier for earlier, later in pairs if earlier >= start and later <= end]
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


def _tokens_per_s(streams: Sequence[TokenStream], start: int, end: int) -> float:
    count = 0
    for stream in streams:
        sizes = stream.sizes if len(stream.sizes) == len(stream.stamps) else repeat(1)
        count += sum(size for stamp, size in zip(stream.stamps, sizes, strict=False) if start <= stamp < end)
    return count * NS_PER_S / max(1, end - start)


def _around(streams: Sequence[TokenStream], start: int, middle: int) -> list[tuple[float, float]]:
    """(seconds from ``middle`` to its end, milliseconds) of each gap that ended after ``start``."""
    pairs = (pair for stream in streams for pair in pairwise(stream.stamps))
    found = ((later - middle, later - earlier) for earlier, later in pairs if later >= start)
    return [(round(at / NS_PER_S, 4), round(gap / NS_PER_MS, 3)) for at, gap in found]


def _ttft(stream: TokenStream) -> int:
    return stream.stamps[0] - stream.intended_ns

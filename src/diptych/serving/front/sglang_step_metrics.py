"""The steps of an SGLang, from its forward-pass metrics: ``--enable-forward-pass-metrics
--forward-pass-metrics-ipc-name ipc:///run/NAME`` publishes one message per step at ``ipc:///run/NAME.RANK``.

A message has three frames: an empty topic, a number (8 bytes, big-endian), and msgpack. The fields are a map in the
releases that are known; their comments speak of positions, so an array is read, too. Unknown fields are ignored.

It says less than Diptych's plugin in vLLM does. There are sums over a step's requests, and no names: a step has unnamed
prompts of equal length (see ``prompts_of``). There are no times: a step ends when its message comes, which is after the
engine has handed out the tokens, and with overlapped scheduling after the next step has begun. ``wall_time`` is how
long the step computed on the device, without the scheduler's own work. Prompt tokens are those that the step
computed, rounded up to whole pages of the cache; a prompt's tokens before them count as its context, wherever they
were computed. Tokens of drafts are not said: each decoding request counts as one row.

A message that computed nothing is a heartbeat. It has a number, too, so that gaps count messages.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.control.events import StepFinished
from diptych.control.slo import NS_PER_S
from diptych.control.step import StepFeatures, chunk_attention
from diptych.serving.front.step_feed import OnStep

logger = logging.getLogger(__name__)

MOST_REQUESTS = 1 << 16  # in a step
MOST_PROMPTS = 4096  # in a step: each is an entry of the timeline
MOST_TOKENS = 1 << 40
LONGEST_S = 3600.0
UNNAMED = ""  # the request of a prompt that is not known
FIELDS = ("worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests", "queued_requests")
SUMS = (
    "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens", "num_decode_requests",
    "sum_decode_kv_tokens", "var_decode_kv_tokens",
)  # fmt: skip


class UnreadablePassError(Exception):
    """A message is not what the protocol says."""


@dataclass(frozen=True, slots=True)
class ReportedPass:
    """One step. duration_ns: on the device. prefill_context: tokens of its prompts that were there before it.
    decode_context: the sum of the tokens that its decoding requests attend to."""

    worker_id: str
    dp_rank: int
    duration_ns: int
    num_prefills: int
    prefill_tokens: int
    prefill_context: int
    num_decodes: int
    decode_context: int

    @property
    def is_step(self) -> bool:
        """Else it is a heartbeat, or says too little of what it computed."""
        return self.duration_ns > 0 and (self.prefill_tokens > 0 or self.num_decodes > 0)


def decode_pass(payload: bytes) -> ReportedPass:
    """The step of a message. Raises UnreadablePassError."""
    try:
        content = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadablePassError(str(error)) from None
    is_without_version = isinstance(content, list) and bool(content) and isinstance(content[0], str)
    fields = _named(content, FIELDS if is_without_version else ("version", *FIELDS))
    sums = _named(fields.get("scheduled_requests", {}), SUMS)
    wall_s, worker_id = fields.get("wall_time", 0.0), fields.get("worker_id", "")
    if isinstance(wall_s, bool) or not isinstance(wall_s, int | float) or not 0 <= wall_s <= LONGEST_S:
        raise UnreadablePassError(f"wall_time is {wall_s!r}")
    num_prefills = _count(sums, "num_prefill_requests", MOST_PROMPTS)
    prefill_tokens = _count(sums, "sum_prefill_tokens", MOST_TOKENS)
    return ReportedPass(
        worker_id if isinstance(worker_id, str) else "",
        _count(fields, "dp_rank", MOST_REQUESTS),
        math.ceil(wall_s * NS_PER_S),
        max(num_prefills, 1) if prefill_tokens else 0,
        prefill_tokens,
        _count(sums, "sum_prefill_kv_tokens", MOST_TOKENS),
        _count(sums, "num_decode_requests", MOST_REQUESTS),
        _count(sums, "sum_decode_kv_tokens", MOST_TOKENS),
    )


def prompts_of(step: ReportedPass) -> tuple[tuple[str, int, int], ...]:
    """The step's n prompts as (request, first token, tokens): T computed tokens and K tokens of context, shared out
    equally in whole tokens. Attention has K*T/n + T*(T/n + 1)/2 pairs then. That is exact for one prompt and for equal
    ones; where long chunks have long contexts, or chunks differ, it is too little."""
    num = step.num_prefills
    found = []
    for at in range(num):
        start = step.prefill_context // num + (at < step.prefill_context % num)
        num_tokens = step.prefill_tokens // num + (at < step.prefill_tokens % num)
        if num_tokens:
            found.append((UNNAMED, start, num_tokens))
    return tuple(found)


class SGLangStepFeed:
    """A StepSource. on_step, num_seen: as in StepFeed. num_missed: messages that were published and did not come, of
    which some may have been heartbeats.

    Messages that come at once, because the way to here was busy, end at once: all but the first are drawn with no
    length, and each has its duration all the same.
    """

    topic = b""

    def __init__(self, on_step: OnStep, clock: Callable[[], int]) -> None:
        self.num_seen = self.num_missed = 0
        self._on_step = on_step
        self._clock = clock
        self._last = -1
        self._end_ns = 0
        self._has_warned = False
        self._whose: dict[str, Any] = {}

    def take_frames(self, frames: Sequence[bytes]) -> None:
        """A message."""
        try:
            if len(frames) < 2 or len(frames[-2]) != 8:
                raise UnreadablePassError(f"{len(frames)} frames, without a number of 8 bytes")
            step = decode_pass(frames[-1])
        except UnreadablePassError as error:
            if not self._has_warned:
                logger.warning("a message about an engine's forward pass cannot be read: %s", error)
                self._has_warned = True
            return
        number = int.from_bytes(frames[-2], "big")
        if 0 <= self._last < number:  # else it is the first, or the engine was started again
            self.num_missed += number - self._last - 1
        self._last = number
        self._whose = {"worker_id": step.worker_id, "dp_rank": step.dp_rank}
        if step.is_step:
            self.num_seen += 1
            self._tell(number, step)

    def described(self) -> dict[str, Any]:
        return self._whose

    def _tell(self, number: int, step: ReportedPass) -> None:
        end_ns = max(self._end_ns, self._clock())
        start_ns = max(self._end_ns, end_ns - step.duration_ns)
        self._end_ns = end_ns
        prompts = prompts_of(step)
        features = StepFeatures(
            step.prefill_tokens,
            sum(chunk_attention(start, num_tokens) for _, start, num_tokens in prompts),
            step.num_decodes,
            step.decode_context,
        )
        finished = StepFinished(number, start_ns, end_ns, prompts, step.num_decodes, step.decode_context, 0)
        self._on_step(finished, features, step.duration_ns)


def _named(value: Any, names: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return dict(zip(names, value, strict=False))
    raise UnreadablePassError(f"{type(value).__name__} instead of fields")


def _count(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UnreadablePassError(f"{name} is {value!r}")
    return value

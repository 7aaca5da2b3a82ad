"""From a plan of vLLM's scheduler to the record of its step.

Reads vLLM's objects by the fields that they have; a field that a version lacks is named in ``EngineAbout.lacks``. Must
never raise: after a plan that cannot be read nothing more is reported, and one warning says so.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from diptych.base.engine_steps import DEFAULT_ADDRESS, EngineAbout, EngineStep

logger = logging.getLogger("vllm.diptych")  # so that vLLM shows it

MOST_PENDING = 64  # plans whose step is under way; an engine with pipeline stages has a few
CONFIG_NAME = "diptych_steps"  # in vLLM's --additional-config: the address to publish on

# field of EngineAbout: where vLLM's configuration has it, by version
SOURCES: dict[str, tuple[str, ...]] = {
    "model": ("model_config.served_model_name", "model_config.model"),
    "policy": ("scheduler_config.policy",),
    "max_model_len": ("model_config.max_model_len", "scheduler_config.max_model_len"),
    "block_size": ("cache_config.block_size",),
    "num_blocks": ("cache_config.num_gpu_blocks",),
    "max_num_seqs": ("scheduler_config.max_num_seqs",),
    "max_batched_tokens": ("scheduler_config.max_num_batched_tokens",),
    "long_prefill_threshold": ("scheduler_config.long_prefill_token_threshold",),
    "chunked_prefill": ("scheduler_config.enable_chunked_prefill", "scheduler_config.chunked_prefill_enabled"),
    "prefix_cache": ("cache_config.enable_prefix_caching",),
    "async_scheduling": ("scheduler_config.async_scheduling",),
}


class StepSink(Protocol):
    """Where steps go."""

    def publish(self, step: EngineStep) -> None:
        """Take a step; does not wait."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


class StepObserver:
    """Receives vLLM's scheduler outputs and step results, in order. sink: None disables reporting."""

    def __init__(self, sink: StepSink | None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._sink = sink
        self._clock = clock
        self._pending: deque[tuple[Any, EngineStep]] = deque(maxlen=MOST_PENDING)
        self._number = 0
        self._last_end_ns = 0

    def begin(self) -> int:
        """When a plan is begun, in nanoseconds."""
        return self._clock()

    def on_planned(self, scheduler: Any, output: Any, begun_ns: int) -> None:
        """The plan of a step that begins now."""
        if self._sink is None:
            return
        try:
            if output.total_num_scheduled_tokens > 0:
                self._pending.append((output, read_plan(scheduler, output, begun_ns)))
        except Exception as error:
            self._give_up(error)

    def on_computed(self, scheduler: Any, output: Any) -> None:
        """The step of a plan has ended, and its tokens are known."""
        if self._sink is None:
            return
        try:
            while self._pending:
                planned, step = self._pending.popleft()
                if planned is output:
                    self._publish(scheduler, step)
                    return
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """The engine ends."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def _publish(self, scheduler: Any, step: EngineStep) -> None:
        assert self._sink is not None
        end_ns = self._clock()
        self._number += 1
        start_ns = min(end_ns, max(step.start_ns, self._last_end_ns))
        self._last_end_ns = end_ns
        left = int(scheduler.get_num_unfinished_requests())
        times = {"number": self._number, "start_ns": start_ns, "end_ns": end_ns}
        self._sink.publish(msgspec.structs.replace(step, **times, num_left=left))

    def _give_up(self, error: Exception) -> None:
        logger.warning("diptych: steps are not reported any more: %s: %s", type(error).__name__, error)
        self.close()


def read_plan(scheduler: Any, output: Any, begun_ns: int) -> EngineStep:
    """What a plan computes; its number and end are not known yet. A request that computes tokens of its prompt, or more
    than its drafts and the token after them (it was preempted), is a prefill; any other decodes."""
    starts = _first_tokens(output)
    drafts: Mapping[str, Any] = getattr(output, "scheduled_spec_decode_tokens", None) or {}
    requests = scheduler.requests
    prefills: list[tuple[str, int, int]] = []
    num_decodes = rows = context = 0
    for request_id, count in output.num_scheduled_tokens.items():
        start = starts[request_id]
        if start < requests[request_id].num_prompt_tokens or count > 1 + len(drafts.get(request_id, ())):
            prefills.append((request_id, start, count))
        else:
            num_decodes += 1
            rows += count
            context += count * start + count * (count + 1) // 2
    return EngineStep(0, begun_ns, begun_ns, tuple(prefills), num_decodes, rows, context)


def _first_tokens(output: Any) -> dict[str, int]:
    """The first token that each request of a plan computes."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    if isinstance(cached, list):  # a record for each request, before vLLM 0.10
        starts.update((known.req_id, known.num_computed_tokens) for known in cached)
    else:
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts


def about_vllm(config: Any, version: str) -> EngineAbout:
    """What vLLM's configuration says of the engine."""
    found: dict[str, Any] = {}
    lacks = []
    for name, places in SOURCES.items():
        value = next((value for place in places if (value := _at(config, place)) is not None), None)
        kind = EngineAbout.__annotations__[name]
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        try:
            found[name] = kind(getattr(value, "value", value)) if value is not None else kind()
        except (TypeError, ValueError):
            value = None
            found[name] = kind()
        if value is None:
            lacks.append(name)
    return EngineAbout("vllm", uuid.uuid4().hex, version, lacks=tuple(lacks), **found)


def address_of(config: Any) -> str:
    """Where to publish: of --additional-config, else DEFAULT_ADDRESS. Ranks of data parallelism count up from its port.
    Raises ValueError for what is no address."""
    more = getattr(config, "additional_config", None)
    address = more.get(CONFIG_NAME, DEFAULT_ADDRESS) if isinstance(more, Mapping) else DEFAULT_ADDRESS
    if not isinstance(address, str) or not address.startswith(("tcp://", "ipc://")):
        raise ValueError(f"{CONFIG_NAME} is {address!r}; it must be tcp://HOST:PORT or ipc://PATH")
    index = _at(config, "parallel_config.data_parallel_index")  # the rank, also where ranks know nothing of each other
    rank = _at(config, "parallel_config.data_parallel_rank") or 0 if index is None else index
    head, _, port = address.rpartition(":")
    if rank and address.startswith("tcp://") and port.isdigit():
        return f"{head}:{int(port) + rank}"
    return f"{address}.{rank}" if rank else address


def _at(config: Any, place: str) -> Any:
    for name in place.split("."):
        config = getattr(config, name, None)
    return config

"""As much of vLLM's scheduler as Diptych's plugin reads: plans are given, and every request is a name with a length."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class FakePlan:
    """A SchedulerOutput. new, cached: (request, tokens in the cache). is_old: cached requests are a list of records."""

    counts: dict[str, int]
    new: list[tuple[str, int]] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    is_old: bool = False

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return self.counts

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def scheduled_new_reqs(self) -> list[Any]:
        return [SimpleNamespace(req_id=name, num_computed_tokens=start) for name, start in self.new]

    @property
    def scheduled_cached_reqs(self) -> Any:
        if self.is_old:
            return [SimpleNamespace(req_id=name, num_computed_tokens=start) for name, start in self.cached]
        return SimpleNamespace(
            req_ids=[name for name, _ in self.cached], num_computed_tokens=[start for _, start in self.cached]
        )


class FakeVLLMScheduler:
    """The base class. plans: that schedule() gives, in order. prompts: tokens of each request's prompt."""

    def __init__(self, vllm_config: Any, **more: Any) -> None:
        self.vllm_config = vllm_config
        self.more = more
        self.plans: list[Any] = []
        self.prompts: dict[str, int] = {}
        self.num_left = 0
        self.is_shut_down = False

    @property
    def requests(self) -> dict[str, Any]:
        return {name: SimpleNamespace(num_prompt_tokens=length) for name, length in self.prompts.items()}

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return self.plans.pop(0)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {0: model_runner_output}

    def get_num_unfinished_requests(self) -> int:
        return self.num_left

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakeAsyncScheduler(FakeVLLMScheduler):
    """What vLLM takes with asynchronous scheduling."""


def fake_config(**additional: Any) -> Any:
    """A VllmConfig."""
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=["m"], model="path", max_model_len=4096),
        scheduler_config=SimpleNamespace(
            policy="fcfs",
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=1000, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        additional_config=additional,
    )

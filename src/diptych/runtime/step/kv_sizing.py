"""How large the KV cache of a GPU may be: what is free beside the weights, the largest step, and CUDA graphs.

Measured before the cache is made, with a small one in its place: two prompts, of which the memory of a longer one
follows, a decode step of as many sequences as there may be, and the graphs of such a step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from diptych.control.request import BlockTables, SamplingParams
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepResult
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.step.cuda_graphs import MAX_BATCH, SEEN_BEFORE_CAPTURE

PROMPTS = (1024, 2048)  # tokens
MARGIN = 0.04  # of the GPU's memory: what libraries take later, and what lies in pieces too small
GRAPHS = 2  # graphs of all sizes take at most so many times what that of the largest takes
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
LARGEST = replace(GREEDY, temperature=1.0, top_p=0.9, frequency_penalty=0.1)  # whose sampling needs most memory

logger = logging.getLogger(__name__)


class DeviceUsage(Protocol):
    """What is known of a device's memory, in bytes."""

    def total_bytes(self) -> int:
        """All that it has."""
        ...

    def free_bytes(self) -> int:
        """What no process has taken, this one's unused memory given back before."""
        ...

    def taken_bytes(self) -> int:
        """What this process uses."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """What ``run`` takes at its peak, besides what was taken before."""
        ...


class CudaUsage:
    """The memory of the current GPU, as torch and the driver see it."""

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def taken_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_bytes(self, run: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class TrialRunner(Protocol):
    """What is asked of a ModelRunner."""

    max_num_seqs: int
    groups: tuple[Any, ...]
    model_config: ModelConfig

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Make a request known."""
        ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run a step."""
        ...


def kv_bytes_beside(usage: DeviceUsage, trial: "MemoryTrial", share: float) -> int:
    """Bytes for the KV cache. share: of the GPU's memory that is this process's, where several compute on one."""
    trial.prompt(PROMPTS[0])  # libraries load what they need, and keep it
    short, long = (usage.peak_bytes(partial(trial.prompt, tokens)) for tokens in trial.prompts)
    per_token = (long - short) / max(1, trial.prompts[1] - trial.prompts[0])
    prompt = long + int(per_token * max(0, trial.max_step_tokens - trial.prompts[1]))
    decode = usage.peak_bytes(trial.decode)
    before = usage.free_bytes()
    trial.capture()
    graphs = GRAPHS * max(0, before - usage.free_bytes())
    trial.close()
    free, total = usage.free_bytes(), usage.total_bytes()
    room = min(free, int(share * total) - usage.taken_bytes()) - int(MARGIN * share * total)
    left = room - prompt - decode - graphs
    logger.info(
        "free on the GPU: %d MiB of %d; a step takes %d and graphs %d at most; the KV cache gets %d",
        *(number >> 20 for number in (free, total, prompt + decode, graphs, max(0, left))),
    )
    return max(0, left)


class MemoryTrial:
    """Steps of a runner over a small KV cache, made by ``make_runner`` with that many blocks. max_step_tokens: of the
    largest step that will be planned."""

    def __init__(self, make_runner: Callable[[int], TrialRunner], block_size: int, max_step_tokens: int) -> None:
        tokens = min(PROMPTS[1], max_step_tokens)
        self.prompts = (tokens // 2, tokens)
        self.max_step_tokens = max_step_tokens
        self._blocks = tuple(range(-(-(tokens + 8) // block_size)))
        self._runner: TrialRunner | None = make_runner(len(self._blocks))

    def prompt(self, num_tokens: int) -> None:
        """Compute a prompt in one step."""
        num_tokens = min(num_tokens, self.prompts[1])
        (request_id,) = self._add(1, num_tokens)
        chunk = ScheduledPrefill(request_id, 0, num_tokens, self._tables, is_last=True)
        self._run(SchedulerOutput(0, prefills=(chunk,)))
        self._run(SchedulerOutput(0, finished=(request_id,)))

    def decode(self) -> None:
        """A token of as many sequences as there may be, whose sampling needs most memory."""
        self._decode(self.runner.max_num_seqs, 2, LARGEST)

    def capture(self) -> None:
        """Decode until a graph of the largest size is captured."""
        self._decode(min(MAX_BATCH, self.runner.max_num_seqs), SEEN_BEFORE_CAPTURE + 2, GREEDY)

    def close(self) -> None:
        """Give the memory back."""
        self._runner = None

    @property
    def runner(self) -> TrialRunner:
        """The one that computes."""
        assert self._runner is not None, "the trial is over"
        return self._runner

    @property
    def _tables(self) -> BlockTables:
        return (self._blocks,) * max(1, len(self.runner.groups))

    def _decode(self, count: int, num_steps: int, params: SamplingParams) -> None:
        context = min(16, self.prompts[1] - 1)
        ids = self._add(count, context + 1, params)
        resumed = tuple([ResumedDecode(request_id, context, self._tables) for request_id in ids])
        self._run(SchedulerOutput(0, num_decodes=count, resumed=resumed))
        for _ in range(num_steps - 1):
            self._run(SchedulerOutput(0, num_decodes=count))
        self._run(SchedulerOutput(0, finished=tuple(ids)))

    def _run(self, output: SchedulerOutput) -> None:
        result = self.runner.execute(output)
        if result.is_out_of_memory:
            raise torch.OutOfMemoryError(result.failed[0][1])

    def _add(self, count: int, num_tokens: int, params: SamplingParams = GREEDY) -> list[str]:
        """Make known requests of made-up tokens."""
        vocab_size = self.runner.model_config.vocab_size
        ids = [f"memory-{index}" for index in range(count)]
        for request_id in ids:
            self.runner.add_request(request_id, [index % vocab_size for index in range(num_tokens)], params)
        return ids

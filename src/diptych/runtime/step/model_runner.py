"""ModelRunner: the Executor that computes. It applies a SchedulerOutput, runs the model, and samples.

For drivers (serving/worker, local_engine.py):

    runner = load_runner(RunnerConfig(model=path), progress)    # blocks until the weights are in memory
    runner.first_block, runner.num_blocks, runner.block_size, runner.num_host_blocks, runner.groups,
    runner.max_model_len          for CacheConfig and EngineConfig; block ids begin at first_block
    runner.model_config.eos_token_ids, .vocab_size, ...
    runner.add_request(request_id, prompt_token_ids, sampling, salt=..., block_hashes=..., output_token_ids=...)
                                  before the first plan that names it; raises InvalidRequestError (then do not queue it)
    runner.forget(request_id)     only for a request that the EngineCore refused; others leave through output.finished
    result = runner.execute(output)                             # StepResult; result.payload is a StepTokens

A request is known here from ``add_request`` until a plan names it in ``finished``. A stopping token (end-of-sequence,
stop token id) is part of StepTokens; hiding it from the client is the driver's choice. Stop strings are the driver's.

Owns the tokens, the decode batch and the KV memory. Never decides what runs, never reads a clock, never looks at text.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from diptych.control.constraint import TokenConstraint
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import KVGroup
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import (
    DraftProposal,
    PromptLogprobs,
    SchedulerOutput,
    StepBrokenOff,
    StepResult,
    StepTokens,
    TokenLogprobs,
    VerifyResult,
)
from diptych.runtime.attention import make_attention
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.device.cpu_only import CPU_ONLY, check_cpu_only
from diptych.runtime.device.host_copies import ToDevice, memory_of
from diptych.runtime.kernels.instruction_set import AUTO, TORCH, TRITON, choose
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.kv_cache.layer_groups import deal
from diptych.runtime.kv_cache.shared_pool import SharedPool
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.layer_loader import LayerLoader
from diptych.runtime.layers.rope import RotaryTables
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.models.registry import LanguageModel, check_quantize, family_of, read_model_config
from diptych.runtime.models.transformers_model import TransformersModel
from diptych.runtime.ops import make_ops
from diptych.runtime.sampling.batch_sampler import BatchSampler
from diptych.runtime.sampling.batched_step import BatchedStepSampling, PendingStep
from diptych.runtime.sampling.step_sampling import Sampled, StepSampling
from diptych.runtime.step.cuda_graphs import GraphedModel
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.kv_sizing import CudaUsage, MemoryTrial, kv_bytes_beside
from diptych.runtime.step.pooling import Pooled, add_rows, pool
from diptych.runtime.step.request_state import RequestState, check_tokens
from diptych.runtime.step.step_layout import StepLayout, lay_out_ahead, lay_out_decodes, lay_out_step
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.runtime.weights.loader import Progress, Weights, resolve_dtype
from diptych.runtime.weights.shared_weights import load_shared, weights_key
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from diptych.runtime.weights.weight_memory import PrivateMemory, WeightMemory

logger = logging.getLogger(__name__)

SPECULATIONS = ("auto", "on", "off")  # auto: where each row is computed the same whatever is beside it
LEAST_BLOCKS = 16  # of a KV cache
GIVEN_BACK = 0.05  # of the KV cache, each time that a step runs out of memory
SCORED_ROWS_AT_ONCE = 64  # logits of prompt tokens are computed in slices: a whole prompt's would take gigabytes


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What to load and how much memory it may use.

    model_impl: see read_model_config. dtype: auto | bfloat16 | float32. kv_bytes: memory of the KV cache, unless
    ``num_blocks`` says it in blocks, or ``memory_share`` what share of a GPU's memory is this worker's: then the cache
    gets what is left of that beside the weights, a step of ``max_step_tokens`` prompt tokens (None: of max_model_len)
    and CUDA graphs.
    max_model_len: None for what the checkpoint supports. instruction_set: the kernels, a name that
    instruction_set.choose takes for the device. quantize: weights in floating point become whole numbers, one of
    QUANTIZATIONS. kv_dtype: of the KV cache, auto (as dtype) or int8. shared_pool: the KV cache lies in a pool that
    other workers map, too; ``num_blocks`` of its blocks are this worker's. shared_weights: the descriptor of a file in
    memory that holds the weights for all workers, or will when the first of them has loaded. shared_host: of one for
    the host blocks, which other workers read. These five on the cpu only.
    speculation: see SPECULATIONS. frees_windows: layers are dealt into groups, and blocks that lie before the window of
    a group are free for other sequences; then prefixes of prompts are found at boundaries alone (see Hit).
    windows_below: a window of that many tokens or more is none (None: of max_model_len).
    """

    model: str | Path
    dtype: str = "auto"
    _: KW_ONLY
    model_impl: str = "auto"
    device: str = "cpu"
    block_size: int = 32
    kv_bytes: int = 1 << 30
    num_blocks: int | None = None
    memory_share: float | None = None
    max_step_tokens: int | None = None
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_model_len: int | None = None
    instruction_set: str = AUTO
    quantize: str = "none"
    kv_dtype: str = "auto"
    shared_pool: SharedPool | None = None
    shared_weights: int | None = None
    shared_host: int | None = None
    speculation: str = "off"
    frees_windows: bool = False
    windows_below: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. weights: their formats, in words. dtype: of the activations. instruction_set: the
    kernels that compute. note: what the loader wants people to know ("" if nothing)."""

    model: LanguageModel
    weights: str
    dtype: str
    instruction_set: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched. result: where it is known already; else ``pending`` brings the tokens."""

    output: SchedulerOutput
    result: StepResult | None
    layout: StepLayout | None = None
    pending: PendingStep | None = None


class ModelRunner:
    """One model and its KV memory. drafted: what is guessed of tokens that come next (None: nothing). sampler: of all
    rows of a step at once, on their device (None: row by row on the host, which is faster on a CPU)."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        kv: KVTensors,
        max_num_seqs: int,
        max_model_len: int,
        drafted: DraftTokens | None = None,
        sampler: BatchSampler | None = None,
    ) -> None:
        self.loaded = loaded
        self.model = model = loaded.model
        self.model_config = model.config
        self.attention = attention
        self.kv = kv
        self.block_size = attention.geometry.block_size
        self.first_block = kv.first_block
        self.num_blocks = kv.num_blocks
        self._least_blocks = -(-kv.num_blocks // 2)  # a step that needs still more will not be saved by a smaller cache
        self.num_host_blocks = kv.num_host_blocks
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.on_layer: Callable[[int], None] | None = None  # see ForwardPass; called on a CPU only
        self._graphs: GraphedModel | None = None
        if attention.fits_cuda_graphs and model.fits_cuda_graphs:
            self._graphs = GraphedModel(model, attention, kv.layers, kv.groups, max_model_len)
        self._requests: dict[str, RequestState] = {}
        layers = attention.geometry.layers
        self.groups: tuple[KVGroup, ...] = () if layers.is_dense else layers.groups  # for CacheConfig
        self._batch = DecodeRows(max_num_seqs, max_model_len, self.block_size, len(layers.groups))
        self._ends_sequence = np.zeros(self.model_config.vocab_size, dtype=np.bool_)
        eos = [token for token in self.model_config.eos_token_ids if token < self.model_config.vocab_size]
        self._ends_sequence[eos] = True
        self._to_device = ToDevice(memory_of(attention.device))
        self._sampling = StepSampling(self._batch, self._ends_sequence)
        if sampler is not None:
            self._sampling = BatchedStepSampling(self._batch, self._ends_sequence, sampler)
        self._draft_tokens = drafted or DraftTokens(drafts=False)
        self._ended: frozenset[str] = frozenset()  # by the step collected last, when another was under way
        self._drafts_wait = False  # until no step is under way: they are verified in a step that is planned with them

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        block_hashes: Sequence[bytes] | None = None,
        output_token_ids: Sequence[int] = (),
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Make a request known.

        salt and block_hashes: as for control's Request (the hashes of all full blocks; computed when not given).
        output_token_ids: tokens that another worker sampled already; for control they are part of the prompt.
        constraint: what the answer may look like; a new one, which is given the output tokens here.
        Raises InvalidRequestError for token ids outside of the vocabulary, ConfigError for an id that is in use.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r} is in use", param="request_id")
        token_ids = [*prompt_token_ids, *output_token_ids]
        vocab_size = self.model_config.vocab_size
        check_tokens(token_ids, sampling, vocab_size)
        if constraint is not None and output_token_ids:
            constraint.accept(output_token_ids)
        state = RequestState(request_id, token_ids, len(prompt_token_ids), sampling, constraint)
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self.model_config.eos_token_ids)
        state.stop_ids = tuple(sorted(token for token in stop_ids if 0 <= token < vocab_size))
        state.start_hashing(self.block_size, salt, block_hashes)
        self._requests[request_id] = state

    def forget(self, request_id: str) -> None:
        """Drop a request that will never be in a plan; unknown ids are ignored."""
        self._requests.pop(request_id, None)
        self._batch.leave(request_id, keep_tokens=False)

    @property
    def num_requests(self) -> int:
        """Requests known here."""
        return len(self._requests)

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Run LanguageModel.forward; the result is valid until the next call. The caller is in torch.inference_mode."""
        if self._graphs is not None:
            return self._graphs.forward(batch)
        # On a GPU a layer is only queued when it returns: its KV may not be sent yet.
        on_layer = self.on_layer if self.attention.device.type == "cpu" else None
        return self.model.forward(ForwardPass(batch, self.kv.layers, self.attention, on_layer, self.kv.groups))

    def forget_graphs(self) -> None:
        """Steps were captured for compute units that are not used any more: capture them again."""
        if self._graphs is not None:
            self._graphs.forget()

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step: see SchedulerOutput for the order of things. Failures of single requests are reported, and that
        of all of them, where there was not enough memory for the step."""
        return self.collect(self.launch(output))

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, behind: StepInFlight | None = None) -> StepInFlight:
        """Begin a step; ``collect`` waits for it and gives its result. Where the tokens of a step need nothing of the
        host, it returns before they are there.

        behind: the step before, which was not collected, and which ``may_run_ahead`` has found fit for this one: its
        tokens are read where they are. Steps are collected in their order, and a step that others are not launched
        behind is collected before the next is launched."""
        self._apply_membership(output)
        if not output.is_compute:
            return StepInFlight(output, StepResult(output.step_id, payload=StepTokens([], [])))
        try:
            return self._launch_ahead(output, behind) if behind is not None else self._launch(output)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Not in the handler, whose exception keeps all tensors of the step.
        return StepInFlight(output, self._give_up(output, reason))

    def may_run_ahead(self, flight: StepInFlight) -> bool:
        """Whether the step that follows this one may be launched before this one is collected: its rows depend on the
        tokens of this one alone, and not on what a host makes of them (constraints, penalties, drafts)."""
        if flight.layout is None or flight.pending is None or self._drafts_wait:
            return False
        layout, batch = flight.layout, self._batch
        if layout.first_slot or layout.last_slot != len(batch):
            return False
        return not batch.is_penalized[: len(batch)].any()

    @torch.inference_mode()
    def collect(self, flight: StepInFlight, *, is_followed: bool = False) -> StepResult:
        """The result of a step that was launched. is_followed: another was launched behind it; then nothing is proposed
        here, and where something could be, no further step runs ahead."""
        ended, self._ended = self._ended, frozenset()
        if flight.result is not None:
            return flight.result
        assert flight.layout is not None and flight.pending is not None
        assert isinstance(self._sampling, BatchedStepSampling)
        sampled = self._sampling.finish(flight.pending)
        if ended:  # by the step before, when this one was under way
            ids = self._batch.request_ids[flight.layout.first_slot : flight.layout.last_slot]
            sampled.silence([place for place, request_id in enumerate(ids) if request_id in ended], ())
            sampled.failed = [failure for failure in sampled.failed if failure[0] not in ended]
        result = self._result(flight.output, flight.layout, sampled, {}, Pooled())
        if is_followed:
            self._ended = frozenset(request_id for request_id, _ in (*result.stopped, *result.failed))
            self._drafts_wait = bool(result.proposals)
            return replace(result, proposals=())
        self._drafts_wait = False
        return result

    def _give_up(self, output: SchedulerOutput, reason: str) -> StepResult:
        """The step ran out of memory. Its requests fail, and the KV cache leaves more to the steps that follow."""
        self._forget_joined(output)
        decodes = self._batch.request_ids[: output.num_decodes]
        self.forget_graphs()
        if self.attention.device.type == "cuda":
            torch.cuda.empty_cache()
        kept = self.num_blocks - max(1, int(self.num_blocks * GIVEN_BACK))
        num_blocks = kept if kept >= self._least_blocks else 0
        tokens = sum([chunk.num_tokens for chunk in output.prefills])
        device = self.attention.device
        message = f"a step of {len(decodes)} sequences and {tokens} prompt tokens ran out of memory on {device}"
        logger.error(
            "%s: %s The KV cache keeps %d of %d blocks", message, reason, num_blocks or self.num_blocks, self.num_blocks
        )
        request_ids = (*decodes, *[chunk.request_id for chunk in output.prefills])
        return StepResult(
            output.step_id,
            failed=tuple([(request_id, message) for request_id in request_ids]),
            payload=StepTokens([], []),
            is_out_of_memory=True,
            num_blocks=num_blocks,
        )

    def _forget_joined(self, output: SchedulerOutput) -> None:
        """Prompts that were to join the decode batch in this step have not."""
        for chunk in output.prefills:
            if chunk.is_last:
                self._batch.leave(chunk.request_id, keep_tokens=False)

    def _launch_ahead(self, output: SchedulerOutput, behind: StepInFlight) -> StepInFlight:
        assert behind.pending is not None and isinstance(self._sampling, BatchedStepSampling)
        layout = lay_out_ahead(self._batch, behind.pending.tokens.token_ids, self._to_device)
        hidden = self.forward(layout.batch)
        logits = self.model.logits(hidden[: layout.num_samples])
        return StepInFlight(output, None, layout, self._sampling.start(layout, logits, num_ahead=1))

    def _launch(self, output: SchedulerOutput) -> StepInFlight:
        layout = self._lay_out(output)
        self._sampling.begin(layout)
        try:
            hidden = self.forward(layout.batch)
        except StepBrokenOff:  # it may be planned again
            self._forget_joined(output)
            raise
        prompt_logprobs = self._score_prompts(layout, hidden)
        pooled = pool(layout, self._batch, hidden)
        if len(pooled.places) == layout.last_slot - layout.first_slot:  # nobody gets a token
            payload = StepTokens([], [], prompt_logprobs=prompt_logprobs, embeddings=pooled.vectors)
            full_blocks, failed = self._hash_full_blocks(layout), tuple(pooled.failed)
            return StepInFlight(
                output, StepResult(output.step_id, full_blocks=full_blocks, failed=failed, payload=payload)
            )
        logits, sampling = self.model.logits(hidden[: layout.num_samples]), self._sampling
        is_simple = not prompt_logprobs and not pooled.places
        if is_simple and isinstance(sampling, BatchedStepSampling) and sampling.may_start(layout):
            return StepInFlight(output, None, layout, sampling.start(layout, logits))
        sampled = sampling.sample(layout, logits)
        return StepInFlight(output, self._result(output, layout, sampled, prompt_logprobs, pooled))

    def _result(
        self,
        output: SchedulerOutput,
        layout: StepLayout,
        sampled: Sampled,
        prompt_logprobs: PromptLogprobs,
        pooled: Pooled,
    ) -> StepResult:
        """What the step gave; the batch advances."""
        sampled.silence(pooled.places, pooled.failed)
        # In this order: accepted tokens count as computed in the hashes, the next inputs, which ``_conclude`` sets, do
        # not.
        extra = self._extra(layout, sampled)
        full_blocks = self._hash_full_blocks(layout)
        payload, stopped = self._conclude(layout, sampled, prompt_logprobs)
        payload.embeddings = pooled.vectors
        proposals = self._proposals(layout, sampled, {request_id for request_id, _ in stopped})
        return StepResult(
            output.step_id,
            stopped,
            full_blocks,
            tuple(sampled.failed),
            payload,
            extra=extra,
            proposals=proposals,
            beyond_grammar=frozenset(sampled.beyond_grammar),
        )

    def _apply_membership(self, output: SchedulerOutput) -> None:
        batch = self._batch
        for request_id in output.finished:
            batch.leave(request_id, keep_tokens=False)
            self._requests.pop(request_id, None)
        for request_id in output.paused:
            batch.leave(request_id, keep_tokens=True)
        if output.num_blocks:
            self.kv.shrink(output.num_blocks)
            self.num_blocks = output.num_blocks
            self.forget_graphs()  # the cache may lie elsewhere
        # Copies in the order of SchedulerOutput: a block that is copied out here may be the target of the next copy.
        if output.swap_out:
            self.kv.copy_to_host(output.swap_out)
        if output.block_copies:
            self.kv.copy_within(output.block_copies)
        if output.swap_in:
            self.kv.copy_from_host(output.swap_in)
        for resumed in output.resumed:
            state = self._requests[resumed.request_id]
            batch.join(state, resumed.num_tokens, resumed.block_tables, resumed.first_blocks)
        for request_id, group, block_id in output.new_blocks:
            batch.add_block(request_id, group, block_id)

    def _lay_out(self, output: SchedulerOutput) -> StepLayout:
        batch = self._batch
        assert output.num_decodes in (0, len(batch)), f"{output.num_decodes} decodes planned, {len(batch)} are here"
        extra = {}
        for rows in output.verify_rows:
            drafted = self._requests[rows.request_id].drafted[: rows.num_tokens]
            assert len(drafted) == rows.num_tokens, f"{rows.num_tokens} extra rows planned, {len(drafted)} are drafted"
            extra[batch.write_drafts(rows.request_id, drafted)] = rows.num_tokens
        if not output.prefills:
            return lay_out_decodes(batch, extra, self._to_device)
        states = [self._requests[chunk.request_id] for chunk in output.prefills]
        return lay_out_step(batch, output.num_decodes, extra, output.prefills, states, self._to_device)

    def _hash_full_blocks(self, layout: StepLayout) -> tuple[tuple[str, bytes], ...]:
        """Blocks with output tokens that this step completes; called before the batch advances to its new inputs."""
        batch, full = self._batch, []
        computed = batch.positions[layout.first_slot : layout.num_members] + 1
        may_be_full = {*np.flatnonzero(computed % self.block_size == 0).tolist(), *layout.extra}
        for slot in sorted(may_be_full):
            full += batch.states[slot].hash_through(int(computed[slot]), batch.token_ids[slot])
        for chunk in layout.chunks:
            state, end = chunk.state, chunk.plan.start + chunk.plan.num_tokens
            if end // self.block_size > state.num_hashed_blocks:
                full += state.hash_through(end, state.token_ids)
        return tuple(full)

    def _conclude(
        self, layout: StepLayout, sampled: Sampled, prompt_logprobs: PromptLogprobs
    ) -> tuple[StepTokens, tuple[tuple[str, FinishReason], ...]]:
        """Advance the batch. Returns the tokens to report and who stopped."""
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        token_ids, is_silent = sampled.token_ids, sampled.is_silent
        batch.advance(first, last, token_ids)
        stops = self._ends_sequence[token_ids] & ~batch.ignores_eos[first:last]
        for place in np.flatnonzero(batch.has_stop_ids[first:last]):
            stops[place] |= int(token_ids[place]) in batch.states[first + place].stop_ids
        request_ids = batch.request_ids[first:last]
        stopped = tuple((request_ids[place], FinishReason.STOP) for place in np.flatnonzero(stops & ~is_silent))
        if not (is_silent.any() or sampled.before or sampled.logprobs):
            return StepTokens(request_ids, token_ids.tolist(), prompt_logprobs=prompt_logprobs), stopped
        tokens = StepTokens([], [], prompt_logprobs=prompt_logprobs)
        for number in np.flatnonzero(~is_silent).tolist():
            for index, entry in enumerate(sampled.logprobs.get(number, ()), len(tokens.token_ids)):
                tokens.logprobs[index] = entry
            of_slot = [*sampled.before.get(number, ()), int(token_ids[number])]
            tokens.request_ids += [request_ids[number]] * len(of_slot)
            tokens.token_ids += of_slot
        return tokens, stopped

    def _extra(self, layout: StepLayout, sampled: Sampled) -> tuple[VerifyResult, ...]:
        """What came of the drafted tokens that were computed; the batch gets those that were right."""
        extra = []
        for slot, num_tokens in layout.extra.items():
            state, place = self._batch.states[slot], slot - layout.first_slot
            if sampled.is_silent[place]:
                continue
            num_accepted = len(sampled.before.get(place, ()))
            self._batch.accept(slot, num_accepted)
            num_forced = min(num_tokens, state.num_forced)
            extra.append(VerifyResult(state.request_id, num_tokens, num_accepted, num_forced))
        return tuple(extra)

    def _proposals(self, layout: StepLayout, sampled: Sampled, stopped: Collection[str]) -> tuple[DraftProposal, ...]:
        """What may come after the tokens of this step."""
        batch, proposals, drafts = self._batch, [], self._draft_tokens.drafts
        num_members = layout.num_members  # those behind them may never decode here
        newest = batch.positions[layout.first_slot : layout.last_slot].tolist()
        for slot, position in enumerate(newest, start=layout.first_slot):
            state = batch.states[slot]
            if state.constraint is None and not (drafts and slot < num_members and position + 1 >= state.next_look):
                continue
            if sampled.is_silent[slot - layout.first_slot] or state.request_id in stopped:
                continue
            tokens = batch.tokens_of(slot)
            most = min(state.num_prompt_tokens + state.params.max_tokens, self.max_model_len)
            try:
                proposal = self._draft_tokens.after(state, tokens, most - len(tokens) - 1, len(newest))
            except ValueError as error:
                sampled.fail(state.request_id, error)
                continue
            if proposal is not None:
                proposals.append(proposal)
        return tuple(proposals)

    def _score_prompts(self, layout: StepLayout, hidden: torch.Tensor) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """Log probabilities of prompt tokens, from the rows behind the sampled ones. Rows of which the mean is wanted
        are added up."""
        scores: dict[str, tuple[int, list[TokenLogprobs]]] = {}
        row = layout.num_samples
        for chunk in layout.chunks:
            state, entries = chunk.state, []
            if state.params.pooling == "mean" and chunk.scores:
                add_rows(state, hidden[row : row + len(chunk.scores)])
                row += len(chunk.scores)
                state.num_scored_tokens = chunk.scores.stop
                continue
            num_top = state.params.prompt_logprobs or 0
            for first in range(chunk.scores.start, chunk.scores.stop, SCORED_ROWS_AT_ONCE):
                count = min(SCORED_ROWS_AT_ONCE, chunk.scores.stop - first)
                logits = self.model.logits(hidden[row : row + count])
                row += count
                token_ids = state.token_ids[first + 1 : first + 1 + count].tolist()
                entries += self._sampling.score(logits, token_ids, num_top)
            if entries:
                scores[state.request_id] = (chunk.scores.start + 1, entries)
                state.num_scored_tokens = chunk.scores.stop
        return scores


def load_runner(config: RunnerConfig, progress: Progress | None = None) -> ModelRunner:
    """Read a checkpoint directory and allocate the KV cache. ``progress(bytes done, bytes in total)``.

    Raises ConfigError or UnsupportedModelError when the directory, its config or a tensor is not what it should be.
    """
    model_config = read_model_config(config.model, config.model_impl)
    check_quantize(model_config, config.quantize)
    max_model_len = _max_model_len(config.max_model_len, model_config)
    model_config = model_config.for_context(max_model_len)
    checkpoint = open_checkpoint(model_config)
    dtype, note = resolve_dtype(config.dtype, model_config, checkpoint)
    device = torch.device(config.device)
    check_cpu_only({name: getattr(config, name) for name in CPU_ONLY}, str(device))
    instruction_set = choose(dtype, config.instruction_set, device.type)
    ops = make_ops(dtype, instruction_set)
    below = config.windows_below or max_model_len
    layers = deal(model_config.attention.layers, config.block_size, below) if config.frees_windows else None
    attention = make_attention(
        model_config.attention, config.block_size, dtype, device, instruction_set, layers, config.kv_dtype
    )
    quantization = QUANTIZATIONS[config.quantize]
    family = family_of(model_config)
    rotary = RotaryTables(model_config.attention.head_dim, max_model_len, device)

    def load(memory: WeightMemory) -> tuple[LanguageModel, str]:
        weights = Weights(checkpoint, dtype, device, progress, memory)
        layer_loader = LayerLoader(weights, ops, attention, rotary, quantization)
        model = family(model_config, layer_loader)
        weights.finish()
        return model, ", ".join(map(str, layer_loader.formats)) or str(dtype).removeprefix("torch.")

    is_own = family is not TransformersModel  # which reads the files by itself
    if config.shared_weights is None or not is_own:
        (model, formats), why_private = load(PrivateMemory(device)), ""
    else:
        key = weights_key(model_config, checkpoint, dtype, f"{ops.name} {config.quantize}")
        (model, formats), why_private = load_shared(config.shared_weights, key, load)
    if progress is not None:
        progress(checkpoint.num_bytes, checkpoint.num_bytes)
    num_blocks = _num_blocks(config, model, attention, max_model_len, instruction_set)
    kv = KVTensors(attention, num_blocks, config.num_host_blocks, config.shared_pool, config.shared_host)
    notes = (note, why_private, *model_config.notes, attention.geometry.layers.note)
    loaded = LoadedModel(
        model, formats, str(dtype).removeprefix("torch."), instruction_set, "; ".join(filter(None, notes))
    )
    drafted = DraftTokens(drafts=speculates(config.speculation, instruction_set if is_own else TORCH))
    sampler = sampler_of(device, instruction_set)
    return ModelRunner(loaded, attention, kv, config.max_num_seqs, max_model_len, drafted, sampler)


def sampler_of(device: torch.device, instruction_set: str) -> BatchSampler | None:
    """What samples on a device; None on a CPU."""
    if device.type == "cpu":
        return None
    if instruction_set != TRITON:
        return BatchSampler(device, memory_of(device))
    from diptych.runtime.kernels.triton_kernels.pick_tokens import pick_triton

    return BatchSampler(device, memory_of(device), pick_triton)


def _num_blocks(
    config: RunnerConfig, model: LanguageModel, attention: AttentionBackend, max_model_len: int, instruction_set: str
) -> int:
    """Blocks of the KV cache. Raises ConfigError where no sequence would fit beside the weights on a GPU."""
    if config.num_blocks is not None or config.memory_share is None:
        return config.num_blocks or attention.geometry.blocks_within(config.kv_bytes)

    def trial_runner(num_blocks: int) -> ModelRunner:
        loaded, sampler = LoadedModel(model, "", "", instruction_set), sampler_of(attention.device, instruction_set)
        kv = KVTensors(attention, num_blocks)
        return ModelRunner(loaded, attention, kv, config.max_num_seqs, max_model_len, None, sampler)

    trial = MemoryTrial(trial_runner, config.block_size, min(config.max_step_tokens or max_model_len, max_model_len))
    num_bytes = kv_bytes_beside(CudaUsage(), trial, config.memory_share)
    num_blocks = attention.geometry.blocks_within(num_bytes)
    if num_blocks < LEAST_BLOCKS:
        raise ConfigError(
            f"beside the weights, {num_bytes >> 20} MiB of the GPU are left for the KV cache; {LEAST_BLOCKS} blocks "
            f"take {LEAST_BLOCKS * attention.geometry.block_bytes >> 20} (a smaller context makes steps smaller)",
            param="max_model_len",
        )
    return num_blocks


def speculates(speculation: str, instruction_set: str) -> bool:
    """Whether tokens are guessed; ``instruction_set``: of the kernels. Raises ConfigError for a word that is none of
    SPECULATIONS."""
    if speculation not in SPECULATIONS:
        raise ConfigError(f"speculation is {speculation!r}; {', '.join(SPECULATIONS)}", param="speculation")
    return speculation == "on" or (speculation == "auto" and instruction_set != TORCH)


def _max_model_len(wanted: int | None, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise ConfigError(
            f"max_model_len is {wanted}; at least 2 and at most {limit}, what {model_config.path} supports",
            param="max_model_len",
        )
    return wanted

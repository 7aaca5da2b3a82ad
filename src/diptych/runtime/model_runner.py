"""ModelRunner: the Executor that computes. It applies a SchedulerOutput, runs the model, and samples.

For drivers (serving/worker, local_engine.py):

    runner = load_runner(RunnerConfig(model=path), progress)    # blocks until the weights are in memory
    runner.first_block, runner.num_blocks, runner.block_size, runner.num_host_blocks, runner.max_model_len
                                  for CacheConfig and EngineConfig; block ids begin at first_block
    runner.model_config.eos_token_ids, .vocab_size, ...
    runner.add_request(request_id, prompt_token_ids, sampling, salt=..., block_hashes=..., output_token_ids=...)
                                  before the first plan that names it; raises InvalidRequestError (then do not queue it)
    runner.forget(request_id)     only for a request that the EngineCore refused; others leave through output.finished
    result = runner.execute(output)                             # StepResult; result.payload is a StepTokens

A request is known here from ``add_request`` until a plan names it in ``finished``. A stopping token (end-of-sequence,
stop token id) is part of StepTokens; hiding it from the client is the driver's choice. Stop strings are the driver's.

Owns the tokens, the decode batch and the KV memory. Never decides what runs, never reads a clock, never looks at text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import ConfigError
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import PromptLogprobs, SchedulerOutput, StepResult, StepTokens, TokenLogprobs
from diptych.runtime.attention import make_attention
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.checkpoint import open_checkpoint
from diptych.runtime.cuda_graphs import GraphedModel
from diptych.runtime.decode_rows import DecodeRows
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.instruction_set import AUTO, TORCH, choose
from diptych.runtime.kv_tensors import KVTensors
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.layer_loader import LayerLoader
from diptych.runtime.loader import Progress, Weights, resolve_dtype
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.models.registry import MODELS, LanguageModel, read_model_config
from diptych.runtime.ops import make_ops
from diptych.runtime.request_state import RequestState, check_tokens
from diptych.runtime.rope import RotaryTables
from diptych.runtime.sampler import (
    RowSampling,
    SamplingError,
    row_as_float32,
    sample_greedy,
    sample_row,
    token_logprobs,
    uniforms,
)
from diptych.runtime.shared_pool import SharedPool
from diptych.runtime.shared_weights import load_shared, weights_key
from diptych.runtime.step_layout import StepLayout, lay_out_decodes, lay_out_step
from diptych.runtime.weight_format import QUANTIZATIONS
from diptych.runtime.weight_memory import PrivateMemory, WeightMemory

SCORED_ROWS_AT_ONCE = 64  # logits of prompt tokens are computed in slices: a whole prompt's would take gigabytes
NOT_A_NUMBER = "the model computed a logit that is not a number"


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What to load and how much memory it may use.

    dtype: auto | bfloat16 | float32. kv_bytes: memory of the KV cache, unless ``num_blocks`` says it in blocks.
    max_model_len: None for what the checkpoint supports. instruction_set: of the native kernels, see
    instruction_set.choose. quantize: weights in floating point become whole numbers, see QUANTIZATIONS. shared_pool:
    the KV cache lies in a pool that other workers map, too; ``num_blocks`` of its blocks are this worker's.
    shared_weights: the descriptor of a file in memory that holds the weights for all workers, or will when the first of
    them has loaded. These four on the cpu only.
    """

    model: str | Path
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 32
    kv_bytes: int = 1 << 30
    num_blocks: int | None = None
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_model_len: int | None = None
    instruction_set: str = AUTO
    quantize: str = "none"
    shared_pool: SharedPool | None = None
    shared_weights: int | None = None


@dataclass(slots=True)
class _Sampled:
    """What the sampling rows of a step got. is_silent: rows that failed, now or in an earlier step, or had ended."""

    token_ids: npt.NDArray[np.int64]
    is_silent: npt.NDArray[np.bool_]
    failed: list[tuple[str, str]] = field(default_factory=list)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. weights: their formats, in words. instruction_set: of its kernels on a cpu. note: what
    the loader wants people to know ("" if nothing)."""

    model: LanguageModel
    weights: str
    instruction_set: str
    note: str = ""


class ModelRunner:
    """One model and its KV memory."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        kv: KVTensors,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.loaded = loaded
        self.model = model = loaded.model
        self.model_config = model.config
        self.attention = attention
        self.kv = kv
        self.block_size = attention.geometry.block_size
        self.first_block = kv.first_block
        self.num_blocks = kv.num_blocks
        self.num_host_blocks = kv.num_host_blocks
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.on_layer: Callable[[int], None] | None = None  # see ForwardPass; called on a CPU only
        self._graphs: GraphedModel | None = None
        if attention.fits_cuda_graphs and model.fits_cuda_graphs:
            self._graphs = GraphedModel(model, attention, kv.layers, max_model_len)
        self._requests: dict[str, RequestState] = {}
        self._batch = DecodeRows(max_num_seqs, max_model_len, self.block_size)
        self._ends_sequence = np.zeros(self.model_config.vocab_size, dtype=np.bool_)
        eos = [token for token in self.model_config.eos_token_ids if token < self.model_config.vocab_size]
        self._ends_sequence[eos] = True

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        block_hashes: Sequence[bytes] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Make a request known.

        salt and block_hashes: as for control's Request (the hashes of all full blocks; computed when not given).
        output_token_ids: tokens that another worker sampled already; for control they are part of the prompt.
        Raises InvalidRequestError for token ids outside of the vocabulary, ConfigError for an id that is in use.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r} is in use", param="request_id")
        token_ids = [*prompt_token_ids, *output_token_ids]
        vocab_size = self.model_config.vocab_size
        check_tokens(token_ids, sampling, vocab_size)
        state = RequestState(request_id, token_ids, len(prompt_token_ids), sampling)
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
        """See LanguageModel.forward; the result is valid until the next call. The caller is in torch.inference_mode."""
        if self._graphs is not None:
            return self._graphs.forward(batch)
        on_layer = self.on_layer if self.attention.device.type == "cpu" else None
        return self.model.forward(ForwardPass(batch, self.kv.layers, self.attention, on_layer))

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step: see SchedulerOutput for the order of things. Failures of single requests are reported."""
        self._apply_membership(output)
        if not output.is_compute:
            return StepResult(output.step_id, payload=StepTokens([], []))
        layout = self._lay_out(output)
        hidden = self.forward(layout.batch)
        prompt_logprobs = self._score_prompts(layout, hidden)
        full_blocks = self._hash_full_blocks(layout)
        if layout.num_samples == 0:
            payload = StepTokens([], [], prompt_logprobs=prompt_logprobs)
            return StepResult(output.step_id, full_blocks=full_blocks, payload=payload)
        sampled = self._sample(layout, self.model.logits(hidden[: layout.num_samples]))
        payload, stopped = self._conclude(layout, sampled, prompt_logprobs)
        return StepResult(output.step_id, stopped, full_blocks, tuple(sampled.failed), payload)

    def _apply_membership(self, output: SchedulerOutput) -> None:
        batch = self._batch
        for request_id in output.finished:
            batch.leave(request_id, keep_tokens=False)
            self._requests.pop(request_id, None)
        for request_id in output.paused:
            batch.leave(request_id, keep_tokens=True)
        if output.swap_out:
            self.kv.copy_to_host(output.swap_out)
        if output.block_copies:
            self.kv.copy_within(output.block_copies)
        if output.swap_in:
            self.kv.copy_from_host(output.swap_in)
        for resumed in output.resumed:
            batch.join(self._requests[resumed.request_id], resumed.num_tokens, resumed.block_ids)
        for request_id, block_id in output.new_blocks:
            batch.add_block(request_id, block_id)

    def _lay_out(self, output: SchedulerOutput) -> StepLayout:
        batch = self._batch
        assert output.num_decodes in (0, len(batch)), f"{output.num_decodes} decodes planned, {len(batch)} are here"
        if not output.prefills:
            return lay_out_decodes(batch, self.attention.device)
        states = [self._requests[chunk.request_id] for chunk in output.prefills]
        return lay_out_step(batch, output.num_decodes, output.prefills, states, self.attention.device)

    def _hash_full_blocks(self, layout: StepLayout) -> tuple[tuple[str, bytes], ...]:
        """Blocks with output tokens that this step completes; called before the batch advances."""
        batch, full = self._batch, []
        num_decodes = layout.batch.num_decodes
        computed = batch.positions[:num_decodes] + 1
        for slot in np.flatnonzero(computed % self.block_size == 0):
            full += batch.states[slot].hash_through(int(computed[slot]), batch.token_ids[slot])
        for chunk in layout.chunks:
            state, end = chunk.state, chunk.plan.start + chunk.plan.num_tokens
            if end // self.block_size > state.num_hashed_blocks:
                full += state.hash_through(end, state.token_ids)
        return tuple(full)

    def _sample(self, layout: StepLayout, logits: torch.Tensor) -> _Sampled:
        """One token per sampling slot."""
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        token_ids, is_finite = sample_greedy(logits)
        sampled = _Sampled(token_ids, ~is_finite)
        for row in np.flatnonzero(~is_finite).tolist():
            sampled.failed.append((batch.request_ids[first + row], NOT_A_NUMBER))
        rows = np.flatnonzero(~batch.is_plain[first:last] & ~sampled.is_silent)
        seeds = np.array([batch.states[first + row].sampling_seed for row in rows], dtype=np.int64)
        numbers = uniforms(seeds, batch.positions[first + rows] + 1)
        for row, uniform in zip(rows.tolist(), numbers.tolist(), strict=True):
            state = batch.states[first + row]
            values = row_as_float32(logits, row)
            raw = values.copy() if state.params.logprobs is not None else values
            tokens = batch.tokens_of(first + row)
            parameters = RowSampling(state.params, uniform, tokens, state.num_prompt_tokens, state.stop_ids)
            try:
                token_ids[row] = sample_row(values, parameters)
            except SamplingError as error:
                sampled.failed.append((state.request_id, str(error)))
                sampled.is_silent[row] = True
                continue
            if state.params.logprobs is not None:
                entry = token_logprobs(raw, int(token_ids[row]), state.params.logprobs)
                sampled.logprobs[state.request_id] = entry
        return sampled

    def _conclude(
        self, layout: StepLayout, sampled: _Sampled, prompt_logprobs: PromptLogprobs
    ) -> tuple[StepTokens, tuple[tuple[str, FinishReason], ...]]:
        """Advance the batch. Returns the tokens to report and who stopped."""
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        token_ids, is_silent = sampled.token_ids, sampled.is_silent
        batch.advance(first, last, token_ids)
        stops = self._ends_sequence[token_ids] & ~batch.ignores_eos[first:last]
        for row in np.flatnonzero(batch.has_stop_ids[first:last]):
            stops[row] |= int(token_ids[row]) in batch.states[first + row].stop_ids
        request_ids, tokens = batch.request_ids[first:last], token_ids.tolist()
        stopped = tuple((request_ids[row], FinishReason.STOP) for row in np.flatnonzero(stops & ~is_silent))
        if is_silent.any():
            reported = np.flatnonzero(~is_silent)
            request_ids, tokens = [request_ids[row] for row in reported], [tokens[row] for row in reported]
        return StepTokens(request_ids, tokens, sampled.logprobs, prompt_logprobs), stopped

    def _score_prompts(self, layout: StepLayout, hidden: torch.Tensor) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """Log probabilities of prompt tokens, from the rows behind the sampled ones."""
        scores: dict[str, tuple[int, list[TokenLogprobs]]] = {}
        row = layout.num_samples
        for chunk in layout.chunks:
            state, entries = chunk.state, []
            num_top = state.params.prompt_logprobs or 0
            for first in range(chunk.scores.start, chunk.scores.stop, SCORED_ROWS_AT_ONCE):
                count = min(SCORED_ROWS_AT_ONCE, chunk.scores.stop - first)
                logits = self.model.logits(hidden[row : row + count])
                row += count
                entries += [
                    token_logprobs(row_as_float32(logits, index), int(state.token_ids[first + index + 1]), num_top)
                    for index in range(count)
                ]
            if entries:
                scores[state.request_id] = (chunk.scores.start + 1, entries)
                state.num_scored_tokens = chunk.scores.stop
        return scores


def load_runner(config: RunnerConfig, progress: Progress | None = None) -> ModelRunner:
    """Read a checkpoint directory and allocate the KV cache. ``progress(bytes done, bytes in total)``.

    Raises ConfigError or UnsupportedModelError when the directory, its config or a tensor is not what it should be.
    """
    model_config = read_model_config(config.model)
    max_model_len = _max_model_len(config.max_model_len, model_config)
    checkpoint = open_checkpoint(model_config)
    dtype, note = resolve_dtype(config.dtype, model_config, checkpoint)
    device = torch.device(config.device)
    _check_cpu_only(config, device)
    instruction_set = choose(dtype, config.instruction_set) if device.type == "cpu" else TORCH
    ops = make_ops(dtype, instruction_set)
    attention = make_attention(model_config.attention, config.block_size, dtype, device, instruction_set)
    num_blocks = config.num_blocks or attention.geometry.blocks_within(config.kv_bytes)
    quantization = QUANTIZATIONS[config.quantize]
    rotary = RotaryTables(model_config.attention.head_dim, max_model_len, device)

    def load(memory: WeightMemory) -> tuple[LanguageModel, str]:
        weights = Weights(checkpoint, dtype, device, progress, memory)
        layer_loader = LayerLoader(weights, ops, attention, rotary, quantization)
        model = MODELS[model_config.architecture](model_config, layer_loader)
        weights.finish()
        return model, ", ".join(map(str, layer_loader.formats)) or str(dtype).removeprefix("torch.")

    if config.shared_weights is None:
        (model, formats), why_private = load(PrivateMemory(device)), ""
    else:
        key = weights_key(model_config, checkpoint, dtype, f"{ops.name} {config.quantize}")
        (model, formats), why_private = load_shared(config.shared_weights, key, load)
    if progress is not None:
        progress(checkpoint.num_bytes, checkpoint.num_bytes)
    kv = KVTensors(attention, num_blocks, config.num_host_blocks, config.shared_pool)
    loaded = LoadedModel(model, formats, instruction_set, "; ".join(filter(None, (note, why_private))))
    return ModelRunner(loaded, attention, kv, config.max_num_seqs, max_model_len)


def _check_cpu_only(config: RunnerConfig, device: torch.device) -> None:
    for name, default in (
        ("instruction_set", AUTO),
        ("quantize", "none"),
        ("shared_pool", None),
        ("shared_weights", None),
    ):
        if device.type != "cpu" and (value := getattr(config, name)) != default:
            raise ConfigError(f"{name} is {value!r} and device is {device}; supported: cpu", param=name)


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

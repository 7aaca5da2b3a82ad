"""From options to an engine that can serve: threads, weights, KV cache, step-time model, connector.

Owns the order of loading. Imports torch when it is called, not before, so that a worker can report its progress.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import ConfigError
from diptych.control.recent_rows import RecentRows
from diptych.runtime.device.compute_device import ComputeDevice, UndividedDevice
from diptych.runtime.dtypes import INT8
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.required_packages import require_packages
from diptych.runtime.tiers.tier_io import TierDriver
from diptych.runtime.transfer import CONNECTORS, make_connector
from diptych.runtime.transfer.connector import KVConnector, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.weights.checkpoint import fingerprint
from diptych.serving.answers.grammar.grammar_checker import is_installed
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.failures.recorded_cores import recent_of_engine, written_to
from diptych.serving.fleet.shared_memory import default_num_blocks
from diptych.serving.kv_memory import kv_geometry_of, longest_sequence_of, windows_below
from diptych.serving.link.engine_options import EngineOptions, parse_cores
from diptych.serving.link.messages import Ready
from diptych.serving.link.recorder import Recorder, record_engine
from diptych.serving.start_checks import check_kv_memory
from diptych.serving.worker.load_tiers import num_host_blocks, open_tiers, tier_config
from diptych.serving.worker.request_intake import Runner

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars
    from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig
    from diptych.runtime.step.step_pipeline import StepPipeline

logger = logging.getLogger(__name__)

Report = Callable[..., None]  # (stage, fraction=None)
RunnerType = TypeVar("RunnerType", bound=Runner)

# A prefill worker on a CPU gives way to processes that need its core for a moment (the front end, a client on this
# host), so that they do not take the core of a decode worker, whose streams would wait.
PREFILL_NICENESS = 5


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[RunnerType]):
    """What a worker process serves with. recorder: of the engine's recording; its owner closes it. device: what it
    computes on. grammars: None where none can be followed. tiers: what drives the disk and the reading of
    other workers' host blocks, if there is either; its owner closes it. recent: the newest inputs of the engine.
    pipeline: where steps are launched ahead."""

    engine: EngineCore
    runner: RunnerType
    ready: Ready
    recorder: Recorder | None = None
    device: ComputeDevice = field(default_factory=UndividedDevice)
    grammars: "Grammars | None" = None
    tiers: TierDriver | None = None
    recent: RecentRows | None = None
    pipeline: "StepPipeline | None" = None


def load_engine(options: EngineOptions, report: Report, *, owns_process: bool = True) -> "LoadedEngine[ModelRunner]":
    """Load the checkpoint, size the KV cache, fit the step-time model. owns_process: threads are bound to CPUs; false
    inside of a program that does other things, too. Raises ConfigError for options that cannot be met."""
    require_packages()
    report("importing torch")
    from diptych.runtime.device.multiprocessors import multiprocessors_of
    from diptych.runtime.device.threads import ThreadPool, configure_threads
    from diptych.runtime.local_engine import engine_config
    from diptych.runtime.step.model_runner import load_runner
    from diptych.runtime.step.warm_up import warm_up

    device = _choose_device(options)
    cores = parse_cores(options.device.cores) if options.device.cores else None
    if device == "cpu" and options.place and options.place.role == "prefill" and hasattr(os, "nice"):
        os.nice(PREFILL_NICENESS)  # before there are threads: they inherit it
    threads = configure_threads(options.device.threads, cores, bind=owns_process and device == "cpu")
    memory = options.memory
    geometry = kv_geometry_of(options)
    config = _runner_config(options, device, geometry)
    runner = load_runner(config, lambda done, total: report("loading weights", done / max(1, total)))
    settings = engine_config(runner, options.scheduler, enable_prefix_cache=memory.prefix_cache, slo=options.slo)
    tiers = tier_config(memory, runner, geometry)
    cache_config = dataclasses.replace(settings.cache, names_evictors=options.explains_misses, tiers=tiers)
    settings = settings.with_(cache=cache_config)
    recorder = record_engine(Path(options.record), settings) if options.record else None
    if recorder is not None:
        logger.warning("recording to %s", recorder.path)
    recent = recent_of_engine()
    engine = RecordingEngineCore(settings, *written_to(recent, recorder))
    measured = []
    if options.warm_up:
        report("warming up")
        for features, duration_ns in warm_up(runner):
            engine.observe(features, duration_ns)
            of_prompts = features.prefill_tokens, features.prefill_attention
            measured.append((*of_prompts, features.decode_seqs, features.decode_context, duration_ns))
    compute: ComputeDevice = ThreadPool(threads)
    if device == "cuda":
        compute = multiprocessors_of(runner.attention.device, runner.forget_graphs)
    model, loaded, capacity = runner.model_config, runner.loaded, _capacity_tokens(engine)
    where = f"{threads.words if device == 'cpu' else device}, {loaded.instruction_set}"
    description = f"{model.architecture}, {loaded.weights}, {where}, {_cache_words(engine, capacity, geometry)}"
    ready = Ready(
        model.vocab_size,
        runner.max_model_len,
        capacity,
        options.scheduler.max_waiting,
        options.scheduler.max_num_seqs,
        list(model.eos_token_ids),
        f"{description}; {loaded.note}" if loaded.note else description,
        instruction_set=loaded.instruction_set,
        weights=loaded.weights,
        processor=threads.processor_words if device == "cpu" else "",
        share=compute.share,
        embedding_size=model.hidden_size,
        measured=measured,
        groups=list(runner.groups),
    )
    driver, grammars = _open_tiers(options, runner), _load_grammars(options, model)
    return LoadedEngine(engine, runner, ready, recorder, compute, grammars, driver, recent, _pipeline_of(runner))


def _open_tiers(options: EngineOptions, runner: "ModelRunner") -> TierDriver | None:
    return open_tiers(options, runner, kv_format(runner)) if options.memory.prefix_cache else None


def _pipeline_of(runner: "ModelRunner") -> "StepPipeline | None":
    """None on a CPU, which does not compute by itself."""
    from diptych.runtime.step.step_pipeline import StepPipeline

    return StepPipeline(runner) if runner.attention.device.type != "cpu" else None


def _cache_words(engine: EngineCore, capacity: int, geometry: KVGeometry) -> str:
    words = [f"{engine.kv.pool.num_blocks * geometry.block_bytes / 2**30:.2f} GiB"]
    if geometry.dtype == INT8:
        words.append(INT8)
    if not engine.kv.is_dense:
        words.append("windows freed")
    return f"KV cache of {capacity:,} tokens ({', '.join(words)})"


def _capacity_tokens(engine: EngineCore) -> int:
    """Tokens that the KV cache holds: with windows, in sequences of the greatest length, or in the longest that
    fits."""
    kv, length = engine.kv, engine.config.max_model_len
    if kv.capacity_tokens < length:
        return kv.capacity_tokens
    return max(length, kv.layout.tokens_within(kv.pool.num_blocks - kv.config.watermark_blocks, length))


def _load_grammars(options: EngineOptions, model: ModelConfig) -> "Grammars | None":
    """None without the package that computes masks, or without a tokenizer."""
    if not is_installed():
        return None
    from diptych.runtime.sampling.grammar import Grammars

    tokenizer = Tokenizer(Path(options.model))
    if not tokenizer.has_text:
        return None
    return Grammars(tokenizer.fast.to_str(), max(model.vocab_size, tokenizer.vocab_size), model.eos_token_ids)


def _choose_device(options: EngineOptions) -> str:
    """cpu or cuda; each worker takes a GPU of its own, while there are some. Raises ConfigError when there is none."""
    import torch

    device, num_gpus = options.device.device, torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device == "cuda":
        if not num_gpus:
            raise ConfigError("device is cuda; PyTorch finds no GPU here (auto, cpu)", param="device")
        if options.place is not None:
            torch.cuda.set_device(options.place.number % num_gpus)
    return device


def _runner_config(options: EngineOptions, device: str, geometry: KVGeometry) -> "RunnerConfig":
    """Blocks: this worker's share of a pool, or as many as fit into what the options say, or a default."""
    from diptych.runtime.kv_cache.shared_pool import SharedPool
    from diptych.runtime.step.model_runner import RunnerConfig

    memory, place, below = options.memory, options.place, windows_below(options)
    num_blocks: int | None = None
    pool, share = None, place.pool if place else None
    if share is not None:
        num_blocks = share.num_blocks
        pool = SharedPool(share.fd, share.total_blocks, share.first_block)
    elif memory.kv_cache_bytes is not None:
        if device == "cpu":
            check_kv_memory(memory.kv_cache_bytes)
        num_blocks = geometry.blocks_within(memory.kv_cache_bytes)
    elif device == "cpu":
        num_blocks = default_num_blocks(options, geometry, 1)
    return RunnerConfig(
        model=options.model,
        model_impl=options.model_impl,
        dtype=options.device.dtype,
        device=device,
        block_size=memory.block_size,
        num_blocks=num_blocks,
        memory_share=None if device == "cpu" else _share_of_gpu(options),
        max_step_tokens=_max_step_tokens(options),
        num_host_blocks=num_host_blocks(memory, geometry, longest_sequence_of(options)),
        max_num_seqs=options.scheduler.max_num_seqs,
        max_model_len=options.max_model_len,
        instruction_set=options.device.instruction_set,
        quantize=options.device.quantize,
        kv_dtype=memory.kv_dtype,
        shared_pool=pool,
        shared_weights=place.weights_fd if place else None,
        shared_host=place.host_fds.get(place.number) if place and device == "cpu" else None,
        speculation=options.speculation,
        frees_windows=below > 0,
        windows_below=below,
    )


def _share_of_gpu(options: EngineOptions) -> float:
    """The share of its GPU that is this worker's: ``_choose_device`` deals the workers of a host out in turn."""
    import torch

    if options.place is None:
        return 1.0
    num_gpus = torch.cuda.device_count()
    return 1.0 / len(range(options.place.number % num_gpus, max(1, options.place.num_workers), num_gpus) or (0,))


def _max_step_tokens(options: EngineOptions) -> int | None:
    """The most tokens of a step; None where prompts run whole."""
    scheduler = options.scheduler
    return None if scheduler.budget.kind == "whole" else scheduler.budget.max_batched_tokens + scheduler.max_num_seqs


def connect_peers(options: EngineOptions, runner: "ModelRunner", directory: Path) -> KVConnector | None:
    """The connector of a worker that has a place among others (else None). Raises ConfigError for options that cannot
    be met."""
    place = options.place
    if place is None:
        return None
    kind = CONNECTORS[place.transfer]
    runner.kv.may_move = place.transfer != "nixl"  # which has registered it
    assert kind.shares_pool == (place.pool is not None), f"{place.transfer} and pool {place.pool}"
    transfer = TransferOptions(
        place.secret,
        place.listen or kind.listen_in(directory),
        place.codec,
        resume_timeout_s=place.resume_timeout_s,
        encrypts=place.encrypts,
    )
    groups = runner.kv.groups if runner.groups else ()
    return make_connector(place.transfer, runner.kv.layers, kv_format(runner), transfer, groups)


def kv_format(runner: "ModelRunner") -> KVFormat:
    """What the bytes of this runner's KV cache mean."""
    model, loaded = runner.model_config, runner.loaded
    geometry = runner.attention.geometry
    # A cache in the dtype of the activations says it itself; numbers of 8 bits are of either.
    computed = f"{loaded.weights} in {loaded.dtype}" if geometry.dtype == INT8 else loaded.weights
    return KVFormat(
        model=fingerprint(model, computed),
        num_layers=len(runner.kv.layers),
        num_kv_heads=model.attention.num_kv_heads,
        head_dim=model.attention.head_dim,
        dtype=geometry.dtype,
        block_size=runner.block_size,
        layout=runner.kv.layers[0][0].device.type,
        windows=tuple([runner.groups[group].window_tokens for group in runner.kv.groups]) if runner.groups else (),
    )

"""Whether the workers of this host fit into its memory, before a weight is read: what they need, what there is, what
would fit instead, and what ``--fit`` chooses.

For workers that compute on CPUs: what a GPU has is measured by the worker. Reads configs and the heads of weight files;
never imports torch, never allocates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from diptych.base.byte_size import size_words
from diptych.base.cgroups import ROOT, available_memory_bytes
from diptych.control.config import CacheConfig, QuantizeName, watermark_of
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.models.model_place import name_of
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes, scratch_bytes
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import may_be_gpu, transfer_of, worker_options
from diptych.serving.fleet.joint_ready import longest_sequence
from diptych.serving.fleet.shared_memory import MIN_BLOCKS, default_num_blocks
from diptych.serving.kv_memory import kv_geometry_of, longest_sequence_of
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import Ready
from diptych.serving.start_checks import most_memory

MIB = 2**20
PROCESS_BYTES = 300 * MIB  # of the front end and of each worker, beside weights and KV cache
LEVELS = (32768, 8192, 2048)  # contexts that are worth weights of fewer bits, the first that can be had
BITS: tuple[QuantizeName, ...] = ("none", "int8", "int4")
USUAL_TOKENS = 2048  # of the shorter sequences in the words about a fleet


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that the workers take which are started with the server. weight_bytes: of all copies of the model.
    scratch_bytes: of the experts of a step. kv_bytes: of all KV caches; the least that serves where no option says how
    large. host_bytes: of the tiers in host memory, once they are full. block_bytes: of a KV block of each worker that
    there may be. is_here: they are processes of this machine and compute on its CPUs."""

    weight_bytes: int
    scratch_bytes: int
    kv_bytes: int
    host_bytes: int
    block_bytes: tuple[int, ...]
    is_here: bool

    @property
    def at_start(self) -> int:
        """What is taken by the time that the workers are ready."""
        return self.weight_bytes + self.scratch_bytes + self.kv_bytes


def check_memory(options: EngineOptions, fleet: FleetOptions, root: Path = ROOT) -> MemoryNeed:
    """What the workers need. Raises ConfigError, naming what would fit, where those that are started here do not fit
    into what this machine has free, or with their host tiers into all that it has. root: see ``diptych.base.cgroups``.
    """
    need = need_of(options, fleet)
    if not need.is_here:
        return need
    available_bytes = available_memory_bytes(root)
    if need.at_start > available_bytes:
        raise ConfigError(_refusal(options, fleet, need, available_bytes), param="model")
    most_bytes, where = most_memory(root)
    if need.host_bytes and need.at_start + need.host_bytes > most_bytes:
        raise ConfigError(
            f"kv_host_gb is {options.memory.host_bytes / 10**9:g}; with weights and KV cache, {_workers(fleet)} take "
            f"{size_words(need.at_start + need.host_bytes)}, and {where} has {size_words(most_bytes)} "
            f"(--kv-host-gb {max(0, most_bytes - need.at_start) // len(fleet.roles) // 10**8 / 10} fits)",
            param="kv_host_gb",
        )
    return need


def need_of(options: EngineOptions, fleet: FleetOptions) -> MemoryNeed:
    """What the workers need. Raises ConfigError for what they would refuse."""
    geometry_of = cache(kv_geometry_of)  # many workers are alike, and reading a large GGUF file takes a second
    wanted = worker_options(options, fleet)
    started = wanted[: len(fleet.roles)]
    keys = [_weights_key(own) for own in started]
    by_key = {key: loaded_weight_bytes(*key) for key in dict.fromkeys(keys)}
    copies = by_key if _shares_weights(options, fleet) else keys
    return MemoryNeed(
        weight_bytes=sum(by_key[key] for key in copies),
        scratch_bytes=sum(map(cache(_scratch_bytes), started)),
        kv_bytes=sum(_kv_bytes(own.memory.kv_cache_bytes, geometry_of(own)) for own in started),
        host_bytes=sum(own.memory.host_bytes for own in started),
        block_bytes=tuple(geometry_of(own).block_bytes for own in wanted),
        is_here=bool(fleet.roles) and fleet.ray is None and not may_be_gpu(options),
    )


def _weights_key(options: EngineOptions) -> tuple[str, str, str, str]:
    return options.model, options.device.dtype, options.device.quantize, options.model_impl


def _shares_weights(options: EngineOptions, fleet: FleetOptions) -> bool:
    """Whether workers with the same weights map one copy."""
    if len(fleet.slots) == 1 and fleet.join is None:
        return True
    return CONNECTORS[transfer_of(options, fleet)].shares_pool


def _scratch_bytes(options: EngineOptions) -> int:
    tokens = options.scheduler.budget.max_batched_tokens
    return scratch_bytes(options.model, options.device.dtype, tokens, options.model_impl)


def _kv_bytes(wanted_bytes: int | None, geometry: KVGeometry) -> int:
    if wanted_bytes is None:
        return _least_kv_bytes(geometry)
    return geometry.blocks_within(wanted_bytes) * geometry.block_bytes


def _least_kv_bytes(geometry: KVGeometry) -> int:
    return MIN_BLOCKS * len(geometry.layers.groups) * geometry.block_bytes


def _workers(fleet: FleetOptions) -> str:
    return f"{len(fleet.roles)} worker{'s' if len(fleet.roles) > 1 else ''}"


def _refusal(options: EngineOptions, fleet: FleetOptions, need: MemoryNeed, available_bytes: int) -> str:
    parts = [f"weights of {size_words(need.weight_bytes)}"]
    if need.scratch_bytes:
        parts.append(f"{size_words(need.scratch_bytes)} for the experts of a step")
    least = "at least " if options.memory.kv_cache_bytes is None and not fleet.groups else ""
    parts.append(f"a KV cache of {least}{size_words(need.kv_bytes)}")
    needs = f"{name_of(Path(options.model))} on {_workers(fleet)} needs {', '.join(parts[:-1])} and {parts[-1]}"
    return (
        f"{needs}; {size_words(available_bytes)} of memory are available. {_nearest(options, fleet, available_bytes)}"
    )


def _nearest(options: EngineOptions, fleet: FleetOptions, available_bytes: int) -> str:
    """A sentence with the settings that fit and change least: a smaller KV cache, then fewer bits, then both."""
    if fleet.groups:
        return "Smaller pools fit: fewer replicas, a smaller kv_cache_bytes, or quantize = int8"
    wanted_bytes = options.memory.kv_cache_bytes
    for quantize in _fewer_bits(options):
        changed = _quantized(options, quantize)
        words = [] if quantize == options.device.quantize else [f"--quantize {quantize}"]
        room = _room(changed, fleet, available_bytes)
        geometry = kv_geometry_of(changed)
        if room < _least_kv_bytes(geometry):
            continue
        if wanted_bytes is not None and room < wanted_bytes:
            words.append(f"--kv-cache-memory {room // MIB}MiB")
        tokens = min(longest_sequence_of(options), _capacity(geometry, min(room, wanted_bytes or room)))
        return f"What fits: {' '.join(words) or 'a smaller KV cache'}, with a context of {tokens:,} tokens"
    if len(fleet.roles) == fleet.both and fleet.both > 1:
        alone = _nearest(options, FleetOptions(), available_bytes)
        return alone.replace("What fits: ", "What fits: --workers 1 ")
    fewest = _quantized(options, list(_fewer_bits(options))[-1])
    least_bytes = need_of(fewest, fleet).at_start + PROCESS_BYTES * (1 + len(fleet.roles))
    return f"No setting makes it fit: with {_bits_words(fewest)} it needs {size_words(least_bytes)}"


def _bits_words(options: EngineOptions) -> str:
    return "its weights as they are" if options.device.quantize == "none" else f"--quantize {options.device.quantize}"


def _fewer_bits(options: EngineOptions) -> Iterator[QuantizeName]:
    """The formats of weights that a server may use instead, from that of ``options`` on: each takes less memory than
    those before it (a checkpoint of 4 bits takes no less when more are asked for)."""
    fewest_bytes: int | None = None
    for quantize in BITS[BITS.index(options.device.quantize) :]:
        num_bytes = loaded_weight_bytes(*_weights_key(_quantized(options, quantize)))
        if fewest_bytes is None or num_bytes < fewest_bytes:
            yield quantize
            fewest_bytes = num_bytes
        if not isinstance(read_model_config(options.model, options.model_impl), DecoderConfig):
            return  # what transformers computes is not quantised


def _quantized(options: EngineOptions, quantize: QuantizeName) -> EngineOptions:
    return msgspec.structs.replace(options, device=msgspec.structs.replace(options.device, quantize=quantize))


def _room(options: EngineOptions, fleet: FleetOptions, available_bytes: int) -> int:
    """Bytes for the KV cache of each worker, of all that there may be, in whole MiB: what is left beside weights and
    processes. Negative where these do not fit."""
    need, num_workers = need_of(options, fleet), len(fleet.slots)
    left = available_bytes - need.weight_bytes - need.scratch_bytes - PROCESS_BYTES * (1 + num_workers)
    return left // num_workers // MIB * MIB


def _cache(geometry: KVGeometry, num_blocks: int) -> CacheConfig:
    groups = geometry.layers.groups
    return CacheConfig(
        num_blocks, geometry.block_size, watermark_blocks=watermark_of(num_blocks, len(groups)), groups=groups
    )


def _capacity(geometry: KVGeometry, kv_bytes: int) -> int:
    """Tokens of the longest sequence that a cache of that many bytes holds."""
    num_blocks = kv_bytes // geometry.block_bytes
    return _cache(geometry, num_blocks).capacity_tokens if num_blocks > 0 else 0


# -- what --fit chooses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into this machine. words: the options of ``diptych serve`` that choose the same."""

    options: EngineOptions
    words: str


def fitted(options: EngineOptions, fleet: FleetOptions, root: Path = ROOT) -> Fit:
    """The options with the bits of weights, the context and the size of the KV cache that fit into this machine.

    The weights keep as many bits as leave room for a context of 32,768 tokens (the whole one, where the model has
    less); where no bits do, for 8,192, then for 2,048, then for any. The context is then as long as fits. Options that
    were given stay: a context, the size of the KV cache, and bits other than none.
    Raises ConfigError for workers that this does not choose for, and where nothing fits.
    """
    _check_fits_here(options, fleet)
    available_bytes = available_memory_bytes(root)
    wanted = longest_sequence_of(options)
    contexts = {
        quantize: _context(_quantized(options, quantize), fleet, available_bytes) for quantize in _fewer_bits(options)
    }
    for level in (wanted,) if options.max_model_len else (*[min(level, wanted) for level in LEVELS], 1):
        for quantize, context in contexts.items():
            if context >= level:
                return _fit(_quantized(options, quantize), fleet, context, available_bytes, root)
    if options.max_model_len and (longest := max(contexts.values())):
        raise ConfigError(
            f"max_model_len is {wanted}; at most {longest} fits into the {size_words(available_bytes)} that are free",
            param="max_model_len",
        )
    raise ConfigError(_refusal(options, fleet, need_of(options, fleet), available_bytes), param="model")


def _check_fits_here(options: EngineOptions, fleet: FleetOptions) -> None:
    if not fleet.roles or fleet.ray is not None or may_be_gpu(options):
        raise ConfigError(
            "fit is on; it chooses for workers of this host that compute on CPUs (--device cpu): on a GPU, the KV "
            "cache takes what is free",
            param="fit",
        )
    if fleet.groups:
        raise ConfigError(
            "fit is on; it chooses for equal workers, and the pools have settings of their own", param="fit"
        )


def _context(options: EngineOptions, fleet: FleetOptions, available_bytes: int) -> int:
    """The longest context that fits; 0: nothing does. Windows that are as long as the context are none, so that a
    shorter context may lay its KV out in another way."""
    context, wanted_bytes = longest_sequence_of(options), options.memory.kv_cache_bytes
    room = _room(options, fleet, available_bytes)
    if wanted_bytes is not None and room < wanted_bytes:
        return 0
    while context > 1:
        geometry = kv_geometry_of(msgspec.structs.replace(options, max_model_len=context))
        longest = _capacity(geometry, room if wanted_bytes is None else wanted_bytes)
        if longest >= context:
            return context
        context = _rounded(longest, options.memory.block_size)
    return 0


def _rounded(num_tokens: int, block_size: int) -> int:
    unit = 1024 if num_tokens >= 2048 else block_size
    return num_tokens // unit * unit


def _fit(options: EngineOptions, fleet: FleetOptions, context: int, available_bytes: int, root: Path) -> Fit:
    words = [] if options.device.quantize == "none" else [f"--quantize {options.device.quantize}"]
    if context < longest_sequence_of(options) or options.max_model_len:
        options = msgspec.structs.replace(options, max_model_len=context)
        words.append(f"--max-model-len {context}")
    if (kv_bytes := options.memory.kv_cache_bytes) is None:
        geometry = kv_geometry_of(options)
        chunk = _cache(geometry, MIN_BLOCKS).charged_chunk
        num_blocks = _cache(geometry, MIN_BLOCKS).layout.peak_pages(context, chunk)
        num_blocks += watermark_of(num_blocks + 4, len(geometry.layers.groups))
        num_blocks = max(num_blocks, default_num_blocks(options, geometry, len(fleet.slots), root))
        room = _room(options, fleet, available_bytes)
        kv_bytes = min(room, -(-num_blocks * geometry.block_bytes // MIB) * MIB)
        options = msgspec.structs.replace(
            options, memory=msgspec.structs.replace(options.memory, kv_cache_bytes=kv_bytes)
        )
    words.append(f"--kv-cache-memory {kv_bytes // MIB}MiB" if kv_bytes % MIB == 0 else f"--kv-cache-memory {kv_bytes}")
    return Fit(options, " ".join(words))


# -- what a fleet that is ready has -----------------------------------------------------------------------------------


def memory_words(need: MemoryNeed, roles: Mapping[int, Role], known: Mapping[int, Ready]) -> str:
    """One line: weights (on CPUs of this host), KV caches, and how many sequences of which length they hold at once.

    roles, known: of the workers that are ready.
    """
    decoders = [number for number, role in roles.items() if role != "prefill"]
    kv_bytes = sum(known[number].num_blocks * need.block_bytes[number] for number in roles)
    context = max(known[number].max_model_len for number in decoders)
    longest = max(longest_sequence(known[number]) for number in decoders)
    lengths = [longest] if longest <= USUAL_TOKENS else [longest, USUAL_TOKENS]
    held = [f"{_num_streams([known[number] for number in decoders], length):,} of {length:,}" for length in lengths]
    parts = [f"KV cache {size_words(kv_bytes)}"]
    if need.is_here:
        parts.insert(0, f"weights {size_words(need.weight_bytes)}")
    words = f"Memory: {', '.join(parts)}, for {' or '.join(held)} tokens at once"
    if longest < context:
        words += f"; the context is {context:,} (a larger --kv-cache-memory or --kv-dtype int8 holds more of it)"
    return words


def _num_streams(workers: list[Ready], num_tokens: int) -> int:
    """How many sequences of this length run on these workers at once."""
    return sum(min(ready.max_num_seqs, _num_sequences(ready, num_tokens)) for ready in workers)


def _num_sequences(ready: Ready, num_tokens: int) -> int:
    groups = tuple(ready.groups)
    watermark = watermark_of(ready.num_blocks, len(groups))
    cache = CacheConfig(ready.num_blocks, ready.block_size, watermark_blocks=watermark, groups=groups)
    pages = cache.layout.peak_pages(num_tokens, cache.charged_chunk)
    return (ready.num_blocks - watermark) // max(1, pages)

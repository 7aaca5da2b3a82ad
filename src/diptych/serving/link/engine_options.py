"""The settings of a worker process: one frozen record, written as JSON into the private directory.

Imports no torch.
"""

from pathlib import Path
from typing import Literal

import msgspec

import diptych
from diptych.base.processor import parse_cpu_list
from diptych.control.config import DTypeName, KVDTypeName, ModelImplName, QuantizeName, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.control.slo import Slo
from diptych.runtime.tiers.extent_format import DiskCodecName
from diptych.runtime.transfer.connector import RESUME_TIMEOUT_S, CodecName

DeviceName = Literal["auto", "cpu", "cuda"]
# The words are those of runtime/kernels/instruction_set.py.
InstructionSetName = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "triton", "torch"]
SpeculationName = Literal["auto", "on", "off"]  # runtime/step/model_runner.py
ExplainMisses = Literal["off", "on", "text"]

BUNDLED_MODEL = Path(diptych.__file__).parent / "bundled" / "stdlib-python"


class DeviceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the worker computes. cores: CPUs by number. threads None: one for each of these, or else for each physical
    core that the process may use. instruction_set: the kernels, on a cpu named after the instructions that they need;
    auto takes the fastest that the processor has, and triton on a GPU. quantize: weights in floating point become whole
    numbers when they are loaded, on a cpu."""

    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    threads: int | None = None
    cores: str | None = None  # such as "0-3,8"
    instruction_set: InstructionSetName = "auto"
    quantize: QuantizeName = "none"


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache and the tiers below it. kv_cache_bytes None: a share of the free memory. host_bytes: host memory of
    each worker for evicted blocks and preempted requests. disk: a folder for KV (None: none), which all its files
    together fill up to disk_bytes at most, also those of other workers and other servers. disk_codec: how blocks lie
    there. kv_dtype: of the cache; int8: whole numbers of 8 bits, with a scale for each token of a head, on a cpu.
    frees_windows: where layers attend to a window, what lies before it is free for other sequences. windows_below: a
    window of that many tokens or more is none (None: of the longest sequence)."""

    block_size: int = 32
    kv_dtype: KVDTypeName = "auto"
    kv_cache_bytes: int | None = None
    host_bytes: int = 0
    disk: str | None = None
    disk_bytes: int = 0
    disk_codec: DiskCodecName = "none"
    prefix_cache: bool = True
    frees_windows: bool = True
    windows_below: int | None = None


class PoolShare(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory that all workers of a host map. fd: of the memfd that the front end made and this worker inherits;
    its file holds ``total_blocks`` blocks, of which the worker owns [first_block, first_block + num_blocks)."""

    fd: int
    total_blocks: int
    first_block: int
    num_blocks: int


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands among the workers of a front end, and how KV moves between them.

    num_workers: on this host. transfer: a name of CONNECTORS. pool: with a connector that shares one (None: its own
    memory, and KV is copied).
    weights_fd: of a memfd with prepared weights. secret: shared by all workers; it is never on a command line. listen:
    address of its KV connector ("": as the connector has it). encrypts: KV travels over TLS. publishes_blocks: report
    what enters and leaves the prefix cache, for a router. resume_timeout_s: a transfer is broken when its connection
    stays broken for so long. host_fds: of memfds for host blocks, by worker: this worker's own, and those of the
    workers whose host blocks it may read (empty: it has them for itself).
    """

    transfer: str
    number: int = 0
    num_workers: int = 1
    role: Role = "both"
    pool: PoolShare | None = None
    weights_fd: int | None = None
    codec: CodecName = "none"
    secret: bytes = b""
    listen: str = ""
    encrypts: bool = False
    publishes_blocks: bool = True
    resume_timeout_s: float = RESUME_TIMEOUT_S
    host_fds: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"WorkerPlace(number={self.number}, role={self.role!r}, transfer={self.transfer!r}, ...)"


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to load a model and to serve it. model_impl: what computes it, this engine's families
    or the package transformers with this engine's attention. record: a file for its recording (None: none).
    failures: the folder for what a core leaves that fails (empty: one of this user in the folder for temporary files).
    speculation: whether tokens are guessed and verified several at a time; auto: where answers stay bitwise the same.
    place: None for a worker that is alone (it takes no part in handoffs). explains_misses: report what enters and
    leaves the prefix cache, and for which requests. tool_format: how calls of tools are written: auto (as the chat
    template says, else generic), generic, none, or the name of a format (serving/answers/response/answer_format.py)."""

    model: str = str(BUNDLED_MODEL)
    model_impl: ModelImplName = "auto"
    device: DeviceOptions = DeviceOptions()
    memory: MemoryOptions = MemoryOptions()
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    slo: Slo = msgspec.field(default_factory=Slo)
    max_model_len: int | None = None
    warm_up: bool = True
    speculation: SpeculationName = "auto"
    record: str | None = None
    failures: str = ""
    place: WorkerPlace | None = None
    explains_misses: bool = False
    tool_format: str = "auto"


def parse_cores(text: str) -> tuple[int, ...]:
    """The CPU numbers of a list such as "0-3,8". Raises ConfigError."""
    try:
        return parse_cpu_list(text)
    except ValueError:
        raise ConfigError(f"cores is {text!r}; expected a list such as 0-3,8", param="cores") from None


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str, param: str) -> int:
    """The bytes of a size such as 2GiB, 500MB or 1.5g. Raises ConfigError naming ``param``."""
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip().lower()[len(number) :]
    try:
        value = int(float(number.strip()) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{param} is {text!r}; expected a size such as 2GiB or 500MB", param=param) from None
    if value < 0:
        raise ConfigError(f"{param} is {text!r}; it must not be negative", param=param)
    return value

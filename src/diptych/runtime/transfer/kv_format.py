"""The format of a KV cache: what two workers compare before any KV moves. Knows no tensor."""

import json
from dataclasses import asdict, dataclass, fields

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import KV_DTYPES, kv_row_bytes

PROTOCOL_VERSION = 1  # of the frames and of the codec's bytes
MAX_DIMENSION = 1 << 20
MAX_WINDOW = 1 << 40

_CONVERTIBLE = frozenset({"block_size", "dtype", "layout"})  # the codec translates these; all else must be equal


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What the bytes of a KV cache mean. Equal formats: blocks can be copied as they are."""

    model: str  # fingerprint of the weights' shapes and names: equal for workers that serve the same model
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the cache: "bfloat16", "float32" or "int8"
    block_size: int  # tokens per block
    layout: str  # of a block: "cpu" or "cuda" (see attention/attention_backend.py)
    protocol_version: int = PROTOCOL_VERSION
    # Where the cache frees what windows have left: for each layer, how many tokens it attends to, itself among them (0:
    # all). Empty where it keeps everything: then descriptions are those of a version that knows no windows.
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
                raise ConfigError(f"{name} of the KV format is {value!r}; it must be 1 to {MAX_DIMENSION}", param=name)
        if self.dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise ConfigError(f"dtype of the KV cache is {self.dtype!r}, not one of {known}", param="dtype")
        if self.windows and len(self.windows) != self.num_layers:
            message = f"windows of the KV format are of {len(self.windows)} layers; it has {self.num_layers}"
            raise ConfigError(message, param="windows")
        for window in self.windows:
            if not isinstance(window, int) or not 0 <= window <= MAX_WINDOW:
                raise ConfigError(f"windows of the KV format have {window!r}; 0 to {MAX_WINDOW}", param="windows")

    @property
    def bytes_per_layer_block(self) -> int:
        """Bytes of one block of K (or of V) in one layer."""
        return self.block_size * self.num_kv_heads * kv_row_bytes(self.head_dim, self.dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, K and V, all layers."""
        return 2 * self.num_layers * self.bytes_per_layer_block

    def check_compatible(self, other: "KVFormat") -> None:
        """Raises ConfigError naming each field that no codec can translate, with the values of both sides."""
        # A window begins to be kept at a block of the worker that keeps it.
        convertible = _CONVERTIBLE - {"block_size"} if self.windows else _CONVERTIBLE
        wrong = [
            f"{field.name} is {getattr(self, field.name)!r} here and {getattr(other, field.name)!r} there"
            for field in fields(self)
            if field.name not in convertible and getattr(self, field.name) != getattr(other, field.name)
        ]
        if wrong:
            raise ConfigError(f"the two workers' KV caches do not fit: {', '.join(wrong)}", param="kv_format")

    def to_bytes(self) -> bytes:
        """The format as JSON, for the handshake."""
        return json.dumps(self.description, sort_keys=True).encode()

    @property
    def description(self) -> dict[str, object]:
        """The format as plain values; one that frees no windows does not speak of them."""
        values = asdict(self)
        return values if self.windows else {name: value for name, value in values.items() if name != "windows"}

    @staticmethod
    def from_bytes(data: bytes) -> "KVFormat":
        """The format of ``to_bytes``. Raises ConfigError for anything else."""
        try:
            values = json.loads(data)
            are_texts = all(isinstance(values[name], str) for name in ("model", "dtype", "layout"))
            if not are_texts or not isinstance(values["protocol_version"], int):
                raise TypeError("a field has the wrong type")
            if "windows" in values:
                values["windows"] = tuple(values["windows"])
            return KVFormat(**values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"not a description of a KV cache: {error}", param="kv_format") from error

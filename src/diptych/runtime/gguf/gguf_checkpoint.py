"""A GGUF file, or the parts that a model is split into, as a checkpoint: its tensors by the names that the layers of a
model ask for. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from diptych.control.errors import UnsupportedModelError
from diptych.runtime.gguf.gguf_families import DRAFT_LAYERS, ROTARY_TENSORS, find_family
from diptych.runtime.gguf.gguf_model import GgufModel
from diptych.runtime.models.model_config import AttentionConfig
from diptych.runtime.weights.stored_tensor import StoredTensor


class GgufCheckpoint:
    """A Checkpoint in one GGUF file, or in the parts of which ``path`` is the first."""

    def __init__(self, path: Path, attention: AttentionConfig) -> None:
        self.path = path
        self.model = GgufModel(path)
        self.files = self.model.files
        self._family = find_family(self.model)
        self._num_layers = len(attention.layers)
        self.stored_names = {
            self._name(name): name
            for name in self.model.tensors
            if name not in ROTARY_TENSORS and not self._is_of_drafts(name)
        }
        self.tensors: Mapping[str, StoredTensor] = {name: self._stored(name) for name in self.stored_names}
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())
        self._attention = attention

    def first_bytes(self, name: str, count: int) -> bytes:
        return bytes(self.model.data(self.stored_names[name])[:count])

    def interleaved_heads(self, name: str) -> int | None:
        """Heads whose rows a tensor keeps in interleaved order; None if no row moves."""
        part = self.stored_names[name].split(".")[-2]
        if not self._family.is_interleaved or part not in ("attn_q", "attn_k"):
            return None
        return self._attention.num_heads if part == "attn_q" else self._attention.num_kv_heads

    def _is_of_drafts(self, stored: str) -> bool:
        """Whether a tensor is of a layer for drafts: the last ones that the file counts."""
        if DRAFT_LAYERS not in self._family.read:
            return False
        block, _, rest = stored.partition(".")
        layer = rest.partition(".")[0]
        return block == "blk" and layer.isdecimal() and int(layer) >= self._num_layers

    def _name(self, stored: str) -> str:
        layer_names, names = self._family.layer_names, self._family.names
        match stored.split("."):
            case [part, ("weight" | "bias") as kind] if part in names:
                return f"{names[part]}.{kind}"
            case ["blk", layer, *parts, ("weight" | "bias") as kind] if (
                layer.isdecimal() and ".".join(parts) in layer_names
            ):
                return f"model.layers.{layer}.{layer_names['.'.join(parts)]}.{kind}"
            case ["blk", layer, part, kind] if layer.isdecimal() and f"{part}.{kind}" in layer_names:
                return f"model.layers.{layer}.{layer_names[f'{part}.{kind}']}"
        raise UnsupportedModelError(
            f"{self.model.file_of(stored)}: tensor {stored} is not part of this architecture", param="model"
        )

    def _stored(self, name: str) -> StoredTensor:
        stored = self.stored_names[name]
        tensor = self.model.tensors[stored]
        # a vector of whole numbers is read as floating point: layers take only matrices otherwise
        format = tensor.kind.format if len(tensor.shape) > 1 else None
        path, num_bytes = self.model.file_of(stored), tensor.end - tensor.start
        return StoredTensor(path, tensor.kind.name, tensor.shape, num_bytes, format)

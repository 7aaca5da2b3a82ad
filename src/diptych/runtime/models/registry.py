"""Which family computes which architecture, and what the engine asks of a family."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diptych.control.errors import ConfigError
from diptych.runtime.gguf.gguf_config import read_gguf_fields
from diptych.runtime.gguf.gguf_file import is_gguf
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.field_table import check_fields
from diptych.runtime.models.gemma2 import Gemma2
from diptych.runtime.models.gemma3 import Gemma3
from diptych.runtime.models.glm4_moe import Glm4Moe
from diptych.runtime.models.gpt_oss import GptOss
from diptych.runtime.models.granite import Granite
from diptych.runtime.models.granite_moe import GraniteMoe
from diptych.runtime.models.lfm2 import Lfm2
from diptych.runtime.models.llama import Llama
from diptych.runtime.models.ministral3 import Ministral3
from diptych.runtime.models.mistral import Mistral
from diptych.runtime.models.mixtral import Mixtral
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.models.muse_glimmer import MuseGlimmer
from diptych.runtime.models.olmo2 import Olmo2
from diptych.runtime.models.olmo3 import Olmo3
from diptych.runtime.models.olmoe import Olmoe
from diptych.runtime.models.phi3 import Phi3
from diptych.runtime.models.phimoe import Phimoe
from diptych.runtime.models.qwen2 import Qwen2
from diptych.runtime.models.qwen3 import Qwen3
from diptych.runtime.models.qwen3_moe import Qwen3Moe
from diptych.runtime.models.seed_oss import SeedOss
from diptych.runtime.models.smollm3 import SmolLM3
from diptych.runtime.models.transformers_config import TransformersConfig
from diptych.runtime.models.transformers_model import TransformersModel
from diptych.runtime.models.wrappers import WRAPPERS, TextPart, read_text_fields

if TYPE_CHECKING:
    import torch

    from diptych.runtime.layers.forward_pass import ForwardPass
    from diptych.runtime.layers.layer_loader import LayerLoader


class LanguageModel(Protocol):
    """A loaded model of one family: from the tokens of a batch to logits, without any state of its own.

    fits_cuda_graphs: a decode step neither waits for the device nor looks at a value on it, so that a captured graph of
    it can be replayed.
    """

    fits_cuda_graphs: bool

    def __init__(self, config: Any, load: LayerLoader) -> None:
        """Ask ``load`` for every tensor of the checkpoint, in the same order each time. config: from read_config."""
        ...

    @classmethod
    def read_config(cls, fields: ConfigFields) -> ModelConfig:
        """The record of a config.json. Raises UnsupportedModelError for what the family does not compute."""
        ...

    @property
    def config(self) -> ModelConfig:
        """What the model was made with."""
        ...

    def forward(self, step: ForwardPass) -> torch.Tensor:
        """Compute all tokens of the batch, write their K and V, and return the last hidden states of its sample_rows,
        in that order: [num_samples, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as from ``forward`` -> [rows, vocab], in the model's dtype."""
        ...


MODELS: dict[str, type[LanguageModel]] = {
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Glm4MoeForCausalLM": Glm4Moe,
    "GptOssForCausalLM": GptOss,
    "GraniteForCausalLM": Granite,
    "GraniteMoeForCausalLM": GraniteMoe,
    "Lfm2ForCausalLM": Lfm2,
    "LlamaForCausalLM": Llama,
    "Ministral3ForCausalLM": Ministral3,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "MuseGlimmerForConditionalGeneration": MuseGlimmer,
    "Olmo2ForCausalLM": Olmo2,
    "Olmo3ForCausalLM": Olmo3,
    "OlmoeForCausalLM": Olmoe,
    "Phi3ForCausalLM": Phi3,
    "PhimoeForCausalLM": Phimoe,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "SeedOssForCausalLM": SeedOss,
    "SmolLM3ForCausalLM": SmolLM3,
}


TRANSFORMERS = "transformers"
MODEL_IMPLS = ("auto", TRANSFORMERS)  # auto: the families above
SETTLED_NS = 10**9  # a file that was written longer ago than that has another time when it is written again


def read_model_config(path: str | Path, model_impl: str = "auto") -> ModelConfig:
    """Read the config of the checkpoint ``path``, a directory or a GGUF file. model_impl: one of MODEL_IMPLS.

    Raises ConfigError when the file is missing or not JSON, UnsupportedModelError when it asks for something that
    this engine does not have.
    """
    path = Path(path)
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl is {model_impl!r}; one of {', '.join(MODEL_IMPLS)}", param="model_impl")
    if model_impl == TRANSFORMERS:
        if is_gguf(path):
            raise ConfigError(f"model_impl is {TRANSFORMERS}; it reads directories, not {path}", param="model_impl")
        return TransformersModel.read_config(ConfigFields.of_file(path / "config.json"))
    if not is_gguf(path):
        return _config_of(ConfigFields.of_file(path / "config.json"))
    status = path.stat() if path.is_file() else None
    if status is None or time.time_ns() - status.st_mtime_ns < SETTLED_NS:
        return _config_of(read_gguf_fields(path))
    return _config_of_file(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=2)
def _config_of_file(path: Path, identity: tuple[int, ...]) -> ModelConfig:
    """The config of a GGUF file. A start asks for it ten times, and each time a whole vocabulary would be walked
    through."""
    return _config_of(read_gguf_fields(path))


def _config_of(fields: ConfigFields) -> ModelConfig:
    names = fields.values.get("architectures")
    known = dict.fromkeys((*MODELS, *WRAPPERS))
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise fields.unsupported(
            "architectures",
            f"one of {', '.join(known)}; others that the package transformers has may be computed by it "
            f"(model_impl {TRANSFORMERS})",
        )
    architecture = names[0]
    wrapper = WRAPPERS.get(architecture)
    if wrapper is not None:
        fields = read_text_fields(fields, architecture)
        architecture = fields.values["architectures"][0]
    check_fields(fields, architecture)
    config = MODELS[architecture].read_config(fields)
    if wrapper is None:
        return config
    note = f"{names[0]} is served as a model of text: its other parts ({', '.join(wrapper.others)}) are not loaded"
    return replace(config, text_part=TextPart(wrapper.others), notes=(*config.notes, note))


def check_quantize(config: ModelConfig, quantize: str) -> None:
    """Raises ConfigError for whole numbers (see QUANTIZATIONS) as weights of a model that transformers computes."""
    if isinstance(config, TransformersConfig) and quantize != "none":
        raise ConfigError(
            f"quantize is {quantize} and model_impl is {TRANSFORMERS}; supported with it: none", param="quantize"
        )


def family_of(config: ModelConfig) -> type[LanguageModel]:
    """What computes the model of a config that read_model_config has read."""
    return TransformersModel if isinstance(config, TransformersConfig) else MODELS[config.architecture]

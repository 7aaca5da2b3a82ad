"""Architectures that hold a text model beside others (vision): which class of text models it is, where its fields are
in config.json, and which tensors are its own. The other models are not loaded. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields

# Beginnings of the names of a text model's tensors, with what they are for a model that is text alone.
TEXT_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
# What both the whole and its text model may say; that of the whole counts, where it says something.
OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "auto_map")


@dataclass(frozen=True, slots=True)
class TextPart:
    """Which tensors of a checkpoint are those of its text model. skipped: beginnings of the names of the others."""

    skipped: tuple[str, ...]

    def name_of(self, stored: str) -> str | None:
        """A tensor's name in a model that is text alone; None: it is not part of that. A name of neither stays as it
        is."""
        for prefix, replacement in TEXT_NAMES.items():
            if stored.startswith(prefix):
                return replacement + stored.removeprefix(prefix)
        return None if stored.removeprefix("model.").startswith(self.skipped) else stored


@dataclass(frozen=True, slots=True)
class Wrapper:
    """model_type: of the whole. texts: the architecture of the text model by the ``model_type`` in ``text_config``.
    is_tied: what a config means that does not say whether the lm_head is the embedding. others: the beginnings of the
    names of other tensors. harmless: fields of the whole that say nothing of text, with the reason."""

    model_type: str
    texts: Mapping[str, str]
    is_tied: bool
    others: tuple[str, ...]
    harmless: Mapping[str, str]


_IMAGES = "of images, which are not read"
_COMMON = {
    "vision_config": _IMAGES,
    "image_token_id": _IMAGES,
    "image_token_index": _IMAGES,
    "vision_feature_layer": _IMAGES,
    "projector_hidden_act": _IMAGES,
    "initializer_range": "of weights that are not loaded",
    "pad_token_id": "prompts are not padded",
    "bos_token_id": "the tokenizer and generation_config.json have the last word",
    "transformers_version": "a label",
    "_name_or_path": "a label",
    "_attn_implementation": "how transformers runs",
    "use_cache": "logits are the same with and without",
}
WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "gemma3",
        {"gemma3_text": "Gemma3ForCausalLM"},
        True,
        ("vision_tower.", "multi_modal_projector."),
        {
            **_COMMON,
            "boi_token_index": _IMAGES,
            "eoi_token_index": _IMAGES,
            "boi_token_id": _IMAGES,
            "eoi_token_id": _IMAGES,
            "mm_tokens_per_image": _IMAGES,
        },
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3",
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        True,
        ("vision_tower.", "multi_modal_projector."),
        {**_COMMON, "multimodal_projector_bias": _IMAGES, "spatial_merge_size": _IMAGES},
    ),
    "MuseGlimmerForConditionalGeneration": Wrapper(
        "muse_glimmer",
        {"muse_glimmer_text": "MuseGlimmerForConditionalGeneration"},
        False,
        ("vision_tower.", "vision_adapter.", "vision_projection."),
        {
            **_COMMON,
            "video_token_id": _IMAGES,
            "out_hidden_size": _IMAGES,
            "projector_hidden_size": _IMAGES,
        },
    ),
}


def read_text_fields(fields: ConfigFields, architecture: str) -> ConfigFields:
    """The fields of the text model in a config.json of one of WRAPPERS, with ``architectures`` of that model alone.
    Raises UnsupportedModelError for a field of the whole that is not known."""
    wrapper, values = WRAPPERS[architecture], fields.values
    if values.get("model_type", wrapper.model_type) != wrapper.model_type:
        raise fields.unsupported("model_type", f"{wrapper.model_type}, the type of {architecture}")
    read = {"architectures", "model_type", "text_config", "tie_word_embeddings", *OF_THE_WHOLE}
    for name, value in values.items():
        if name not in read and name not in wrapper.harmless and value is not None:
            raise fields.unsupported(name, f"no such field beside text_config in {architecture}")
    text = fields.nested("text_config")
    if text.values.get("model_type") not in wrapper.texts:
        raise text.unsupported("model_type", ", ".join(wrapper.texts))
    found: dict[str, Any] = dict(text.values)
    found |= {name: values[name] for name in OF_THE_WHOLE if values.get(name) is not None}
    found["architectures"] = [wrapper.texts[text.values["model_type"]]]
    found["tie_word_embeddings"] = values.get("tie_word_embeddings", wrapper.is_tied)
    return text.with_values(found)

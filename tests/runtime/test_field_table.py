"""Every field that changes what a model computes is read, or refused by its name: the columns of models/field_table.py
against the code of transformers, and against the families here."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diptych.control.errors import UnsupportedModelError
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.field_table import ROPE_HARMLESS, ROPE_READ, ROPE_REFUSED, TABLES, check_fields
from diptych.runtime.models.registry import MODELS, read_model_config
from diptych.runtime.models.wrappers import WRAPPERS
from tests.runtime.test_model_config import LLAMA
from tests.runtime.transformers_fields import fields_used, rope_fields_used

OF_IMAGES = {"layer_norm_eps", "merge_size", "patch_size", "patch_temporal", "pos_emb_height", "pos_emb_width"}
YARN = {"rope_type": "yarn", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALED_ROPES: dict[str, dict[str, Any]] = {  # of a family that does not take YARN as it is
    "Gemma3ForCausalLM": {"full_attention": YARN},
    "Ministral3ForCausalLM": {**YARN, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
    "Olmo3ForCausalLM": {"full_attention": YARN},
    "Phi3ForCausalLM": LONG,
    "PhimoeForCausalLM": {**LONG, "short_mscale": 1.1, "long_mscale": 1.2},
}


def installed() -> Path:
    """The folder of the transformers that is installed."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def in_no_column(folder: Path, architecture: str) -> dict[str, list[str]]:
    """The fields that the class in a folder of transformers uses and no column has, with the files that use them."""
    table = TABLES[architecture]
    known = table.read | set(table.refused) | set(table.harmless)
    model_type = table.model_type.removesuffix("_text")
    if model_type != table.model_type:  # in one file with the models of images
        known |= OF_IMAGES.union(*(wrapper.harmless for wrapper in WRAPPERS.values()))
    return {name: sorted(files) for name, files in fields_used(folder, model_type).items() if name not in known}


@pytest.mark.parametrize("architecture", MODELS)
def test_every_field_that_the_class_of_transformers_uses_is_in_a_column(architecture: str) -> None:
    assert in_no_column(installed(), architecture) == {}


def test_every_field_of_rotary_embeddings_is_in_a_column() -> None:
    assert rope_fields_used(installed()) <= ROPE_READ | set(ROPE_REFUSED) | set(ROPE_HARMLESS)


@pytest.mark.slow
def test_the_newest_transformers_has_no_field_that_is_in_no_column(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "transformers"]
    if subprocess.run(pip, check=False, timeout=240).returncode:
        pytest.skip("pip cannot fetch the newest transformers")
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert {name: found for name in MODELS if (found := in_no_column(tmp_path / "transformers", name))} == {}
    assert rope_fields_used(tmp_path / "transformers") <= ROPE_READ | set(ROPE_REFUSED) | set(ROPE_HARMLESS)


def test_the_parser_finds_what_the_code_uses() -> None:
    used = fields_used(installed(), "qwen3")
    assert used["is_causal"] == {"masking_utils.py", "utils/generic.py"}  # getattr, in a shared file
    assert "models/qwen3/modeling_qwen3.py" in used["attention_bias"]  # config.NAME
    assert "models/qwen3/configuration_qwen3.py" in used["max_window_layers"]  # declared
    assert "modeling_rope_utils.py" in used["partial_rotary_factor"]  # kwargs.pop
    assert not {"to_dict", "get_text_config", "base_model_tp_plan", "cache_dir"} & set(used)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_field_is_in_one_column(architecture: str) -> None:
    table = TABLES[architecture]
    assert not table.read & set(table.refused)
    assert not (table.read | set(table.refused)) & set(table.harmless)
    assert all(table.harmless.values())


class SeenValues(Mapping[str, Any]):
    """Values that remember which of them were looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def complete(architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json with a window in it, where the family has windows."""
    values = LLAMA | {"architectures": [architecture], "model_type": TABLES[architecture].model_type} | changes
    if architecture not in WRAPPERS:
        return values
    return {"architectures": [architecture], "text_config": values | {"architectures": None}}


def prefix(architecture: str) -> str:
    """Before the names of fields in messages."""
    return "text_config." if architecture in WRAPPERS else ""


def write(directory: Path, architecture: str, **changes: Any) -> None:
    """Such a config.json in a directory."""
    (directory / "config.json").write_text(json.dumps(complete(architecture, **changes)))


@pytest.mark.parametrize("architecture", MODELS)
def test_a_family_looks_at_the_fields_of_its_column_and_at_no_other(architecture: str, tmp_path: Path) -> None:
    seen: set[str] = set()
    for changes in (
        {"rope_parameters": SCALED_ROPES.get(architecture, YARN), "dtype": "float32", "sliding_window": 8},
        {"use_sliding_window": True, "torch_dtype": "float32"} if architecture != "LlamaForCausalLM" else {},
        {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["full_attention"] * 4},
    ):
        if "layer_types" in changes and architecture in ("MistralForCausalLM", "Ministral3ForCausalLM"):
            changes["layer_types"] = ["sliding_attention"] * 4
        if "rope_parameters" in changes and architecture == "LlamaForCausalLM":
            del changes["sliding_window"]
        whole = complete(architecture, **changes)
        values = SeenValues({**whole.get("text_config", whole), "architectures": [architecture]})
        fields = ConfigFields(tmp_path / "config.json", values)
        check_fields(fields, architecture)
        values.seen &= {"model_type", "rope_parameters", "rope_scaling"}
        MODELS[architecture].read_config(fields)
        seen |= values.seen
    assert seen == TABLES[architecture].read


@pytest.mark.parametrize("architecture", MODELS)
def test_a_field_that_is_not_computed_is_refused_by_its_name_but_at_neutral_values(
    architecture: str, tmp_path: Path
) -> None:
    odd: tuple[Any, ...] = (False, True, 0.5, 3, "other", [1], {"a": 1})
    for number, (name, neutral) in enumerate(TABLES[architecture].refused.items()):
        for value in neutral:
            write(tmp_path, architecture, **{name: value})
            read_model_config(tmp_path)
        for value in [value for value in odd if value not in neutral][number % 2 :: 2]:
            write(tmp_path, architecture, **{name: value})
            with pytest.raises(UnsupportedModelError) as caught:
                read_model_config(tmp_path)
            assert f"config.json: {prefix(architecture)}{name} is {value!r}; supported: " in str(caught.value)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_harmless_field_changes_nothing(architecture: str, tmp_path: Path) -> None:
    def read(**changes: Any) -> object:
        write(tmp_path, architecture, **changes)
        return read_model_config(tmp_path)

    plain = read()
    for name in TABLES[architecture].harmless:
        for value in (None, 0.25, "text", [3]):
            assert read(**{name: value}) == plain


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("name", "value"), [("partial_rotary_factor", 0.5), ("llama_4_scaling_beta", 0.1), ("alpha", 1000.0), ("new", 1)]
)
def test_fields_of_rotary_embeddings_likewise(spelling: str, name: str, value: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    for changes in ({"finetuned": True}, {"mrope_section": [1, 2]}, {name: None}):
        write(tmp_path, "LlamaForCausalLM", **{spelling: rope | changes})
        assert read_model_config(tmp_path).ropes[0].factor == 2.0  # type: ignore[attr-defined]
    write(tmp_path, "LlamaForCausalLM", **{spelling: rope | {name: value}})
    with pytest.raises(UnsupportedModelError, match=rf"{spelling}\.{name} is {value}; supported: "):
        read_model_config(tmp_path)


@pytest.mark.parametrize("architecture", MODELS)
def test_the_types_and_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    table = TABLES[architecture]
    theirs = CONFIG_MAPPING[table.model_type]
    wide = {"num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 64 * 128}
    config = {name: value for name, value in complete(architecture, **wide).items() if name != "architectures"}
    config = config.get("text_config", config)
    del config["num_key_value_heads"]
    write_text(tmp_path, architecture, config)
    ours = read_model_config(tmp_path)
    expected = theirs(**{name: value for name, value in config.items() if name != "architectures"})
    assert ours.attention.num_kv_heads == expected.num_key_value_heads
    assert ours.attention.head_dim == (getattr(expected, "head_dim", None) or 128)
    for index, rope in enumerate(ours.ropes):  # type: ignore[attr-defined]
        kinds = getattr(expected, "layer_types", None)
        parameters = expected.rope_parameters
        parameters = parameters[kinds[index]] if kinds and kinds[index] in parameters else parameters
        assert rope is None or rope.theta == parameters["rope_theta"]
    write_text(tmp_path, architecture, config | {"model_type": "gemma"})
    with pytest.raises(UnsupportedModelError, match=f"model_type is 'gemma'; supported: {table.model_type}"):
        read_model_config(tmp_path)


def write_text(directory: Path, architecture: str, values: Mapping[str, Any]) -> None:
    """A config.json with these fields of a text model, where the architecture has them."""
    whole = {"architectures": [architecture]}
    whole |= {"text_config": values} if architecture in WRAPPERS else values
    (directory / "config.json").write_text(json.dumps(whole | {"architectures": [architecture]}))


# Fields without which the class of transformers means a model that cannot be: 96 heads of a width of 4096.
NEEDED: dict[str, dict[str, int]] = {"Glm4MoeForCausalLM": {"head_dim": 128}}
WITH_DEFAULTS = [name for name in MODELS if not name.startswith(("Llama", "Mistral", "Qwen"))]


@pytest.mark.parametrize("architecture", WITH_DEFAULTS)
def test_what_a_file_does_not_say_is_what_the_class_of_transformers_takes(architecture: str, tmp_path: Path) -> None:
    theirs = CONFIG_MAPPING[TABLES[architecture].model_type]
    needed = NEEDED.get(architecture, {})
    write_text(tmp_path, architecture, {"model_type": theirs.model_type, **needed})
    ours = read_model_config(tmp_path)
    write_text(tmp_path, architecture, theirs(**needed).to_dict())
    assert replace(read_model_config(tmp_path), eos_token_ids=ours.eos_token_ids, dtype=ours.dtype) == ours


@pytest.mark.parametrize("architecture", MODELS)
def test_rotations_and_activations_that_are_not_computed_are_refused(architecture: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    is_nested = "full_attention" in SCALED_ROPES.get(architecture, ())
    write(tmp_path, architecture, rope_parameters={"full_attention": rope} if is_nested else rope)
    with pytest.raises(UnsupportedModelError, match=r"rope_type is 'dynamic'; supported: default, "):
        read_model_config(tmp_path)
    field = "hidden_activation" if "hidden_activation" in TABLES[architecture].read else "hidden_act"
    write(tmp_path, architecture, **{field: "relu2"})
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {prefix(architecture)}{field} is 'relu2'; supp"):
        read_model_config(tmp_path)


def test_code_in_the_directory_is_said_and_not_run(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    for auto_map, notes in (
        ({}, ()),
        ({"AutoTokenizer": ["a", None]}, ()),
        (code, ("auto_map names code of its own",)),
    ):
        write(tmp_path, "Qwen2ForCausalLM", auto_map=auto_map)
        found = read_model_config(tmp_path).notes
        assert len(found) == len(notes) and all(note in text for note, text in zip(notes, found, strict=True))

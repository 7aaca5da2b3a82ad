"""How a model makes embeddings is read from its files, or refused by the file's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFWriter

from diptych import LLM
from diptych.control.errors import InvalidRequestError
from diptych.serving.embedding_recipe import read_embedding_recipe
from diptych.serving.link.engine_options import BUNDLED_MODEL

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.base.modules.Normalize"}
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


def write(directory: Path, **files: Any) -> Path:
    """A directory with files of Sentence Transformers."""
    names = {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "prompts": "config_sentence_transformers.json",
        "transformer": "sentence_bert_config.json",
    }
    for name, content in files.items():
        path = directory / names.get(name, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),  # the same direction
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False}, "mean"),  # their default
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),  # from version 6 on
        ({"pooling_mode": "mean", "pooling_mode_lasttoken": True}, "mean"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
        ({"pooling_mode": "cls"}, None),
        ({"pooling_mode": ["mean", "max"]}, None),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_weightedmean_tokens": True}, None),
        ({"pooling_mode_of_the_future": True}, None),
    ],
)
def test_pooling_in_both_spellings(pooling: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    recipe = read_embedding_recipe(write(tmp_path, pooling=pooling, modules=[TRANSFORMER, POOLING, NORMALIZE]))
    assert recipe.pooling("mean") == "mean"
    if expected is not None:
        assert recipe.pooling(None) == expected
        return
    with pytest.raises(InvalidRequestError, match=r"own pooling is .*, which is not served; pooling is one of last, m"):
        recipe.pooling(None)


def test_the_pooling_is_where_the_modules_say(tmp_path: Path) -> None:
    write(tmp_path, pooling={"pooling_mode": "mean"})
    assert read_embedding_recipe(tmp_path).pooling(None) == "mean"
    write(tmp_path, modules=[TRANSFORMER, POOLING | {"path": "other"}])
    (tmp_path / "other").mkdir()
    write(tmp_path, **{"other/config.json": {"pooling_mode": "lasttoken"}})
    assert read_embedding_recipe(tmp_path).pooling(None) == "last"


def test_what_the_transformer_module_usually_says_is_taken(tmp_path: Path) -> None:
    newer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": TEXT},
        "module_output_name": "token_embeddings",
        "unpad_inputs": True,
    }
    for transformer in ({}, {"max_seq_length": 512, "do_lower_case": False}, newer):
        recipe = read_embedding_recipe(write(tmp_path, transformer=transformer, pooling={"pooling_mode": "mean"}))
        assert recipe.pooling(None) == "mean"


def test_a_model_without_such_files_gives_the_last_tokens_state(tmp_path: Path) -> None:
    recipe = read_embedding_recipe(tmp_path)
    assert (recipe.pooling(None), recipe.prompt(None, "last")) == ("last", "")


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "CNN", "LSTM", "WordWeights", "WeightedLayerPooling", "Own"])
def test_a_module_that_changes_vectors_is_refused_by_its_path(kind: str, tmp_path: Path) -> None:
    module = {"idx": 2, "name": "2", "path": f"2_{kind}", "type": f"sentence_transformers.models.{kind}"}
    write(tmp_path, pooling={"pooling_mode": "mean"}, modules=[TRANSFORMER, POOLING, module, NORMALIZE])
    with pytest.raises(InvalidRequestError, match=rf"modules\.json: 2_{kind} is a {kind}, which is not served"):
        read_embedding_recipe(tmp_path)


@pytest.mark.parametrize(
    "modules", [[], [TRANSFORMER], [POOLING, TRANSFORMER], [TRANSFORMER, POOLING, POOLING], [TRANSFORMER, NORMALIZE]]
)
def test_modules_in_another_order_are_refused(modules: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"modules\.json: has .*; served: Transformer, Pooling, Normalize"):
        read_embedding_recipe(write(tmp_path, modules=modules))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pooling": "{"}, r"1_Pooling/config\.json: cannot be read"),
        ({"pooling": "[]"}, r"1_Pooling/config\.json: cannot be read"),
        ({"modules": "{}"}, r"modules\.json: cannot be read"),
        ({"prompts": {"prompts": ["a"]}}, r"config_sentence_transformers\.json: cannot be read"),
        ({"transformer": {"do_lower_case": True}}, r"sentence_bert_config\.json: do_lower_case is True"),
        ({"transformer": {"processing_kwargs": {"text": {"max_length": 9}}}}, "processing_kwargs is {'text': "),
        ({"transformer": {"transformer_task": "text-generation"}}, "transformer_task is 'text-generation'"),
        (
            {"transformer": {"modality_config": {"text": TEXT, "message": TEXT | {"format": "flat"}}}},
            "the chat template",
        ),
        (
            {"transformer": {"modality_config": {"text": {"method_output_name": "logits"}}}},
            "is 'logits'; served: last_h",
        ),
    ],
)
def test_files_that_cannot_be_followed_are_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_embedding_recipe(write(tmp_path, **files))


def test_prompts_by_name(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "q: ", "passage": "p: ", "none": None}, "default_prompt_name": "passage"}
    recipe = read_embedding_recipe(write(tmp_path, prompts=prompts, pooling={"include_prompt": False}))
    assert [recipe.prompt(name, "last") for name in (None, "query", "document", "none", "")] == [
        "p: ",
        "q: ",
        "",
        "",
        "",
    ]
    with pytest.raises(InvalidRequestError, match="prompt_name is 'x'; one of: query, document, passage, none"):
        recipe.prompt("x", "last")
    with pytest.raises(InvalidRequestError, match="include_prompt is false"):
        recipe.prompt(None, "mean")
    assert recipe.prompt("", "mean") == ""


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "last"), (0, "last"), (1, "mean"), (2, None), (3, "last"), (4, None)]
)
def test_a_gguf_file_has_a_key_for_it(value: int | None, expected: Any, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen3")
    if value is not None:
        writer.add_uint32("qwen3.pooling_type", value)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    recipe = read_embedding_recipe(tmp_path / "model.gguf")
    if expected is not None:
        assert recipe.pooling(None) == expected
    else:
        with pytest.raises(InvalidRequestError, match="not served"):
            recipe.pooling(None)


def test_offline_embeddings_follow_the_files_too(tmp_path: Path) -> None:
    for file in Path(BUNDLED_MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    write(tmp_path, pooling={"pooling_mode_mean_tokens": True}, prompts=prompts)
    llm = LLM(tmp_path, dtype="float32", threads=1)
    model = transformers.AutoModel.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()

    def expected(text: str, pooling: str) -> list[float]:
        with torch.no_grad():
            states = model(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0]
        vector = states.mean(0) if pooling == "mean" else states[-1]
        return (vector / vector.norm()).tolist()

    assert llm.embed("a file")[0] == pytest.approx(expected("find: a file", "mean"), abs=2e-5)
    assert llm.embed("a file", prompt_name="")[0] == pytest.approx(expected("a file", "mean"), abs=2e-5)
    assert llm.embed("a file", "last", prompt_name="")[0] == pytest.approx(expected("a file", "last"), abs=2e-5)
    tokens = llm.tokenizer.encode("a file")
    assert llm.embed(tokens)[0] == pytest.approx(expected("a file", "mean"), abs=2e-5)
    write(tmp_path, modules=[TRANSFORMER, POOLING, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}])
    with pytest.raises(InvalidRequestError, match="2_Dense is a Dense"):
        llm.embed("a file", "last")

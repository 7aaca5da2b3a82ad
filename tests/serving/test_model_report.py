"""``diptych models``: what is said of a checkpoint is what a start of a server would find, without reading a weight."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from sparse_model import sparse_llama
from tests.gguf_files import VOCABULARY, write_gguf
from tool_model import tool_model
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.control.errors import ConfigError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions
from diptych.serving.model_report import report_model
from diptych.serving.start_checks import check_start, most_memory

BUNDLED = Path(BUNDLED_MODEL)


def changed(directory: Path, **changes: Any) -> Path:
    """The bundled model with other fields in its config (None: without the field)."""
    shutil.copytree(BUNDLED, directory)
    config = json.loads((BUNDLED / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    return directory


def refusal_of(model: Path) -> str:
    """Why a server of this model does not start; empty where it does."""
    try:
        check_start(EngineOptions(model=str(model)))
        Tokenizer(model)
    except ConfigError as error:
        return error.message
    return ""


def shown(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["models", *words])
    assert result.exit_code == 0, result.output
    return result.output


def recorded(*words: str) -> Any:
    return json.loads(shown(*words, "--json"))


def test_a_model_is_described() -> None:
    report = report_model(BUNDLED)
    assert (report.can_be_served, report.format, report.architecture) == (True, "safetensors", "LlamaForCausalLM")
    assert (report.context_length, report.vocab_size, report.precision) == (8192, 4096, "BF16")
    assert report.num_parameters and report.size_bytes > 2 * report.num_parameters
    assert report.abilities["chat"].is_served and report.abilities["embeddings"].detail == "pooling last"
    assert report.abilities["tools"].is_served and "generic" in report.abilities["tools"].detail


def test_a_model_that_takes_tools_says_in_which_format(tmp_path: Path) -> None:
    abilities = report_model(tool_model(tmp_path / "tools")).abilities
    assert abilities["tools"].is_served and "hermes" in abilities["tools"].detail
    assert abilities["reasoning"].is_served


def test_what_the_template_takes_is_shown(tmp_path: Path) -> None:
    model = tool_model(tmp_path / "tools")
    template = report_model(model).template
    assert template is not None and (template["tools"], template["calls"], template["complaints"]) == (True, True, [])
    lines = shown(str(model)).partition("the chat template:\n")[2].splitlines()
    assert {"tools", "calls", "null content", "arguments", "parts", "later system", "documents", "reasoning"} <= {
        line[2:21].strip() for line in lines
    }
    assert recorded(str(model))["template"] == template


def test_a_template_that_does_not_compile_is_said(tmp_path: Path) -> None:
    model = changed(tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{% for %}"}))
    chat = report_model(model).abilities["chat"]
    assert not chat.is_served and "template" in chat.detail
    assert f"no: {chat.detail}" in shown(str(model))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["GemmaForCausalLM"]},
        {"architectures": None},
        {"hidden_act": "gelu"},
        {"num_attention_heads": 7},
        {"vocab_size": "many"},
        {"quantization_config": {"quant_method": "hqq"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
    ],
    ids=lambda changes: "-".join(changes) or "none",
)
def test_what_is_refused_is_what_a_start_refuses(changes: dict[str, Any], tmp_path: Path) -> None:
    model = changed(tmp_path / "model", **changes)
    report = report_model(model)
    assert list(report.refusals) == [text for text in [refusal_of(model)] if text]
    assert report.size_bytes > 7_000_000 and (report.vocab_size == 4096) == ("vocab_size" not in changes)
    name = changes.get("architectures", ["LlamaForCausalLM"])
    assert report.architecture == (name[0] if name else "")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', struct.pack("<Q", 2**40)])
def test_a_broken_file_is_a_refusal_and_no_failure(file: str, content: bytes, tmp_path: Path) -> None:
    model = changed(tmp_path / "model")
    (model / file).write_bytes(content)
    report = report_model(model)
    refusal = refusal_of(model)
    assert report.can_be_served == (not refusal) and (not refusal or refusal in report.refusals)
    output = shown(str(model))
    assert "can be served" in output if not refusal else f"refused: {refusal}" in output


def test_without_weights_or_tokenizer_the_rest_is_said(tmp_path: Path) -> None:
    model = changed(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    report = report_model(model)
    assert not report.can_be_served and "model.safetensors" in report.refusals[0]
    assert not report.abilities["text"].is_served and "token ids" in report.abilities["chat"].detail


def test_no_weight_is_read_and_what_is_too_large_for_the_machine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = 512
    rows = most_memory()[0] // (4 * columns)
    model = changed(tmp_path / "model", vocab_size=rows, hidden_size=columns)
    (model / "model.safetensors").unlink()
    num_bytes, names = 2 * rows * columns, ("model.embed_tokens.weight", "lm_head.weight", "more.weight")
    for name in names:
        head = json.dumps({name: {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, num_bytes]}}).encode()
        with (model / f"{name}.safetensors").open("wb") as file:  # sparse: values that no disk here could hold
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + num_bytes)
    index = {"weight_map": {name: f"{name}.safetensors" for name in names}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr("diptych.serving.model_report.GPU", tmp_path / "none")
    report = report_model(model)
    assert report.can_be_served and report.num_parameters == 3 * rows * columns
    assert any("of memory" in obstacle for obstacle in report.obstacles)


def test_a_gguf_file_is_described_whether_it_can_be_served_or_not(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "small.gguf", {"general.architecture": "gemma3", "gemma3.context_length": 77, **VOCABULARY}
    )
    report = report_model(file)
    assert (report.format, report.name, report.architecture) == ("GGUF", "small", "gemma3")
    assert (report.context_length, report.vocab_size) == (77, 8)
    assert not report.can_be_served and refusal_of(file) in report.refusals


def test_what_a_worker_needs_is_said_for_each_number_of_bits(tmp_path: Path) -> None:
    model = sparse_llama(tmp_path / "Llama-8B")
    report = report_model(model)
    assert report.kv_token_bytes == 128 * 2**10 and report.loaded_bytes == 2 * (report.num_parameters or 0)
    assert list(report.by_quantize) == ["int8", "int4"]
    assert report.by_quantize["int4"] < report.by_quantize["int8"] < 0.51 * (report.loaded_bytes or 0)
    lines = {line[2:21].strip(): line[21:] for line in shown(str(model)).splitlines()}
    assert lines["KV cache"] == "128 KiB a token, 16 GiB for its whole context"
    assert re.fullmatch(r"7\.\d+ GiB with --quantize int8, 4\.\d+ GiB with --quantize int4", lines["smaller weights"])
    assert recorded(str(model))["by_quantize"] == report.by_quantize
    refused = report_model(changed(tmp_path / "refused", architectures=["Other"]))
    assert (refused.kv_token_bytes, refused.by_quantize) == (None, {})


def test_the_models_of_this_machine_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = tmp_path / "cache" / "models--Org--Whole" / "snapshots"
    changed(snapshots / "aaa")
    (tmp_path / "cache" / "models--Org--Empty" / "snapshots" / "bbb").mkdir(parents=True)
    parts = tmp_path / "cache" / "models--Org--Part" / "snapshots" / "ddd"
    changed(parts)
    (parts / "model.safetensors").rename(parts / "model-00002-of-00002.safetensors")
    (tmp_path / "cache" / "datasets--Org--Data" / "snapshots" / "ccc").mkdir(parents=True)
    changed(tmp_path / "models" / "refused", architectures=["Other"])
    changed(tmp_path / "models" / "Org" / "Inner")
    write_gguf(tmp_path / "models" / "part-00001-of-00002.gguf", {"general.architecture": "llama"})
    write_gguf(tmp_path / "models" / "part-00002-of-00002.gguf", {"general.architecture": "llama"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    found = {entry["name"]: entry["can_be_served"] for entry in recorded()}
    assert found == {
        "Org/Whole": True, "Inner": True, "refused": False, "part": False, BUNDLED.name: True
    }  # fmt: skip
    lines = shown().splitlines()
    for name in (
        "Org/Whole",
        "models/Org/Inner",
        "models/refused",
        BUNDLED.name,
        "Org/Empty",
        "Org/Part: it is here in part",
    ):
        assert any(line.strip().startswith(name) for line in lines), name
    assert [line.split()[-1] for line in lines if line.strip().startswith("models/refused ")] == ["no"]
    assert any(line.startswith("models/refused: ") and "architectures is ['Other']" in line for line in lines)
    assert {entry["name"] for entry in recorded("models")} == found.keys() - {"Org/Whole", BUNDLED.name}
    assert recorded("Org/Whole")["path"] == str(snapshots / "aaa")


@pytest.mark.parametrize("place", ["no-such-folder", "Org/Unknown", ".", "file.safetensors", "file.txt"])
def test_a_wrong_path_is_one_line(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.safetensors").touch()
    (tmp_path / "file.txt").write_text("text")
    result = CliRunner().invoke(cli.app, ["models", place])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1

"""What people type wrong: each gets one sentence that says what is wrong and what would be right, and no traceback."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.serving.link.engine_options import BUNDLED_MODEL

CONFIG = json.loads((BUNDLED_MODEL / "config.json").read_text())
SIMULATE = ("simulate", "--model", "llama-3-8b", "--hardware", "h100", "--num-requests", "5")


def model(folder: Path, name: str, **changes: Any) -> None:
    """A model directory that differs from the bundled one in its config."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(CONFIG | changes))
    shutil.copy(BUNDLED_MODEL / "model.safetensors", folder / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what people have lying about."""
    folder = tmp_path_factory.mktemp("place")
    model(folder, "gemma", architectures=["Gemma3ForCausalLM"])
    model(folder, "hqq", quantization_config={"quant_method": "hqq"})
    model(folder, "truncated")
    whole = (BUNDLED_MODEL / "model.safetensors").read_bytes()
    (folder / "truncated" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    model(folder, "pickled")
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    (folder / "ggufs").mkdir()
    (folder / "ggufs" / "a.gguf").touch()
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").touch()
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("hello")
    (folder / "trace.csv").write_text("time,input_tokens,answer\n1,2,3\n")
    return folder


WRONG: Mapping[str, str] = {
    # the command line itself
    "serv": "Did you mean 'serve'",
    "serve --modle x": "did you mean --model",
    "serve --port eight": "--port is 'eight'; it must be a whole number",
    "serve --port": "requires an argument",
    "serve --dtype float16": "--dtype is 'float16'; one of auto, bfloat16, float32",
    "serve one two": "unexpected extra argument",
    "simulate --json --no-such": "diptych simulate has no option --no-such",
    # names of other engines
    "serve --tensor-parallel-size 2": "--workers N",
    "serve -tp 2": "--workers N",
    "serve --gpu-memory-utilization 0.9": "--kv-cache-memory",
    "serve --gpu-memory-utilization=0.9": "--kv-cache-memory",
    "serve --quantization awq": "read from the checkpoint",
    "serve --trust-remote-code": "leave it out",
    "serve --chat-template x.jinja": "the template is that of the model's directory",
    "serve --enable-lora": "merge one into the checkpoint",
    "serve --no-enable-chunked-prefill": "--shape unified",
    "serve --ssl-keyfile key.pem": "proxy",
    "serve --kv-transfer-config {}": "--prefill N --decode N",
    "serve --speculative-config {}": "--speculation",
    "simulate --workers 2": "--processes",
    "bench --backend vllm": "--api completions or chat",
    # models
    "serve Qwen/Qwen2.5-0.5B-Instruct": "or let the server do it: diptych serve --download",
    "serve https://huggingface.co/Qwen/Qwen3-4B": "diptych pull Qwen/Qwen3-4B",
    "serve gpt-oss:20b": "on the Hub it is openai/gpt-oss-20b: diptych pull openai/gpt-oss-20b",
    "serve some-model": "a model of the Hub is named by organisation and name, such as diptych pull",
    "serve --revision v1": "--revision is 'v1'",
    "serve /no/such/folder": "/no/such/folder does not exist",
    "serve missing.gguf": "missing.gguf does not exist",
    "serve {}/ggufs": "give it: ",
    "serve {}/lora": "merge it into its model",
    "serve {}/empty": "has no config.json",
    "serve {}/notes.txt": "is no GGUF file",
    "serve {}/gemma/model.safetensors": "give its directory",
    "serve {}/gemma": "Gemma3ForCausalLM",
    "serve {}/hqq": "quant_method is 'hqq'",
    "serve {}/truncated": "model.safetensors",
    "serve {}/pickled": "must be converted",
    "serve {}/gemma --model {}/hqq": "given twice",
    "generate hi --model /no/such": "/no/such does not exist",
    "calibrate --model /no/such": "/no/such does not exist",
    "calibrate /no/such": "/no/such does not exist",
    # settings of a server
    "serve --prefill 1": "give --decode or --both",
    "serve --host 192.0.2.1 --port 0": "--host must be an address of this machine",
    "serve --threads 5000": "--threads is 5000",
    "serve --kv-cache-memory 999TiB": "--kv-cache-memory is 1,022,976.0 GiB; this machine has",
    "serve --kv-cache-memory 1KiB": "--kv-cache-memory is 1 KiB; one block of this model takes",
    "serve --listen-workers 127.0.0.1:0": "--listen-workers needs a --key-file",
    "serve --kv-cache-memory lots": "--kv-cache-memory is 'lots'; expected a size such as 2GiB",
    "serve --max-num-batched-tokens 0": "--max-batched-tokens is 0",
    "serve --slo soon": "ttft=300ms,tpot=50ms",
    "serve --slo ttft=1s --ttft-slo-ms 5": "--ttft-slo-ms is given, too",
    # simulating and measuring
    "simulate": "--model is not set",
    "simulate --model llama-3-8b": "--hardware is not set",
    "simulate --list engins": "one of models, hardware, links, engines, traces, settings",
    "simulate --model llama-3-8b --hardware h100 --set foo.bar=1": "--list settings",
    "simulate --model llama-3-8b --hardware h100 --trace {}/trace.csv": "there is no column output_tokens",
    "plan --model llama-3-8b --hardware h100 --rate 1 --processes 0": "--processes is 0",
    "bench 127.0.0.1 --url 127.0.0.1": "given twice",
    "bench --gaps": "--gaps has no effect without --records",
    "bench --find-goodput --rates 1,2": "--find-goodput and --rates are two measurements",
    "bench --slo ttft=2": "needs a unit, such as 2ms",
    "bench http://127.0.0.1:9 --rate 0": "--rate is 0.0",
    "bench http://127.0.0.1:9": "127.0.0.1:9",
    "chat http://127.0.0.1:9": "is a server running?",
    "chat --url http://127.0.0.1:9": "the address of a server stands alone",
    "diagnose --url http://127.0.0.1:9": "the address of a server stands alone",
    "diagnose http://127.0.0.1:9": "cannot reach",
    "diagnose http://127.0.0.1:9 --tpot-slo-ms 0": "--tpot-slo-ms is 0; it must be more than 0",
    "advise http://127.0.0.1:9 --trace azure-conv": "2 sources of traffic",
    "advise --model llama-3-8b": "--model has no effect without --trace",
    "replay {}/notes.txt": "notes.txt",
    # a command that asks for no keys does not repeat them
    "guide --api-keys keys.toml": "--api-keys: there is no such option here: diptych serve and diptych front",
    "guide --api-key=sk-1": "--api-key: there is no such option here",
    "guide --admin-key sk-1": "--admin-key: there is no such option here",
    "simulate --admin-key-file key": "--admin-key-file: there is no such option here",
}


def test_there_are_forty_of_them() -> None:
    assert len(WRONG) >= 40


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_word_gets_one_helpful_sentence(
    words: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, words.replace("{}/", f"{place}/").split())
    assert result.exit_code in (1, 2), result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert WRONG[words] in result.stderr
    assert "sk-1" not in result.stderr

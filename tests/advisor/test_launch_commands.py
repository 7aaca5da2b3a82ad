"""The command of a plan starts something: weights that are here or on the Hub, and an engine that has the family."""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diptych.advisor.device_layout import LayoutName, PlannedDevice, WorkerKind
from diptych.advisor.layout_space import LayoutSpace
from diptych.cli.launch_commands import launch_command
from diptych.runtime.models.registry import MODELS
from diptych.runtime.models.wrappers import WRAPPERS
from diptych.serving.front.engine_spec import parse_engine
from diptych.simulation.model_catalogue import model_names, published
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.settings import settings_from

H100 = PlannedDevice("h100", 2.9, 700.0)


def command(model: str, shape: LayoutName, counts: tuple[int, ...], tensor: int = 1, engine: str | None = None) -> str:
    """The command of a fleet of H100."""
    kinds = (WorkerKind(H100, Parallelism(tensor)),) * len(counts)
    raw = {"model": model, "slo": {"ttft_ms": 500.0, "tpot_ms": 15.0}, **({"engine": engine} if engine else {})}
    return launch_command(LayoutSpace.layout(shape, kinds, counts), settings_from(raw))


def test_weights_that_are_not_here_are_downloaded_by_the_server() -> None:
    assert shlex.split(command("llama-3.1-8b", "split", (1, 3))) == [
        "diptych", "serve", "--model", "meta-llama/Llama-3.1-8B", "--download", "--prefill", "1", "--decode", "3",
        "--ttft-slo-ms", "500", "--tpot-slo-ms", "15",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "settings", "options"),
    [
        ("cpu-epyc-9004-2c", {}, "diptych serve --model meta-llama/Meta-Llama-3-8B --download --both 2"),
        (
            "cpu-epyc-9004-2c",
            {"quantize": "int4", "kv_bits": 8},
            "diptych serve --model meta-llama/Meta-Llama-3-8B --download --quantize int4 --kv-dtype int8 --both 2",
        ),
        ("h100", {"kv_bits": 8}, "--kv-cache-dtype fp8"),  # of vLLM: serve keeps 16 bits there
        ("h100", {"kv_bits": 8, "engine": "sglang"}, "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_the_command_of_a_fleet_has_the_numbers_that_were_simulated(
    device: str, settings: dict[str, Any], options: str
) -> None:
    kind = WorkerKind(PlannedDevice(device, None, 100.0), Parallelism(1))
    layout = LayoutSpace.layout("unified", (kind,), (2,))
    base = settings_from({"model": "llama-3-8b", "hardware": device, **settings})
    assert options in launch_command(layout, base)


def test_weights_that_are_here_are_served_from_where_they_are(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert command(name, "chunked", (2,)).startswith(f"diptych serve --model {tmp_path} --both 2 --shape chunked")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["UnknownForCausalLM"]}))
    assert f"vllm serve {tmp_path} --port 8001 &\n" in command(str(tmp_path), "chunked", (2,))


@pytest.mark.parametrize(
    ("shape", "counts"), [("chunked", (2,)), ("unified", (1,)), ("split", (1, 2)), ("mixed", (1, 1, 1))]
)
@pytest.mark.parametrize("engine", [None, "sglang"])
def test_a_family_that_diptych_does_not_serve_is_started_by_other_engines_behind_the_front(
    shape: LayoutName, counts: tuple[int, ...], engine: str | None
) -> None:
    *engines, front = command("deepseek-v3", shape, counts, 2, engine).splitlines()
    assert len(engines) == sum(counts) and all(line.endswith(" &") for line in engines)
    words = shlex.split(front)
    assert words[:2] == ["diptych", "front"]
    given = [parse_engine(word) for option, word in pairwise(words) if option == "--engine"]
    assert [spec.kind for spec in given] == [engine or "vllm"] * sum(counts)
    roles = {"chunked": ["both"] * 2, "unified": ["both"], "split": ["prefill", "decode", "decode"]}
    assert [spec.role for spec in given] == roles.get(shape, ["prefill", "decode", "both"])
    for number, line in enumerate(engines):
        assert f"CUDA_VISIBLE_DEVICES={2 * number},{2 * number + 1} " in line
        assert "deepseek-ai/DeepSeek-V3" in line and f"--port {8001 + number}" in line
        assert ("--tp-size 2" if engine else "--tensor-parallel-size 2") in line
        assert given[number].url.endswith(f":{8001 + number}")


def test_workers_of_several_devices_are_other_engines_and_spread_over_hosts() -> None:
    lines = command("llama-3.1-70b", "chunked", (3,), 4).splitlines()
    assert [line.partition(" ")[0] for line in lines[:3]] == [
        "CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7", "CUDA_VISIBLE_DEVICES=0,1,2,3",
    ]  # fmt: skip
    assert "HOST2" in lines[2] and "vllm=http://HOST2:8003" in lines[3]


def test_every_model_of_the_catalogue_names_its_publication_and_architecture() -> None:
    served = set()
    for name in model_names():
        known = published(name)
        assert known is not None and known.hub_name.count("/") == 1, name
        if known.architecture in (*MODELS, *WRAPPERS):
            served.add(name)
        assert published(known.hub_name) == known
    assert {"llama-3.1-8b", "qwen3-8b", "mixtral-8x7b", "gemma-3-27b"} <= served
    assert not {"deepseek-v3", "opt-13b", "llama-4-scout"} & served
    assert published("qwen/qwen2.5-0.5b-INSTRUCT") == published("Qwen/Qwen2.5-0.5B-Instruct")

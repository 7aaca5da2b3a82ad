"""The commands that start a planned fleet: of ``diptych serve`` where it can, else of vLLM or SGLang and of
``diptych front`` before them.

``diptych serve`` starts workers of one device each, all of one kind, of the families that its engine computes. What
it is given exists: the weights that are on this machine, or those that it downloads.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.control.errors import ConfigError

if TYPE_CHECKING:
    from diptych.advisor.device_layout import FleetLayout, LayoutGroup
    from diptych.simulation.settings import Settings

FIRST_PORT = 8001  # the front has 8000
NIXL_PORT = 5600
BOOTSTRAP_PORT = 8998
DEVICES_OF_HOST = 8  # workers that need more devices than these are started on other hosts
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def launch_command(layout: "FleetLayout", base: "Settings") -> str:
    """A shell script of one line, or of one for each engine and one for the front."""
    model = str(base.model)
    own = _own_weights(model)
    if layout.can_be_served() and _is_served(model, own) and _keeps_kv(layout, base):
        return _serve(layout, base, model if own is None else str(own))
    return _engines(layout, base, str(own) if own is not None else _hub_name(model))


def _own_weights(model: str) -> Path | None:
    """Where the model is on this machine; None: it is not."""
    from diptych.runtime.models.model_place import WEIGHTS, find_model

    path = Path(model)
    names = [str(path.parent)] if path.suffix == ".json" else [model, _hub_name(model)]
    for name in names:
        try:
            found = find_model(name)
        except ConfigError:  # it is not here by this name
            continue
        if found.suffix == ".gguf" or any(any(found.glob(pattern)) for pattern in WEIGHTS):
            return found
    return None


def _is_served(model: str, own: Path | None) -> bool:
    """Whether the engine computes this family."""
    from diptych.runtime.models.registry import MODELS, read_model_config
    from diptych.runtime.models.wrappers import WRAPPERS
    from diptych.simulation.model_catalogue import published

    if own is not None:
        try:
            read_model_config(own)
        except ConfigError:
            return False
        return True
    known = published(model)
    return known is not None and known.architecture in (*MODELS, *WRAPPERS)


def _keeps_kv(layout: "FleetLayout", base: "Settings") -> bool:
    """Whether the engine keeps KV in as many bits: on a GPU in those of the model alone."""
    from diptych.simulation.hardware import load_hardware

    return base.kv_bits != 8 or load_hardware(layout.groups[0].kind.device.name).kind == "cpu"


def _hub_name(model: str) -> str:
    from diptych.simulation.model_catalogue import published

    known = published(model)
    return model if known is None else known.hub_name


def _serve(layout: "FleetLayout", base: "Settings", model: str) -> str:
    is_here = Path(model).exists()
    words = ["diptych", "serve", "--model", model if is_here else _hub_name(model)]
    words += [] if is_here else ["--download"]
    words += ["--quantize", base.quantize] if base.quantize else []
    words += ["--kv-dtype", "int8"] if base.kv_bits == 8 else []
    for group in layout.groups:
        words += [f"--{group.role}", str(group.count)]
    if layout.shape in ("unified", "chunked"):
        words += ["--shape", layout.shape]
    return shlex.join([*words, *_objectives(base)])


def _objectives(base: "Settings") -> list[str]:
    limits = (("--ttft-slo-ms", base.slo.ttft_ms), ("--tpot-slo-ms", base.slo.tpot_ms))
    return [word for name, value in limits if value is not None for word in (name, f"{value:g}")]


def _engines(layout: "FleetLayout", base: "Settings", model: str) -> str:
    """A line for each engine, and one for the front."""
    kind = "sglang" if (base.engine or "").startswith("sglang") else "vllm"
    lines, engines, device, host = [], [], 0, 0
    number = 0
    for group in layout.groups:
        for _ in range(group.count):
            count = group.kind.num_devices
            if device and device + count > DEVICES_OF_HOST:
                device, host = 0, host + 1
            place = range(device, device + count)
            lines.append(_engine(kind, layout, base, group, model, place, number, host))
            role = "" if group.role == "both" else f",role={group.role}"
            if kind == "sglang" and group.role == "prefill":
                role += f",bootstrap={_host(host)}:{BOOTSTRAP_PORT + number}"
            engines.append(f"{kind}=http://{_host(host)}:{FIRST_PORT + number}{role}")
            device, number = device + count, number + 1
    front = ["diptych", "front", *(word for engine in engines for word in ("--engine", engine)), *_objectives(base)]
    return "\n".join([*lines, shlex.join(front)])


def _host(number: int) -> str:
    return "127.0.0.1" if number == 0 else f"HOST{number + 1}"


def _engine(
    kind: str,
    layout: "FleetLayout",
    base: "Settings",
    group: "LayoutGroup",
    model: str,
    devices: Sequence[int],
    number: int,
    host: int,
) -> str:
    """One engine in the background, on these devices of its host."""
    split, port = group.kind.parallelism, str(FIRST_PORT + number)
    environment = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))}"]
    if kind == "sglang":
        words = ["python3", "-m", "sglang.launch_server", "--model-path", model, "--port", port]
        words += _parallel({"--tp-size": split.tensor, "--pp-size": split.pipeline})
        words += ["--kv-cache-dtype", "fp8_e4m3"] if base.kv_bits == 8 else []
        words += ["--chunked-prefill-size", "-1"] if layout.shape == "unified" else []
        if group.role != "both":
            words += ["--disaggregation-mode", group.role]
            bootstrap = ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT + number)]
            words += bootstrap if group.role == "prefill" else []
    else:
        words = ["vllm", "serve", model, "--port", port]
        words += _parallel({"--tensor-parallel-size": split.tensor, "--pipeline-parallel-size": split.pipeline})
        words += ["--kv-cache-dtype", "fp8"] if base.kv_bits == 8 else []
        words += ["--no-enable-chunked-prefill"] if layout.shape == "unified" else []
        if layout.shape in ("split", "mixed"):
            words += ["--kv-transfer-config", json.dumps(CONNECTOR)]
            environment += [f"VLLM_NIXL_SIDE_CHANNEL_PORT={NIXL_PORT + number}"]
    where = "" if host == 0 else f"  # on {_host(host)}, with --host 0.0.0.0"
    return f"{' '.join(environment)} {shlex.join(words)} &{where}"


def _parallel(sizes: dict[str, int]) -> list[str]:
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]

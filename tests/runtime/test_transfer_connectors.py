"""The table of connectors: what it promises of each, and that a new connector is one class and one entry."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

import diptych
from diptych.control.errors import ConfigError
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import Committed, ConnectorEvent, ConnectorKind, Sent, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import FleetPlan, plan_fleet
from diptych.serving.link.engine_options import DeviceName, DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.worker.load_engine import connect_peers
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import ConnectedRunner, chunks_of, generate, greedy, hand_off

INSTALLED = [name for name, kind in CONNECTORS.items() if kind.is_installed]


class InMemoryConnector:
    """A KVConnector without a wire: both sides live in one process and one thread, so a send copies at once."""

    reachable: ClassVar[dict[str, "InMemoryConnector"]] = {}  # by address

    def __init__(self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions) -> None:
        self.address = f"{options.listen}/{len(self.reachable)}"
        self.reachable[self.address] = self
        self._layers = layers
        self._block_size = kv_format.block_size
        self._expected: dict[str, Sequence[int]] = {}
        self._open: dict[str, tuple[InMemoryConnector, int]] = {}  # receiver, where the next send begins
        self._events: list[ConnectorEvent] = []
        self._fd = os.eventfd(0)

    def expect(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        self._expected[attempt_id] = tuple(block_ids)

    def forget(self, attempt_id: str) -> None:
        self._expected.pop(attempt_id, None)

    def open(self, attempt_id: str, address: str, start: int) -> None:
        self._open[attempt_id] = self.reachable[address], start

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        """Copy the blocks, when all is there: nothing leaves before all layers are computed."""
        if attempt_id not in self._open or num_layers not in (None, len(self._layers)):
            return
        receiver, begin = self._open[attempt_id]
        for at in range(begin // self._block_size, -(-(start + num_tokens) // self._block_size)):
            for sent, received in zip(self._layers, receiver._layers, strict=True):
                for mine, theirs in zip(sent, received, strict=True):
                    theirs[receiver._expected[attempt_id][at]] = mine[block_ids[at]]
        self._open[attempt_id] = receiver, start + num_tokens

    def commit(self, attempt_id: str, payload: bytes) -> None:
        receiver, _ = self._open.pop(attempt_id)
        receiver._happen(Committed(attempt_id, payload, 0, 0, 0))
        self._happen(Sent(attempt_id, 0, 0, 0, 0))

    def cancel(self, attempt_id: str) -> None:
        self._open.pop(attempt_id, None)

    def poll(self) -> list[ConnectorEvent]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        del self.reachable[self.address]
        os.close(self._fd)

    def _happen(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._fd, 1)


def planned(transfer: str, device: DeviceName = "cpu", **changes: object) -> FleetPlan:
    """A prefill worker and a decode worker that use this connector. The caller closes the plan."""
    memory = MemoryOptions(kv_cache_bytes=2**20, block_size=32)
    options = EngineOptions(model=str(reference("llama").directory), device=DeviceOptions(device=device), memory=memory)
    return plan_fleet(options, FleetOptions(prefill=1, decode=1, transfer=transfer, **changes))


def test_a_connector_that_is_added_to_the_table_can_be_chosen_and_serves_a_handoff(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = ConnectorKind(f"{__name__}:InMemoryConnector", listen="memory:{directory}")
    monkeypatch.setitem(CONNECTORS, "in_memory", kind)
    plan = planned("in_memory")
    workers = []
    for options, num_blocks in zip(plan.options, (90, 91), strict=True):
        model_runner = runner("llama", num_blocks=num_blocks)
        connector = connect_peers(options, model_runner, tmp_path)
        assert isinstance(connector, InMemoryConnector) and connector.address.startswith(f"memory:{tmp_path}/")
        workers.append(ConnectedRunner(model_runner, connector))
    prefill, decode = workers
    prompt, sampling = prompt_of(100), greedy(8)
    expected, _ = generate(prefill.runner, prompt, chunks_of(100, 48), sampling)
    assert hand_off(prefill, decode, "a", prompt, sampling, 48) == expected
    assert [type(event) for event in prefill.connector.poll()] == [Sent]
    for worker in workers:
        worker.connector.close()
    with pytest.raises(ConfigError, match="no effect with transfer in_memory"):
        planned("in_memory", kv_codec="int8")


def test_reading_the_table_loads_neither_torch_nor_what_a_connector_needs() -> None:
    needed = {kind.needs for kind in CONNECTORS.values()} | {"torch", "numpy"}
    source = f"import sys, diptych.runtime.transfer; print({needed} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector_that_is_not_installed_is_refused_with_the_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = CONNECTORS[name]
    missing = ConnectorKind(kind.implementation, shares_pool=kind.shares_pool, needs="a_missing_module", extra="fast")
    monkeypatch.setitem(CONNECTORS, name, missing)
    with pytest.raises(ConfigError, match=r"not installed \(pip install '\.\[fast\]' in the checkout\)"):
        FleetOptions(prefill=1, decode=1, transfer=name)


@pytest.mark.parametrize("name", INSTALLED)
def test_options_are_refused_where_the_entry_says_that_they_have_no_effect(name: str) -> None:
    kind = CONNECTORS[name]
    plan = planned(name)
    try:
        for options in plan.options:
            assert options.place is not None
            assert (options.place.pool is not None) == kind.shares_pool
            assert (options.place.transfer, options.place.codec) == (name, "none")
    finally:
        plan.close()
    if kind.packs:
        assert all(
            options.place and options.place.codec == "int8" for options in planned(name, kv_codec="int8").options
        )
    else:
        with pytest.raises(ConfigError, match="kv_codec is int8 and has no effect"):
            planned(name, kv_codec="int8")
    if kind.serves_cuda:
        planned(name, "cuda")
    else:
        with pytest.raises(ConfigError, match="does not serve GPUs"):
            planned(name, "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_no_connector_is_named_the_first_that_serves_the_device_is_taken(device: DeviceName) -> None:
    first = next(name for name, kind in CONNECTORS.items() if kind.serves_cuda or device == "cpu")
    plan = planned("auto", device)
    assert all(options.place and options.place.transfer == first for options in plan.options)
    plan.close()


def test_no_file_of_the_transfer_package_imports_itself_through_others() -> None:
    """Imports for type checking only count too."""
    source = Path(diptych.__file__).parent.parent
    imports: dict[str, set[str]] = {}
    for path in sorted((source / "diptych/runtime/transfer").rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        nodes = ast.walk(ast.parse(path.read_text()))
        imports[name] = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    while leaves := [name for name, imported in imports.items() if not imported & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert not imports, f"these import each other in a circle: {sorted(imports)}"

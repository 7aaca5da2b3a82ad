"""What fits into memory is known before a weight is read: refusals name what would fit, and ``--fit`` chooses it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sparse_model import sparse_llama
from tests.runtime.checkpoints import reference
from tests.test_cgroups import GIB, V2, tree
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.control.config import CacheConfig, watermark_of
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import KVGroup
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.memory_fit import BITS, check_memory, fitted, memory_words, need_of
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.kv_memory import kv_geometry_of, longest_sequence_of
from diptych.serving.link.engine_options import (
    BUNDLED_MODEL,
    DeviceOptions,
    EngineOptions,
    MemoryOptions,
    parse_bytes,
)
from diptych.serving.link.messages import Ready

MIB = 2**20
ONE, TWO, SPLIT = FleetOptions(), FleetOptions(both=2), FleetOptions(prefill=1, decode=1)
FITS = re.compile(r"What fits: (.*), with a context of ([\d,]+) tokens$")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 billion parameters, which takes 15 GiB in bf16, and 16 GiB of KV for its whole context."""
    return sparse_llama(tmp_path_factory.mktemp("models") / "Llama-8B")


def machine(folder: Path, gib: float) -> Path:
    """One that has this much memory free."""
    return tree(folder / str(gib), {"proc/meminfo": f"MemAvailable: {int(gib * 2**20)} kB"})


def options_of(model: Path, quantize: Any = "none", kv: str | None = None, **changes: Any) -> EngineOptions:
    memory = MemoryOptions(kv_cache_bytes=None if kv is None else parse_bytes(kv, "kv"), **changes.pop("memory", {}))
    return EngineOptions(
        model=str(model), device=DeviceOptions(device="cpu", quantize=quantize), memory=memory, **changes
    )


def with_words(options: EngineOptions, words: Sequence[str]) -> EngineOptions:
    """The options with what a sentence says to type."""
    values = dict(zip(words[::2], words[1::2], strict=True))
    if (quantize := values.pop("--quantize", None)) is not None:
        options = msgspec.structs.replace(options, device=msgspec.structs.replace(options.device, quantize=quantize))
    if (memory := values.pop("--kv-cache-memory", None)) is not None:
        size = parse_bytes(memory, "kv")
        options = msgspec.structs.replace(options, memory=msgspec.structs.replace(options.memory, kv_cache_bytes=size))
    if (length := values.pop("--max-model-len", None)) is not None:
        options = msgspec.structs.replace(options, max_model_len=int(length))
    assert not values
    return options


def capacity_of(options: EngineOptions) -> int:
    """Tokens that the engine of a worker says it holds."""
    geometry = kv_geometry_of(options)
    assert options.memory.kv_cache_bytes is not None
    num_blocks, groups = geometry.blocks_within(options.memory.kv_cache_bytes), geometry.layers.groups
    return CacheConfig(
        num_blocks, geometry.block_size, watermark_blocks=watermark_of(num_blocks, len(groups)), groups=groups
    ).capacity_tokens


@pytest.mark.parametrize("fleet", [ONE, TWO, SPLIT], ids=["one", "two", "split"])
@pytest.mark.parametrize("kv", [None, "1GiB", "20GiB"])
@pytest.mark.parametrize("gib", [2, 6, 17, 100])
def test_what_is_refused_comes_with_settings_that_are_not(
    llama: Path, tmp_path: Path, gib: int, kv: str | None, fleet: FleetOptions
) -> None:
    root, options = machine(tmp_path, gib), options_of(llama, kv=kv)
    try:
        check_memory(options, fleet, root)
    except ConfigError as error:
        assert "needs weights of " in error.message and f"; {gib} GiB of memory are available" in error.message
        if (found := FITS.search(error.message)) is not None:
            changed = with_words(options, found[1].split())
            check_memory(changed, fleet, root)
            assert changed != options
        else:
            assert "No setting makes it fit: with --quantize int4 it needs" in error.message
            with pytest.raises(ConfigError):
                check_memory(with_words(options, ["--quantize", "int4", "--kv-cache-memory", "300MiB"]), fleet, root)
    else:
        assert need_of(options, fleet).at_start <= gib * GIB


def test_bits_go_only_where_a_smaller_cache_is_not_enough(llama: Path, tmp_path: Path) -> None:
    def refused(gib: float, kv: str | None) -> str:
        with pytest.raises(ConfigError) as caught:
            check_memory(options_of(llama, kv=kv), ONE, machine(tmp_path, gib))
        return caught.value.message

    assert "What fits: --kv-cache-memory 8" in refused(24, "20GiB")
    assert "What fits: --quantize int8, with a context of" in refused(14, "1GiB")
    assert "What fits: --quantize int4 --kv-cache-memory" in refused(6, "4GiB")
    assert "What fits: --quantize int8, with a context of" in refused(14, None)


def test_what_fits_is_not_refused(llama: Path, tmp_path: Path) -> None:
    check_memory(options_of(llama, kv="4GiB"), TWO, machine(tmp_path, 25))
    with pytest.raises(ConfigError, match=r"on 2 workers needs weights of 14\.96 GiB and a KV cache of 8 GiB"):
        check_memory(options_of(llama, kv="4GiB"), TWO, machine(tmp_path, 22))


def test_workers_with_memory_of_their_own_have_weights_of_their_own(llama: Path) -> None:
    options = options_of(llama, kv="1GiB")
    shared, separate = need_of(options, TWO), need_of(options, FleetOptions(both=2, transfer="tcp"))
    assert separate.weight_bytes == 2 * shared.weight_bytes == 2 * need_of(options, ONE).weight_bytes
    assert separate.kv_bytes == shared.kv_bytes == 2 * GIB


def test_pools_of_unequal_workers_count_as_they_are(llama: Path, tmp_path: Path) -> None:
    groups = (
        WorkerGroup(name="exact", kv_cache_bytes=2 * GIB),
        WorkerGroup(name="fast", kv_cache_bytes=GIB, quantize="int8", replicas=2),
    )
    need, options = need_of(options_of(llama), FleetOptions(groups=groups)), options_of(llama)
    weights = [loaded_weight_bytes(llama, "auto", quantize) for quantize in ("none", "int8")]
    assert (need.weight_bytes, need.kv_bytes) == (sum(weights), 4 * GIB)
    with pytest.raises(ConfigError, match="Smaller pools fit"):
        check_memory(options, FleetOptions(groups=groups), machine(tmp_path, 25))


def test_host_tiers_must_fit_into_the_machine_once_they_are_full(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 4 * GIB}
    options = options_of(BUNDLED_MODEL, memory={"host_bytes": 3 * 10**9})
    check_memory(options, ONE, tree(tmp_path, files))
    with pytest.raises(
        ConfigError, match=r"kv_host_gb is 3; .* 2 workers take .* the control group .* 4 GiB"
    ) as caught:
        check_memory(options, TWO, tree(tmp_path, files))
    fitting = re.search(r"--kv-host-gb ([\d.]+) fits", caught.value.message)
    assert fitting is not None
    smaller = options_of(BUNDLED_MODEL, memory={"host_bytes": int(float(fitting[1]) * 10**9)})
    check_memory(smaller, TWO, tree(tmp_path, files))


@pytest.mark.parametrize("fleet", [ONE, TWO, SPLIT], ids=["one", "two", "split"])
@pytest.mark.parametrize("gib", [6, 9, 17, 100])
def test_what_fit_chooses_fits_and_holds_its_context(
    llama: Path, tmp_path: Path, gib: int, fleet: FleetOptions
) -> None:
    root, options = machine(tmp_path, gib), options_of(llama)
    fit = fitted(options, fleet, root)
    check_memory(fit.options, fleet, root)
    assert with_words(options, fit.words.split()) == fit.options
    assert capacity_of(fit.options) >= longest_sequence_of(fit.options) > 0


def test_fit_keeps_the_bits_that_leave_room_for_a_useful_context(llama: Path, tmp_path: Path) -> None:
    def chosen(gib: float, **given: Any) -> tuple[str, int]:
        fit = fitted(options_of(llama, **given), ONE, machine(tmp_path, gib))
        return fit.options.device.quantize, longest_sequence_of(fit.options)

    assert chosen(100) == ("none", 131072)
    assert chosen(24)[0] == "none" and 32768 <= chosen(24)[1] < 131072
    assert chosen(17)[0] == "int8" and chosen(17)[1] >= 32768
    assert chosen(9.5)[0] == "int4" and chosen(9.5)[1] >= 32768
    assert chosen(6)[0] == "int4" and 2048 <= chosen(6)[1] < 32768
    assert chosen(17, max_model_len=4096) == ("none", 4096)
    assert chosen(17, kv="8GiB") == ("int8", 65408 // 1024 * 1024)
    assert chosen(100, quantize="int8") == ("int8", 131072)
    with pytest.raises(ConfigError, match=r"max_model_len is 131072; at most \d+ fits into the 8 GiB that are free"):
        chosen(8, max_model_len=131072)
    with pytest.raises(ConfigError, match="No setting makes it fit"):
        chosen(2)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "mistral-window", "qwen2"])
def test_models_with_windows_experts_or_neither_get_what_holds_their_context(family: str, tmp_path: Path) -> None:
    options = options_of(reference(family).directory)
    for mib in (610, 640, 4096):
        root = machine(tmp_path, mib / 1024)
        fit = fitted(options, ONE, root)
        check_memory(fit.options, ONE, root)
        assert capacity_of(fit.options) >= longest_sequence_of(fit.options) > 0


def test_a_checkpoint_that_fewer_bits_do_not_shrink_is_not_given_fewer(tmp_path: Path) -> None:
    model = reference("llama").directory
    sizes = [loaded_weight_bytes(model, "auto", quantize) for quantize in BITS]
    assert sizes == sorted(sizes, reverse=True)
    fit = fitted(options_of(model, quantize="int4"), ONE, machine(tmp_path, 4))
    assert fit.options.device.quantize == "int4"


def test_fit_refuses_what_it_cannot_choose_for(tmp_path: Path) -> None:
    pools = FleetOptions(groups=(WorkerGroup(name="a"), WorkerGroup(name="b", max_model_len=64)))
    with pytest.raises(ConfigError, match="fit is on; it chooses for equal workers"):
        fitted(options_of(BUNDLED_MODEL), pools, machine(tmp_path, 4))
    on_gpu = EngineOptions(model=str(BUNDLED_MODEL), device=DeviceOptions(device="cuda"))
    with pytest.raises(ConfigError, match=r"fit is on; .* \(--device cpu\)"):
        fitted(on_gpu, ONE, machine(tmp_path, 4))
    check_memory(on_gpu, ONE, machine(tmp_path, 0.001))  # what a GPU has is for its worker to say


def ready(num_blocks: int, max_model_len: int, capacity: int, groups: Sequence[KVGroup] = (), most: int = 128) -> Ready:
    return Ready(8, max_model_len, capacity, 2, most, [], "", num_blocks=num_blocks, block_size=32, groups=list(groups))


def test_the_line_of_a_start_says_how_many_sequences_of_which_length_run_at_once() -> None:
    options = options_of(BUNDLED_MODEL)
    one = ready(1028, 8192, 32768)
    words = memory_words(need_of(options, ONE), {0: "both"}, {0: one})
    assert re.fullmatch(
        r"Memory: weights [\d.]+ MiB, KV cache [\d.]+ MiB, for 4 of 8,192 or 16 of 2,048 tokens at once", words
    )
    small = memory_words(need_of(options, ONE), {0: "both"}, {0: ready(132, 8192, 4096)})
    assert "for 1 of 4,096 or 2 of 2,048 tokens at once; the context is 8,192 (a larger --kv-cache-memory" in small
    few = memory_words(need_of(options, ONE), {0: "both"}, {0: ready(1028, 8192, 32768, most=3)})
    assert "for 3 of 8,192 or 3 of 2,048" in few
    short = memory_words(need_of(options, ONE), {0: "both"}, {0: ready(1028, 1024, 32768)})
    assert "for 32 of 1,024 tokens at once" in short


def test_only_workers_that_decode_hold_sequences_and_every_cache_counts() -> None:
    options, one = options_of(BUNDLED_MODEL), ready(1028, 8192, 32768)
    split = memory_words(need_of(options, SPLIT), {0: "prefill", 1: "decode"}, {0: one, 1: one})
    two = memory_words(need_of(options, TWO), {0: "both", 1: "both"}, {0: one, 1: one})
    assert "for 4 of 8,192" in split and "for 8 of 8,192" in two
    size = re.compile(r"KV cache ([\d.]+ MiB)")
    assert (
        size.findall(split)
        == size.findall(two)
        != size.findall(memory_words(need_of(options, ONE), {0: "both"}, {0: one}))
    )


def test_a_server_says_what_fits_before_it_starts_a_process(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*words: str) -> str:
        result = CliRunner().invoke(cli.app, ["serve", str(llama), "--device", "cpu", *words])
        assert result.exit_code == 1
        return result.output

    monkeypatch.setattr(cli, "_serve", lambda *arguments: pytest.fail("it was started"))
    monkeypatch.setattr("diptych.serving.fleet.memory_fit.available_memory_bytes", lambda root: 12 * GIB)
    output = shown("--workers", "1000", "--cores-per-worker", "1", "--kv-cache-memory", "1GiB")
    assert output.startswith("error: Llama-8B on 1000 workers needs weights of 14.96 GiB and a KV cache of 1000 GiB; ")
    assert "12 GiB of memory are available. What fits: --workers 1 --quantize int8, with a context of 8,064" in output
    assert "error: --fit is on; it chooses for equal workers" in shown(
        "--fit", "--pool", "a=1:max_model_len=64", "--pool", "b=1"
    )

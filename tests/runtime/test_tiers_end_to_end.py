"""Tokens stay the same whatever tier their KV comes from: a runner, an engine and a disk in this process."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from diptych.control.config import scheduler_config
from diptych.control.events import RequestAdmitted
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import LocalEngine
from diptych.runtime.tiers.weights_digest import FILE_NAME, weights_digest
from diptych.serving.link.engine_options import BUNDLED_MODEL, DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.worker.load_engine import LoadedEngine, load_engine

NUM_BLOCKS = 24
SLOW = (1e6, 1e7, 1e3, 1e6, 1e3)  # a machine on which tiers pay, however busy the disk is
TOKENS = SamplingParams(max_tokens=8, temperature=0.0)


def options(**memory: object) -> EngineOptions:
    return EngineOptions(
        model=str(BUNDLED_MODEL),
        device=DeviceOptions(threads=1, device="cpu"),
        memory=MemoryOptions(kv_cache_bytes=NUM_BLOCKS * 32 * BYTES_PER_TOKEN, **memory),  # type: ignore[arg-type]
        scheduler=scheduler_config("chunked", max_num_seqs=4),
        max_model_len=512,
        warm_up=False,
    )


BYTES_PER_TOKEN = 0  # set by the fixture below


@pytest.fixture(scope="module", autouse=True)
def _sizes() -> Iterator[None]:
    from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry

    global BYTES_PER_TOKEN
    BYTES_PER_TOKEN = read_kv_geometry(BUNDLED_MODEL, "auto", 32).block_bytes // 32
    yield


class Server:
    """One engine; ``answer`` runs one prompt to its end."""

    def __init__(self, **memory: object) -> None:
        loaded: LoadedEngine[object] = load_engine(options(**memory), lambda *_: None)  # type: ignore[assignment]
        self.core = loaded.engine
        tiers = self.core.kv.tiers  # copies cost little, whatever was measured beside the other tests
        tiers.config = replace(tiers.config, copy_block_ns=min(1000, tiers.config.copy_block_ns))
        self.engine = LocalEngine(loaded.engine, loaded.runner, tiers=loaded.tiers)  # type: ignore[arg-type]
        self.cached: dict[str, int] = {}
        self._number = 0

    def answer(self, prompt: list[int], salt: str | None = None) -> list[int]:
        name, self._number = f"r{self._number}", self._number + 1
        self.core.model.coefficients = SLOW
        self.engine.add(name, prompt, TOKENS, salt=salt)
        tokens: list[int] = []
        while (outcome := self.engine.step()) is not None:
            self.core.model.coefficients = SLOW  # whatever it has learned
            tokens += [
                t for r, t in zip(outcome.tokens.request_ids, outcome.tokens.token_ids, strict=True) if r == name
            ]
            for event in outcome.events:
                if isinstance(event, RequestAdmitted):
                    self.cached[event.request_id] = event.num_cached_tokens
        self.last_cached = self.cached[name]
        return tokens


def prompts(count: int, length: int = 300) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(500) for _ in range(length)] for _ in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    server = Server(prefix_cache=False)
    return [server.answer(prompt) for prompt in prompts(6)]


def test_what_went_to_the_host_gives_the_same_tokens(expected: list[list[int]]) -> None:
    server = Server(host_bytes=200 * 32 * BYTES_PER_TOKEN)
    assert [server.answer(prompt) for prompt in prompts(6)] == expected
    hits = 0
    for prompt, tokens in zip(prompts(6), expected, strict=True):
        assert server.answer(prompt) == tokens
        hits += server.last_cached
    assert hits >= 5 * 288
    assert server.core.kv.tiers.host_hit_tokens > 0


def test_what_is_on_disk_is_found_after_a_restart_and_gives_the_same_tokens(
    expected: list[list[int]], tmp_path: Path
) -> None:
    first = Server(disk=str(tmp_path), disk_bytes=10**9)
    for prompt in prompts(6):
        first.answer(prompt)
    first.engine.close()
    assert first.core.kv.tiers.num_stored_blocks >= 6 * 9
    second = Server(disk=str(tmp_path), disk_bytes=10**9)
    for prompt, tokens in zip(prompts(6), expected, strict=True):
        assert second.answer(prompt) == tokens
        assert second.last_cached == 288  # nine blocks; the rest of the prompt is less than one
    assert second.core.kv.tiers.loads.disk.loaded_blocks == 6 * 9
    second.answer(prompts(1)[0], salt="another tenant")
    assert second.last_cached == 0
    second.engine.close()


def test_int8_on_disk_takes_half_and_is_another_format(expected: list[list[int]], tmp_path: Path) -> None:
    first = Server(disk=str(tmp_path), disk_bytes=10**9, disk_codec="int8")
    for prompt in prompts(6):
        first.answer(prompt)
    first.engine.close()
    used = sum(path.stat().st_size for path in tmp_path.glob("*.kv"))
    blocks = first.core.kv.tiers.num_stored_blocks
    assert used / (blocks * 32 * BYTES_PER_TOKEN) < 0.7  # headers included
    second = Server(disk=str(tmp_path), disk_bytes=10**9, disk_codec="int8")
    same = 0
    for prompt, tokens in zip(prompts(6), expected, strict=True):
        found = second.answer(prompt)
        assert second.last_cached == 288
        same += sum(a == b for a, b in zip(found, tokens, strict=True))
    assert same >= 24  # of 48: rounded, and still what the model says of this prompt
    second.engine.close()
    exact = Server(disk=str(tmp_path), disk_bytes=10**9)
    exact.answer(prompts(1)[0])
    assert exact.last_cached == 0
    exact.engine.close()


def test_damage_is_computed_again(expected: list[list[int]], tmp_path: Path) -> None:
    first = Server(disk=str(tmp_path), disk_bytes=10**9)
    for prompt in prompts(3):
        first.answer(prompt)
    first.engine.close()
    rng = random.Random(2)
    for path in tmp_path.glob("*.kv"):
        data = bytearray(path.read_bytes())
        for _ in range(8):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    second = Server(disk=str(tmp_path), disk_bytes=10**9)
    assert [second.answer(prompt) for prompt in prompts(3)] == expected[:3]
    second.engine.close()


def test_weights_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    weights, kept = tmp_path / "model.safetensors", tmp_path / "kept"
    kept.mkdir()
    weights.write_bytes(b"a" * 10_000)
    first = weights_digest([weights], kept)
    assert weights_digest([weights], kept) == first
    assert len(msgspec.json.decode((kept / FILE_NAME).read_bytes())) == 1
    weights.write_bytes(b"a" * 9_999 + b"b")
    assert weights_digest([weights], kept) != first
    (kept / FILE_NAME).write_text("not json")
    os.rename(weights, tmp_path / "renamed.safetensors")
    assert weights_digest([tmp_path / "renamed.safetensors"], kept) != first

"""Tokens of a model that frees what windows have left stay the same whatever tier their KV comes from."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.control.config import scheduler_config
from diptych.control.events import RequestAdmitted
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import LocalEngine
from diptych.serving.kv_memory import kv_geometry_of
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.worker.load_engine import LoadedEngine, load_engine
from tests.runtime.checkpoints import reference
from tests.runtime.test_freed_windows import spoil

SLOW = (1e6, 1e7, 1e3, 1e6, 1e3)  # a machine on which tiers pay, however busy the disk is
TOKENS = SamplingParams(max_tokens=8, temperature=0.0)
FAMILIES = ["gemma3", "mistral-window", "lfm2-biased"]
PROMPTS = [[random.Random(number).randrange(90) for _ in range(300)] for number in range(6)]
BOUNDARY = 288


class Server:
    """One engine; ``answer`` runs one prompt to its end."""

    def __init__(self, family: str, **memory: object) -> None:
        options = EngineOptions(
            model=str(reference(family, "float32").directory),
            device=DeviceOptions(threads=1, device="cpu", dtype="float32"),
            scheduler=scheduler_config("chunked", max_num_seqs=4),
            max_model_len=512,
            warm_up=False,
        )
        asked = MemoryOptions(**memory)  # type: ignore[arg-type]
        geometry = kv_geometry_of(replace_memory(options, asked))
        num_blocks = {1: 18, 5: 60}.get(len(geometry.layers.groups), 26 * len(geometry.layers.groups))
        sizes = MemoryOptions(kv_cache_bytes=num_blocks * geometry.block_bytes, **memory)  # type: ignore[arg-type]
        loaded: LoadedEngine[object] = load_engine(replace_memory(options, sizes), lambda *_: None)  # type: ignore[assignment]
        spoil(loaded.runner)  # type: ignore[arg-type]
        self.core = loaded.engine
        assert not self.core.kv.is_dense
        tiers = self.core.kv.tiers  # copies cost little, whatever was measured beside the other tests
        tiers.config = replace(tiers.config, copy_block_ns=min(1000, tiers.config.copy_block_ns))
        self.engine = LocalEngine(loaded.engine, loaded.runner, tiers=loaded.tiers)  # type: ignore[arg-type]
        self.last_cached = self.num_asked = 0

    def answer(self, prompt: list[int]) -> list[int]:
        name, self.num_asked = f"r{self.num_asked}", self.num_asked + 1
        self.core.model.coefficients = SLOW
        self.engine.add(name, prompt, TOKENS)
        tokens: list[int] = []
        while (outcome := self.engine.step()) is not None:
            self.core.model.coefficients = SLOW  # whatever it has learned
            tokens += outcome.tokens.token_ids
            for event in outcome.events:
                if isinstance(event, RequestAdmitted):
                    self.last_cached = event.num_cached_tokens
        return tokens


def replace_memory(options: EngineOptions, memory: MemoryOptions) -> EngineOptions:
    import msgspec

    return msgspec.structs.replace(options, memory=memory)


@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in FAMILIES), ("gemma3", "int8")])
def test_host_and_disk_give_the_tokens_that_were_computed(family: str, kv_dtype: str, tmp_path: Path) -> None:
    computed = Server(family, kv_dtype=kv_dtype, prefix_cache=False)
    expected = [computed.answer(prompt) for prompt in PROMPTS]
    host = Server(family, kv_dtype=kv_dtype, host_bytes=1 << 24)
    for _ in range(2):
        assert [host.answer(prompt) for prompt in PROMPTS] == expected
    assert host.last_cached == BOUNDARY and host.core.kv.tiers.host_hit_tokens > 0
    first = Server(family, kv_dtype=kv_dtype, disk=str(tmp_path), disk_bytes=10**9)
    assert [first.answer(prompt) for prompt in PROMPTS] == expected
    first.engine.close()
    again = Server(family, kv_dtype=kv_dtype, disk=str(tmp_path), disk_bytes=10**9)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert again.answer(prompt) == tokens
        assert again.last_cached == BOUNDARY
    again.engine.close()
    stranger = "gemma3" if family != "gemma3" or kv_dtype != "auto" else "mistral-window"
    other = Server(stranger, disk=str(tmp_path), disk_bytes=10**9)
    other.answer(PROMPTS[0])
    assert other.last_cached == 0
    other.engine.close()

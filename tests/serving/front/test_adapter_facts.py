"""What an engine is found to be by what it says of itself, without an engine."""

from typing import Any

import pytest

from diptych.serving.front.adapters import llamacpp_adapter
from diptych.serving.front.adapters.llamacpp_adapter import LlamaCppAdapter
from diptych.serving.front.capabilities import (
    UNKNOWN_BLOCKS,
    Capabilities,
    EngineFacts,
    EngineNotReadyError,
    described,
    text_in,
    whole_number,
)
from diptych.serving.front.engine_spec import EngineSpec

SPEC = EngineSpec("llamacpp", "http://127.0.0.1:8080")
PAGE = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"


def found(monkeypatch: pytest.MonkeyPatch, props: dict[str, Any], page: bytes | Exception = PAGE) -> Any:
    """A look at a llama.cpp whose /props and /metrics are these."""

    async def model_of(*_: Any) -> dict[str, Any]:
        return {"id": "m"}

    async def real_token(*_: Any) -> None:
        """One comes."""

    async def get_fields(*_: Any) -> dict[str, Any]:
        return props

    async def ask(*_: Any, **__: Any) -> tuple[int, bytes]:
        if isinstance(page, Exception):
            raise page
        return 200, page

    for function in (model_of, real_token, get_fields, ask):
        monkeypatch.setattr(llamacpp_adapter, function.__name__, function)
    return LlamaCppAdapter().look(None, SPEC)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_llama_cpp_tokenizes_and_says_what_it_had_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    props = {"build_info": "b1", "total_slots": 4, "default_generation_settings": {"n_ctx": 2048}}
    assert await found(monkeypatch, props) == EngineFacts(
        "llamacpp", "b1", "m", 2048, 8192, 1, Capabilities(tokenizes=True, cached_tokens=True, gauges=True), ()
    )


@pytest.mark.asyncio
async def test_a_llama_cpp_that_says_little_is_degraded_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = await found(monkeypatch, {}, b"404")
    assert (facts.max_model_len, facts.num_blocks, facts.block_size) == (0, 0, 1)
    assert facts.capabilities == Capabilities(tokenizes=True, cached_tokens=True, gauges=False)
    assert facts.degraded == ("gauges (start it with --metrics)", "version (no /props)")
    for slots in (0, -1, "x", None):
        facts = await found(monkeypatch, {"total_slots": slots, "default_generation_settings": {"n_ctx": 16}})
        assert (facts.max_model_len, facts.num_blocks, facts.degraded) == (16, 16, ())
    with pytest.raises(EngineNotReadyError, match="/metrics: no reply"):
        await found(monkeypatch, {}, TimeoutError())


def test_blocks_of_an_engine_are_counted_in_the_size_that_is_asked_for() -> None:
    facts = EngineFacts("vllm", "1", "m", 100, 50, 16)
    assert [facts.num_blocks_of(size) for size in (16, 32, 800, 801)] == [50, 25, 1, 1]
    assert EngineFacts("vllm", "1", "m", 0, 50, 0).num_blocks_of(10) == 5  # it says no size: of a token
    assert EngineFacts("vllm", "1", "m").num_blocks_of(16) == UNKNOWN_BLOCKS
    ready = facts.ready("http://h:1", 32)
    assert (ready.max_model_len, ready.kv_capacity_tokens, ready.num_blocks, ready.block_size) == (100, 800, 25, 32)
    assert (ready.address, ready.description, ready.vocab_size) == ("http://h:1", "vllm 1, m", 0)
    assert EngineFacts("vllm", "1", "m", 0, 50, 16).ready("", 16).max_model_len == 800


def test_what_is_not_known_is_said_so() -> None:
    assert EngineFacts("sglang", "", "m", degraded=("a (b)", "c")).description == (
        "sglang (version not said), m, degraded: a (b); c"
    )
    assert described(None)["degraded"] == [] and described(None)["version"] is None
    known = described(EngineFacts("vllm", "1", "m", 100, degraded=("x",)))
    assert (known["version"], known["model"], known["max_model_len"], known["degraded"]) == ("1", "m", 100, ["x"])


def test_a_count_is_a_number_and_a_text_a_text() -> None:
    assert [whole_number(value, 7) for value in (0, 3, 3.9, -1, True, "3", None, [3])] == [0, 3, 3, 7, 7, 7, 7, 7]
    assert whole_number("x") == 0
    assert text_in({"a": 1, "b": "x", "c": "y"}, "a", "b", "c") == "x" and text_in({}, "a") == ""

"""Prompts out of identities: equal identities, equal tokens."""

from dataclasses import replace

import pytest

from diptych.bench.prompts import WORDS, PromptMaker, as_text
from diptych.control.errors import ConfigError
from diptych.workload.build import (
    LengthConfig,
    LengthsConfig,
    PrefixConfig,
    SessionConfig,
    WorkloadConfig,
    build,
)
from diptych.workload.spec import ClosedLoop, RequestSpec

SPEC = RequestSpec(arrival_ns=0, prompt_tokens=100, output_tokens=8, hash_ids=(7, 8, 9), hash_block_tokens=32)


def test_equal_beginnings_are_equal_tokens_and_the_rest_is_not() -> None:
    maker = PromptMaker("salt", 100, 1000)
    first, other = maker.units(SPEC, 1), maker.units(replace(SPEC, hash_ids=(7, 8, 10)), 2)
    assert len(first) == len(other) == 100
    assert first[:64] == other[:64] and first[64:96] != other[64:96] and first[96:] != other[96:]
    assert all(100 <= unit < 1000 for unit in first)


def test_the_same_salt_gives_the_same_prompts_and_another_does_not() -> None:
    first = PromptMaker("salt", 100, 1000).units(SPEC, 1)
    assert PromptMaker("salt", 100, 1000).units(SPEC, 1) == first
    assert PromptMaker("other", 100, 1000).units(SPEC, 1) != first


def test_identities_that_reach_into_the_answer_are_cut_at_the_prompts_end() -> None:
    maker = PromptMaker("salt", 0, 10)
    assert maker.units(replace(SPEC, prompt_tokens=40), 1) == maker.units(SPEC, 1)[:40]


def test_every_turn_begins_with_the_turns_before_it() -> None:
    config = WorkloadConfig(
        num_requests=60,
        lengths=LengthsConfig(prompt=LengthConfig(mean=70), output=LengthConfig(mean=30)),
        prefix=PrefixConfig(prompts=2, tokens=64),
        sessions=SessionConfig(min_turns=2, max_turns=5),
    )
    workload = build(config, 1)
    assert not isinstance(workload, ClosedLoop)
    maker = PromptMaker("salt", 0, 2**16)
    last: dict[int, list[int]] = {}
    turns = 0
    for number, spec in enumerate(workload):
        units = maker.units(spec, number)
        before = last.get(spec.session, [])
        full = len(before) // 32 * 32
        assert units[:full] == before[:full]
        turns += bool(before)
        last[spec.session] = units
    assert turns > 10


def test_words_share_beginnings_as_tokens_do() -> None:
    maker = PromptMaker("salt", 0, len(WORDS), tokens_per_unit=1.3, overhead_tokens=12)
    first, other = maker.units(SPEC, 1), maker.units(replace(SPEC, hash_ids=(7, 8, 10)), 2)
    assert len(first) == round((100 - 12) / 1.3)
    assert first[: int(64 / 1.3)] == other[: int(64 / 1.3)] and first != other
    assert len(as_text(first).split()) == len(first)


def test_an_empty_range_of_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        PromptMaker("salt", 10, 10)

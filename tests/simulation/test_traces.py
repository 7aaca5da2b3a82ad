"""Recorded workloads: the shipped traces' published numbers, the formats, windows and rates, and what errors say."""

import gzip
import statistics
from array import array
from pathlib import Path
from typing import Any

import pytest

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.errors import ConfigError
from diptych.control.request import Request
from diptych.control.slo import NS_PER_S, Slo
from diptych.workload.build import (
    ArrivalConfig,
    LengthConfig,
    LengthsConfig,
    SloConfig,
    TraceConfig,
    WorkloadConfig,
    build,
)
from diptych.workload.packed import BUNDLED, read_bundled, tree_columns
from diptych.workload.synthetic import SyntheticWorkload
from diptych.workload.traces import Trace, load_pairs, load_trace

OWN_CSV = """arrival_s,prompt_tokens,output_tokens,kind,priority,ttft_slo_ms,session
2.5,10,3,chat,1,250,7
0.000000001,0,0,long,,,
2.5,11,4,chat,1,250,8
"""


def traced(path: object, **settings: Any) -> Trace:
    config = WorkloadConfig(
        trace=TraceConfig(path=str(path), **{k: v for k, v in settings.items() if k in ("start_s", "end_s", "scale")}),
        **{k: v for k, v in settings.items() if k in ("num_requests", "rate", "slo")},
    )
    trace = build(config, 1)
    assert isinstance(trace, Trace)
    return trace


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_the_azure_conversation_trace_has_its_published_statistics() -> None:
    trace = load_trace("azure-conv")
    assert len(trace) == 19_366
    assert round(trace.arrival_ns[-1] / NS_PER_S) == 3_502
    assert trace.arrival_ns[0] == 0
    assert round(statistics.fmean(trace.prompt_tokens), 1) == 1154.7
    assert statistics.median_low(trace.prompt_tokens) == 1020
    assert round(statistics.fmean(trace.output_tokens), 1) == 211.1
    assert statistics.median_low(trace.output_tokens) == 129
    assert trace.num_raised == 0
    first = next(iter(trace))
    assert (first.prompt_tokens, first.output_tokens, first.hash_ids) == (374, 44, ())


def test_the_mooncake_conversation_trace_shares_what_was_published() -> None:
    trace = load_trace("mooncake-conversation")
    assert len(trace) == 12_031
    assert trace.arrival_ns[-1] == 3_536_999 * 10**6
    assert [len(ids) for ids in trace.hash_ids] == [-(-tokens // 512) for tokens in trace.prompt_tokens]
    assert trace.hash_ids[1][:3] == (0, 14, 15)
    cache = KVCacheManager(CacheConfig(num_blocks=200_000, block_size=512, watermark_blocks=0))
    for spec in trace:
        hashes = tuple(identity.to_bytes(8, "little") for identity in spec.hash_ids)
        request = Request("", spec.prompt_tokens, 1, block_hashes=hashes)
        cache.admit(request, cache.longest_hit(request), 0)
        cache.remember_computed(request, request.num_tokens)
        cache.release(request)
    assert 100 * cache.hit_tokens / cache.queried_tokens == pytest.approx(37.4, abs=0.5)


def test_a_shipped_trace_names_its_source_and_licence() -> None:
    for name in BUNDLED:
        packed = read_bundled(name)
        assert "github.com" in packed.source
        assert packed.licence
        assert packed.changes


def test_block_identities_survive_packing_and_only_trees_are_packed() -> None:
    rows = [(0, 1, 2), (0, 1, 3), (4,), (0, 5), (0, 1, 2), (0,), ()]
    known, counts = tree_columns(rows)
    packed = read_bundled("azure-conv")
    again = type(packed)(
        name="", source="", licence="", changes="", unit_ns=1, gaps=(), prompt_tokens=(), output_tokens=(),
        known_ids=known, id_counts=counts,
    )  # fmt: skip
    assert again.hash_ids() == rows
    for wrong in ([(0, 1), (1,)], [(1, 0)], [(0, 1), (2, 1)]):
        with pytest.raises(ValueError, match="fits no tree"):
            tree_columns(wrong)


def test_an_azure_file_counts_from_its_first_date(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9000000,374,44\n2023-11-17 00:00:00.1,1,9\n"
    trace = traced(written(tmp_path, "trace.csv", text))
    assert list(trace.arrival_ns) == [0, 200_000_000]
    assert list(trace.output_tokens) == [44, 9]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_file_keeps_its_block_identities(tmp_path: Path, name: str) -> None:
    text = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}\n'
    (one,) = traced(written(tmp_path, name, text))
    assert (one.arrival_ns, one.prompt_tokens, one.output_tokens) == (1_500_000_000, 600, 5)
    assert (one.hash_ids, one.hash_block_tokens) == ((3, 9), 512)


def test_a_file_of_ones_own_is_put_in_order_and_keeps_its_classes(tmp_path: Path) -> None:
    trace = traced(written(tmp_path, "own.csv.gz", OWN_CSV), slo=SloConfig(tpot_ms=20))
    empty, first, second = trace
    assert (empty.arrival_ns, empty.prompt_tokens, empty.output_tokens) == (1, 1, 1)  # lengths of 0 count as 1
    assert trace.num_raised == 1
    assert (empty.kind, empty.priority, empty.slo, empty.session) == ("long", 0, Slo(None, 20_000_000), -1)
    assert (first.arrival_ns, first.kind, first.priority, first.session) == (2_500_000_000, "chat", 1, 7)
    assert first.slo == Slo(250_000_000)
    assert second.session == 8
    assert list(trace) == list(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n2,many,5\n", "own.csv, line 3: prompt_tokens is 'many'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,-5\n", "line 2: output_tokens is -5; it must be in"),
        ("arrival_s,prompt_tokens,output_tokens\nsoon,5,5\n", "line 2: arrival_s is 'soon'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5\n", "line 2: output_tokens is None"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,6,7\n", "line 2: more values than the header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,6\n", "line 2: TIMESTAMP is 'yesterday'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 4}\n', "line 1: hash_ids is '4'"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 2}\n{nonsense\n', "line 2: no JSON"),
        ("when,what\n1,2\n", "no column arrival_s and no prompt_tokens and no output_tokens; it has when, what"),
        ("time,input_tokens,answer\n1,2,3\n", "no column output_tokens; it has time, input_tokens, answer"),
        ("2023-11-16x,prompt_tokens,output_tokens\n1,2,3\n", "no column arrival_s"),
        ("time,prompt_tokens,output_tokens\n2023-11-16 99:00,2,3\n", "it must be a date and time"),
        ("", "has no rows"),
    ],
)
def test_a_broken_file_is_named_with_line_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        traced(written(tmp_path, "own.csv", text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "time,input_tokens,output_tokens\n3,10,2\n4.5,20,3\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens\n3,m,10,2,12\n4.5,m,20,3,23\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n3,10,2\n4.5,20,3\n",
        '{"start_time": 3, "prompt_len": 10, "completion_tokens": 2}\n'
        '{"start_time": 4.5, "prompt_len": 20, "completion_tokens": 3}\n',
    ],
)
def test_columns_may_have_the_names_of_other_programs(tmp_path: Path, text: str) -> None:
    rows = list(load_trace(str(written(tmp_path, "theirs", text))))
    assert [(row.arrival_ns, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (3_000_000_000, 10, 2),
        (4_500_000_000, 20, 3),
    ]


def test_arrivals_may_be_dates(tmp_path: Path) -> None:
    text = "time,prompt_tokens,output_tokens\n2026-01-02 10:00:00.25,10,2\n2026-01-02T10:00:01.5Z,20,3\n"
    trace = load_trace(str(written(tmp_path, "dates.csv", text)))
    assert list(trace.arrival_ns) == [0, 1_250_000_000]


def test_an_access_log_is_a_trace_without_what_is_no_answer(tmp_path: Path) -> None:
    log = (
        '{"time": "2026-01-02T10:00:00Z", "arrival_s": 1767348000.0, "path": "/metrics", "status": 200}\n'
        '{"time": "2026-01-02T10:00:01Z", "arrival_s": 1767348001.0, "status": 200, "prompt_tokens": 7, '
        '"output_tokens": 3}\n'
    )
    path = str(written(tmp_path, "access.jsonl", log))
    assert [(row.prompt_tokens, row.output_tokens) for row in load_trace(path)] == [(7, 3)]
    assert [list(lengths) for lengths in load_pairs(path)] == [[7], [3]]


def test_the_example_of_the_documents_is_a_trace() -> None:
    trace = load_trace(str(Path(__file__).parents[2] / "docs" / "example-trace.csv"))
    assert len(trace) == 12 and {label.kind for label in trace.labels} == {"chat", "document"}


def test_a_missing_or_damaged_file_is_an_error_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.csv"):
        traced(tmp_path / "nowhere.csv")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(OWN_CSV.encode())[:-9])
    with pytest.raises(ConfigError, match=r"cannot read .*cut\.csv\.gz"):
        traced(cut)


def test_a_window_starts_at_zero_and_a_limit_takes_the_first_of_it() -> None:
    whole = load_trace("azure-conv")
    part = traced("azure-conv", start_s=60, end_s=120)
    inside = [time for time in whole.arrival_ns if 60 * NS_PER_S <= time < 120 * NS_PER_S]
    assert list(part.arrival_ns) == [time - 60 * NS_PER_S for time in inside]
    assert list(traced("azure-conv", start_s=60, num_requests=5).arrival_ns) == list(part.arrival_ns[:5])
    with pytest.raises(ConfigError, match="no requests in"):
        traced("azure-conv", start_s=4000)


def test_a_rate_or_a_scale_moves_the_arrivals_and_nothing_else() -> None:
    whole = load_trace("azure-conv")
    fast = traced("azure-conv", scale=2.0)
    assert fast.arrival_ns == array("q", [time // 2 for time in whole.arrival_ns])
    assert fast.prompt_tokens == whole.prompt_tokens
    assert traced("azure-conv", rate=20.0, num_requests=1000).rate() == pytest.approx(20.0, rel=1e-9)


def test_settings_that_a_trace_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match="arrivals has no effect with a trace"):
        WorkloadConfig(trace=TraceConfig(path="azure-conv"), arrivals=ArrivalConfig(kind="constant"))
    with pytest.raises(ConfigError, match="give one of them"):
        WorkloadConfig(trace=TraceConfig(path="azure-conv", scale=2.0), rate=3.0)


def test_lengths_can_be_drawn_from_a_trace_in_pairs_or_from_one_column(tmp_path: Path) -> None:
    trace = load_trace("azure-conv")
    pairs = set(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
    workload = build(WorkloadConfig(num_requests=2_000, lengths=LengthsConfig(pairs="azure-conv")), 1)
    assert isinstance(workload, SyntheticWorkload)
    assert {(one.prompt_tokens, one.output_tokens) for one in workload} <= pairs
    path = str(written(tmp_path, "own.csv", OWN_CSV))
    column = LengthConfig(kind="empirical", path=path, column="prompt_tokens")
    drawn = build(WorkloadConfig(num_requests=200, lengths=LengthsConfig(prompt=column)), 1)
    assert isinstance(drawn, SyntheticWorkload)
    assert {one.prompt_tokens for one in drawn} == {10, 11, 1}
    with pytest.raises(ConfigError, match="no column 'missing'; it has arrival_s"):
        build(
            WorkloadConfig(lengths=LengthsConfig(output=LengthConfig(kind="empirical", path=path, column="missing"))), 1
        )

"""Every row of the diagnosis table is named when its cause is injected, and none when nothing is wrong."""

from collections import Counter

import pytest

from diptych.control.slo import NS_PER_MS, Slo
from diptych.diagnosis.adapters.timeline_records import reread_signals
from diptych.diagnosis.causes import UNAVOIDABLE, Evidence, evidence_of, lost_to
from diptych.diagnosis.diagnosis import Diagnosis, diagnose
from diptych.diagnosis.diagnosis_table import BY_CAUSE, ROWS
from diptych.diagnosis.engine_settings import CATALOGUE
from diptych.diagnosis.observation import SIGNALS, Observation
from diptych.diagnosis.request_parts import RequestParts
from tests.diagnosis.simulated_servers import INJECTED, SLO, Server, chat, server_with

RECORDS = ("slow_client", "front_end", "worker_losses")  # causes that a simulation does not show: built from parts


def of_parts(**account_ns: int) -> Diagnosis:
    """The parts of twenty requests that are alike: 10 ms of TTFT and of decode, and what these accounts add to it."""
    requests = []
    for number in range(20):
        parts = RequestParts(f"r{number}", 0, number * 10**9, 10, num_output_tokens=11, slo=SLO)
        parts.ttft.update({"prefill_own": 10 * NS_PER_MS})
        parts.decode.update({"decode_floor": 10 * NS_PER_MS})
        parts.unread_ns = account_ns.get("unread", 0)
        parts.ttft["delivery"] += account_ns.get("delivery", 0)
        parts.decode["retried"] += account_ns.get("retried", 0)
        requests.append(parts)
    signals = {"requests": 20.0, "unread_share": float("unread" in account_ns)}
    seen = Observation(
        engine="diptych", source="test", window_s=20, is_exact=True, requests=tuple(requests), signals=signals, slo=SLO
    )
    return diagnose(seen)


@pytest.mark.parametrize("cause", INJECTED)
def test_an_injected_cause_is_the_first_that_is_named(cause: str) -> None:
    found = diagnose(server_with(cause).observe())
    assert found.verdict == "limited"
    assert found.causes[0].name == cause, [(other.name, other.share_of_misses) for other in found.causes]
    assert found.causes[0].seconds > 0
    assert cause.replace("_", " ") in found.sentence


def test_causes_of_the_front_end_and_of_clients_are_named() -> None:
    assert of_parts(delivery=2 * 10**9).causes[0].name == "front_end"
    assert of_parts(retried=2 * 10**9).causes[0].name == "worker_losses"
    assert of_parts(unread=5 * 10**9).causes[0].name == "slow_client"


def test_every_row_is_injected_by_a_test() -> None:
    assert {row.cause for row in ROWS} == {*INJECTED, *RECORDS}


def test_a_healthy_server_raises_no_alarm() -> None:
    for seed in range(5):
        found = diagnose(Server(chat(80, 120, seed=seed)).observe())
        assert (found.verdict, found.causes) == ("healthy", ())


def test_without_an_objective_one_is_asked_for_and_nothing_is_a_miss() -> None:
    found = diagnose(server_with("sequence_limit").observe(Slo()))
    assert found.verdict == "no objective"
    assert found.causes[0].name == "sequence_limit"
    assert found.causes[0].share_of_misses is None
    assert "--slo" in found.sentence


def test_too_few_requests_name_no_cause() -> None:
    found = diagnose(Server(chat(5, 100, prompt=9000)).observe())
    assert (found.verdict, found.causes) == ("too few requests", ())


def test_given_objectives_replace_those_of_the_server() -> None:
    seen = Server(chat(60, 120)).observe()
    assert diagnose(seen, Slo(NS_PER_MS, None)).verdict == "limited"
    assert diagnose(seen, Slo(10**12, None)).verdict == "healthy"


def test_what_a_request_lost_to_its_causes_is_all_that_it_took() -> None:
    seen = server_with("prefill_interference").observe()
    evidence = evidence_of(seen)
    for parts in seen.requests:
        before, after = lost_to(parts, evidence)
        assert sum(before.values()) == pytest.approx(parts.ttft_ns)
        assert sum(after.values()) == pytest.approx(parts.decode_ns)
        assert before[UNAVOIDABLE] >= 0


def test_the_pause_of_a_handoff_blames_the_decode_workers_only_where_they_lack_something() -> None:
    parts = RequestParts("a", 0, 0, 100, ttft=Counter(reserve=5), decode=Counter(handoff=7))
    assert lost_to(parts, Evidence(transfer_limits=False)) == ({"front_end": 5}, {"front_end": 7})
    short = Evidence(transfer_limits=False, decode_pool_limits=True)
    assert lost_to(parts, short) == ({"too_few_decode_workers": 5}, {"too_few_decode_workers": 7})


def test_what_is_computed_again_because_it_was_evicted_is_the_memory_s_fault() -> None:
    assert reread_signals({"new": 60, "block_rounding": 0, "differs": 10, "evicted": 30}) == {
        "reread_share": 0.4,
        "reread_evicted": 0.75,
    }
    server = server_with("prefix_misses")
    server.signals = {"reread_share": 0.9, "reread_evicted": 0.9}
    assert diagnose(server.observe()).causes[0].name == "kv_cache_full"


def test_the_table_and_the_settings_name_what_exists() -> None:
    assert len(BY_CAUSE) == len(ROWS)
    for row in ROWS:
        assert set(row.signals) | set(row.needs) <= SIGNALS.keys(), row.cause
    for engine, settings in CATALOGUE.items():
        assert settings.keys() <= BY_CAUSE.keys(), engine


def test_stalls_of_a_saturated_server_are_for_want_of_capacity_unless_a_few_prompts_are_the_work() -> None:
    parts = RequestParts("r", 0, 0, 10, num_output_tokens=11)
    parts.decode.update({"mixed_prefill": 30, "stalled_by_prefill": 10})
    assert lost_to(parts, Evidence())[1] == {"prefill_interference": 40}
    assert lost_to(parts, Evidence(is_saturated=True))[1]["capacity"] == 40
    parts.marked_decode_ns = 30
    assert lost_to(parts, Evidence(is_saturated=True))[1] == {"prefill_interference": 30, "capacity": 10}

"""Records of requests: their lines, their summary, and the longest gaps among them."""

from array import array

from diptych.bench.load import LoadResult
from diptych.bench.objectives import LatencyObjectives
from diptych.bench.request_records import ClientRecord, lines
from diptych.bench.stalls import longest_gaps
from diptych.bench.summary import classes, summarize
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.workload.build import ClassConfig, WorkloadConfig

from .loopback import SHORT, loopback_config, measured


def test_a_stall_names_who_was_waiting() -> None:
    def stream(number: int, sent: int, stamps: list[int]) -> ClientRecord:
        times = array("q", (stamp * NS_PER_MS for stamp in stamps))
        return ClientRecord(
            number=number, intended_ns=sent * NS_PER_MS, sent_ns=sent * NS_PER_MS, end_ns=times[-1],
            outcome="completed", prompt_tokens=1000 * number, output_tokens=len(stamps), stamps=times,
        )  # fmt: skip

    records = [stream(1, 0, [10, 20, 30, 230, 240]), stream(2, 5, [15, 25, 228, 238]), stream(3, 28, [229, 231])]
    first, second, _ = longest_gaps(records)
    assert (first.number, first.gap_ms, first.token) == (2, 203.0, 2)
    assert (second.number, second.at_s, second.prefilling, second.decoding) == (1, 0.03, {3: 3000}, 2)


def test_classes_and_records_have_what_the_simulators_have() -> None:
    kinds = (ClassConfig(kind="chat", share=3), ClassConfig(kind="batch"))
    workload = WorkloadConfig(num_requests=20, rate=500.0, classes=kinds, lengths=SHORT)
    result: LoadResult = measured(loopback_config(workload, slo=LatencyObjectives(ttft_ns=5 * NS_PER_S)))
    found = classes(result.records)
    assert set(found) == {"batch", "chat"} and sum(figures["num_requests"] for figures in found.values()) == 20
    written = list(lines(result.records, with_gaps=True))
    assert len(written) == 20 and b'"arrival_s"' in written[0] and b'"gaps_ms"' in written[0]
    summary = summarize(result)
    assert summary["attainment"] == 1.0 and summary["attainment_interval"][1] == 1.0
    assert summary["goodput_interval"] is not None

"""Recording a live worker: what is written replays, and recording never stands in the way of serving."""

import io
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import CLI, RunningServer, running

from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.link.recorder import record_engine
from diptych.simulation.replay import replay

CONFIG = EngineConfig(CacheConfig(64))


def mixed_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Short and long prompts, half of them with a common beginning, some with objectives, priorities or n."""
    stem = [rng.randrange(300, 4000) for _ in range(200)]
    bodies = []
    for number in range(12):
        prompt = (stem if number % 2 else []) + [rng.randrange(300, 4000) for _ in range(rng.choice([5, 60, 700]))]
        body = {"prompt": prompt, "max_tokens": rng.choice([1, 20, 60]), "temperature": 0, "priority": number % 3}
        body |= {"ignore_eos": number % 4 != 0}
        if number % 3 == 0:
            body |= {"tpot_slo_ms": 20, "ttft_slo_ms": 500}
        if number == 5:
            body |= {"n": 2, "temperature": 1.0, "seed": 1}
        if number == 6:
            body |= {"prompt_logprobs": 0, "prompt": stem}
        bodies.append(body)
    bodies.append({"prompt": stem, "max_tokens": 4000})  # more than the cache holds: refused
    return bodies


def send_all(server: RunningServer, bodies: list[dict[str, Any]], aborted: set[int]) -> None:
    """All at once; the clients of ``aborted`` hang up after the first piece of their answer."""

    def send(number: int) -> None:
        body = {**bodies[number], "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            for _ in reply.iter_lines():
                if number in aborted:
                    return

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.system
@pytest.mark.parametrize("shape", ["chunked", "unified"])
def test_a_live_run_on_the_wall_clock_replays_to_the_same_decisions(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    flags = ["--port", "0", "--kv-cache-memory", "6MiB", "--threads", "1", "--shape", shape, "--record", str(path)]
    with running((*CLI, "serve", *flags)) as server:
        bodies = mixed_requests(random.Random(7))
        bodies += [{"prompt": body["prompt"], "max_tokens": 400, "ignore_eos": True} for body in bodies[:3]]
        send_all(server, bodies, aborted={13, 14})
        send_all(server, mixed_requests(random.Random(7)), aborted=set())  # what the first round left in the cache
        assert server.terminate() == 0
    report = replay(path)
    assert report.is_identical, report.difference
    assert report.is_complete
    assert report.num_steps > 50
    assert report.num_aborted >= 2
    assert len(report.result.requests) >= 24
    assert sum(report.result.requests.cached_tokens) > 0


def test_a_recording_takes_a_new_name_rather_than_overwriting_another(tmp_path: Path) -> None:
    recorders = [record_engine(tmp_path / "run.jsonl", CONFIG) for _ in range(3)]
    for recorder in recorders:
        recorder.close()
        recorder.close()
        assert replay(recorder.path).is_complete
    assert [recorder.path.name for recorder in recorders] == ["run.jsonl", "run.1.jsonl", "run.2.jsonl"]
    with pytest.raises(ConfigError, match="cannot record"):
        record_engine(tmp_path / "no" / "such" / "directory", CONFIG)


def test_a_full_disk_ends_the_recording_and_not_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = record_engine(tmp_path / "run.jsonl", CONFIG)
    engine = RecordingEngineCore(CONFIG, recorder.write)
    recorder._file.close()
    recorder._file = io.FileIO("/dev/full", "w")
    for now in range(100):
        engine.begin_step(now)
    recorder.close()
    engine.begin_step(100)
    assert "No space left" in recorder.stopped_because
    assert "serving goes on" in caplog.text


def test_a_recording_ends_at_its_limit(tmp_path: Path) -> None:
    recorder = record_engine(tmp_path / "run.jsonl", CONFIG, max_bytes=1000)
    for now in range(1000):
        recorder.write(("begin", now, None))
    recorder.close()
    assert "limit" in recorder.stopped_because
    assert recorder.path.stat().st_size <= 1000
    assert not replay(recorder.path).is_complete


def test_a_recording_ends_when_too_many_rows_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(edge_limits, "RECORDER_ROWS", 100)
    recorder = record_engine(tmp_path / "run.jsonl", CONFIG)
    is_busy, is_free = threading.Event(), threading.Event()
    encode = recorder._encode

    def stalled(row: Any) -> Any:
        is_busy.set()
        is_free.wait()
        return encode(row)

    recorder._encode = stalled
    recorder.write(("begin", 0, None))
    assert is_busy.wait(20)  # the thread holds this one, and takes no more
    for now in range(1, 101):
        recorder.write(("begin", now, None))
    assert not recorder.stopped_because
    for now in range(101, 1000):
        recorder.write(("begin", now, None))
    assert len(recorder._rows) == 100 and "100 rows wait" in recorder.stopped_because
    assert caplog.text.count("serving goes on") == 1
    is_free.set()
    recorder.close()
    assert not recorder._rows and not replay(recorder.path).is_complete

"""How often a line of a batch is tried: until it has a reply, or has failed three times by the server's fault. That the
server had no room (429, 503) is no failure of the line, however often it happens."""

import json
import random
from pathlib import Path

import pytest
from batch_files import add_file, check_each_once, jsonl, line, rows
from test_batch_runner import FakeServer, create, ended, stop

from diptych.serving.batches import batch_runner
from diptych.serving.batches.batch_runner import LineReply

FULL, FAILING, FINAL = (429, 503), (500, 502, 504), (200, 400, 404, 413)


def tries_of(rng: random.Random) -> list[int]:
    """Statuses of one line, the last of which is its reply."""
    failures = rng.choices(FAILING, k=rng.randint(0, 3))
    last = failures.pop() if len(failures) == 3 else rng.choice(FINAL)
    busy = rng.choices(FULL, k=rng.randint(0, 9))
    before = failures + busy
    rng.shuffle(before)
    return [*before, last]


@pytest.mark.asyncio
async def test_a_line_without_room_waits_as_often_as_it_must_and_one_that_fails_has_three_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "POLL_S", 0.001)
    rng = random.Random(40)
    expected = {number: tries_of(rng) for number in range(60)}
    expected[0], expected[1] = [429] * 8 + [200], [500, 429, 503, 500, 429, 500]
    left = {number: iter(statuses) for number, statuses in expected.items()}

    def answer(body: bytes) -> LineReply:
        [number] = json.loads(body)["prompt"]
        return LineReply(next(left[number]), b"{}")

    server = FakeServer(answer)
    service = server.service(tmp_path, at_once=8)
    bodies = [{"model": "fake", "prompt": [number], "max_tokens": 3} for number in expected]
    add_file(service.store, jsonl([line(f"id-{number}", body=body) for number, body in enumerate(bodies)]))
    done = await ended(service, await create(service, window_s=10**6), server)
    check_each_once(service.store, done, [f"id-{number}" for number in expected])
    written = [row for name in (done.output_file, done.error_file) for row in rows(service.store.path(name))]
    found = {int(row["custom_id"][3:]): row["response"]["status_code"] for row in written}
    assert found == {number: statuses[-1] for number, statuses in expected.items()}
    assert [next(statuses, None) for statuses in left.values()] == [None] * len(left)  # and was tried as often
    await stop(service)

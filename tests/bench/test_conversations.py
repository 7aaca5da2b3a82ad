"""Conversations: what the next prompt holds of what the server said."""

from typing import Any

import msgspec
import pytest

from diptych.bench.load import LoadResult
from diptych.bench.session import Session
from diptych.bench.summary import summarize
from diptych.workload.build import (
    ArrivalConfig,
    LengthConfig,
    LengthsConfig,
    SessionConfig,
    WorkloadConfig,
)

from .loopback import LoopbackClient, loopback_config, measured

TALKS = WorkloadConfig(
    num_requests=12,
    arrivals=ArrivalConfig(kind="closed", concurrency=2),
    lengths=LengthsConfig(prompt=LengthConfig(mean=40), output=LengthConfig(mean=5)),
    sessions=SessionConfig(min_turns=3, max_turns=3, think_s=0.0),
)


def talked(workload: WorkloadConfig = TALKS, **more: Any) -> tuple[LoadResult, list[dict[str, Any]]]:
    """A run, and the bodies of its requests in the order in which they were sent."""

    async def use(session: Session, client: LoopbackClient) -> tuple[LoadResult, list[dict[str, Any]]]:
        client.bodies.clear()  # those that found out about the server
        return await session.run(), [msgspec.json.decode(body) for body in client.bodies]

    fake = {"ttft_ms": 1, "itl_ms": 1, **more.pop("fake", {})}
    found: tuple[LoadResult, list[dict[str, Any]]] = measured(loopback_config(workload, fake=fake, **more), use)
    return found


def test_the_next_turn_holds_the_token_ids_that_the_server_answered() -> None:
    result, bodies = talked()
    turns = summarize(result)["turns"]
    assert turns == {"kind": "token ids", "real": 8, "made_up": 0}
    prompts = sorted((body["prompt"] for body in bodies), key=len)
    followed = 0
    for prompt in prompts:
        for later in prompts:
            if len(later) > len(prompt) and later[: len(prompt)] == prompt:
                followed += later[len(prompt) : len(prompt) + 5] == [7] * 5
    assert followed == 8 + 4  # every later turn follows a turn, and the third turns the first ones too
    assert sorted(map(len, prompts)) == [40] * 4 + [85] * 4 + [130] * 4


def test_without_token_ids_the_answer_is_made_up_and_that_is_said() -> None:
    result, bodies = talked(fake={"ids": False})
    assert summarize(result)["turns"] == {"kind": "made up", "real": 0, "made_up": 8}
    assert not any(body.get("return_token_ids") for body in bodies)
    assert sorted(len(body["prompt"]) for body in bodies) == [40] * 4 + [85] * 4 + [130] * 4


def test_a_chat_holds_questions_and_answers_in_turn() -> None:
    result, bodies = talked(api="chat", prompts="text")
    assert summarize(result)["turns"] == {"kind": "text", "real": 8, "made_up": 0}
    last = max(bodies, key=lambda body: len(body["messages"]))
    assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert last["messages"][1]["content"] == " word" * 5
    assert {record.prompt_tokens for record in result.records} == {40, 85, 130}


def test_a_chat_gives_its_limit_by_the_older_name_too() -> None:
    _, bodies = talked(api="chat", prompts="text")
    assert all(body["max_tokens"] == body["max_completion_tokens"] == 5 for body in bodies)


def test_text_completions_go_on_where_the_answer_ended() -> None:
    result, bodies = talked(prompts="text")
    first = min((body["prompt"] for body in bodies), key=len)
    assert any(body["prompt"].startswith(first + " word" * 5 + " ") for body in bodies)
    assert {record.prompt_tokens for record in result.records} == {40, 85, 130}


@pytest.mark.parametrize(("pause_s", "ttft_ms"), [(0.0, 700), (0.4, 1)], ids=["answers are late", "in time"])
def test_in_an_open_loop_nobody_waits_for_an_answer(pause_s: float, ttft_ms: float) -> None:
    sessions = SessionConfig(min_turns=3, max_turns=3, think_s=pause_s, random_think=False, token_ms=10)
    workload = msgspec.structs.replace(
        TALKS,
        arrivals=ArrivalConfig(kind="constant"),
        rate=10.0 if pause_s else 100.0,
        sessions=sessions,
        num_requests=9,
    )
    result, _ = talked(workload, fake={"ttft_ms": ttft_ms})
    turns = summarize(result)["turns"]
    later = len(result.records) - len({record.session for record in result.records})
    assert later > 2
    assert (turns["real"], turns["made_up"]) == ((later, 0) if pause_s else (0, later))
    assert all(record.is_completed for record in result.records)

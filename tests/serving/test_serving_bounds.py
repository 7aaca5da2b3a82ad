"""Parts of a server at the numbers where they change their mind: what a health check still names, what waits and what
is refused, what a name is held for, how large a template's values may become."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from tests.laws import law

from diptych.control.errors import ConfigError, OverloadedError
from diptych.serving import edge_limits, long_work
from diptych.serving.answers import chat_renderer
from diptych.serving.answers.chat_template import ChatTemplate
from diptych.serving.answers.grammar.schema_parts import alternatives
from diptych.serving.answers.response.value_types import with_type
from diptych.serving.answers.stream_journal import StreamJournal
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.keys.key_meter import _expected, _first_of_each_prompt
from diptych.serving.long_work import LongWork
from diptych.serving.ray.ray_options import RayOptions

# -- failures ---------------------------------------------------------------------------------------------------------


def test_what_was_mended_is_named_for_ten_minutes_and_what_was_not_until_it_is() -> None:
    now = [1000.0]
    board = FailureBoard(lambda: now[0])
    assert board.health() == (200, {"status": "ok", "detail": None})
    board.report("worker 1", "planted", "/x")
    now[0] += 10**6
    status, content = board.health()
    assert (status, content["status"]) == (503, "failed")
    assert content["detail"] == "worker 1 has failed: planted (recording: /x)"
    now[0] = 1000.0
    board.replaced("worker 1")
    for age, is_named in ((0.0, True), (599.0, True), (599.9, True), (600.0, False)):
        now[0] = 1000.0 + age
        status, content = board.health()
        assert status == 200 and bool(content["detail"]) is is_named
        if is_named:
            assert content["detail"] == f"{age:.0f} s ago worker 1 has failed: planted (recording: /x); it was replaced"


def test_what_has_failed_elsewhere_fails_health_for_thirty_seconds() -> None:
    now = [1000.0]
    board = FailureBoard(lambda: now[0])
    board.report("worker 2", "planted", is_elsewhere=True)
    for age, status in ((0.0, 503), (29.9, 503), (30.0, 200), (31.0, 200)):
        now[0] = 1000.0 + age
        assert board.health()[0] == status
    assert "it has not come back yet" in (board.health()[1]["detail"] or "")
    board.report("the cluster core", "planted", is_final=True)
    board.report("the planner", "planted", is_final=True)
    board.replaced("the cluster core")
    board.replaced("the planner")
    assert board.final is not None and board.final.core == "the cluster core" and board.ended.is_set()
    assert board.health()[0] == 503
    assert board.final.words_for_clients == "the cluster core has failed by a defect of the server: planted"


def test_sixteen_failures_are_kept_and_all_are_counted() -> None:
    board = FailureBoard(lambda: 0.0)
    for number in range(20):
        board.report(f"worker {number % 2}", str(number))
    assert [failure.error for failure in board.recent] == [str(number) for number in range(4, 20)]
    assert board.counts == {"worker 0": 10, "worker 1": 10}


# -- what waits -------------------------------------------------------------------------------------------------------


@law(weight=0.2)
def test_who_has_the_most_gives_way_and_nobody_else(seed: int) -> None:
    """The queue beside a plain model of it: nothing starts, since no thread is free."""
    asyncio.run(fill(random.Random(seed)))


async def fill(rng: random.Random) -> None:
    most, most_bytes = rng.randint(1, 8), rng.choice([20_000, 50_000, 10**9])
    patch = pytest.MonkeyPatch()
    patch.setattr(edge_limits, "LONG_WORK_WAITING", most)
    patch.setattr(edge_limits, "LONG_WORK_BYTES", most_bytes)
    patch.setattr(long_work, "NUM_THREADS", 0)
    patch.setattr(long_work, "ThreadPoolExecutor", lambda *_, **__: SimpleNamespace(shutdown=lambda **__: None))
    patch.setattr(long_work, "FreedMemory", lambda _: SimpleNamespace(close=lambda: None))
    work = LongWork()
    waiting: dict[str, list[int]] = defaultdict(list)
    tasks: list[asyncio.Task[Any]] = []
    try:
        for _ in range(20):
            tenant, size = rng.choice("abc"), rng.randint(4096, 20_000)
            is_reply = rng.random() < 0.1
            expected = is_reply or makes_room(waiting, tenant, size, most, most_bytes)
            if expected:
                waiting[tenant].append(size)
            task = asyncio.ensure_future(work.run(lambda: None, size, tenant, is_reply=is_reply))
            tasks.append(task)
            await asyncio.sleep(0)
            refused = task.done() and isinstance(task.exception(), OverloadedError)
            assert refused is not expected
            assert {name: [item.size for item in items] for name, items in work._waiting.items()} == {
                name: sizes for name, sizes in waiting.items() if sizes
            }
            assert work.num_waiting == sum(map(len, waiting.values()))
            assert work.num_bytes == sum(map(sum, waiting.values()))
    finally:
        patch.undo()
        work.close()
        await asyncio.gather(*tasks, return_exceptions=True)


def makes_room(waiting: dict[str, list[int]], tenant: str, size: int, most: int, most_bytes: int) -> bool:
    """Whether it may wait; takes out of the model who gives way."""
    while True:
        count, total = sum(map(len, waiting.values())), sum(map(sum, waiting.values()))
        is_full = count >= most
        if not is_full and not (total and total + size > most_bytes):
            return True
        held = {name: len(sizes) if is_full else sum(sizes) for name, sizes in waiting.items() if sizes}
        largest = max(held, key=lambda name: held[name], default=tenant)
        mine = held.get(tenant, 0) + (1 if is_full else size)
        if largest == tenant or held[largest] <= mine:
            return False
        waiting[largest].pop()
        if not waiting[largest]:
            del waiting[largest]


# -- what a name is held for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "held"), [(1, 1), (0, 0), (10**9, None)])
def test_a_stream_holds_what_was_asked_for_up_to_the_limit_for_each_answer(max_tokens: int, held: int | None) -> None:
    each = edge_limits.HELD_TOKENS if held is None else held
    for answers in (1, 3):
        stream: Any = SimpleNamespace(num_answers=answers, sampling=SimpleNamespace(max_tokens=max_tokens))
        assert _expected(stream) == answers * each


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    shared, other = [1, 2], [1, 2]
    streams: Any = [SimpleNamespace(prompt_token_ids=ids, at=at) for at, ids in enumerate((shared, shared, other))]
    assert sorted(stream.at for stream in _first_of_each_prompt(streams)) == [0, 2]


# -- what templates may make ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["[0] * {}", "{} * [0]", "(0,) * {}", "'x' * {}", "{} * 'x'", "'xy' * ({} // 2)"])
def test_a_template_repeats_up_to_a_million_items(product: str) -> None:
    most = 2**20
    source = "{%% set n = messages[0].n %%}{{ (%s) | length }}"
    template = ChatTemplate(source % product.format("n"))
    assert template.render([{"n": most}]) == str(most)
    assert template.render([{"n": 3}]) == ("2" if "//" in product else "3")
    with pytest.raises(OverflowError, match=f"more than {most} items"):
        template.render([{"n": most + 2}])


def test_numbers_of_a_template_multiply_and_have_65536_bits() -> None:
    template = ChatTemplate("{{ (messages[0].a ** messages[0].b) % 7 }} {{ 2000000 * 3000000 }}")
    assert template.render([{"a": 2, "b": 32_768}]) == f"{2**32_768 % 7} 6000000000000"
    with pytest.raises(OverflowError, match="more than 65536 bits"):
        template.render([{"a": 2, "b": 32_769}])
    assert ChatTemplate("{{ 2.0 ** 3 }}").render([]) == "8.0"


@pytest.mark.parametrize("name", ["_x", "__class__"])
def test_a_namespace_of_a_template_takes_no_hidden_names(name: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError, match="underscore"):
        ChatTemplate("{% set n = namespace({'" + name + "': 1}) %}").render([])


def test_of_the_forms_that_a_template_takes_the_first_is_rendered_that_loses_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where each loses one, the first."""
    refuses = "{% if messages|length == 2 %}{{ raise_exception('no') }}{% endif %}"
    source = refuses + "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    first, second = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    cut, whole = [first], [first, second, {"role": "user", "content": "three"}]
    renderer = chat_renderer.ChatRenderer({"default": source}, {})
    for forms, expected in (([cut, whole], "<one><two><three>"), ([whole, cut], "<one><two><three>"), ([cut], "<one>")):
        monkeypatch.setattr(chat_renderer, "relaxed", lambda _, forms=forms: iter(forms))
        assert chat_renderer._rendered(renderer._loaded["default"], [first, second], {}) == expected


@pytest.mark.parametrize(("schema", "kind"), [
    ({"minLength": 2}, "string"), ({"minimum": 1}, "integer"), ({"minItems": 1}, "array"), ({"required": []}, "object"),
    ({"type": "number", "minimum": 1}, "number"), ({}, None), ({"title": "x"}, None), ({"enum": [1, "a"]}, None),
])  # fmt: skip
def test_a_schema_without_a_type_has_that_of_its_keywords(schema: dict[str, Any], kind: str | None) -> None:
    [found] = alternatives(schema, schema, "x")
    assert found == ({**schema, "type": kind} if kind else schema)


@pytest.mark.parametrize(("text", "kind", "expected"), [
    ("null", "null", None), ("None", "null", None), ("nul", "null", "nul"), ("True", "boolean", True),
    ("false", "boolean", False), ("yes", "boolean", "yes"), (" 3 ", "integer", 3), ("3.0", "integer", 3),
    ("3.5", "integer", "3.5"), ("3.5", "number", 3.5), ("true", "number", "true"), ("[1]", "array", [1]),
    ("[1]", "object", "[1]"), ('{"a": 1}', "object", {"a": 1}), ("[1", "array", "[1"),
])  # fmt: skip
def test_a_text_is_read_as_the_type_that_is_asked_for_or_stays_one(text: str, kind: str, expected: Any) -> None:
    found = with_type(text, {"type": kind})
    assert found == expected and type(found) is type(expected)


def test_a_journal_lets_its_folder_go_once(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir(0o700)
    journal = StreamJournal(tmp_path / "streams")
    with pytest.raises(ConfigError, match="another server"):
        StreamJournal(tmp_path / "streams")
    journal.end()
    journal.end()
    StreamJournal(tmp_path / "streams").end()


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "param", "least", "words"), [
    ("num_cpus", "ray_cpus", 0.0, "at least 0"), ("num_gpus", "ray_gpus", 0.0, "at least 0"),
    ("wait_s", "ray_wait", 0.001, "more than 0"),
])  # fmt: skip
def test_settings_of_ray_are_refused_with_their_limit(field: str, param: str, least: float, words: str) -> None:
    made: Any = RayOptions(key_file=Path("key"), **{field: least})
    assert getattr(made, field) == least
    with pytest.raises(ConfigError, match=f"{param} is -0.001; it must be {words}") as refused:
        RayOptions(key_file=Path("key"), **{field: -0.001})
    assert refused.value.param == param
    defaults = RayOptions(key_file=Path("key"))
    assert (defaults.address, defaults.num_cpus, defaults.num_gpus, defaults.wait_s) == ("auto", 1.0, 0.0, 300.0)
    assert defaults.needs == "1 CPUs, 0 GPUs"

"""LLM: offline batches with the bundled model."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
import torch
from servers import RunningServer

from diptych import LLM, SamplingParams
from diptych.control.errors import ConfigError, ContextLengthError, InvalidRequestError
from diptych.runtime.device.threads import TASKS

GREEDY = SamplingParams(max_tokens=16, temperature=0)
PROMPTS = ["def f(x):\n", "class Reader:\n    def", "import os\nimport sys\n\n\n"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    one = LLM(threads=1)
    yield one


def test_results_come_in_order_with_the_names_of_vllm(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.prompt for one in together] == PROMPTS
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]
    assert all(len(one.outputs[0].token_ids) == 16 for one in together)
    assert together[0].outputs[0].text == llm.tokenizer.decode(together[0].outputs[0].token_ids)
    assert together[0].finished
    assert together[0].metrics is not None


def test_texts_and_token_ids_one_and_many(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == expected
    assert [one.outputs[0].token_ids for one in llm.generate([ids, ids], GREEDY)] == [expected] * 2
    assert llm.generate([], GREEDY) == []


def test_offline_and_served_say_the_same(llm: LLM, server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for prompt in PROMPTS:
            served = client.completions.create(model="stdlib-python", prompt=prompt, max_tokens=16, temperature=0)
            assert served.choices[0].text == llm.generate(prompt, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_offline_and_served_are_the_same_bits(llm: LLM, server: RunningServer, pooling: Any) -> None:
    alone = [llm.embed(prompt, pooling)[0] for prompt in PROMPTS]
    assert llm.embed(PROMPTS, pooling) == alone and {len(vector) for vector in alone} == {256}
    token_ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for given in (PROMPTS, token_ids):
            served = client.embeddings.create(model="stdlib-python", input=given, extra_body={"pooling": pooling})
            assert [item.embedding for item in served.data] == alone
            assert served.usage.total_tokens == sum(map(len, token_ids))
        long = token_ids[1] * 30
        for num_cached in (0, 0 if pooling == "mean" else len(long) // 32 * 32):
            served = client.embeddings.create(
                model="stdlib-python", input=long, extra_body={"pooling": pooling, "cache_salt": pooling}
            )
            assert served.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": num_cached}}
    with pytest.raises(InvalidRequestError, match="0 tokens"):
        llm.embed("", pooling)


def test_params_for_each_prompt_and_several_answers(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=number, temperature=1, n=2, seed=3) for number in (2, 5)]
    outputs = llm.generate(PROMPTS[:2], params)
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[2, 2], [5, 5]]
    with pytest.raises(ConfigError, match="2 prompts and 1 params"):
        llm.generate(PROMPTS[:2], params[:1])


def test_stop_strings_and_logprobs(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    params = SamplingParams(max_tokens=16, temperature=0, stop=(text[6:9],), logprobs=1, prompt_logprobs=0)
    output = llm.generate(PROMPTS[0], params)[0]
    assert output.outputs[0].text == text[: text.index(text[6:9])]
    assert output.outputs[0].stop_reason == text[6:9]
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_chat_and_stream(llm: LLM) -> None:
    messages = [{"role": "user", "content": "open a file"}]
    assert llm.chat(messages, GREEDY)[0].outputs[0].text == llm.chat([messages], GREEDY)[0].outputs[0].text
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


def test_a_bad_prompt_is_refused_before_anything_runs_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="8192"):
        llm.generate([PROMPTS[0], [1] * 9000], GREEDY)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[4096]], GREEDY)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


def test_a_wrong_directory_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        LLM("/nowhere")


def test_a_text_that_the_tokenizer_panics_on_is_refused_and_leaves_nothing_behind(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    endless = "x" + " " * 10_100_000 + "x"
    with pytest.raises(InvalidRequestError, match="retry-limit"):
        llm.generate([PROMPTS[0], endless], GREEDY)
    with pytest.raises(InvalidRequestError, match="retry-limit"):
        llm.chat([{"role": "user", "content": endless}], GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == expected


def affinities() -> dict[int, set[int]]:
    """The CPUs that each thread of this process may run on."""
    found = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def test_a_program_keeps_its_cpus_and_threads_and_may_have_several_models() -> None:
    if not TASKS.is_dir():
        pytest.skip("the system has no /proc")
    cpus, before = os.sched_getaffinity(0), torch.get_num_threads()
    count = len(cpus)
    first, second = LLM(threads=count), LLM(threads=1)
    seen: list[int] = []
    for model in (first, second):
        step = model._engine.step
        model._engine.step = lambda step=step: (seen.append(torch.get_num_threads()), step())[1]  # type: ignore[method-assign]
    expected = first.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    assert set(seen) == {count}
    seen.clear()
    assert second.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == expected
    assert set(seen) == {1}
    seen.clear()
    pieces = first.stream(PROMPTS[0], GREEDY)
    next(pieces)
    assert torch.get_num_threads() == before
    second.embed(PROMPTS[0])
    assert {*pieces} and set(seen) == {1, count}
    answers: list[list[int]] = []
    other = threading.Thread(target=lambda: answers.append(first.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids))
    other.start()
    other.join()
    assert answers == [expected]
    first.close()
    second.close()
    assert torch.get_num_threads() == before
    assert all(found == cpus for found in affinities().values())
    with pytest.raises(ConfigError, match=f"threads is {count + 1}; between 1 and {count}"):
        LLM(threads=count + 1)
    assert torch.get_num_threads() == before


def test_a_program_is_kept_to_named_cores_until_the_model_is_closed() -> None:
    if not TASKS.is_dir():
        pytest.skip("the system has no /proc")
    cpus, before = os.sched_getaffinity(0), torch.get_num_threads()
    core = min(cpus)
    with LLM(threads=1) as plain:
        options = msgspec.structs.replace(
            plain.options, device=msgspec.structs.replace(plain.options.device, cores=str(core), threads=None)
        )
    with LLM(options=options) as llm:
        assert os.sched_getaffinity(0) == {core}
        assert llm.generate(PROMPTS[0], GREEDY)[0].finished
    assert torch.get_num_threads() == before
    assert all(found == cpus for found in affinities().values())
    missing = msgspec.structs.replace(options, max_model_len=1)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(options=missing)
    assert os.sched_getaffinity(0) == cpus and torch.get_num_threads() == before

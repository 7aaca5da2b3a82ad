"""What the terminal shows when a server is ready: addresses, workers, and a request that works."""

import json
import shlex
from pathlib import Path

import pytest

from diptych.control.compute_share import ComputeShare
from diptych.control.router.topology import Role
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.start_screen import PromptKind, StartScreen, curl, prompt_kind
from diptych.serving.fleet.joint_ready import fleet_summary
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.serving.link.messages import Loading, Ready

URL = "http://127.0.0.1:8000"


def ready(*cpus: int) -> Ready:
    """What a worker on these CPUs says when it is ready."""
    share = ComputeShare(cpus, len(cpus))
    return Ready(8, 8192, 9000, 2, 3, [], "LlamaForCausalLM, oneDNN", share=share, summary="1 worker, 2 cores")


def test_four_addresses_one_line_of_workers_and_two_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with StartScreen("tiny", has_key=False, chat_command="scripts/diptych chat") as screen:
        screen.on_loading(Loading("importing torch"))
        screen.on_ready(ready(0, 1), URL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "tiny: importing torch",
        f"tiny is served at {URL}",
        f"API        {URL}/v1",
        f"Live page  {URL}/ui",
        f"Guide      {URL}/guide",
        f"Reference  {URL}/docs",
        "1 worker, 2 cores; context 8,192 tokens",
    ]
    assert f"scripts/diptych chat {URL}" in lines
    assert "oneDNN" not in "".join(lines)


def test_the_end_of_a_server_is_said_but_not_that_of_a_failed_start(capsys: pytest.CaptureFixture[str]) -> None:
    with StartScreen("tiny", has_key=False, chat_command="diptych chat") as screen:
        screen.on_ready(ready(0), URL)
    assert capsys.readouterr().err == "tiny is stopped\n"
    with pytest.raises(ValueError), StartScreen("tiny", has_key=False, chat_command="diptych chat"):
        raise ValueError
    assert capsys.readouterr().err == ""


def test_details_are_for_those_who_ask(capsys: pytest.CaptureFixture[str]) -> None:
    with StartScreen("tiny", has_key=False, chat_command="diptych chat", is_verbose=True) as screen:
        screen.on_ready(ready(0), URL)
    assert "LlamaForCausalLM, oneDNN\n" in capsys.readouterr().out


def test_a_model_without_tokenizer_is_warned_of_and_shown_with_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = prompt_kind(Tokenizer(tmp_path), is_bundled=False)
    assert kind == "ids"
    with StartScreen("tiny", has_key=False, chat_command="diptych chat") as screen:
        screen.kind = kind
        screen.on_ready(ready(0), URL)
        shown = capsys.readouterr()
    assert "no tokenizer" in shown.err and shown.err.count("\n") == 1
    assert '"prompt": [1, 2, 3]' in shown.out and "diptych chat" not in shown.out


def test_a_chat_is_shown_for_a_chat_template_but_not_for_the_bundled_model() -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL)
    assert tokenizer.has_chat_template
    assert prompt_kind(tokenizer, is_bundled=False) == "chat"
    assert prompt_kind(tokenizer, is_bundled=True) == "code"


@pytest.mark.parametrize("kind", ["chat", "code", "text", "ids"])
def test_the_command_is_one_that_shells_take(kind: PromptKind) -> None:
    words = shlex.split(curl(URL, "tiny's", kind, has_key=True).replace("\\\n", ""))
    assert words[1].startswith(f"{URL}/v1/") and "Authorization: Bearer $DIPTYCH_API_KEY" in words
    body = json.loads(words[-1])
    assert body["model"] == "tiny's" and body["temperature"] == 0


@pytest.mark.parametrize(
    ("roles", "cpus", "words"),
    [
        (("both",), [(0, 1)], "1 worker, 2 cores"),
        (("both", "both"), [(0,), (1,)], "2 workers, 1 core each"),
        (("prefill", "decode"), [(0,), (1,)], "1 prefill + 1 decode worker, 1 core each"),
        (("prefill", "decode", "decode"), [(0, 1), (2,), (3,)], "1 prefill + 2 decode workers, 2 cores and 1 core"),
        (("both",), [()], "1 worker"),
    ],
    ids=str,
)
def test_workers_and_cores_in_words(roles: tuple[Role, ...], cpus: list[tuple[int, ...]], words: str) -> None:
    assert fleet_summary(roles, [ready(*each) for each in cpus]) == words

"""The engines that a TOML file names (``diptych front --engines``), and what such a file is refused for."""

from dataclasses import fields
from pathlib import Path

import pytest

from diptych.cli.front import front_options
from diptych.control.errors import ConfigError
from diptych.serving.front.engine_spec import (
    EVENT_BLOCK,
    EngineSpec,
    FrontOptions,
    parse_engine,
    parse_engines,
    read_engines,
)

WHOLE = """
[[engine]]
kind = "vllm"
url = "http://10.0.0.1:8000"
role = "decode"
api_key_env = "ENGINE_KEY"
kv_events = "tcp://10.0.0.1:5557"
kv_replay = "tcp://10.0.0.1:5558"
step_events = "tcp://10.0.0.1:5559"
model = "one"
rank = 3

[[engine]]
kind = "sglang"
url = "https://10.0.0.2"
role = "prefill"
bootstrap = "10.0.0.2:8998"
api_key_file = "FOLDER/key"
"""
PLAIN = '[[engine]]\nkind = "vllm"\nurl = "http://h:1"\n'


def test_a_file_may_name_every_field_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    file = tmp_path / "engines.toml"
    file.write_text(WHOLE.replace("FOLDER", str(tmp_path)))
    key = tmp_path / "key"
    key.write_text(" another\n")
    key.chmod(0o440)
    first, second = read_engines(file)
    assert first == EngineSpec(
        "vllm", "http://10.0.0.1:8000", "decode", "ENGINE_KEY", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558",
        "tcp://10.0.0.1:5559", model="one", rank=3,
    )  # fmt: skip
    address = "https://10.0.0.2"
    assert second == EngineSpec("sglang", address, "prefill", bootstrap="10.0.0.2:8998", api_key_file=str(key))
    assert first.headers["Authorization"] == "Bearer secret" and first.headers["X-data-parallel-rank"] == "3"
    assert second.headers["Authorization"] == "Bearer another" and second.address == ("10.0.0.2", 443)
    key.write_text("a-new-one")
    assert (last := second.headers_again({}))["Authorization"] == "Bearer a-new-one"
    key.unlink()
    assert second.headers_again(last) is last, "an engine that comes back is asked with the key of before"
    assert all(f"{field.name} = " in WHOLE for field in fields(EngineSpec))


def test_the_ranks_of_one_server_are_engines_and_their_ports_count_up() -> None:
    events = "kv_events=tcp://[fd00::1]:5557,kv_replay=tcp://h:5657"
    first, second, third = parse_engines(f"vllm=http://h:1,rank=2-4,{events},step_events=ipc:///run/steps.2")
    assert [engine.rank for engine in (first, second, third)] == [2, 3, 4]
    assert first.kv_events == "tcp://[fd00::1]:5557" and third.kv_events == "tcp://[fd00::1]:5559"
    assert third.kv_replay == "tcp://h:5659" and third.step_events == "ipc:///run/steps.4"
    assert second.name == "vllm h:1 rank 3" and parse_engine("vllm=http://h:1,rank=0,kv_events=auto").rank == 0
    with pytest.raises(ConfigError, match="has 2 ranks; one of them is wanted here"):
        parse_engine("vllm=http://h:1,rank=0-1")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ("vllm=http://h:1,rank=1", "engine vllm h:1 rank 1 is given twice"),
        ("vllm=http://h:1/", "engine http://h:1/ is given with a rank and without one"),
        ("vllm=http://h:1,rank=3", ""),
        ("vllm=http://h:2", ""),
    ],
)
def test_an_engine_is_given_once(others: str, words: str) -> None:
    engines = [*parse_engines("vllm=http://h:1,rank=0-2"), *parse_engines(others)]
    if not words:
        assert len(FrontOptions(tuple(engines)).engines) == 4
        return
    with pytest.raises(ConfigError) as refused:
        FrontOptions(tuple(engines))
    assert refused.value.message == words


def test_an_empty_file_names_no_engine(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text("# nothing yet\n")
    assert read_engines(file) == []


REFUSED = [
    (PLAIN + 'colour = "red"\n', "engine", "unknown field 'colour'"),
    (PLAIN + "role = 3\n", "role", "role of engine http://h:1 is 3; it must be text"),
    (PLAIN + "api_key_env = true\n", "api_key_env", "is True; it must be text"),
    (PLAIN + 'role = "both"\nkv_events = ["tcp://h:1"]\n', "kv_events", "it must be text"),
    (PLAIN + 'api_key_env = "NO_SUCH_VARIABLE_HERE"\n', "api_key_env", "there is no such environment variable"),
    (PLAIN + "rank = -1\n", "rank", "rank of engine http://h:1 is -1; a number, or several as 0-7"),
    (PLAIN + "rank = true\n", "rank", "is True; a number, or several as 0-7"),
    (PLAIN + 'rank = "3-2"\n', "rank", "is '3-2'; a number, or several as 0-7"),
    (PLAIN + "rank = 1024\n", "rank", "rank of http://h:1 is 1024; it must be in [0, 1023]"),
    (PLAIN.replace("vllm", "sglang") + "rank = 0\n", "rank", "and of a vllm"),
    ('[[engine]]\nurl = "http://h:1"\n', "engine", "an engine has no kind"),
    ('[[engine]]\nkind = "vllm"\n', "engine", "an engine has no url"),
    ('engine = "vllm=http://h:1"\n', "engines", "engine must be tables"),
    ("engine = [1]\n", "engines", "engine must be tables"),
    (PLAIN + '[front]\nport = 1\n', "engines", "has 'front'; only"),
    ("[[engine]\n", "engines", "is no TOML"),
    (b"\xff\xfe\x00", "engines", "is no TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "param", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_a_file_is_refused_with_words_that_name_its_fault(
    tmp_path: Path, content: str | bytes, param: str, words: str
) -> None:
    file = tmp_path / "engines.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        read_engines(file)
    assert words in refused.value.message and refused.value.param == param


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_engines(tmp_path / name)
    assert str(tmp_path / name) in refused.value.message and refused.value.param == "engines"


def test_engines_of_the_command_line_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(PLAIN + 'kv_events = "tcp://h:5557"\n')
    given = {"engine": ["openai=http://a:1"], "engines": file, "bytes_per_token": 4.0, "recovery": True}
    times = {"assumed": 600.0, "probe_interval": 0.5, "silence": 5.0, "first_byte_timeout": 1.0, "idle_timeout": 1.0}
    options = front_options({**given, **times, "block_size": None})
    assert [engine.name for engine in options.engines] == ["openai a:1", "vllm h:1"]
    assert options.block_size == EVENT_BLOCK

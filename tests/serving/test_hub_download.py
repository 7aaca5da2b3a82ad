"""Models come from the Hub whole, checked and only with what a server needs; what was cut is gone on with."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tests.fake_hub import FakeHub, FakeRepo, digest_of, fake_hub

from diptych.cli.pull import wanted_name
from diptych.control.errors import ConfigError
from diptych.runtime.models.hub_name import HubName
from diptych.runtime.models.model_place import cached_model
from diptych.serving import hub_download
from diptych.serving.hub_download import HubCache
from diptych.serving.link.engine_options import BUNDLED_MODEL

MIB = 2**20
BUNDLED = {
    path.name: path.read_bytes() for path in Path(BUNDLED_MODEL).iterdir() if path.suffix in (".json", ".safetensors")
}
WEIGHTS = bytes(range(256)) * 12000  # 3 MB
OTHERS = {
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
    "consolidated.safetensors": b"the same again",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"another format",
    "README.md": b"words",
    ".gitattributes": b"*.bin",
    "pytorch_model.bin.index.json": b"{}",
    "../escape.json": b"{}",
}
NEEDED = {
    "config.json": b'{"architectures": []}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b"{}",
}
SINGLE = {**OTHERS, **NEEDED, "model.safetensors": WEIGHTS}
SHARDED = {
    **NEEDED,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
GGUF = {
    "model-Q4_K_M.gguf": b"four" * 9,
    "model-Q8_0.gguf": b"eight" * 9,
    "model-BF16-00001-of-00002.gguf": b"first",
    "model-BF16-00002-of-00002.gguf": b"second",
    "mmproj-F16.gguf": b"for images",
    "README.md": b"words",
}


@pytest.fixture(autouse=True)
def _library_of_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits a second before it goes on
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", MIB // 4)  # it keeps whole chunks, of 10 MB


def pull(hub: FakeHub, folder: Path, name: str = "org/model", **wanted: Any) -> Path:
    parsed = wanted_name(name, wanted.pop("revision", None))
    HubCache(folder, hub.url, **wanted).pull(parsed)
    return cached_model(parsed, folder)


def files_in(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_only_what_a_server_needs_comes_and_never_a_pickle_or_code(tmp_path: Path) -> None:
    with fake_hub(model=FakeRepo({"main": SINGLE})) as hub:
        place = pull(hub, tmp_path)
        assert files_in(place) == {**NEEDED, "model.safetensors": WEIGHTS}
        for name in OTHERS:
            assert not hub.bytes_of(name), name
        before = len(hub.bytes_of(""))
        assert pull(hub, tmp_path) == place
        assert len(hub.bytes_of("")) == before + 1, "of a model that is here, only its list of files is asked for"


def test_the_shards_that_an_index_names_come_before_the_config(tmp_path: Path) -> None:
    stages: list[str] = []
    with fake_hub(model=FakeRepo({"main": SHARDED})) as hub:
        place = pull(hub, tmp_path, on_progress=lambda stage, done, total: stages.append(stage))
    assert files_in(place) == SHARDED
    assert stages[-1] == "checking config.json"
    broken = SHARDED | {"model.safetensors.index.json": b'{"weight_map": {"a": "model.bin"}}', "model.bin": b"a pickle"}
    with (
        fake_hub(model=FakeRepo({"main": broken})) as hub,
        pytest.raises(ConfigError, match=r"names model\.bin, which is no safetensors file"),
    ):
        pull(hub, tmp_path / "other")


def test_a_download_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    name = "model.safetensors"
    repo = FakeRepo({"main": SINGLE}, cuts={name: [MIB, *[0] * 30]})
    with fake_hub(model=repo) as hub:
        with pytest.raises(
            ConfigError, match=r"org/model could not be downloaded from http://127\.0\.0\.1:\d+: .* goes on"
        ):
            pull(hub, tmp_path)
        with pytest.raises(ConfigError, match="it is not in"):
            cached_model(HubName("org/model"), tmp_path)
        (partial,) = tmp_path.rglob("*.incomplete")
        assert partial.read_bytes() == WEIGHTS[: partial.stat().st_size] and partial.stat().st_size >= MIB // 2
        size = partial.stat().st_size
        repo.cuts.clear()
        hub.asked.clear()
        assert files_in(pull(hub, tmp_path))[name] == WEIGHTS
        assert {span for _, span in hub.bytes_of(name)} == {f"bytes={size}-"}
        assert not list(tmp_path.rglob("*.incomplete"))


def test_one_cut_is_mended_within_one_call(tmp_path: Path) -> None:
    with fake_hub(model=FakeRepo({"main": SINGLE}, cuts={"model.safetensors": [MIB]})) as hub:
        assert files_in(pull(hub, tmp_path))["model.safetensors"] == WEIGHTS


def test_a_server_that_sends_all_again_is_understood(tmp_path: Path) -> None:
    repo = FakeRepo({"main": SINGLE}, cuts={"model.safetensors": [MIB, *[0] * 30]}, ignores_ranges=True)
    with fake_hub(model=repo) as hub:
        with pytest.raises(ConfigError):
            pull(hub, tmp_path)
        repo.cuts.clear()
        assert files_in(pull(hub, tmp_path))["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "config.json"])
def test_a_file_that_was_changed_on_its_way_is_never_served(tmp_path: Path, name: str) -> None:
    files = SINGLE | {"config.json": b'{"architectures": ["x"]}', "tokenizer_config.json": b'{"a": 1}'}
    repo = FakeRepo({"main": files}, changed={name})
    with fake_hub(model=repo) as hub:
        with pytest.raises(ConfigError, match=f"{name} of org/model came with another digest .* thrown away") as caught:
            pull(hub, tmp_path)
        assert digest_of(name, files[name]) in caught.value.message
        assert not [path for path in tmp_path.glob(f"models--org--model/snapshots/*/{name}") if path.exists()]
        repo.changed.clear()
        assert files_in(pull(hub, tmp_path))[name] == files[name]


def test_a_file_that_rotted_in_the_cache_comes_again(tmp_path: Path) -> None:
    with fake_hub(model=FakeRepo({"main": SINGLE})) as hub:
        place = pull(hub, tmp_path)
        (place / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))
        assert files_in(pull(hub, tmp_path))["model.safetensors"] == WEIGHTS


def test_what_the_hub_gives_no_digest_of_is_refused(tmp_path: Path) -> None:
    with (
        fake_hub(model=FakeRepo({"main": SINGLE}, without_digest={"model.safetensors"})) as hub,
        pytest.raises(ConfigError, match=r"no digest of model\.safetensors"),
    ):
        pull(hub, tmp_path)


def test_what_only_the_library_can_fetch_is_checked_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", MIB)
    monkeypatch.setattr("huggingface_hub.file_download.constants.MAX_HTTP_DOWNLOAD_SIZE", MIB)
    fetched: list[str] = []

    def library_way(name: str, file: str, *, cache_dir: Path, revision: str, endpoint: str) -> str:
        fetched.append(file)
        path = cache_dir / "models--org--model" / "snapshots" / revision / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(len(WEIGHTS)))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", library_way)
    with (
        fake_hub(model=FakeRepo({"main": SINGLE})) as hub,
        pytest.raises(ConfigError, match=r"model\.safetensors of org/model came with another digest"),
    ):
        pull(hub, tmp_path)
    assert fetched == ["model.safetensors"] and not list(tmp_path.rglob("model.safetensors"))


def test_room_on_the_disk_is_looked_at_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda path: usage(0, 0, len(WEIGHTS)))
    with fake_hub(model=FakeRepo({"main": SINGLE})) as hub:
        with pytest.raises(ConfigError, match=r"needs 2\.9\d* MiB more on the disk of .* which has 2\.9\d* MiB free"):
            pull(hub, tmp_path)
        assert not hub.bytes_of("model.safetensors")
        assert not list(tmp_path.rglob("blobs/*"))


def test_a_disk_that_fills_up_meanwhile_is_said_and_what_has_come_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = hub_download._CountedFile.write

    def full(self: Any, data: bytes) -> int:
        if self.tell() >= MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data[: MIB // 4])

    with fake_hub(model=FakeRepo({"main": SINGLE})) as hub:
        with monkeypatch.context() as patched:
            patched.setattr(hub_download._CountedFile, "write", full)
            with pytest.raises(ConfigError, match=r"the disk of .* is full: .* goes on with org/model"):
                pull(hub, tmp_path)
        (partial,) = tmp_path.rglob("*.incomplete")
        assert partial.stat().st_size == MIB
        assert files_in(pull(hub, tmp_path))["model.safetensors"] == WEIGHTS


def test_a_revision_is_what_is_asked_for(tmp_path: Path) -> None:
    old = SINGLE | {"config.json": b'{"version": "old"}'}
    with fake_hub(model=FakeRepo({"main": SINGLE, "v1": old})) as hub:
        new_place = pull(hub, tmp_path)
        old_place = pull(hub, tmp_path, revision="v1")
        assert (
            (old_place / "config.json").read_bytes() == old["config.json"] != (new_place / "config.json").read_bytes()
        )
        assert cached_model(HubName("org/model"), tmp_path) == new_place
        assert cached_model(HubName("org/model", revision="v1"), tmp_path) == old_place
        assert cached_model(HubName("org/model", revision=old_place.name), tmp_path) == old_place
        assert pull(hub, tmp_path, revision=new_place.name) == new_place
        assert pull(hub, tmp_path, "https://huggingface.co/org/model/tree/v1") == old_place
        assert len(list(tmp_path.rglob("blobs/*"))) == 6, "files that two revisions share come once"
        with pytest.raises(ConfigError, match="has no revision v9"):
            pull(hub, tmp_path, revision="v9")
        with pytest.raises(ConfigError, match="has no weights of revision v9"):
            cached_model(HubName("org/model", revision="v9"), tmp_path)


def test_main_is_the_old_commit_until_the_new_one_is_whole(tmp_path: Path) -> None:
    repo = FakeRepo({"main": SINGLE})
    with fake_hub(model=repo) as hub:
        place = pull(hub, tmp_path)
        repo.revisions["main"] = SINGLE | {"model.safetensors": WEIGHTS[::-1]}
        repo.changed = {"model.safetensors"}
        with pytest.raises(ConfigError, match="another digest"):
            pull(hub, tmp_path)
        assert cached_model(HubName("org/model"), tmp_path) == place
        repo.changed = set()
        assert pull(hub, tmp_path) != place


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("q8_0", ["model-Q8_0.gguf"]),
        ("model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        ("BF16", ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_tag_chooses_among_gguf_files(tmp_path: Path, tag: str, files: list[str]) -> None:
    with fake_hub(model=FakeRepo({"main": GGUF})) as hub:
        place = pull(hub, tmp_path, f"org/model:{tag}")
    assert place.name == files[0] and place.read_bytes() == GGUF[files[0]]
    assert sorted(files_in(place.parent)) == files


def test_what_is_not_one_model_is_refused_with_the_choices(tmp_path: Path) -> None:
    repos = {
        "gguf": FakeRepo({"main": GGUF}),
        "one": FakeRepo({"main": {"model-Q8_0.gguf": b"eight", "README.md": b""}}),
        "pickle": FakeRepo({"main": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}}),
        "empty": FakeRepo({"main": {"README.md": b""}}),
    }
    with fake_hub(**repos) as hub:
        with pytest.raises(ConfigError, match=r"3 GGUF models; one of .*org/gguf:Q4_K_M, org/gguf:Q8_0$"):
            pull(hub, tmp_path, "org/gguf")
        with pytest.raises(ConfigError, match=r"none of its GGUF models is Q2_K; one of org/gguf:BF16, "):
            pull(hub, tmp_path, "org/gguf:Q2_K")
        assert pull(hub, tmp_path, "org/one").name == "model-Q8_0.gguf"
        with pytest.raises(ConfigError, match=r"nor GGUF files; pytorch_model\.bin may hold code, and is never loaded"):
            pull(hub, tmp_path, "org/pickle")
        with pytest.raises(ConfigError, match="org/empty holds neither"):
            pull(hub, tmp_path, "org/empty")
        with pytest.raises(ConfigError, match="org/none is not on http"):
            pull(hub, tmp_path, "org/none")


def test_a_gated_model_needs_the_hubs_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(model=FakeRepo({"main": SINGLE}, is_gated=True)) as hub:
        with pytest.raises(ConfigError, match=r"accept its terms at its page, and set HF_TOKEN .*/org/model\)"):
            pull(hub, tmp_path)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert files_in(pull(hub, tmp_path))["model.safetensors"] == WEIGHTS
        assert "Bearer hf_secret" in {key for *_, key in hub.asked}


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with fake_hub() as hub:
        pass
    with pytest.raises(ConfigError, match="could not be downloaded from http"):
        pull(hub, tmp_path)


def run(folder: Path, hub: FakeHub, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from diptych.cli.main import main; main()"
    return subprocess.run(
        (sys.executable, "-c", code, *words), cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip


@pytest.mark.system
def test_the_command_brings_a_model_that_is_then_served_by_its_name(tmp_path: Path) -> None:
    with fake_hub(model=FakeRepo({"main": BUNDLED | {"pytorch_model.bin": b"a pickle"}})) as hub:
        pulled = run(tmp_path, hub, "pull", "org/model")
        assert pulled.returncode == 0, pulled.stderr
        assert "serve org/model" in pulled.stdout and "each as the Hub has it" in pulled.stderr
        listed = run(tmp_path, hub, "models")
        assert "org/model" in listed.stdout
        unknown = run(tmp_path, hub, "pull", "gpt-oss:20b")
        assert unknown.returncode == 1 and "diptych pull openai/gpt-oss-20b" in unknown.stderr
        shutil.rmtree(tmp_path / "cache")
        refused = run(tmp_path, hub, "serve", "org/model", "--workers", "2000")
        assert "diptych pull org/model" in refused.stderr and not hub.bytes_of("none")
        before = len(hub.asked)
        brought = run(tmp_path, hub, "serve", "org/model", "--download", "--kv-cache-memory", "9999TiB")
        assert "org/model: " in brought.stderr and "error: --kv-cache-memory is" in brought.stderr
        assert len(hub.asked) > before
        hub.asked.clear()
        again = run(tmp_path, hub, "serve", "org/model", "--download", "--kv-cache-memory", "9999TiB")
        assert "error: --kv-cache-memory is" in again.stderr and not hub.asked, "the Hub is asked once"

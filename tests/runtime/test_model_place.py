"""From what people type to a model: paths, names of the Hub in its cache, and sentences with the cure."""

import os
from pathlib import Path

import pytest

from diptych.control.errors import ConfigError
from diptych.runtime.models.model_place import find_model, hub_cache, name_of
from diptych.runtime.required_packages import is_there, require_packages

NAME = "Qwen/Qwen3-0.6B"


def snapshot(cache: Path, commit: str, *files: str) -> Path:
    """A snapshot of NAME as the Hub's programs lay it out: links to files without endings."""
    folder = cache / "models--Qwen--Qwen3-0.6B"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    place = folder / "snapshots" / commit
    place.mkdir(parents=True)
    for number, name in enumerate(files):
        blob = folder / "blobs" / f"{commit}{number}"
        blob.touch()
        (place / name).symlink_to(blob)
    return place


def test_a_name_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    old = snapshot(tmp_path, "aaa", "config.json", "model.safetensors")
    new = snapshot(tmp_path, "bbb", "config.json", "model.safetensors")
    os.utime(old, (1, 1))
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model(NAME, environment) == new
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "refs").mkdir()
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "refs" / "main").write_text("aaa\n")
    assert find_model(NAME, environment) == old
    assert find_model(f"https://huggingface.co/{NAME}/tree/main", environment) == old
    assert name_of(old) == NAME


def test_a_snapshot_without_weights_is_not_enough(tmp_path: Path) -> None:
    snapshot(tmp_path, "aaa", "config.json")
    with pytest.raises(ConfigError, match="has no weights") as caught:
        find_model(NAME, {"HF_HUB_CACHE": str(tmp_path)})
    assert f"hf download {NAME} --local-dir Qwen3-0.6B" in caught.value.message


def test_a_gguf_file_in_the_cache_keeps_its_name(tmp_path: Path) -> None:
    place = snapshot(tmp_path, "aaa", "model-q4.gguf")
    assert find_model(place / "model-q4.gguf").name == "model-q4.gguf"
    with pytest.raises(ConfigError, match=r"give it: .*model-q4\.gguf"):
        find_model(NAME, {"HF_HUB_CACHE": str(tmp_path)})


def test_a_folder_with_the_parts_of_one_gguf_model_holds_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model-{number:05}-of-00002.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds a GGUF file; give it: .*model-00001-of-00002\.gguf"):
        find_model(tmp_path)
    assert name_of(tmp_path / "model-00001-of-00002.gguf") == "model"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_the_cache_is_where_the_hubs_programs_have_it(environment: dict[str, str], folder: str) -> None:
    assert hub_cache(environment) == Path(folder)


def test_a_path_that_exists_is_taken_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model("org/model") == tmp_path / "org" / "model"  # though it looks like a name of the Hub
    assert name_of(find_model("org/model/")) == "model"


def test_the_folder_of_a_cached_model_leads_to_its_snapshot(tmp_path: Path) -> None:
    place = snapshot(tmp_path, "aaa", "config.json")
    with pytest.raises(ConfigError, match="is a folder of the Hub's cache") as caught:
        find_model(tmp_path / "models--Qwen--Qwen3-0.6B")
    assert str(place) in caught.value.message


def test_missing_packages_are_named_with_the_cure() -> None:
    require_packages()
    with pytest.raises(ConfigError, match=r"needs torch, which is not installed: pip install '\.\[engine\]' in the"):
        require_packages(lambda name: name != "torch")
    with pytest.raises(ConfigError, match="needs torch and numpy, which are not installed"):
        require_packages(lambda name: False)
    assert not is_there("no_such_package_at_all")

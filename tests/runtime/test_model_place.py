"""From what people type to a model: paths, names of the Hub in its cache, and sentences with the cure."""

import os
from pathlib import Path

import pytest

from diptych.control.errors import ConfigError
from diptych.runtime.models.model_place import cached_models, find_model, hub_cache, missing_parts, name_of
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
    assert f"diptych pull {NAME}, or let the server do it: diptych serve --download" in caught.value.message


def test_a_gguf_file_in_the_cache_keeps_its_name(tmp_path: Path) -> None:
    place = snapshot(tmp_path, "aaa", "model-q4.gguf")
    assert find_model(place / "model-q4.gguf").name == "model-q4.gguf"
    assert find_model(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == place / "model-q4.gguf", "the only one has the name"


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


def test_one_of_several_gguf_files_is_named_by_its_tag(tmp_path: Path) -> None:
    names = ("model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf")
    place, environment = snapshot(tmp_path, "aaa", *names), {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model(f"{NAME}:q4_k_m", environment).name == names[0]
    assert find_model(f"https://hf.co/{NAME}:Q8_0", environment).name == names[1]
    assert find_model(f"https://huggingface.co/{NAME}/blob/main/{names[1]}", environment) == place / names[1]
    assert find_model(f"hf://{NAME}:BF16", environment).name == names[2]
    for tag in ("4_K_M", "Q2_K", "M"):
        with pytest.raises(ConfigError, match=f"none of its GGUF files here is {tag} .* diptych pull {NAME}:{tag}"):
            find_model(f"{NAME}:{tag}", environment)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_model_that_is_here_in_part_is_not_served(tmp_path: Path, kind: str) -> None:
    place = snapshot(tmp_path, "aaa", "config.json", f"model-00002-of-00003.{kind}")
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"in part: model-00001-of-00003.{kind}, .*00003.* diptych pull {NAME}"):
        find_model(NAME, environment)
    assert cached_models(tmp_path)[0] == [] and "without model-00001" in cached_models(tmp_path)[1][0][1]
    for number in (1, 3):
        (place / f"model-{number:05}-of-00003.{kind}").touch()
    assert missing_parts(place) == []


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_never_a_place_outside(tmp_path: Path) -> None:
    old = snapshot(tmp_path, "aaa", "config.json", "model.safetensors")
    new = snapshot(tmp_path, "bbb", "config.json", "model.safetensors")
    refs = tmp_path / "models--Qwen--Qwen3-0.6B" / "refs"
    refs.mkdir()
    for name, commit in (("main", "bbb"), ("v1", "aaa")):
        (refs / name).write_text(commit)
    (tmp_path / "outside").write_text("aaa")
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    found = {revision: find_model(NAME, environment, revision) for revision in (None, "main", "v1", "aaa")}
    assert found == {None: new, "main": new, "v1": old, "aaa": old}
    assert find_model(f"https://huggingface.co/{NAME}/tree/v1", environment) == old
    for revision in ("v2", "../../outside", "../snapshots/aaa"):
        with pytest.raises(ConfigError, match=f"no weights of revision {revision}"):
            find_model(NAME, environment, revision)
    with pytest.raises(ConfigError, match=r"revision is 'v1'; .* is a path, which has none"):
        find_model(old, environment, "v1")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gpt-oss:20b", "diptych pull openai/gpt-oss-20b"),
        ("qwen3:8b", "diptych pull Qwen/Qwen3-8B"),
        ("llama3.1:8b-instruct-q4_K_M", "diptych pull meta-llama/Llama-3.1-8B-Instruct"),
        ("gemma3:latest", "diptych pull google/gemma-3-SIZE-it"),
        ("https://ollama.com/library/gpt-oss:120b", "diptych pull openai/gpt-oss-120b"),
        ("no-such:7b", "a name of Ollama; a model of the Hub is named by organisation and name"),
        ("qwen3-0.6b", "here is Qwen/Qwen3-0.6B"),
        ("some-model", "it is no folder here; a model of the Hub is named by organisation and name"),
        ("https://example.com/model", "it is an address; a model of the Hub"),
    ],
)
def test_names_of_others_get_a_hint(text: str, hint: str, tmp_path: Path) -> None:
    snapshot(tmp_path, "aaa", "config.json", "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        find_model(text, {"HF_HUB_CACHE": str(tmp_path)})
    assert caught.value.message.startswith(f"{text} does not exist: ") and hint in caught.value.message


@pytest.mark.parametrize("text", ["./folder", "model.gguf", "a/b/c", "/nowhere", "..", "~/nothing/there"])
def test_paths_get_no_hint_about_names(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(tmp_path / "none" if text == ".." else text, {"HF_HUB_CACHE": str(tmp_path)})
    assert "Hub" not in caught.value.message

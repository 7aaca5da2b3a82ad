"""Where a model is: from what people type to the directory or GGUF file, or a sentence with the cure.

A name of the Hugging Face Hub is looked for in the Hub's cache folder on this machine. Nothing is downloaded, and
nothing but file names is read here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from diptych.control.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # organisation/name
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+).*")
WEIGHTS = ("*.safetensors", "*.gguf")
SPLIT_GGUF = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")  # a part of a model, with its number


def find_model(place: str | Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The model directory or GGUF file: a path, or a name of the Hub that is in its cache. environment: says where that
    cache is, as for the programs that fill it. Raises ConfigError."""
    text = str(place)
    address = HUB_ADDRESS.fullmatch(text)
    path = Path(text).expanduser()
    if address is None and path.exists():
        return _model_at(Path(os.path.abspath(path)))  # links are kept: in the Hub's cache, only they have names
    name = address[1] if address else text
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{place} does not exist", param="model")
    return _cached(name, hub_cache(environment))


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder in which the Hub's programs keep what they have downloaded."""
    if folder := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def models_in(folder: Path) -> list[Path]:
    """The model directories and GGUF files in a folder of models, and in its folders (as ``ORGANISATION/NAME``), by
    name. Of a model that is split in several GGUF files, only the first."""
    found = []
    for pattern in ("*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            is_inside = any(parent in found for parent in path.parents)
            if not is_inside and _is_model(path):
                found.append(path)
    return sorted(found)


def cached_models(cache: Path) -> tuple[list[Path], list[str]]:
    """(what the Hub's cache folder holds of models, the names of those whose entry has no weights). Of each name the
    snapshot that ``find_model`` takes; a snapshot of GGUF files has an entry for each."""
    whole: list[Path] = []
    empty: list[str] = []
    for folder in sorted(cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = newest_snapshot(folder)
        if snapshot is None:
            empty.append(name)
        elif (snapshot / "config.json").exists() and not any(snapshot.glob("*.gguf")):
            whole.append(snapshot)
        else:
            whole += models_in(snapshot)
    return whole, empty


def newest_snapshot(folder: Path) -> Path | None:
    """The snapshot of an entry of the Hub's cache that has weights: that of ``main``, else the newest; None: there is
    none."""
    main = folder / "refs" / "main"
    wanted = main.read_text().strip() if main.is_file() else ""
    snapshots = sorted(folder.glob("snapshots/*/"), key=lambda path: (path.name == wanted, path.stat().st_mtime))
    whole = [path for path in snapshots if any(any(path.glob(pattern)) for pattern in WEIGHTS)]
    return whole[-1] if whole else None


def name_of(path: Path) -> str:
    """What a model is called: by its name on the Hub where it lies in the Hub's cache, else by its folder or file."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return SPLIT_GGUF.sub("", path.name).removesuffix(".gguf")


def _is_model(path: Path) -> bool:
    if path.suffix == ".gguf" and path.is_file():
        part = SPLIT_GGUF.search(path.name)
        return part is None or int(part[1]) == 1
    return (path / "config.json").is_file()


def _model_at(path: Path) -> Path:
    """What there is at a path. Raises ConfigError."""
    if path.is_file():
        if path.suffix in (".safetensors", ".json", ".bin"):
            raise ConfigError(f"{path} is one file of a model; give its directory, {path.parent}", param="model")
        return path
    if (path / "config.json").exists():
        return path
    if found := sorted(path.glob("*.gguf")):
        raise ConfigError(_which_gguf(path, list(filter(_is_model, found)) or found), param="model")
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"{path} is an adapter (LoRA); merge it into its model first", param="model")
    if snapshots := sorted(path.glob("snapshots/*/config.json")):
        raise ConfigError(f"{path} is a folder of the Hub's cache; give {snapshots[-1].parent}", param="model")
    raise ConfigError(f"{path} is not a model directory: it has no config.json", param="model")


def _which_gguf(path: Path, found: Sequence[Path]) -> str:
    if len(found) == 1:
        return f"{path} holds a GGUF file; give it: {found[0]}"
    return f"{path} holds {len(found)} GGUF files; give one of them, such as {found[0]}"


def _cached(name: str, cache: Path) -> Path:
    """The newest snapshot of a name of the Hub. Raises ConfigError."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = newest_snapshot(folder)
    if snapshot is not None:
        return _model_at(snapshot)
    is_known = any(folder.glob("snapshots/*/"))
    here = f"its entry in {cache} has no weights" if is_known else f"it is not in {cache}"
    directory = name.partition("/")[2]
    raise ConfigError(
        f"{name} does not exist here; it looks like a name of the Hugging Face Hub ({here}). Download it with "
        f"'hf download {name} --local-dir {directory}', then: diptych serve ./{directory}",
        param="model",
    )

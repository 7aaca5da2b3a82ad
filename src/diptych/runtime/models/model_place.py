"""Where a model is: from what people type to the directory or GGUF file, or a sentence with the cure.

A name of the Hugging Face Hub is looked for in the Hub's cache folder on this machine. Nothing is downloaded, and
nothing but file names is read here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.models.hub_name import SPLIT_GGUF, HubName, gguf_models, hint_for, hub_name, with_tag

WEIGHTS = ("*.safetensors", "*.gguf")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(safetensors|gguf)$")


def find_model(place: str | Path, environment: Mapping[str, str] = os.environ, revision: str | None = None) -> Path:
    """The model directory or GGUF file: a path, or a name of the Hub that is in its cache. environment: says where that
    cache is, as for the programs that fill it. revision: a branch, tag or commit of the Hub (None: main, else the
    newest). Raises ConfigError."""
    path = Path(place).expanduser()
    name = hub_name(str(place))
    if path.exists() and not str(place).startswith("hf://"):
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}; {place} is a path, which has none", param="revision")
        return _model_at(Path(os.path.abspath(path)))  # links are kept: in the Hub's cache, only they have names
    if name is None:
        here = [name_of(found) for found in cached_models(hub_cache(environment))[0]]
        hint = hint_for(str(place), list(dict.fromkeys(here)))
        raise ConfigError(f"{place} does not exist" + (f": {hint}" if hint else ""), param="model")
    if revision is not None:
        name = replace(name, revision=revision)
    return cached_model(name, hub_cache(environment))


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


def cached_models(cache: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """(what the Hub's cache folder holds of models; the names of those that are not whole, with what is missing). Of
    each name the snapshot that ``find_model`` takes; a snapshot of GGUF files has an entry for each."""
    whole: list[Path] = []
    parts: list[tuple[str, str]] = []
    for folder in sorted(cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = newest_snapshot(folder)
        if snapshot is None:
            parts.append((name, "its entry in the Hub's cache has no weights"))
        elif missing := missing_parts(snapshot):
            parts.append((name, f"it is here in part, without {', '.join(missing[:3])}: diptych pull {name}"))
        elif (snapshot / "config.json").exists() and not any(snapshot.glob("*.gguf")):
            whole.append(snapshot)
        else:
            whole += models_in(snapshot)
    return whole, parts


def newest_snapshot(folder: Path, revision: str | None = None) -> Path | None:
    """The snapshot of an entry of the Hub's cache that has weights: that of ``revision``, or else (None) that of
    ``main``, or else the newest; None: there is none."""
    wanted = commit_of(folder, revision or "main")
    snapshots = sorted(folder.glob("snapshots/*/"), key=lambda path: (path.name == wanted, path.stat().st_mtime))
    if revision is not None:
        snapshots = [path for path in snapshots if path.name in (wanted, revision)]
    whole = [path for path in snapshots if any(any(path.glob(pattern)) for pattern in WEIGHTS)]
    return whole[-1] if whole else None


def commit_of(folder: Path, revision: str) -> str:
    """The commit that an entry of the Hub's cache has under a revision; "" where it has none."""
    ref = folder / "refs" / revision
    try:
        return ref.read_text().strip() if ".." not in revision.split("/") else ""
    except OSError:
        return ""


def missing_parts(snapshot: Path) -> list[str]:
    """Files of weights that a model in the Hub's cache lacks, by the names of those that are there: of a model in
    several files that was not downloaded to its end."""
    missing = []
    for path in sorted(snapshot.rglob("*-of-*")):
        if (part := PART.fullmatch(path.name)) is not None:
            every = (f"{part[1]}-{number:05}-of-{part[3]}.{part[4]}" for number in range(1, int(part[3]) + 1))
            missing += [name for name in every if not path.with_name(name).exists()]
    return list(dict.fromkeys(missing))


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


def entry_of(name: str, cache: Path) -> Path:
    """The folder of a name of the Hub in its cache, whether it exists or not."""
    return cache / f"models--{name.replace('/', '--')}"


def cached_model(wanted: HubName, cache: Path) -> Path:
    """The newest snapshot of a name of the Hub, or the GGUF file in it. Raises ConfigError."""
    folder = entry_of(wanted.name, cache)
    snapshot = newest_snapshot(folder, wanted.revision)
    get = f"Get it with: diptych pull {wanted}" + (f" --revision {wanted.revision}" if wanted.revision else "")
    if snapshot is None:
        of = "" if wanted.revision is None else f" of revision {wanted.revision}"
        is_known = any(folder.glob("snapshots/*/"))
        here = f"its entry in {cache} has no weights{of}" if is_known else f"it is not in {cache}"
        raise ConfigError(
            f"{wanted} does not exist here; it looks like a name of the Hugging Face Hub ({here}). {get}, or let the "
            "server do it: diptych serve --download",
            param="model",
        )
    if missing := missing_parts(snapshot):
        raise ConfigError(f"{wanted} is here in part: {', '.join(missing[:3])} of it is missing. {get}", param="model")
    files = gguf_models(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf"))
    if wanted.tag:
        found = with_tag(files, wanted.tag)
        if len(found) != 1:
            which = f"{len(found)} of its GGUF files are" if found else "none of its GGUF files here is"
            raise ConfigError(f"{which} {wanted.tag} in {snapshot}. {get}", param="model")
        return snapshot / found[0]
    if len(files) == 1 and not (snapshot / "config.json").exists():
        return snapshot / files[0]
    return _model_at(snapshot)

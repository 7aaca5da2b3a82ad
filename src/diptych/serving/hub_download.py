"""Models of the Hugging Face Hub, downloaded into its cache on this machine: safetensors or GGUF files, configs, and
what belongs to a tokenizer; never a pickle, never code.

Addresses, tokens, requests and the layout of the cache are those of the Hub's own client library. What that leaves open
is done here: whether there is room is looked at before anything is sent, a download that was cut is gone on with, and a
file gets its name in the cache only after its digest was found to be the one that the Hub says.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from diptych.base.byte_size import size_words
from diptych.control.errors import ConfigError
from diptych.runtime.models.hub_name import HubName, gguf_models, with_tag
from diptych.runtime.models.model_place import PART, commit_of, entry_of
from diptych.runtime.required_packages import is_there

if TYPE_CHECKING:
    from types import ModuleType

PACKAGE = "huggingface_hub"
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SPARE_BYTES = 64 * 2**20  # of the disk, which stay free
READ_BYTES = 2**20
COMMIT = re.compile(r"[0-9a-f]{40}")
# What is taken beside weights: configs and tokenizers of text models, in forms that hold no code.
BESIDE = re.compile(r"[\w-]+\.json|(?:chat_template|additional_chat_templates/[\w-]+)\.jinja|(?:merges|vocab)\.txt")
BESIDE_TOO = re.compile(r"tokenizer\.model|[\w.-]+\.tiktoken|\d+_\w+/config\.json")
PICKLES = re.compile(r".*\.(?:bin|pt|pth|ckpt|pkl|msgpack|h5)")

Progress = Callable[[str, int, int], None]  # (what is done, bytes of all files that are there, bytes of all files)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a model. digest: SHA-256 of its content where git keeps it elsewhere (LFS), else the SHA-1 of git's
    blob; which of the two, its length says. The Hub's cache calls the file by it."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at one commit: of its files those that are needed, weights first and the config last, so that what was
    cut in between is not taken for a model."""

    wanted: HubName
    commit: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(slots=True)
class HubCache:
    """Downloads into a folder of the Hub's cache. endpoint: the address of the Hub (None: that of its library, which
    HF_ENDPOINT names). on_progress: is told how far it is, several times a second."""

    folder: Path
    endpoint: str | None = None
    on_progress: Progress = field(default=lambda stage, done, total: None)

    def pull(self, wanted: HubName) -> HubModel:
        """Have all files of a model here, each with the digest that the Hub says. Raises ConfigError where they cannot
        be had; what has come by then is kept, and the next call goes on with it."""
        hub = _library()
        if wanted.revision is not None and not _is_plain(wanted.revision):
            raise ConfigError(f"revision is {wanted.revision!r}; a branch, tag or commit", param="revision")
        with _errors_in_words(wanted, self.folder, self.endpoint):
            hub.utils.disable_progress_bars()
            model = self._look_up(hub, wanted)
            self._check_room(model)
            done = 0
            for file in model.files:
                self._fetch(hub, model, file, done)
                done += file.num_bytes
            self._name_revision(model)
        return model

    def _look_up(self, hub: "ModuleType", wanted: HubName) -> HubModel:
        info = hub.HfApi(endpoint=self.endpoint).model_info(wanted.name, revision=wanted.revision, files_metadata=True)
        if not COMMIT.fullmatch(info.sha or ""):
            raise ConfigError(f"the Hub names no commit of {wanted}", param="model")
        files = {entry.rfilename: _file_of(entry) for entry in info.siblings or () if _is_plain(entry.rfilename)}
        names = _chosen(wanted, list(files))
        _require_digests(wanted, files, names)
        if INDEX in names:
            index = HubModel(wanted, info.sha, (files[INDEX],))
            self._check_room(index)
            weights = self._indexed(hub, index)
            _require_digests(wanted, files, weights)
            names = [*weights, *names]
        return HubModel(wanted, info.sha, tuple(files[name] for name in dict.fromkeys(names)))

    def _indexed(self, hub: "ModuleType", model: HubModel) -> list[str]:
        """The files of weights that the index names which is the only file of ``model``."""
        path = self._fetch(hub, model, model.files[0], 0)
        try:
            named = sorted({str(name) for name in json.loads(path.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{INDEX} of {model.wanted} has no valid weight_map", param="model") from None
        if wrong := [name for name in named if not name.endswith(".safetensors")]:
            raise ConfigError(
                f"{INDEX} of {model.wanted} names {wrong[0]}, which is no safetensors file", param="model"
            )
        return named

    # -- one file -----------------------------------------------------------------------------------------------------

    def _blob(self, model: HubModel, file: HubFile) -> Path:
        return entry_of(model.wanted.name, self.folder) / "blobs" / file.digest

    def _partial(self, model: HubModel, file: HubFile) -> Path:
        return self._blob(model, file).with_name(f"{file.digest}.incomplete")

    def _check_room(self, model: HubModel) -> None:
        """Raises ConfigError where what is still to come does not fit on the disk."""
        missing = sum(
            file.num_bytes - _size(self._partial(model, file))
            for file in model.files
            if not self._blob(model, file).exists()
        )
        free = shutil.disk_usage(_existing(self.folder)).free
        if missing and missing + SPARE_BYTES > free:
            raise ConfigError(
                f"{model.wanted} needs {size_words(missing)} more on the disk of {self.folder}, which has "
                f"{size_words(free)} free (HF_HUB_CACHE names another folder)",
                param="model",
            )

    def _fetch(self, hub: "ModuleType", model: HubModel, file: HubFile, done: int) -> Path:
        """Have a file in the cache, checked. done: bytes of the files before it."""
        wanted, blob = model.wanted, self._blob(model, file)
        lock = self.folder / ".locks" / entry_of(wanted.name, self.folder).name / f"{file.digest}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        is_large = file.num_bytes > hub.constants.MAX_HTTP_DOWNLOAD_SIZE  # only the library's own way takes these
        with hub.utils.WeakFileLock(lock):  # that of the library: nobody else writes this file
            if not (blob.exists() and self._is_right(model, file, blob, done)):
                blob.unlink(missing_ok=True)
                if not is_large:
                    self._download(hub, model, file, done)
        path = Path(
            hub.hf_hub_download(
                wanted.name, file.name, revision=model.commit, cache_dir=self.folder, endpoint=self.endpoint
            )
        )
        if (path.resolve() != blob.resolve() or is_large) and not self._is_right(model, file, path, done):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ConfigError(_changed(model, file), param="model")
        return path

    def _download(self, hub: "ModuleType", model: HubModel, file: HubFile, done: int) -> None:
        from huggingface_hub.file_download import http_get

        partial = self._partial(model, file)
        if _size(partial) > file.num_bytes:
            partial.unlink()

        def on_bytes(count: int) -> None:
            self.on_progress(f"downloading {file.name}", done + count, model.num_bytes)

        url = hub.hf_hub_url(model.wanted.name, file.name, revision=model.commit, endpoint=self.endpoint)
        headers = hub.utils.build_hf_headers(library_name="diptych")
        while True:
            begun = _size(partial)
            try:
                with partial.open("ab") as opened:
                    counted = _CountedFile(opened, on_bytes)
                    http_get(url, counted, resume_size=begun, headers=headers, expected_size=file.num_bytes)  # type: ignore[arg-type]
                break
            except _reaching():
                if _size(partial) <= begun:  # a connection that breaks is made again, while it brings something
                    raise
        if not self._is_right(model, file, partial, done):
            partial.unlink()
            raise ConfigError(_changed(model, file), param="model")
        partial.replace(self._blob(model, file))

    def _is_right(self, model: HubModel, file: HubFile, path: Path, done: int) -> bool:
        """Whether a file has the digest that it should."""
        if _size(path) != file.num_bytes:
            return False
        is_git = len(file.digest) == 40
        digest = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
        if is_git:
            digest.update(b"blob %d\0" % file.num_bytes)
        checked = 0
        with path.open("rb") as opened:
            while piece := opened.read(READ_BYTES):
                digest.update(piece)
                checked += len(piece)
                self.on_progress(f"checking {file.name}", done + checked, model.num_bytes)
        return digest.hexdigest() == file.digest

    def _name_revision(self, model: HubModel) -> None:
        """Let the revision that was asked for be this commit: last, so that a server takes the one before till then."""
        revision = model.wanted.revision or "main"
        folder = entry_of(model.wanted.name, self.folder)
        if COMMIT.fullmatch(revision) or commit_of(folder, revision) == model.commit:
            return
        path = folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(model.commit)
        new.replace(path)


class _CountedFile:
    """A file that says how long it is, several times for each MiB: what http_get needs of one."""

    def __init__(self, opened: Any, on_bytes: Callable[[int], None]) -> None:
        self._opened = opened
        self._on_bytes = on_bytes

    def write(self, data: bytes) -> int:
        written: int = self._opened.write(data)
        self._on_bytes(self._opened.tell())
        return written

    def tell(self) -> int:
        return int(self._opened.tell())

    def seek(self, offset: int) -> int:
        return int(self._opened.seek(offset))

    def truncate(self) -> int:
        return int(self._opened.truncate())


def _library() -> "ModuleType":
    if not is_there(PACKAGE):
        raise ConfigError(f"downloading needs {PACKAGE}, which is not installed: pip install 'diptych[hub]'")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.utils  # which the package alone does not show

    return huggingface_hub


def _file_of(entry: Any) -> HubFile:
    digest = entry.lfs.sha256 if entry.lfs else entry.blob_id or ""
    return HubFile(
        entry.rfilename, entry.size or 0, digest if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest) else ""
    )


def _require_digests(wanted: HubName, files: Mapping[str, HubFile], names: Sequence[str]) -> None:
    """Raises ConfigError for a file that the Hub does not have, or says no digest of."""
    for name in names:
        if name not in files:
            raise ConfigError(f"{wanted} has no {name}, which its {INDEX} names", param="model")
        if not files[name].digest:
            raise ConfigError(f"the Hub says no digest of {name} of {wanted}: it cannot be checked", param="model")


def _is_plain(name: str) -> bool:
    """Whether a file's name stays within its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and "\\" not in name and ".." not in parts


def _chosen(wanted: HubName, names: Sequence[str]) -> list[str]:
    """The files that are needed, weights first (those that an index names come in addition). Raises ConfigError where
    there are no weights, or several models."""
    if not wanted.tag and (INDEX in names or SINGLE in names):
        beside = [name for name in names if BESIDE.fullmatch(name) or BESIDE_TOO.fullmatch(name)]
        beside = [name for name in beside if not (name.endswith(".index.json") and name != INDEX)]
        weights = [INDEX] if INDEX in names else [SINGLE]
        return [*weights, *sorted(beside, key=lambda name: (name == CONFIG, name))]
    models = gguf_models(names)
    found = with_tag(models, wanted.tag) if wanted.tag else models
    if len(found) == 1:
        return _parts_of(found[0], names)
    if models:
        which = f"{len(found) or 'none'} of its GGUF models {'is' if len(found) < 2 else 'are'} {wanted.tag}"
        says = which if wanted.tag else f"it holds {len(models)} GGUF models"
        choices = ", ".join(f"{wanted.name}:{_tag_of(name, models)}" for name in models)
        raise ConfigError(f"{wanted}: {says}; one of {choices}", param="model")
    held = next((name for name in names if PICKLES.fullmatch(name)), "")
    pickle = f"; {held} may hold code, and is never loaded" if held else ""
    raise ConfigError(f"{wanted} holds neither {SINGLE} nor {INDEX} nor GGUF files{pickle}", param="model")


def _parts_of(name: str, names: Sequence[str]) -> list[str]:
    """All files of the GGUF model that begins with one."""
    if (part := PART.fullmatch(name)) is None:
        return [name]
    return sorted(other for other in names if (of := PART.fullmatch(other)) and (of[1], of[3]) == (part[1], part[3]))


def _tag_of(name: str, models: Sequence[str]) -> str:
    """What chooses one of these GGUF models: its precision where only one has it, else the name of its file."""
    part = PART.fullmatch(name)
    stem = PurePosixPath(part[1] if part else name.removesuffix(".gguf")).name
    precision = re.split(r"[-.](?=[A-Za-z]*\d)", stem)[-1]
    return precision if with_tag(models, precision) == [name] else stem


def _changed(model: HubModel, file: HubFile) -> str:
    return (
        f"{file.name} of {model.wanted} came with another digest than the Hub says, {file.digest}: it was changed on "
        "its way, and is thrown away. The same command begins it anew"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


@contextmanager
def _errors_in_words(wanted: HubName, folder: Path, endpoint: str | None) -> Iterator[None]:
    """What the library raises, as ConfigErrors that say what to do. Never holds a token."""
    from huggingface_hub import constants, errors

    place = endpoint or constants.ENDPOINT
    try:
        yield
    except ConfigError:
        raise
    except errors.GatedRepoError:
        cure = f"accept its terms at its page, and set HF_TOKEN to a token of yours ({place}/{wanted.name})"
        raise ConfigError(f"{wanted} is given only to those who accept its terms: {cure}", param="model") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{wanted} is not on {place}, or only for those who have access: then set HF_TOKEN", param="model"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{wanted} has no revision {wanted.revision}", param="revision") from None
    except errors.OfflineModeIsEnabled:
        raise ConfigError(f"{wanted} cannot be downloaded: HF_HUB_OFFLINE is set", param="model") from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{wanted} is no name of the Hub: {error}", param="model") from None
    except _reaching() as error:
        raise ConfigError(_failure(wanted, folder, place, error), param="model") from None


def _reaching() -> tuple[type[Exception], ...]:
    """The errors of the library's HTTP client, and of the system: which client it is, depends on its release."""
    from huggingface_hub import errors

    return cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)


def _failure(wanted: HubName, folder: Path, place: str, error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full: make room, and the same command goes on with {wanted}"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return f"{folder} cannot be written to: {error.strerror} (HF_HUB_CACHE names another folder)"
    response = getattr(error, "response", None)
    words = (
        f"HTTP {response.status_code}" if response is not None else " ".join(str(error).split()) or type(error).__name__
    )
    return f"{wanted} could not be downloaded from {place}: {words}. The same command goes on with what has come"

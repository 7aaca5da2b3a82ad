"""Names of models as people type them: those of the Hugging Face Hub in their forms, and hints for those of others.

Looks at words alone: opens no file and asks nobody.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+))?")  # organisation/name, of GGUF files with a tag
HUB_ADDRESS = re.compile(
    r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)([^/?#:]+/[^/?#:]+)(?::([\w.-]+))?"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]+))?)?/?(?:[?#].*)?"
)
SPLIT_GGUF = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")  # a part of a model, with its number
# What runs by names of its own, "family:size", and where its makers keep the same on the Hub; {} is the size.
ELSEWHERE = {
    "gpt-oss": "openai/gpt-oss-{}",
    "qwen2.5": "Qwen/Qwen2.5-{}-Instruct",
    "qwen2.5-coder": "Qwen/Qwen2.5-Coder-{}-Instruct",
    "qwen3": "Qwen/Qwen3-{}",
    "llama3.1": "meta-llama/Llama-3.1-{}-Instruct",
    "llama3.2": "meta-llama/Llama-3.2-{}-Instruct",
    "llama3.3": "meta-llama/Llama-3.3-{}-Instruct",
    "gemma2": "google/gemma-2-{}-it",
    "gemma3": "google/gemma-3-{}-it",
    "smollm2": "HuggingFaceTB/SmolLM2-{}-Instruct",
    "granite3.3": "ibm-granite/granite-3.3-{}-instruct",
}
LOWER_SIZES = ("openai/", "google/", "ibm-granite/")  # whose names have sizes such as 20b


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the Hub. tag: which of its GGUF files ("": the only one), such as Q4_K_M or the name of one.
    revision: a branch, tag or commit (None: main)."""

    name: str
    tag: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else self.name


def hub_name(text: str) -> HubName | None:
    """The model of the Hub that is meant by ``ORGANISATION/NAME``, ``ORGANISATION/NAME:TAG`` or an address; None: it is
    neither."""
    if found := HUB_ADDRESS.fullmatch(text):
        name, tag, revision, file = found.groups()
        file_tag = file if file and file.endswith(".gguf") else ""
        return HubName(name, tag or file_tag, None if revision == "main" else revision)
    if (found := HUB_NAME.fullmatch(text)) and not found[1].endswith((".gguf", ".safetensors")):
        return HubName(found[1], found[2] or "")
    return None


def gguf_models(names: Iterable[str]) -> list[str]:
    """The files that begin a model of GGUF files: not the further parts of one, and not what only images need."""
    found = []
    for name in sorted(names):
        part = SPLIT_GGUF.search(name)
        is_model = name.endswith(".gguf") and not name.rpartition("/")[2].startswith(("mmproj", "imatrix"))
        if is_model and (part is None or int(part[1]) == 1):
            found.append(name)
    return found


def with_tag(names: Sequence[str], tag: str) -> list[str]:
    """Those of these GGUF files that a tag names: the end of their name, whatever its case, or all of it."""
    wanted = tag.lower().removesuffix(".gguf")
    before = "-./_" if re.match(r"(?:i?q|b?f|tq|mxfp)\d", wanted) else "-./"  # a precision is not cut in its middle
    found = []
    for name in names:
        stem = SPLIT_GGUF.sub("", name).removesuffix(".gguf").lower()
        end = stem.removesuffix(wanted)
        if end != stem and (not end or end[-1] in before):
            found.append(name)
    return found


def hint_for(text: str, here: Sequence[str]) -> str:
    """What to type instead of a name that is no path and no name of the Hub; "" where nothing is known. here: names of
    the models of this machine."""
    if re.match(r"(?:https?://)?(?:www\.)?ollama\.com/", text):
        family = text.rstrip("/").rpartition("/")[2]
        return hint_for(family, here) or f"it is an address of Ollama; {_HUB}"
    if re.match(r"\w+://", text):
        return f"it is an address; {_HUB}"
    word, _, size = text.lower().partition(":")
    place, near = ELSEWHERE.get(word), [name for name in here if word and word in name.lower()]
    if near and not (place and size):
        return f"here {'are' if len(near) > 1 else 'is'} {', '.join(near[:3])}"
    if place is not None:
        name = place.format("SIZE" if size in ("", "latest") else _size_words(size, place))
        return f"it looks like a name of Ollama; on the Hub it is {name}: diptych pull {name}"
    if size:
        return f"it looks like a name of Ollama; {_HUB}"
    is_word = bool(re.fullmatch(r"\w[\w.-]*", text)) and not text.endswith((".gguf", ".safetensors", ".json", ".bin"))
    return f"it is no folder here; {_HUB}" if is_word else ""


_HUB = "a model of the Hub is named by organisation and name, such as diptych pull Qwen/Qwen3-0.6B"


def _size_words(size: str, place: str) -> str:
    size = size.partition("-")[0]
    return size if place.startswith(LOWER_SIZES) else size.upper()

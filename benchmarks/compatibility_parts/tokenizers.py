"""Variants of a folder's tokenizer files, in Diptych and in transformers: the same tokens and texts, or a refusal.

    python benchmarks/compatibility.py tokenizers [--limit 20] [--json compatibility-tokenizers.json]

The folder of the bundled model, with the config of each class of tokenizers, is changed one field at a time,
and in combinations. Of each variant both encode and decode a number of texts, with and without special tokens, and name
the special tokens that a chat template sees. A variant is

    equal       ids, texts and names are the same
    refused     Diptych raises an error
    not theirs  transformers raises an error
    different   neither: the worst that can happen

Classes that build their pipeline anew in transformers 5 (Qwen2Tokenizer ...) are left out: what they make of the
tokenizer.json of another family is a known regression there. Diptych computes what tokenizer.json says.
"""

import argparse
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import transformers
from common import report

from diptych.control.errors import DiptychError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

CLASSES = ("equal", "refused", "not theirs", "different")
KINDS = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "TokenizersBackend")
TEXTS = (
    "def f(x):\n    return x\n",
    " <new> there<x1> <x2><pad>  <|endoftext|> <x1>  q",
    "Don't , stop .  \u00e9\u0301 \U0001f642\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    "NEW <NEW> Upper",
)
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
TOKEN = {"__type": "AddedToken"}  # as transformers writes them
END = "<|endoftext|>"  # a special token of the bundled model

Files = dict[str, dict[str, Any]]


def variants() -> Iterator[tuple[str, Files]]:
    """Names, and the fields that differ, by file."""
    config = "tokenizer_config"
    yield "plain", {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "mask_token"):
        yield f"{name} known", {config: {name: END}}
        yield f"{name} new", {config: {name: "<new>"}}
        yield f"{name} as a token", {config: {name: {**TOKEN, "content": "<new>", **FLAGS}}}
        yield f"{name} null", {config: {name: None}}
        yield f"{name} in the map", {"special_tokens_map": {name: "<new>"}}
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens", "legacy"):
        for value in (True, False):
            yield f"{name} {value}", {config: {name: value, "bos_token": END, "eos_token": END}}
    for flag in FLAGS:
        token = {"content": "<x1>", **FLAGS, flag: True, "special": False}
        yield f"added {flag}", {config: {"added_tokens_decoder": {"4096": token}}}
        yield f"added special {flag}", {config: {"added_tokens_decoder": {"4096": {**token, "special": True}}}}
    yield (
        "added with a gap",
        {config: {"added_tokens_decoder": {"5000": {"content": "<x1>", **FLAGS, "special": True}}}},
    )
    yield "added in a file of their own", {"added_tokens": {"<x1>": 4096, "<x2>": 4097}}
    yield "additional", {config: {"additional_special_tokens": ["<x1>", "<x2>"]}}
    yield "additional as tokens", {config: {"additional_special_tokens": [{**TOKEN, "content": "<x1>", **FLAGS}]}}
    yield "additional in the map", {"special_tokens_map": {"additional_special_tokens": ["<x1>"]}}
    yield "extra, a list", {config: {"extra_special_tokens": ["<x1>", "<x2>"]}}
    yield "extra, named", {config: {"extra_special_tokens": {"image_token": "<x1>"}}}
    yield "named by itself", {config: {"image_token": "<x1>", "boi_token": "<x2>"}}
    yield "model_max_length", {config: {"model_max_length": 8}}
    yield "clean_up_tokenization_spaces", {config: {"clean_up_tokenization_spaces": True}}
    yield "padding and truncation sides", {config: {"padding_side": "left", "truncation_side": "left"}}
    yield "do_lower_case", {config: {"do_lower_case": True}}
    yield (
        "both files",
        {config: {"pad_token": "<new>"}, "special_tokens_map": {"pad_token": "<x1>", "unk_token": "<x2>"}},
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare them all. Returns rows (a class of tokenizers each), and what differs."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for number, (name, files) in enumerate(list(variants())[: arguments.limit]):
                directory = Path(folder) / f"{kind}-{number}"
                _write(directory, kind, files)
                outcome, detail = compare(directory)
                found[kind][outcome] += 1
                if outcome != "equal":
                    bad.append({"class": kind, "variant": name, "found": outcome, "detail": detail[:300]})
    rows = [{"class": kind, **{name: of[name] for name in CLASSES}} for kind, of in found.items()]
    for entry in bad[: arguments.show]:
        print(json.dumps(entry, ensure_ascii=False))
    return {"rows": rows, "packages": [f"transformers=={metadata.version('transformers')}"], "others": bad}


def compare(directory: Path) -> tuple[str, str]:
    """What becomes of a folder, and why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = transformers.AutoTokenizer.from_pretrained(directory)
            theirs = _seen_by_transformers(reference)
    except Exception as error:
        return "not theirs", f"{type(error).__name__}: {error}"
    try:
        ours = _seen_by_diptych(Tokenizer(directory))
    except DiptychError as error:
        return "refused", error.message
    differences = [f"{name}: {ours[name]} and not {theirs[name]}" for name in theirs if ours[name] != theirs[name]]
    return ("different", "; ".join(differences)) if differences else ("equal", "")


def _seen_by_transformers(tokenizer: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {"names": tokenizer.special_tokens_map}
    for number, text in enumerate(TEXTS):
        for adds in (False, True):
            ids = tokenizer(text, add_special_tokens=adds)["input_ids"]
            seen[f"ids {number} {adds}"] = ids
            for skips in (False, True):
                options = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
                seen[f"text {number} {adds} {skips}"] = tokenizer.decode(ids, **options)
    return seen


def _seen_by_diptych(tokenizer: Tokenizer) -> dict[str, Any]:
    seen: dict[str, Any] = {"names": dict(tokenizer.special_tokens)}
    for number, text in enumerate(TEXTS):
        for adds in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=adds)
            seen[f"ids {number} {adds}"] = ids
            for skips in (False, True):
                seen[f"text {number} {adds} {skips}"] = tokenizer.decode(ids, skip_special_tokens=skips)
    return seen


def _write(directory: Path, kind: str, files: Files) -> None:
    directory.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(BUNDLED_MODEL / name, directory)
    base = {"tokenizer_class": kind, "eos_token": END}
    for name, fields in {"tokenizer_config": {}, **files}.items():
        whole = {**base, **fields} if name == "tokenizer_config" else fields
        (directory / f"{name}.json").write_text(json.dumps(whole))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--limit", type=int, help="cases of each source, for a quick look")
    parser.add_argument("--show", type=int, default=20, help="how many differences are printed")


def main(options: argparse.Namespace) -> None:
    """Print the table and what differs."""
    found = run(options)
    report("Compatibility: tokenizers", found.pop("rows"), options.json, **found)

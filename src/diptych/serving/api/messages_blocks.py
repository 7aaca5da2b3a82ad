"""The blocks of a conversation in /v1/messages as messages of a chat request.

Results of tools are messages of their own, calls and reasoning belong to the assistant's. Calls of tools that another
server ran, and their results, are read like those of the client's tools. What an image or a file holds cannot be read:
in the result of a tool a text says so, anywhere else it is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.stand_ins import is_unreadable, readable_json, stand_in

Block = dict[str, Any]
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
# Blocks that say nothing to the model: sealed by another server, or about the way of its answer.
_SILENT = ("redacted_thinking", "compaction", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal")


def messages_of(role: str, blocks: list[Block], where: str) -> Iterator[dict[str, Any]]:
    """The messages of a turn. Raises InvalidRequestError that names the block."""
    if role == "assistant":
        yield from _assistant(blocks, where)
    else:
        yield from _user(role, blocks, where)


def texts_of(blocks: Any, where: str) -> list[str]:
    """The texts of blocks that are texts, or documents that are."""
    if not isinstance(blocks, list):
        raise InvalidRequestError(f"{where} is no text and no list of blocks", param=where)
    return [_block_text(block, f"{where}.{number}") for number, block in enumerate(blocks)]


def is_result(block: Mapping[str, Any]) -> bool:
    """Whether a block is the result of a tool."""
    kind = block.get("type")
    return isinstance(kind, str) and kind.endswith("tool_result")


def _assistant(blocks: list[Block], where: str) -> Iterator[dict[str, Any]]:
    """Messages of the assistant; a result among its blocks ends one."""
    message: dict[str, Any] = {}  # with lists of texts, which _ended joins
    has_results = False
    for number, block in enumerate(blocks):
        kind, place = block.get("type"), f"{where}.{number}"
        if kind == "text":
            message.setdefault("content", []).append(_field(block, "text", place))
        elif kind == "thinking":
            message.setdefault("reasoning_content", []).append(_field(block, "thinking", place))
        elif kind in _CALLS:
            message.setdefault("tool_calls", []).append(_call(block, place))
        elif is_result(block):
            if message:
                yield _ended(message)
                message = {}
            has_results = True
            yield _result(block, place)
        elif kind not in _SILENT:
            raise _refused(kind, place)
    if message or not has_results:
        yield _ended(message)


def _ended(message: dict[str, Any]) -> dict[str, Any]:
    silence = None if "tool_calls" in message else ""
    content = "".join(message.pop("content")) if "content" in message else silence
    if "reasoning_content" in message:
        message["reasoning_content"] = "\n".join(message["reasoning_content"])
    fields = {"role": "assistant", "content": content, **message}
    return {name: value for name, value in fields.items() if name != "reasoning_content" or value}


def _call(block: Block, where: str) -> dict[str, Any]:
    given = block.get("input") or {}
    arguments = given if isinstance(given, dict) else {"value": given}
    function = {"name": _field(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _user(role: str, blocks: list[Block], where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{where}.{number}"
        if is_result(block):
            yield _result(block, place)
        elif block.get("type") not in _SILENT:
            texts.append(_block_text(block, place))
    if texts or not any(map(is_result, blocks)):
        parts = [{"type": "text", "text": text} for text in texts]
        has_parts = role == "user" and len(parts) > 1  # templates that loop over parts do so for the user's
        yield {"role": role, "content": parts if has_parts else "\n\n".join(texts)}


def _result(block: Block, where: str) -> dict[str, Any]:
    """The message of a tool. Results of the client's tools are lists of blocks; those of servers have forms of their
    own."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and block.get("type") in ("tool_result", "mcp_tool_result"):
        text = "\n".join(_result_text(part, f"{where}.content.{number}") for number, part in enumerate(content))
    else:
        text = readable_json(content)
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}


def _result_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_reference":
        return f"Found tool: {part.get('tool_name')}"
    if kind in ("text", "search_result") or _is_text_document(part):
        return _block_text(part, where)
    if is_unreadable(kind):
        return stand_in(kind)
    if kind is None:
        raise _refused(part, where)
    return readable_json(part)


def _block_text(block: Any, where: str) -> str:
    """The text of a block that may stand anywhere."""
    kind = block.get("type") if isinstance(block, dict) else block
    if kind == "text":
        return _field(block, "text", where)
    if kind == "search_result":
        return "\n".join([*_headings(block, "title", "source"), *texts_of(block.get("content"), f"{where}.content")])
    if not _is_text_document(block):
        raise _refused(kind, where)
    source = block["source"]
    if source["type"] == "text":
        texts = [_field(source, "data", f"{where}.source")]
    else:
        content = source.get("content")
        texts = [content] if isinstance(content, str) else texts_of(content, f"{where}.source.content")
    return "\n".join([*_headings(block, "title", "context"), *texts])


def _headings(block: Block, *names: str) -> list[str]:
    return [str(block[name]) for name in names if block.get(name)]


def _is_text_document(block: Any) -> bool:
    """Whether a block is a document with its text; those of a PDF, a URL or a stored file have none."""
    if not isinstance(block, dict) or block.get("type") != "document" or not isinstance(block.get("source"), dict):
        return False
    return block["source"].get("type") in ("text", "content")


def _field(block: Block, name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name} is no text", param=f"{where}.{name}")
    return text


def _refused(kind: Any, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has the type {str(kind)[:40]!r}, which is not supported", param=where, code="unsupported"
    )

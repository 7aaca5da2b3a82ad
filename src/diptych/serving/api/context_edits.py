"""context_management of /v1/messages, as Anthropic documents it: old results of tools and old reasoning are cleared
from a conversation before it becomes a prompt, and what a summary stands for is left out. Owns what is cleared; asks
for the number of tokens of a conversation.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.messages_blocks import Block, is_result

CLEAR_TOOL_USES, CLEAR_THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
CLEARED = "[tool result cleared]"
DEFAULT_TRIGGER_TOKENS, DEFAULT_KEPT_USES, DEFAULT_KEPT_TURNS = 100_000, 3, 1

Turn = dict[str, Any]  # role and content
Cleared = tuple[Sequence[Turn], int]  # a conversation, and how much was cleared in it
Edit = Callable[[Sequence[Turn]], Cleared]
Count = Callable[[Sequence[Turn]], Awaitable[int]]  # the tokens of a conversation
Clear = Callable[[Edit, Sequence[Turn]], Awaitable[Cleared]]  # does an edit, which may take long


async def at_once(edit: Edit, turns: Sequence[Turn]) -> Cleared:
    """A Clear for short conversations."""
    return edit(turns)


@dataclass(frozen=True, slots=True)
class EditedContext:
    """A conversation after its edits. applied: as the reply names them. left_out: types of edits that this server does
    not know. original_tokens: of the prompt without any edit, where it was counted."""

    turns: Sequence[Turn]
    applied: Sequence[dict[str, Any]] = ()
    left_out: Sequence[str] = ()
    original_tokens: int | None = None


def after_compaction(turns: Sequence[Turn]) -> Sequence[Turn]:
    """The conversation from its last compaction on: a summary stands for all that was before."""
    for number, turn in reversed(list(enumerate(turns))):
        for place, block in reversed(list(enumerate(_blocks(turn)))):
            if block.get("type") == "compaction" and isinstance(block.get("content"), str):
                rest = _blocks(turn)[place + 1 :]
                own = [_with(turn, rest)] if rest else []
                return [{"role": "user", "content": block["content"]}, *own, *turns[number + 1 :]]
    return turns


async def edited_context(
    management: dict[str, Any] | None, turns: Sequence[Turn], count: Count, apply: Clear = at_once
) -> EditedContext:
    """Apply the edits in their order. Raises InvalidRequestError that names the field."""
    where, edits = "context_management.edits", (management or {}).get("edits") or []
    if not isinstance(edits, list):
        raise InvalidRequestError(f"{where} is no list", param=where)
    if len(edits) > edge_limits.CONTEXT_EDITS:
        text = f"{where} has {len(edits)} entries; at most {edge_limits.CONTEXT_EDITS}"
        raise InvalidRequestError(text, param=where)
    applied, left_out = [], []
    original: int | None = None
    known: int | None = None  # tokens of the conversation as it is now: each is counted once
    for number, edit in enumerate(edits):
        place = f"{where}.{number}"
        kind = edit.get("type") if isinstance(edit, dict) else None
        clear: _ToolUses | _Thinking
        least = 0
        if kind == CLEAR_TOOL_USES:
            clear, least = _ToolUses.of(edit, place), _amount(edit, "clear_at_least", "input_tokens", 0, place)
        elif kind == CLEAR_THINKING:
            clear = _Thinking.of(edit, place)
        elif isinstance(kind, str):
            left_out.append(f"context_management.{kind}")
            continue
        else:
            raise InvalidRequestError(f"{place}.type is missing", param=f"{place}.type")
        cleared, num_cleared = await apply(clear, turns)
        if not num_cleared:
            continue
        before = known = await count(turns) if known is None else known
        original = before if original is None else original
        if before <= clear.trigger_tokens:
            continue
        after = await count(cleared)
        num_tokens = max(0, before - after)
        if num_tokens >= least:
            turns, known = cleared, after
            applied.append({"type": kind, clear.counted: num_cleared, "cleared_input_tokens": num_tokens})
    return EditedContext(turns, applied, left_out, original)


@dataclass(frozen=True, slots=True)
class _ToolUses:
    """Clears the results of all calls but the last ``kept``. inputs: whether a tool's arguments are cleared, too."""

    trigger_tokens: int
    trigger_uses: int
    kept: int
    excluded: frozenset[str]
    inputs: bool | frozenset[str]
    counted = "cleared_tool_uses"

    @classmethod
    def of(cls, edit: dict[str, Any], where: str) -> "_ToolUses":
        trigger = edit.get("trigger")
        if isinstance(trigger, dict) and trigger.get("type") == "tool_uses":
            tokens, uses = -1, _amount(edit, "trigger", "tool_uses", 0, where)
        else:
            tokens, uses = _amount(edit, "trigger", "input_tokens", DEFAULT_TRIGGER_TOKENS, where), -1
        inputs = edit.get("clear_tool_inputs") or False
        return cls(
            tokens,
            uses,
            _amount(edit, "keep", "tool_uses", DEFAULT_KEPT_USES, where),
            _names(edit.get("exclude_tools") or [], f"{where}.exclude_tools"),
            inputs if isinstance(inputs, bool) else _names(inputs, f"{where}.clear_tool_inputs"),
        )

    def __call__(self, turns: Sequence[Turn]) -> tuple[Sequence[Turn], int]:
        """The conversation without what is cleared, and the number of calls whose results were."""
        blocks = [block for turn in turns for block in _blocks(turn)]
        uses = {block.get("id"): block.get("name") for block in blocks if block.get("type") == "tool_use"}
        if len(uses) <= self.trigger_uses:
            return turns, 0
        old = list(uses)[: max(0, len(uses) - self.kept)]
        chosen = {use for use in old if uses[use] not in self.excluded}
        results = {
            block.get("tool_use_id")
            for block in blocks
            if block.get("type") == "tool_result" and block.get("content") not in (None, "", CLEARED)
        }
        chosen &= results
        return [_with(turn, [self._cleared(block, chosen) for block in _blocks(turn)]) for turn in turns], len(chosen)

    def _cleared(self, block: Block, chosen: set[Any]) -> Block:
        if block.get("type") == "tool_result" and block.get("tool_use_id") in chosen:
            return {**block, "content": CLEARED}
        is_input = block.get("type") == "tool_use" and block.get("id") in chosen
        wants = self.inputs if isinstance(self.inputs, bool) else block.get("name") in self.inputs
        return {**block, "input": {}} if is_input and wants else block


@dataclass(frozen=True, slots=True)
class _Thinking:
    """Clears the reasoning of all turns of the assistant but the last ``kept`` that have some. A turn goes on until the
    user says something new: results of tools are within it."""

    kept: int | None  # None: all
    trigger_tokens = -1
    counted = "cleared_thinking_turns"

    @classmethod
    def of(cls, edit: dict[str, Any], where: str) -> "_Thinking":
        keep = edit.get("keep")
        if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
            return cls(None)
        return cls(_amount(edit, "keep", "thinking_turns", DEFAULT_KEPT_TURNS, where))

    def __call__(self, turns: Sequence[Turn]) -> tuple[Sequence[Turn], int]:
        """The conversation without what is cleared, and the number of turns whose reasoning was."""
        number, numbers = 0, []
        for turn in turns:
            if turn["role"] == "user" and not (_blocks(turn) and all(map(is_result, _blocks(turn)))):
                number += 1
            numbers.append(number)
        thinking = sorted({at for at, turn in zip(numbers, turns, strict=True) if any(map(_is_thought, _blocks(turn)))})
        old = set() if self.kept is None else set(thinking[: max(0, len(thinking) - self.kept)])
        cleared = [
            _with(turn, [block for block in _blocks(turn) if not _is_thought(block)]) if at in old else turn
            for at, turn in zip(numbers, turns, strict=True)
        ]
        return cleared, len(old)


def _is_thought(block: Block) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _blocks(turn: Turn) -> list[Block]:
    return turn["content"] if isinstance(turn["content"], list) else []


def _with(turn: Turn, blocks: list[Block]) -> Turn:
    return {**turn, "content": blocks} if isinstance(turn["content"], list) else turn


def _names(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(f"{where} is no list of names", param=where)
    return frozenset(value)


def _amount(edit: dict[str, Any], name: str, unit: str, default: int, where: str) -> int:
    """The value of a field such as ``{"type": "tool_uses", "value": 3}``."""
    given = edit.get(name)
    if given is None:
        return default
    value = given.get("value") if isinstance(given, dict) and given.get("type") == unit else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequestError(
            f'{where}.{name} is not {{"type": "{unit}", "value": N}} with a whole number N of at least 0',
            param=f"{where}.{name}",
        )
    return value

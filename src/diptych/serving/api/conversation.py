"""A chat request on its way to the engine: messages and tools through the chat template, then one generation and the
reader of its answers. /v1/chat/completions, /v1/responses and /v1/messages share it.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.answer_stream import Generation
from diptych.serving.answers.generic_tools import has_tool_messages, with_generic_tools
from diptych.serving.answers.grammar.grammar_checker import NO_GRAMMAR
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter, Thinking
from diptych.serving.answers.response.response_parser import ResponseParser
from diptych.serving.answers.response.response_template import ResponseTemplate
from diptych.serving.answers.stream_journal import StreamRecord
from diptych.serving.answers.template_messages import REASONING_NAMES, flatten_content, text_parts
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.parameters import (
    context_limit,
    max_tokens_of,
    options_of,
    sampling_of,
    shown_tokens,
    template_arguments,
    truncated,
)
from diptych.serving.api.protocol import ChatBody, Message, PredictionBody
from diptych.serving.api.reply import ReplyContext
from diptych.serving.api.structured import wanted_grammar, wants_structure
from diptych.serving.api.tools import ToolRequest, requested_tools
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.long_work import LONG

PREDICTED_CHARACTERS = 16  # of a prediction, for each token that an answer can have: the rest is of no use
FEW_MESSAGES = 16  # and tools; a template that refuses renders them ten times: some milliseconds
PARSER_SIZE = 1024  # characters that take as long to encode as a parser takes to read the end of the prompt
_PROMPT_END_TOKENS = 64  # of the prompt, in which the template may have begun the answer


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat request that was submitted. id_length: of tool call ids, where the chat template wants an exact one."""

    generation: Generation
    reader: AnswerReader
    context: ReplyContext
    id_length: int = 0


async def start_chat(
    llm: AsyncLLM, body: ChatBody, model_name: str, tenant: str, id_prefix: str, size: int = 0, *,
    clamps: bool = False, resumed: StreamRecord | None = None,
) -> StartedChat:  # fmt: skip
    """Submit a chat request. size: of its body in bytes. clamps: more tokens than the context has room for means: as
    many as it has. resumed: its stream goes on."""
    ready = llm.require_ready()
    size = chat_size(body, size)
    if resumed is None:
        tools, prompt = await chat_prompt(llm, body, size, tenant, context_limit(body, ready))
    else:
        tools, prompt = requested_tools(body, llm.tokenizer), resumed.head.prompt
    [prompt] = truncated(body, [prompt], ready, body.max_completion_tokens or body.max_tokens)
    if clamps and len(prompt) + (body.max_tokens or 0) > ready.max_model_len:
        body = body.model_copy(update={"max_tokens": None})
    begins_answer = body.add_generation_prompt is not False or continues(body)
    template = llm.tokenizer.response_template if begins_answer else None
    may_call = tools is not None and tools.may_call
    is_read = template is not None and (may_call or template.has_more_than_content)
    parsers: list[ResponseParser] = []
    if is_read and template is not None:
        count = body.n or 1
        made = partial(_parsers, llm.tokenizer, template, prompt, tools, count)
        parsers = await llm.long_work.run(made, max(size, count * PARSER_SIZE), tenant)
    wants_form = tools is not None or wants_structure(body)  # large schemas take long to write
    parser = parsers[0] if parsers else None
    grammar = await asyncio.to_thread(_grammar, body, llm.tokenizer, tools, parser) if wants_form else None
    tried = NO_GRAMMAR if grammar is None else await llm.try_grammar(grammar)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = max_tokens_of(body, len(prompt), ready)
    sampling = await llm.long_work.run(
        lambda: sampling_of(body, max_tokens, logprobs, grammar=tried.text), size if body.logit_bias else 0, tenant
    )
    if body.thinking_token_budget is not None:
        sampling = replace(sampling, **_budget(body.thinking_token_budget, llm.tokenizer, parser))
    if body.prediction is not None:
        sampling = replace(sampling, predicted=await _predicted(llm, body.prediction, ready.max_model_len, tenant))
    shown = shown_tokens(llm.tokenizer, body, template.texts if template is not None else ())
    request_id = f"{id_prefix}{uuid.uuid4().hex}" if resumed is None else resumed.stream_id
    generation = await llm.submit_in_turn(
        [prompt], sampling, request_id, options_of(body, tenant), shown=shown, resumed=resumed
    )
    created = int(time.time()) if resumed is None else resumed.head.created
    generation.not_enforced = tried.left_out
    context = ReplyContext(generation, body, llm.tokenizer, model_name, created)
    return StartedChat(generation, AnswerReader(parsers), context, template.id_length if template is not None else 0)


async def _predicted(llm: AsyncLLM, prediction: PredictionBody, limit: int, tenant: str) -> tuple[int, ...]:
    """The tokens of a prediction, as many as an answer can have at most."""

    def predicted() -> tuple[int, ...]:
        text = flatten_content(prediction.content, "prediction.content")[: limit * PREDICTED_CHARACTERS]
        return tuple(llm.tokenizer.encode(text, add_special_tokens=False)[:limit])

    size = LONG if isinstance(prediction.content, list) else len(prediction.content)
    return await llm.long_work.run(predicted, size, tenant)


def _budget(budget: int, tokenizer: Tokenizer, parser: ResponseParser | None) -> dict[str, Any]:
    """What SamplingParams say of a budget for reasoning; nothing where the model's answers have no reasoning."""
    template = tokenizer.response_template
    if template is None or template.thinks is None or parser is None:
        return {}
    begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in template.thinks)
    marks = {"thinking_begin": () if parser.is_reasoning else begin, "thinking_end": end}
    return {"thinking_budget": budget, **marks}


def _grammar(
    body: ChatBody, tokenizer: Tokenizer, tools: ToolRequest | None, parser: ResponseParser | None
) -> Grammar | None:
    """What the answer has to look like: calls, the wanted form, or either of them."""
    template = tokenizer.response_template
    thinking = None
    if template is not None and parser is not None and template.thinks is not None:
        begin, end = template.thinks
        if parser.is_reasoning or (tokenizer.template_mentions(begin) and not parser.is_prefilled):
            thinking = Thinking(begin, end, parser.is_reasoning)
    writer = GrammarWriter(tokenizer.special_token_ids, thinking)
    wanted = wanted_grammar(body, writer)
    if tools is None or template is None or not tools.may_call:
        return wanted
    needs_form = tools.must_call or wanted is not None or tools.strict & tools.allowed
    if not needs_form:
        return None
    if template.calls is None:
        param = "tool_choice" if tools.must_call else "response_format" if wanted is not None else "tools"
        raise InvalidRequestError(
            f"{param} needs a grammar of tool calls, and there is none for the format {template.name}",
            param=param,
            code="unsupported",
        )
    if tools.must_call:
        return writer.calls(template.calls, tools.callable_schemas, tools.max_calls, tools.strict, tools.positions)
    if wanted is not None:
        if wanted.foreign:
            return wanted
        schemas, beside = tools.callable_schemas, wanted.num_bytes
        calls = writer.calls(template.calls, schemas, tools.max_calls, tools.strict, tools.positions, beside)
        return wanted.otherwise(calls)
    return writer.text_with_calls(template.calls, tools.enforced_schemas, tools.positions)


def chat_size(body: ChatBody, num_bytes: int) -> int:
    """What a chat request counts as in the queue of long work. num_bytes: of its body."""
    is_long = len(body.messages) > FEW_MESSAGES or len(body.tools or ()) > FEW_MESSAGES
    return max(num_bytes, LONG) if is_long else num_bytes


async def chat_prompt(
    llm: AsyncLLM, body: ChatBody, size: int, tenant: str, limit: int | None = None
) -> tuple[ToolRequest | None, list[int]]:
    """The tools and the token ids of the conversation. size: of the request, see chat_size. limit: of tokens. Raises
    InvalidRequestError for documents that the chat template does not read."""

    def prompt() -> tuple[ToolRequest | None, list[int]]:
        tools = requested_tools(body, llm.tokenizer)
        return tools, llm.tokenizer.encode_rendered(_rendered(llm.tokenizer, body, tools), limit)

    return await llm.long_work.run(prompt, size, tenant)


async def chat_length(llm: AsyncLLM, body: ChatBody, size: int, tenant: str) -> int:
    """How many tokens the prompt of the conversation has. See chat_prompt."""

    def length() -> int:
        return llm.tokenizer.count_rendered(_rendered(llm.tokenizer, body, requested_tools(body, llm.tokenizer)))

    return await llm.long_work.run(length, size, tenant)


def _rendered(tokenizer: Tokenizer, body: ChatBody, tools: ToolRequest | None) -> str:
    """The text of the prompt."""
    if body.documents and not tokenizer.template_mentions("documents"):
        message = "documents are given, and the chat template of this model reads none"
        raise InvalidRequestError(message, param="documents", code="unsupported")
    arguments = template_arguments(body)
    messages = conversation(body.messages)
    rendered = list(tools.rendered) if tools is not None else []
    if tokenizer.answer_format.is_generic and (rendered or has_tool_messages(messages)):
        messages = with_generic_tools(messages, rendered, takes_system=tokenizer.takes_system)
    elif tools is not None:
        arguments.setdefault("tools", rendered)
    return tokenizer.render_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continues(body),
        template_arguments=arguments,
    )


def continues(body: ChatBody) -> bool:
    """Whether the answer goes on with the text of the last message: continue_final_message, or Mistral's and DeepSeek's
    ``prefix`` of an assistant's message. Raises InvalidRequestError where that is impossible."""
    last = body.messages[-1]
    extras = last.model_extra or {}
    if not body.continue_final_message and not (last.role == "assistant" and extras.get("prefix") is True):
        return False
    name = "continue_final_message" if body.continue_final_message else f"messages.{len(body.messages) - 1}.prefix"
    if body.add_generation_prompt:
        raise InvalidRequestError(f"{name} and add_generation_prompt exclude each other", param=name)
    if extras.get("tool_calls"):
        raise InvalidRequestError(f"{name}: the last message has tool calls, behind which no text goes on", param=name)
    return True


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as Tokenizer.render_chat takes them: content as it was sent, of which only text can be read; calls
    checked; fields that are null left out, other fields unchanged. Raises InvalidRequestError that names the field."""
    return [_message(message, f"messages.{number}") for number, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    content = message.content
    thoughts: list[str] = []
    if isinstance(content, list):
        if message.role == "assistant":
            content, thoughts = _without_thoughts(content, f"{where}.content")
        content = text_parts(content, f"{where}.content", leaves_out=message.role == "tool")
    fields = {**_extras(message, where), "role": message.role, "content": content}
    if thoughts and not any(name in fields for name in REASONING_NAMES):
        fields["reasoning_content"] = "\n".join(thoughts)
    return fields


def _without_thoughts(content: list[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The parts of an answer that are no reasoning, and the texts of those that are."""
    others, thoughts = [], []
    for part in content:
        thought = part.get("thinking") if part.get("type") == "thinking" else None
        if thought is None:
            others.append(part)
        else:
            thoughts.append(flatten_content(thought, where))
    return others, thoughts


def _extras(message: Message, where: str) -> dict[str, Any]:
    extras = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    calls = extras.get("tool_calls")
    if calls is None:
        return extras
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where}.tool_calls is no list", param=f"{where}.tool_calls")
    if not calls:
        del extras["tool_calls"]
        return extras
    return {**extras, "tool_calls": [_call(call, f"{where}.tool_calls.{number}") for number, call in enumerate(calls)]}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn. Its arguments may be anything: a model wrote them, and may have been cut."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function.name is missing", param=where)
    return {**call, "type": "function", "function": {**function, "arguments": function.get("arguments")}}


def _parsers(
    tokenizer: Tokenizer, template: ResponseTemplate, prompt: list[int], tools: ToolRequest | None, count: int
) -> list[ResponseParser]:
    prompt_end = tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
    schemas = tools.callable_schemas if tools is not None and tools.may_call else None
    max_calls = tools.max_calls if tools is not None else None
    special = tokenizer.special_token_ids
    return [ResponseParser(template, prompt_end, schemas, max_calls, special) for _ in range(count)]

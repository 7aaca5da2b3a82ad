"""A chat request on its way to the engine: messages and tools through the chat template, then one generation and the
reader of its answers. /v1/chat/completions, /v1/responses and /v1/messages share it.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.answer_stream import Generation
from diptych.serving.answers.generic_tools import has_tool_messages, with_generic_tools
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter, Thinking
from diptych.serving.answers.response.response_parser import ResponseParser
from diptych.serving.answers.response.response_template import ResponseTemplate
from diptych.serving.answers.stream_journal import StreamRecord
from diptych.serving.answers.tokenizer import Tokenizer, flatten_content
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.parameters import (
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

_PROMPT_END_TOKENS = 64  # of the prompt, in which the template may have begun the answer


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat request that was submitted. id_length: of tool call ids, where the chat template wants an exact one."""

    generation: Generation
    reader: AnswerReader
    context: ReplyContext
    id_length: int = 0


async def start_chat(
    llm: AsyncLLM, body: ChatBody, model_name: str, tenant: str, id_prefix: str, *, clamps: bool = False,
    resumed: StreamRecord | None = None,
) -> StartedChat:  # fmt: skip
    """Submit a chat request. clamps: more tokens than the context has room for means: as many as it has. resumed: its
    stream goes on."""
    ready = llm.require_ready()
    tools = requested_tools(body, llm.tokenizer)
    prompt = await chat_prompt(llm, body, tools) if resumed is None else resumed.head.prompt
    [prompt] = truncated(body, [prompt], ready, body.max_completion_tokens or body.max_tokens)
    if clamps and len(prompt) + (body.max_tokens or 0) > ready.max_model_len:
        body = body.model_copy(update={"max_tokens": None})
    template = llm.tokenizer.response_template if body.add_generation_prompt is not False else None
    may_call = tools is not None and tools.may_call
    is_read = template is not None and (may_call or template.has_more_than_content)
    parsers = _parsers(llm.tokenizer, template, prompt, tools, body.n or 1) if is_read and template is not None else []
    wants_form = tools is not None or wants_structure(body)  # large schemas take long to write
    parser = parsers[0] if parsers else None
    grammar = await asyncio.to_thread(_grammar, body, llm.tokenizer, tools, parser) if wants_form else None
    text = "" if grammar is None else await llm.try_grammar(grammar)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, max_tokens_of(body, len(prompt), ready), logprobs, grammar=text)
    if body.thinking_token_budget is not None:
        sampling = replace(sampling, **_budget(body.thinking_token_budget, llm.tokenizer, parser))
    if body.prediction is not None:
        sampling = replace(sampling, predicted=await _predicted(llm, body.prediction, ready.max_model_len))
    shown = shown_tokens(llm.tokenizer, body, template.texts if template is not None else ())
    request_id = f"{id_prefix}{uuid.uuid4().hex}" if resumed is None else resumed.stream_id
    generation = llm.submit([prompt], sampling, request_id, options_of(body, tenant), shown=shown, resumed=resumed)
    created = int(time.time()) if resumed is None else resumed.head.created
    context = ReplyContext(generation, body, llm.tokenizer, model_name, created)
    return StartedChat(generation, AnswerReader(parsers), context, template.id_length if template is not None else 0)


async def _predicted(llm: AsyncLLM, prediction: PredictionBody, limit: int) -> tuple[int, ...]:
    """The tokens of a prediction, as many as an answer can have at most."""
    text = flatten_content(prediction.content, "prediction.content")
    return tuple((await llm.encode(text, add_special_tokens=False))[:limit])


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
        return writer.calls(template.calls, tools.callable_schemas, tools.max_calls, tools.positions)
    if wanted is not None:
        if wanted.foreign:
            return wanted
        calls = writer.calls(template.calls, tools.callable_schemas, tools.max_calls, tools.positions)
        return wanted.otherwise(calls)
    return writer.text_with_calls(template.calls, tools.enforced_schemas, tools.positions)


async def chat_prompt(llm: AsyncLLM, body: ChatBody, tools: ToolRequest | None) -> list[int]:
    """The token ids of the conversation. Raises InvalidRequestError for documents that the chat template does not
    read."""
    if body.documents and not llm.tokenizer.template_mentions("documents"):
        message = "documents are given, and the chat template of this model reads none"
        raise InvalidRequestError(message, param="documents", code="unsupported")
    arguments = template_arguments(body)
    messages = conversation(body.messages)
    rendered = list(tools.rendered) if tools is not None else []
    if llm.tokenizer.answer_format.is_generic and (rendered or has_tool_messages(messages)):
        messages = with_generic_tools(messages, rendered, takes_system=llm.tokenizer.takes_system)
    elif tools is not None:
        arguments.setdefault("tools", rendered)
    return await llm.encode_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_arguments=arguments,
    )


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: content flattened to text, arguments of tool calls as objects, fields
    that are null left out, other fields unchanged."""
    return [
        {
            **_extras(message, f"messages.{number}"),
            "role": message.role,
            "content": flatten_content(message.content, f"messages.{number}.content"),
        }
        for number, message in enumerate(messages)
    ]


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
    """A call of an earlier turn. Chat templates write its arguments as JSON, so they get an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function.name is missing", param=where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequestError(
                f"{where}.function.arguments is no valid JSON", param=f"{where}.function.arguments"
            ) from None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where}.function.arguments is no JSON object", param=f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _parsers(
    tokenizer: Tokenizer, template: ResponseTemplate, prompt: list[int], tools: ToolRequest | None, count: int
) -> list[ResponseParser]:
    prompt_end = tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
    schemas = tools.callable_schemas if tools is not None and tools.may_call else None
    max_calls = tools.max_calls if tools is not None else None
    special = tokenizer.special_token_ids
    return [ResponseParser(template, prompt_end, schemas, max_calls, special) for _ in range(count)]

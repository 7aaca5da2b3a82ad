"""What both kinds of replies share: the head of every chunk, usage with latency, and log-probabilities.

Owns the JSON shapes of usage and logprobs. Must never wait.
"""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from diptych.control.slo import NS_PER_MS
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import Delta, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.miss_views import client_view
from diptych.serving.api.protocol import GenerationBody
from diptych.serving.output_builder import request_metrics

encode_json = msgspec.json.Encoder().encode


class ReplyContext:
    """One request's constant facts, and its usage."""

    def __init__(
        self, generation: Generation, body: GenerationBody, tokenizer: Tokenizer, model: str, created: int
    ) -> None:
        options = body.stream_options
        self.generation = generation
        self.tokenizer = tokenizer
        self.id = generation.request_id
        self.model = model
        self.created = created
        self.n = body.n or 1
        self.wants_token_ids = bool(body.return_token_ids)
        self.wants_latency = bool(body.return_latency)
        self.wants_misses = bool(body.return_prefix_misses)
        self.wants_usage = self.wants_latency or self.wants_misses or bool(options and options.include_usage)
        self.wants_continuous_usage = bool(options and options.continuous_usage_stats)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every chunk and reply begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def event_prefix(self, kind: str) -> bytes:
        """A server-sent event up to the list of choices, encoded once per request."""
        return b"data: " + encode_json(self.head(kind))[:-1] + b',"choices":['

    def plain_event(self, kind: str, choice: bytes) -> bytes:
        """A format string for a whole event. choice: a format string, too; its values come first, then those of the
        ``usage_suffix``."""
        return self.event_prefix(kind).replace(b"%", b"%%") + choice + b"%b"

    def token_ids(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """The token ids of a choice, when they were asked for; the first chunk of a sequence has its prompt's too."""
        if not self.wants_token_ids:
            return {}
        prompt = self.generation.streams[delta.index].prompt_token_ids
        return {"token_ids": delta.token_ids, **({"prompt_token_ids": prompt} if is_first else {})}

    def usage(self, *, is_final: bool = True) -> dict[str, Any]:
        """Tokens so far, and with ``return_latency`` at the end the latency breakdown of the slowest answer."""
        sequences = self.generation.streams
        prompts = sequences[:: self.n]
        num_prompt = sum(len(sequence.prompt_token_ids) for sequence in prompts)
        num_output = sum(sequence.num_tokens for sequence in sequences)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in prompts)},
        }
        if self.wants_misses and is_final:
            misses = [client_view(sequence.prefix_miss) for sequence in prompts]
            usage["prompt_tokens_details"]["prefix_misses"] = misses
        if self.wants_latency and is_final and (metrics := request_metrics(sequences)):
            latency = metrics.latency
            parts = {
                "queue_ms": latency.queue_ns / NS_PER_MS,
                "prefill_ms": latency.prefill_ns / NS_PER_MS,
                "handoff_ms": latency.handoff_ns / NS_PER_MS,
                "decode_ms": latency.decode_ns / NS_PER_MS,
            }
            usage["latency"] = {**parts, "total_ms": sum(parts.values())}
        return usage

    def usage_suffix(self) -> bytes:
        """The end of an event after its choices: with usage when every chunk carries it."""
        if not self.wants_continuous_usage:
            return b"]}\n\n"
        return b'],"usage":' + encode_json(self.usage(is_final=False)) + b"}\n\n"


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; what is no JSON object (an answer that was cut) is a text in one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"incomplete": arguments}
    return value if isinstance(value, dict) else {"value": value}


def gather(deltas: Iterable[Delta], count: int) -> list[Delta]:
    """All deltas of each of ``count`` sequences as one."""
    whole = [Delta(index, "", [], []) for index in range(count)]
    texts: list[list[str]] = [[] for _ in whole]
    for delta in deltas:
        answer = whole[delta.index]
        texts[delta.index].append(delta.text)
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.finish_reason = delta.finish_reason or answer.finish_reason
    for answer, pieces in zip(whole, texts, strict=True):
        answer.text = "".join(pieces)
    return whole


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], token_ids: Iterable[int], offset: int, count: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The logprobs object of completions; None entries stand for a prompt's first token. offset: of the text."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=False):
        text = tokenizer.token_text(token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if entry is None else entry.logprob)
        best = {} if entry is None else {tokenizer.token_text(top): value for top, value in entry.top[:count]}
        if entry is not None:
            best.setdefault(text, entry.logprob)
        tops.append(best or None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(entries: Iterable[TokenLogprobs], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The logprobs object of chat completions."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [
        {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*top) for top in entry.top[:count]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: list[TokenLogprobs | None] | None, tokenizer: Tokenizer) -> list[Any] | None:
    """vLLM's prompt_logprobs: per position a map of token id to logprob, rank and text; None for the first."""
    if entries is None:
        return None
    rows: list[Any] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row: dict[str, Any] = {}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            row[str(token_id)] = {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
        own = {"logprob": entry.logprob, "rank": None, "decoded_token": tokenizer.token_text(entry.token_id)}
        row.setdefault(str(entry.token_id), own)
        rows.append(row)
    return rows

"""What an engine is asked for a client's stream: the path, the body, and how its reply differs from the client's.

Asked as the client asked; after the tokens that the client has, as a completion; or for the tokens of a rendered chat.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.serving.front.relay_request import COMPLETION_PATH, encode_json
from diptych.serving.front.relay_stream import RelayStream
from diptych.serving.front.tokenized_prompt import GENERATE_PATH, generate_fields


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is sent. resumes: the answer goes on after tokens of another engine. adds_ids, adds_usage: the engine was
    asked for more than the client has asked for. writes_as: the engine gets and gives tokens and text, and the front
    writes the answer to a chat with this model's name ("": the engine writes it)."""

    path: str
    body: bytes
    resumes: bool = False
    adds_ids: bool = False
    adds_usage: bool = False
    writes_as: str = ""

    @property
    def is_rewritten(self) -> bool:
        """Whether the client gets events that the front writes."""
        return self.resumes or bool(self.writes_as)


def id_header(attempt_id: str) -> bytes:
    """The header by which an engine that reports its steps names the request in them, and others in their logs."""
    return b"X-Request-Id: %b\r\n" % attempt_id.encode()


@dataclass(frozen=True, slots=True)
class RequestFields:
    """What is asked of an engine for a stream, from its beginning or after the tokens that its client has; fields: of
    the body. writes_as: see EngineRequest."""

    path: str
    fields: Mapping[str, Any]
    resumes: bool = False
    writes_as: str = ""

    def question(self, stream: RelayStream, more: Mapping[str, Any] = {}) -> EngineRequest:
        """The request as it is sent, with more fields."""
        body = encode_json({**self.fields, **more})
        if self.resumes or self.writes_as:
            return EngineRequest(self.path, body, resumes=self.resumes, writes_as=self.writes_as)
        asked = stream.request
        return EngineRequest(
            self.path,
            body,
            adds_ids="return_token_ids" in self.fields and "return_token_ids" not in asked.fields,
            adds_usage="stream_options" in self.fields and not asked.wants_usage,
        )


def fields_of(stream: RelayStream, model: str, changes: Mapping[str, Any], max_model_len: int) -> RequestFields:
    """The request's fields for an engine that calls the model so. changes: what its adapter adds. max_model_len: of
    prompt and answer (0: not known)."""
    request = stream.request
    if stream.num_tokens:
        assert stream.prompt_ids is not None
        known = stream.token_ids[: len(stream.token_ids) - stream.num_textless]
        fields = request.continuation_fields(model, stream.prompt_ids, known, max_model_len)
        return RequestFields(COMPLETION_PATH, fields, resumes=True)
    return RequestFields(request.path, request.engine_fields(model, changes))


def token_fields_of(stream: RelayStream, model: str, attempt_id: str) -> RequestFields | None:
    """The request's fields for an engine that takes the tokens of a chat from their beginning; None: it must get the
    client's request."""
    question = stream.request.question
    if question is None or stream.num_tokens:
        return None
    fields = generate_fields(question, model, attempt_id, is_stream=stream.request.is_stream)
    return RequestFields(GENERATE_PATH, fields, writes_as=model)

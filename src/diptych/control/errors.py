"""The exceptions that Diptych raises on purpose.

    DiptychError
    |-- ConfigError              a setting is wrong (also a ValueError)
    |   `-- UnsupportedModelError    a checkpoint asks for something we do not have
    |-- ConstraintError          an answer under a grammar cannot go on (also a ValueError)
    |   `-- GrammarLimitError        400, code grammar_too_complex (also an InvalidRequestError)
    |-- RequestError             one request cannot be served; carries its HTTP status
    |   |-- InvalidRequestError      400
    |   |   `-- ContextLengthError       400, code context_length_exceeded
    |   |-- AuthenticationError      401
    |   |-- PermissionDeniedError    403
    |   |-- NotFoundError            404
    |   |-- ConflictError            409
    |   |-- BodyTooLargeError        413
    |   |-- OverloadedError          429, with Retry-After
    |   |-- ChatTemplateError        501
    |   `-- UnavailableError         503, with Retry-After
    |       |-- DrainingError              code draining
    |       `-- StepMemoryError            code out_of_memory
    |-- WorkerError              the worker failed (500)
    `-- CoreFailedError          what decides or computes has failed by a defect of its own (500)

BrokenInvariantError is none of these: it is a defect, and must not be taken for an error that somebody handles.

Each carries what the OpenAI error format needs: message, type, param and code. An ErrorRecord is an error as data: in
events, logs and messages between processes.
"""

from dataclasses import dataclass


class DiptychError(Exception):
    """Base of all errors raised on purpose."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(DiptychError, ValueError):
    """A setting names an impossible or useless value; the message names the field, the value and the limit."""

    type = "configuration_error"


class UnsupportedModelError(ConfigError):
    """A checkpoint needs a feature that this engine does not have; the message names it."""

    code = "unsupported_model"


class ConstraintError(DiptychError, ValueError):
    """A constraint of an answer (see constraint.py) allows no token, or was given one that it does not allow."""


class RequestError(DiptychError):
    """One request cannot be served; others are not affected. retry_after: of Retry-After, as it is to be said ("": by
    retry_after_s)."""

    type = "invalid_request_error"
    retry_after_s: float | None = None
    retry_after: str = ""


class InvalidRequestError(RequestError):
    """The request is malformed or a value is out of range; ``param`` names the field."""

    status = 400


class GrammarLimitError(ConstraintError, InvalidRequestError):
    """A client's grammar takes more than a limit of the compiler, which the message names: the answer ends where that
    shows, and others go on."""

    code = "grammar_too_complex"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit in the model's context or in the KV cache."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    """This caller may not do that."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(RequestError):
    """The model or the path does not exist here."""

    status = 404
    type = "not_found_error"


class ConflictError(RequestError):
    """What was asked for cannot be done in the present state of the server."""

    status = 409
    code = "conflict"


class BodyTooLargeError(RequestError):
    """The HTTP body is larger than the server accepts."""

    status = 413
    code = "body_too_large"


class OverloadedError(RequestError):
    """A queue limit is reached; try again after ``retry_after_s`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class ChatTemplateError(RequestError):
    """The chat template among the model's files cannot be used, so that no conversation becomes a prompt. Neither the
    client nor the server can mend that."""

    status = 501
    type = "model_error"
    code = "chat_template"


class UnavailableError(RequestError):
    """The server cannot take requests now (starting, draining, worker lost)."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DrainingError(UnavailableError):
    """The server ends: what it has not answered by then, and whatever comes later, is to be asked of another."""

    code = "draining"

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message)


class StepMemoryError(UnavailableError):
    """A step took more memory than its device had left. Its requests end, others go on, and the KV cache gets smaller;
    the same request may well be served when it comes again."""

    code = "out_of_memory"


class WorkerError(DiptychError):
    """A worker process failed or was lost while it held requests."""

    code = "worker_failed"


class CoreFailedError(DiptychError):
    """A core or its driver has failed by a defect; the message names it and the error."""

    code = "core_failed"


class BrokenInvariantError(AssertionError):
    """What must always hold of a state does not. The message has counts and ids, never a text of a request.

    Raised where a plain ``assert`` would vanish with ``python -O``."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as data. kind: the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: DiptychError) -> "ErrorRecord":
        """The record of an error."""
        return cls(type(error).__name__, error.message, error.param, error.code)

    def exception(self) -> DiptychError:
        """The error again; an unknown kind becomes a WorkerError."""
        error = _CLASSES.get(self.kind, WorkerError)(self.message)
        error.param, error.code = self.param, self.code
        return error


_CLASSES: dict[str, type[DiptychError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        UnsupportedModelError,
        InvalidRequestError,
        GrammarLimitError,
        ContextLengthError,
        OverloadedError,
        UnavailableError,
        StepMemoryError,
        WorkerError,
        CoreFailedError,
    )
}

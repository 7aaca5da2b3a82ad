"""How long a client waits besides the worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What a client of the HTTP server waits besides the worker: nanoseconds from sending a request to the worker's
    notice of it and from a first token to the client, together; a part for each request and one per prompt token."""

    request_ns: float = 0.0
    prompt_token_ns: float = 0.0

    def delay_ns(self, prompt_tokens: int) -> int:
        """Time to add to the time to first token that a worker gives, in nanoseconds."""
        return round(self.request_ns + self.prompt_token_ns * prompt_tokens)

"""The reply to a request that was passed on: bytes of an engine, straight to the connection as they come."""

from collections.abc import Callable, Sequence

from starlette.types import Scope

from diptych.serving.answers.answer_stream import Delta
from diptych.serving.api import responses
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.responses import GenerationResponse, MoreHeaders
from diptych.serving.front.relay_stream import RELAY, RelayGeneration, RelayWriter
from diptych.serving.served_fleet import ServedFleet


class RelayResponse(GenerationResponse):
    """A GenerationResponse whose events are written without records in between."""

    def __init__(
        self, front: ServedFleet, generation: RelayGeneration, *, stream: bool, more_headers: MoreHeaders
    ) -> None:
        super().__init__(front, generation, RelayWriter(), stream=stream, dialect=RELAY, more_headers=more_headers)
        self._relay = generation

    async def content(self, deltas: Sequence[Delta]) -> bytes:
        """The whole reply, which is there already."""
        return self._writer.body(deltas)

    def _pause_due_s(self) -> float:
        last_s = self._relay.relay.last_token_s  # whose chunk may have been written without this reply
        return max(super()._pause_due_s(), last_s + responses.SILENCE_S if last_s else 0.0)

    def _direct_writes(self, scope: Scope) -> Callable[[], bool] | None:
        generation = self._relay
        body: DirectBody | None = scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body")
        if body is None:
            return None
        generation.count_unsent = body.count_unsent
        generation.relay.write_chunk = body.write_chunk
        return body.writes(generation.take_data)

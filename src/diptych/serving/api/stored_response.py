"""A reply of /v1/responses that is stored before its end is sent, so that the end says whether it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.serving.answers.answer_stream import Delta, Generation
from diptych.serving.api.api_flavour import RESPONSES
from diptych.serving.api.reply import encode_json
from diptych.serving.api.response_store import ResponseStore
from diptych.serving.api.responses import GenerationResponse
from diptych.serving.api.responses_writer import Reply, ResponsesWriter
from diptych.serving.served_fleet import ServedFleet


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a response is stored. new_items: of its request."""

    store: ResponseStore
    tenant: str
    previous: str | None
    new_items: list[dict[str, Any]]

    async def keep(self, reply: Reply) -> None:
        """Store it; a reply that could not be stored says so: ``store`` is false, and ``warnings`` has the reason."""
        items = [*self.new_items, *reply["output"]]
        why = await self.store.put_in_time(reply, self.tenant, self.previous, items)
        if why:
            message = f"the response is not stored, and cannot be continued by its id: {why}"
            reply |= {"store": False, "warnings": [{"code": "response_not_stored", "message": message}]}


class StoredResponse(GenerationResponse):
    """A GenerationResponse of a ResponsesWriter. keeping: None: it is not stored."""

    def __init__(
        self,
        llm: ServedFleet,
        generation: Generation,
        writer: ResponsesWriter,
        keeping: Keeping | None,
        *,
        stream: bool,
    ) -> None:
        super().__init__(llm, generation, writer, stream=stream, flavour=RESPONSES)
        self._whole = writer
        self._keeping = keeping

    async def content(self, deltas: Sequence[Delta]) -> bytes:
        """The reply as JSON, given all deltas in order."""
        await self.written(lambda: self._whole.read(deltas))
        await self._keep()
        return await self.written(lambda: encode_json(self._whole.ended))

    async def _last_events(self) -> bytes:
        await self._keep()
        return self._whole.last_events()

    async def _keep(self) -> None:
        assert self._whole.ended is not None
        if self._keeping is not None:
            await self._keeping.keep(self._whole.ended)

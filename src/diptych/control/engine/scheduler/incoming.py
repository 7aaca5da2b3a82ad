"""Requests that another worker prefills and this one will decode: those that wait for blocks, those that wait for KV,
those that may join.

Owns these three places; the scheduler decides when a request moves from one to the next.
"""

from diptych.control.request import Request


class Incoming:
    """In order of arrival: ``waiting`` for blocks, ``reserved`` until the KV has come, ``delivered`` until the next
    plan."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.reserved: dict[str, Request] = {}
        self.delivered: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that hold blocks."""
        return len(self.reserved) + len(self.delivered)

    def holders(self) -> list[Request]:
        """Those that hold blocks."""
        return [*self.reserved.values(), *self.delivered.values()]

    def seat(self, request: Request) -> None:
        """The first in the queue got its blocks."""
        del self.waiting[request.request_id]
        self.reserved[request.request_id] = request

    def deliver(self, request: Request) -> None:
        """Its KV is here, and its first token is known."""
        del self.reserved[request.request_id]
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_prompt_tokens
        request.num_output_tokens = 1
        self.delivered[request.request_id] = request

    def take_delivered(self) -> list[Request]:
        """Those that may join the decode batch now."""
        delivered = list(self.delivered.values())
        self.delivered.clear()
        return delivered

    def remove(self, request_id: str) -> None:
        """The request ends, wherever it is."""
        for place in (self.waiting, self.reserved, self.delivered):
            place.pop(request_id, None)

"""Requests that another worker prefills and this one will decode: those that wait for blocks, those that wait for KV,
those that may join.

Owns these three places; the scheduler decides when a request moves from one to the next.
"""

from diptych.control.request import Request


class Incoming:
    """In order of arrival: ``waiting`` for blocks (by standing first), ``reserved`` until the KV has come,
    ``delivered`` until the next plan. ``recalled``: those of the reserved whose blocks a stream needs."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.reserved: dict[str, Request] = {}
        self.delivered: dict[str, Request] = {}
        self.recalled: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that hold blocks."""
        return len(self.reserved) + len(self.delivered)

    def holders(self) -> list[Request]:
        """Those that hold blocks."""
        return [*self.reserved.values(), *self.delivered.values()]

    def add(self, request: Request) -> None:
        """It waits for blocks, before those whose standing is higher; all before those that give way."""
        place = (request.gives_way, request.standing)
        behind = [other for other in self.waiting.values() if (other.gives_way, other.standing) > place]
        self.waiting[request.request_id] = request
        for other in behind:
            self.waiting[other.request_id] = self.waiting.pop(other.request_id)

    def recall(self, stream: Request, num_blocks: int) -> list[Request]:
        """Ask for the blocks of reservations that stand behind this stream, the latest first, until these hold so many:
        one at least. None while others are on their way back."""
        if self.recalled:
            return []
        for request in reversed(self.reserved.values()):
            if request.order_key > stream.order_key and (num_blocks > 0 or not self.recalled):
                self.recalled[request.request_id] = request
                num_blocks -= len(request.block_ids) - request.num_shared_blocks
        return list(self.recalled.values())

    def seat(self, request: Request) -> None:
        """The first in the queue got its blocks."""
        del self.waiting[request.request_id]
        self.reserved[request.request_id] = request

    def deliver(self, request: Request) -> None:
        """Its KV is here, and its first token is known."""
        del self.reserved[request.request_id]
        self.recalled.pop(request.request_id, None)
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
        for place in (self.waiting, self.reserved, self.delivered, self.recalled):
            place.pop(request_id, None)

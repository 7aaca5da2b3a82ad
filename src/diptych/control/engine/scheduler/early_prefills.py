"""Prompts prefilled before the decode worker has reserved blocks.

Owns how many blocks these hold and which of them wait for room. Early prefills leave room for one prompt of maximum
length, so a prompt whose decode blocks are reserved always fits, and workers do not wait for one another in a circle.
"""

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.waiting_queue import WaitingQueue
from diptych.control.request import Request


class EarlyPrefills:
    """longest: blocks of the longest prompt. parked: those of the prompts for which there is no room."""

    def __init__(self, kv: KVCacheManager, longest: int) -> None:
        self._kv = kv
        self._longest = longest
        self._blocks: dict[str, int] = {}
        self.parked = WaitingQueue()

    @property
    def room(self) -> int:
        """Blocks that more of these may take."""
        taken = sum(self._blocks.values()) + self._longest + self._kv.config.watermark_blocks
        return self._kv.pool.num_blocks - taken

    def has_room(self, request: Request) -> bool:
        """Whether this prompt may be computed, if it is one of these."""
        return not request.is_early_prefill or self._kv.num_blocks_for(request.num_tokens) <= self.room

    def admitted(self, request: Request) -> None:
        """This prompt got its blocks."""
        if request.is_early_prefill:
            self._blocks[request.request_id] = request.num_blocks

    def forget(self, request_id: str) -> None:
        """Stop counting this request as prefilled early."""
        self._blocks.pop(request_id, None)

    def take_unparked(self) -> list[Request]:
        """Parked prompts that there is room for again."""
        requests: list[Request] = []
        room = self.room if self.parked else 0
        while (request := self.parked.head()) is not None:
            room -= self._kv.num_blocks_for(request.num_tokens)
            if room < 0:
                break
            self.parked.remove(request)
            requests.append(request)
        return requests

"""A publisher of KV events as vLLM's and SGLang's: PUB, and a ROUTER that repeats. It can lose what it publishes."""

import asyncio
import contextlib
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio


class FakePublisher:
    """form: of events, "array" or "map". kept: batches that it can repeat. lose: messages that are lost from now on."""

    def __init__(self, form: str = "array", kept: int = 10_000) -> None:
        self.form = form
        self.lose = 0
        self.number = 0
        self.num_asked = 0  # times that it was to repeat something
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._task = asyncio.create_task(self._repeat())

    def restart(self) -> None:
        """Numbers begin again, and nothing from before is repeated."""
        self.number = 0
        self._kept.clear()

    async def publish(self, *events: dict[str, Any]) -> None:
        """One batch."""
        content = [dict(event) if self.form == "map" else list(event.values()) for event in events]
        await self.publish_bytes(msgspec.msgpack.encode([0.5, content, 0]))

    async def publish_bytes(self, payload: bytes) -> None:
        """One batch, or what is none."""
        self._kept.append((self.number, payload))
        number, self.number = self.number, self.number + 1
        if self.lose:
            self.lose -= 1
        else:
            await self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def _repeat(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.num_asked += 1
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        """End."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


def stored(hashes: list[Any], parent: Any, token_ids: list[int], size: int, **more: Any) -> dict[str, Any]:
    """BlockStored."""
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids,
             "block_size": size, "lora_id": None, "medium": "GPU"}  # fmt: skip
    return {**event, **more}


def removed(hashes: list[Any], medium: str = "GPU") -> dict[str, Any]:
    """BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}

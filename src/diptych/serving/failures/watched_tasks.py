"""Background tasks that no other code awaits: the end of one by an exception is reported, never lost."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

OnFailure = Callable[[BaseException], None]


def start_watched(work: Coroutine[Any, Any, None], name: str, on_failure: OnFailure) -> asyncio.Task[None]:
    """A task; on_failure: called in the loop with the exception that ends it. A cancellation is none."""
    task = asyncio.get_running_loop().create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            on_failure(error)

    task.add_done_callback(ended)
    return task


class WatchedTasks:
    """The watched tasks of one owner, held until they end. on_failure: of any of them."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Begin."""
        task = start_watched(work, name, self._on_failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel those that run, and wait for their ends."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

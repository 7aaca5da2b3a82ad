"""Orders for attempts whose grammar is being compiled: they are held back, so that no step waits for a compiler.

The orders of an attempt keep their order. One that is dropped meanwhile begins without its grammar, to be dropped.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from diptych.control.commands import Drop, Prefill, Reserve, Serve, WorkerCommand
from diptych.serving.link.messages import AttemptTokens, Order

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars

Held = tuple[Order, WorkerCommand]


class AwaitedGrammars:
    """The room where orders wait. ``fileno`` becomes readable when a grammar is ready."""

    def __init__(self, grammars: "Grammars") -> None:
        self._grammars = grammars
        self._held: dict[str, list[Held]] = {}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        grammars.on_compiled = self._wake

    def fileno(self) -> int:
        """A descriptor for a poller."""
        return self._reading

    def holds(self, order: Order, command: WorkerCommand) -> bool:
        """Whether an order has to wait; it comes back from ``released``."""
        attempt_id = getattr(command, "attempt_id", None)
        if attempt_id in self._held:
            self._held[attempt_id].append((order, command))
            return True
        tokens = order.tokens
        if tokens is None or not tokens.sampling.grammar or not isinstance(command, Serve | Reserve | Prefill):
            return False
        if self._grammars.prepare(tokens.sampling.grammar) or isinstance(command, Reserve):
            return False  # a reserved attempt needs its grammar when its KV has come
        self._held[command.attempt_id] = [(order, command)]
        return True

    def released(self) -> Iterator[Held]:
        """Orders that need wait no longer."""
        if not self._held:
            return
        with contextlib.suppress(BlockingIOError):
            os.read(self._reading, 4096)
        for attempt_id, orders in list(self._held.items()):
            first, command = orders[0]
            assert first.tokens is not None
            if any(isinstance(later, Drop) for _, later in orders):
                orders[0] = (_without_grammar(first, first.tokens), command)
            elif not self._grammars.prepare(first.tokens.sampling.grammar):
                continue
            del self._held[attempt_id]
            yield from orders

    def clear(self) -> None:
        """None of the orders is wanted any more."""
        self._held.clear()

    def _wake(self) -> None:
        """Wake the worker; called in the thread that compiles."""
        with contextlib.suppress(BlockingIOError):  # full: the reader wakes anyway
            os.write(self._writing, b"x")

    def close(self) -> None:
        """Give the descriptor back."""
        self._grammars.on_compiled = lambda: None
        os.close(self._reading)
        os.close(self._writing)


def _without_grammar(order: Order, tokens: AttemptTokens) -> Order:
    return Order(
        order.command,
        AttemptTokens(tokens.prompt, replace(tokens.sampling, grammar=""), tokens.output, tokens.options),
        order.address,
    )

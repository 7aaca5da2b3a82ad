"""The simulated front end dies, and another takes its place.

With it go its core, its connections, and what was on its way to and from it. Workers that have joined it drop their
attempts and come back with what they have cached, as soon as there is a front end again (see process_lives.py). Every
token was recorded before its client got it (``diptych serve --survive-restart``): a client whose stream has ended comes
again when it can, and its stream goes on after the tokens that it has. What arrives meanwhile waits.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.faults import Fault


class FleetOfFrontEnd(Protocol):
    """What dies and comes back."""

    def on_front_end_lost(self, until_ns: int) -> None:
        """There is none before ``until_ns``; called again when that is later than was thought."""
        ...

    def on_front_end_back(self) -> None:
        """Another one begins, which knows of nothing."""
        ...


class FrontEndLife:
    """Whether there is a front end."""

    def __init__(self, environment: Environment, fleet: FleetOfFrontEnd) -> None:
        self.is_up = True
        self._environment = environment
        self._fleet = fleet
        self._until_ns = 0
        self._waiting: list[Callable[[], None]] = []

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Schedule those of these faults that befall the front end."""
        for fault in faults:
            if fault.kind == "front_end_crash":
                self._environment.at(fault.at_ns, MESSAGE, partial(self._die, fault.end_ns))

    def when_up(self, act: Callable[[], None]) -> bool:
        """False while there is none: then this is done when there is one again."""
        if not self.is_up:
            self._waiting.append(act)
        return self.is_up

    def _die(self, until_ns: int) -> None:
        if not self.is_up and until_ns <= self._until_ns:
            return
        self.is_up, self._until_ns = False, until_ns
        self._environment.at(until_ns, MESSAGE, partial(self._begin, until_ns))
        self._fleet.on_front_end_lost(until_ns)

    def _begin(self, at_ns: int) -> None:
        if self.is_up or at_ns != self._until_ns:
            return
        self.is_up = True
        self._fleet.on_front_end_back()
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

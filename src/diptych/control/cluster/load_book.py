"""The loads that workers reported last, and what a prompt token costs by them."""

from diptych.control.cluster.membership import Membership
from diptych.control.engine.reports import LoadReport


class LoadBook:
    """Loads by worker, of those that are ready."""

    def __init__(self, members: Membership) -> None:
        self.least_token_ns = 0.0  # that any worker asks for a prompt token
        self._members = members
        self._loads: dict[int, LoadReport] = {}

    def set(self, worker: int, load: LoadReport) -> None:
        """A worker reported."""
        self._loads[worker] = load

    def get(self, worker: int) -> LoadReport | None:
        """Its last report."""
        return self._loads.get(worker)

    def drop(self, worker: int) -> None:
        """Its process is gone."""
        self._loads.pop(worker, None)

    def waiting_token_ns(self) -> float | None:
        """What a waiting prompt token costs the requests behind it: all workers that compute prompts share the queue.
        The backlog of the workers does not count: there, a short prompt passes the long ones. None: no worker that
        computes prompts has reported."""
        infos, loads = self._members.infos, self._loads
        prices = [
            loads[worker].token_ns
            for worker in self._members.usable
            if worker in loads and infos[worker].role != "decode"
        ]
        if not prices:
            return None
        self.least_token_ns = min(prices)
        return sum(prices) / len(prices) ** 2

"""The loads that workers reported last, and what a prompt token costs by them: the admission queue is told."""

from diptych.control.admission.admission_queue import AdmissionQueue
from diptych.control.cluster.membership import Membership
from diptych.control.engine.reports import LoadReport


class LoadBook:
    """Loads by worker, of those that are ready. admission: None where no request waits there for long."""

    def __init__(self, members: Membership, admission: AdmissionQueue | None) -> None:
        self.least_token_ns = 0.0  # that any worker asks for a prompt token
        self._members = members
        self._admission = admission
        self._loads: dict[int, LoadReport] = {}
        self._token_prices: dict[int, float] = {}  # of the workers that compute prompts

    def set(self, worker: int, load: LoadReport) -> None:
        """A worker reported."""
        self._loads[worker] = load

    def get(self, worker: int) -> LoadReport | None:
        """The worker's last report."""
        return self._loads.get(worker)

    def drop(self, worker: int) -> None:
        """Forget a worker whose process is gone."""
        self._loads.pop(worker, None)

    def collect_prices(self) -> None:
        """Workers came, went, drain, or have other roles."""
        if self._admission is None:
            return
        infos, loads = self._members.infos, self._loads
        self._token_prices = {
            worker: loads[worker].token_ns
            for worker in self._members.usable
            if worker in loads and infos[worker].role != "decode"
        }
        self._tell(self._admission)

    def reprice(self, worker: int) -> None:
        """A worker that may be used has reported."""
        if worker in self._token_prices and self._admission is not None:
            self._token_prices[worker] = self._loads[worker].token_ns
            self._tell(self._admission)
        elif self._members.infos[worker].role != "decode":
            self.collect_prices()

    def _tell(self, admission: AdmissionQueue) -> None:
        """What a waiting prompt token costs the requests behind it: all workers that compute prompts share the queue.
        The backlog of the workers does not count: there, a short prompt passes the long ones."""
        prices = self._token_prices.values()
        if prices:
            self.least_token_ns = min(prices)
            admission.on_load(sum(prices) / len(prices) ** 2)

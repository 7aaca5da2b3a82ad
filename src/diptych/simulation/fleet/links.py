"""Links under virtual time: latency, and bandwidth shared fairly by the transfers that are under way.

Every transfer crosses a path of links (for example the sender's network card, then the receiver's); while one of them
is down, the transfer stands still. Rates are max-min fair (progressive filling: Bertsekas and Gallager, Data Networks,
section 6.5.2): the link with the least bandwidth per transfer fixes the rate of all that cross it, and so on with what
is left. Integer arithmetic throughout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.environment import MESSAGE, Environment

GB = 1_000_000_000

# Usable bandwidth in one direction, bytes per second, and latency in nanoseconds. PCIe, NVLink: the published rate per
# direction times 0.85 to 0.9 for protocol overhead; Ethernet and InfiniBand: line rate times 0.92.
LINKS: dict[str, tuple[int, int]] = {
    "pcie4": (27 * GB, 2_000),  # x16: 31.5 GB/s on paper
    "pcie5": (54 * GB, 2_000),  # x16: 63 GB/s
    "eth100": (11_500_000_000, 10_000),
    "eth200": (23 * GB, 10_000),
    "eth400": (46 * GB, 10_000),
    "ib100": (11_500_000_000, 3_000),  # EDR
    "ib200": (23 * GB, 3_000),  # HDR
    "ib400": (46 * GB, 3_000),  # NDR
    "nvlink3": (255 * GB, 1_500),  # A100: 300 GB/s a direction
    "nvlink4": (382 * GB, 1_500),  # H100: 450 GB/s
    "nvlink5": (765 * GB, 1_500),  # B200: 900 GB/s
    # one core copies; where blocks are borrowed only the latency counts, which was measured (control's LinkCosts, too)
    "shared_memory": (8 * GB, 1_000_000),
}


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a connection. ``bandwidth`` in bytes per second, shared by the transfers that cross it."""

    bandwidth: int
    latency_ns: int = 0
    name: str = ""
    transfers: dict[int, "LinkTransfer"] = field(default_factory=dict)
    busy_ns: int = 0  # time with at least one transfer
    num_bytes: int = 0  # carried to the end
    is_up: bool = True

    @classmethod
    def named(cls, name: str) -> "Link":
        """A link of the catalogue above. Raises ConfigError with the names there are."""
        if name not in LINKS:
            raise ConfigError(f"link is {name!r}; one of {', '.join(LINKS)}", param="link")
        bandwidth, latency_ns = LINKS[name]
        return cls(bandwidth, latency_ns, name)


@dataclass(eq=False, slots=True)
class LinkTransfer:
    """Bytes on their way. ``left``: in bytes times 1e9, so that rate (bytes/s) times time (ns) subtracts exactly."""

    number: int
    num_bytes: int
    path: tuple[Link, ...]
    on_done: Callable[[], None]
    left: int = 0
    rate: int = 0
    timer: int = 0


class Network:
    """All transfers under way. Whenever one begins or ends, the rates of those it shares a link with change."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._transfers: dict[int, LinkTransfer] = {}
        self._num_started = 0
        self._updated_ns = 0

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._transfers)

    def send(self, num_bytes: int, path: tuple[Link, ...], on_done: Callable[[], None]) -> int:
        """Start a transfer; ``on_done`` is called when the last byte has arrived. Returns a number for ``cancel``.

        The latencies of the path pass first, then the bytes flow through all its links at one rate.
        """
        if num_bytes < 0 or not path:
            raise ConfigError(f"transfer of {num_bytes} bytes over {len(path)} links; at least 0 and 1", param="path")
        self._num_started += 1
        transfer = LinkTransfer(self._num_started, num_bytes, path, on_done, left=num_bytes * NS_PER_S)
        latency_ns = sum(link.latency_ns for link in path)
        self._transfers[transfer.number] = transfer
        start_ns = self._environment.now + latency_ns
        transfer.timer = self._environment.at(start_ns, MESSAGE, lambda: self._start(transfer))
        return transfer.number

    def cancel(self, number: int) -> None:
        """Stop a transfer (one that has arrived is left alone); the others go faster from now on."""
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        self._environment.cancel(transfer.timer)
        self._advance()
        for link in transfer.path:
            link.transfers.pop(number, None)
        self._share()

    def set_up(self, link: Link, is_up: bool) -> None:
        """The link breaks, or works again."""
        self._advance()
        link.is_up = is_up
        self._share()

    def set_bandwidth(self, link: Link, bandwidth: int) -> None:
        """The link is faster or slower from now on (bytes per second)."""
        self._advance()
        link.bandwidth = bandwidth
        self._share()

    def _start(self, transfer: LinkTransfer) -> None:
        self._advance()
        transfer.timer = 0
        for link in transfer.path:
            link.transfers[transfer.number] = transfer
        self._share()

    def _advance(self) -> None:
        """Bring every transfer up to now at the rates that held until now."""
        now = self._environment.now
        elapsed = now - self._updated_ns
        self._updated_ns = now
        if not elapsed:
            return
        busy: dict[Link, None] = {}
        for transfer in self._transfers.values():
            if transfer.rate:
                transfer.left = max(0, transfer.left - transfer.rate * elapsed)
                busy.update(dict.fromkeys(transfer.path))
        for link in busy:
            link.busy_ns += elapsed

    def _share(self) -> None:
        """Max-min fair rates, and a timer for the end of each transfer whose rate changed."""
        started = {number: sent for number, sent in self._transfers.items() if number in sent.path[0].transfers}
        unfixed = {number: sent for number, sent in started.items() if all(link.is_up for link in sent.path)}
        for transfer in [sent for number, sent in started.items() if number not in unfixed]:
            self._stall(transfer)
        room = {link: link.bandwidth for transfer in unfixed.values() for link in transfer.path}
        crossing = dict.fromkeys(room, 0)
        for transfer in unfixed.values():
            for link in transfer.path:
                crossing[link] += 1
        while unfixed:
            tightest = min((link for link in room if crossing[link]), key=lambda link: room[link] // crossing[link])
            rate = max(1, room[tightest] // crossing[tightest])
            for number in [number for number in tightest.transfers if number in unfixed]:
                transfer = unfixed.pop(number)
                for link in transfer.path:
                    room[link] = max(0, room[link] - rate)
                    crossing[link] -= 1
                self._retime(transfer, rate)

    def _stall(self, transfer: LinkTransfer) -> None:
        if transfer.timer:
            self._environment.cancel(transfer.timer)
        transfer.rate = transfer.timer = 0

    def _retime(self, transfer: LinkTransfer, rate: int) -> None:
        if transfer.timer and transfer.rate == rate:
            return
        if transfer.timer:
            self._environment.cancel(transfer.timer)
        transfer.rate = rate
        end_ns = self._environment.now + -(-transfer.left // rate)
        transfer.timer = self._environment.at(end_ns, MESSAGE, lambda: self._finish(transfer))

    def _finish(self, transfer: LinkTransfer) -> None:
        self._advance()
        del self._transfers[transfer.number]
        for link in transfer.path:
            del link.transfers[transfer.number]
            link.num_bytes += transfer.num_bytes
        self._share()
        transfer.on_done()

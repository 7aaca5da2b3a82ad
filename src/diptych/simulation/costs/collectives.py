"""What devices send to each other: sums over all of them, exchanges between all of them, hops from one to the next.

Everything here is a latency plus bytes over a bandwidth. Inside one host the all-reduce is measured (by number of
devices), or follows from a link's latency and bandwidth; several hosts are joined by the network of the hardware entry.
"""

from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.simulation.hardware import Hardware, HostNetwork, Interconnect
from diptych.simulation.parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class MessageCost:
    """latency_s: of an empty message. byte_s: seconds for each byte of it."""

    latency_s: float = 0.0
    byte_s: float = 0.0

    def __add__(self, other: "MessageCost") -> "MessageCost":
        """One after the other, with the same message."""
        return MessageCost(self.latency_s + other.latency_s, self.byte_s + other.byte_s)

    def times(self, count: int, num_bytes: float) -> "MessageCost":
        """``count`` messages of a step; then ``byte_s`` is for each unit of which a message has ``num_bytes`` bytes."""
        return MessageCost(count * self.latency_s, count * num_bytes * self.byte_s)

    def seconds(self, num_bytes: float) -> float:
        """Seconds that a message takes."""
        return self.latency_s + num_bytes * self.byte_s


def num_hosts(hardware: Hardware, num_devices: int) -> int:
    """Hosts that ``num_devices`` devices fill. Raises ConfigError where there is no network to join several."""
    within = hardware.interconnect.max_devices
    hosts = -(-num_devices // within)
    if hosts > 1 and hardware.network is None:
        raise ConfigError(
            f"{num_devices} devices share a model; {hardware.interconnect.kind} joins at most {within} x "
            f"{hardware.name}, and its entry has no network",
            param="tensor_parallel",
        )
    return hosts


def all_reduce(hardware: Hardware, num_devices: int) -> MessageCost:
    """The sum of one message of each device, on all of them.

    Over h hosts: reduced inside each host, the parts summed between the hosts (each device sends its share of the
    message over its own network card), gathered inside each host. Thakur, Rabenseifner, Gropp: Optimization of
    Collective Communication Operations in MPICH, IJHPCA 19(1), 2005, section 4.5, twice. Raises ConfigError.
    """
    inside = -(-num_devices // num_hosts(hardware, num_devices))
    return _host_all_reduce(hardware.interconnect, inside) + between_hosts(hardware, num_devices)


def between_hosts(hardware: Hardware, num_devices: int) -> MessageCost:
    """What the network adds to an all-reduce inside each host (nothing for one host). Raises ConfigError."""
    hosts = num_hosts(hardware, num_devices)
    if hosts == 1:
        return MessageCost()
    network = _network(hardware)
    whole = _by_link(hosts, network.latency_s, network.bandwidth)
    return MessageCost(whole.latency_s, whole.byte_s / -(-num_devices // hosts))


def all_to_all(hardware: Hardware, num_devices: int) -> MessageCost:
    """Every device sends an equal part of its message to each device.

    The first half of an all-reduce (a reduce-scatter) sends as many bytes over the same links: half of its time, with
    its latency. NCCL's all-to-all as aiconfigurator measured it on 2 to 8 A100, H100 and B200 takes 1.0 to 1.2 times
    that for large messages. Raises ConfigError.
    """
    whole = all_reduce(hardware, num_devices)
    hosts = num_hosts(hardware, num_devices)
    if hosts == 1:
        return MessageCost(whole.latency_s, whole.byte_s / 2)
    inside = _host_all_reduce(hardware.interconnect, -(-num_devices // hosts))
    away = (hosts - 1) / (hosts * _network(hardware).bandwidth)  # that share of each device's message leaves the host
    return MessageCost(whole.latency_s, inside.byte_s / 2 + away)


def hop(hardware: Hardware, *, between_hosts: bool) -> MessageCost:
    """A message from one device to another: inside a host as an all-reduce of two devices, in which each sends the
    message once."""
    if between_hosts:
        return MessageCost(_network(hardware).latency_s, 1.0 / _network(hardware).bandwidth)
    return _host_all_reduce(hardware.interconnect, 2)


def pipeline_hops(hardware: Hardware, parallelism: Parallelism) -> MessageCost:
    """The activations' way through all stages: each device sends those of its group to its fellow in the next stage.
    As many whole stages as fit share a host. Raises ConfigError."""
    num_hosts(hardware, parallelism.devices)
    stages_per_host = max(1, hardware.interconnect.max_devices // parallelism.stage_devices)
    total = MessageCost()
    for stage in range(1, parallelism.pipeline):
        total += hop(hardware, between_hosts=stage % stages_per_host == 0)
    return total


def _network(hardware: Hardware) -> HostNetwork:
    assert hardware.network is not None, "num_hosts has checked it"
    return hardware.network


def _host_all_reduce(link: Interconnect, num_devices: int) -> MessageCost:
    """Inside one host; a number that was not measured takes the next larger one's."""
    if num_devices <= 1:
        return MessageCost()
    if link.link_bandwidth:
        return _by_link(num_devices, link.link_latency_s, link.link_bandwidth)
    size = min(size for size in link.all_reduce_latency_s if size >= num_devices)
    return MessageCost(link.all_reduce_latency_s[size], 1.0 / link.all_reduce_bandwidth[size])


def _by_link(num_devices: int, latency_s: float, bandwidth: float) -> MessageCost:
    """Rabenseifner's all-reduce: 2 log2(n) messages one after the other, 2 (n - 1) / n of the bytes (Thakur et al.)."""
    steps = 2 * (num_devices - 1).bit_length()
    return MessageCost(steps * latency_s, 2 * (num_devices - 1) / (num_devices * bandwidth))

"""Settings of the fleet: how requests are routed, let in and tried again."""

from dataclasses import dataclass, field
from typing import Literal

from diptych.control.admission.admission_config import AdmissionConfig
from diptych.control.config import changed
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Disaggregate, LocalPrefill, RoutingConfig, RoutingName
from diptych.control.slo import NS_PER_S, Slo

OnFailure = Literal["retry", "local", "fail"]
MAX_PREFILLS_IN_FLIGHT_PER_WORKER = 64


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """on_failure: when a worker or a handoff is lost, try again through the pools, try again on one worker, or end the
    request with an error. max_attempts: how many in a row may give the client no token. lease_ns: how long one side of
    a copied handoff waits for a renewal (0: without limit). max_prefills_in_flight_per_worker: requests without a first
    token per worker, beyond which new ones wait in the admission queue, where priority and fairness count (0: none
    wait). park_ns: how long a request waits for a worker that can take it. slo: objectives of requests that name none.
    """

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    on_failure: OnFailure = "retry"
    max_attempts: int = 5
    lease_ns: int = 60 * NS_PER_S
    max_prefills_in_flight_per_worker: int = MAX_PREFILLS_IN_FLIGHT_PER_WORKER
    park_ns: int = 120 * NS_PER_S
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        if self.on_failure not in ("retry", "local", "fail"):
            raise ConfigError(f"on_failure is {self.on_failure!r}; retry, local or fail", param="on_failure")
        for name, least in (
            ("max_attempts", 1),
            ("lease_ns", 0),
            ("max_prefills_in_flight_per_worker", 0),
            ("park_ns", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)


def cluster_config(
    *,
    routing: RoutingName | None = None,
    disaggregate: Disaggregate | None = None,
    local_prefill: LocalPrefill | None = None,
    on_failure: OnFailure | None = None,
    max_prefills_in_flight_per_worker: int | None = None,
    max_queued: int | None = None,
    max_queued_per_key: int | None = None,
) -> ClusterConfig:
    """What a front end does by default, changed by the options that were given (None: not given). ``diptych serve`` and
    ``diptych simulate`` both begin here."""
    base = ClusterConfig()
    return changed(
        base,
        routing=changed(base.routing, routing=routing, disaggregate=disaggregate, local_prefill=local_prefill),
        admission=changed(base.admission, max_queued=max_queued, max_queued_per_tenant=max_queued_per_key),
        on_failure=on_failure,
        max_prefills_in_flight_per_worker=max_prefills_in_flight_per_worker,
    )

"""The router that a configuration names."""

from diptych.control.router.cost_router import CostRouter
from diptych.control.router.round_robin import RoundRobinRouter
from diptych.control.router.routing import Router, RoutingConfig


def make_router(config: RoutingConfig) -> Router:
    """The router of this configuration: by cost, or in turn."""
    return CostRouter(config) if config.routing == "kv_aware" else RoundRobinRouter(config)

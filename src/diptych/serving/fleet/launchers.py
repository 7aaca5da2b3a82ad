"""Which launcher starts the workers of a fleet."""

from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.launched_worker import JobLauncher
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.fleet.worker_handle import Launcher
from diptych.serving.ray.ray_jobs import RayJobs


def launcher_of(fleet: FleetOptions) -> Launcher:
    """The launcher that the settings name. Raises ConfigError when what it needs is not installed."""
    if fleet.ray is None or fleet.join is None:
        return LocalLauncher()
    return JobLauncher(RayJobs(fleet.ray), fleet.ray, fleet.join)

"""A scheduler class of vLLM, made to report: the class is given, so that this file needs no vLLM.

Every method passes on whatever arguments this version of vLLM calls it with.
"""

from typing import Any

from diptych.vllm_plugin.step_observer import StepObserver


def reporting(base: type[Any], observer: StepObserver) -> type[Any]:
    """A subclass of a scheduler that decides exactly as it does, and tells ``observer``."""

    class ReportingScheduler(base):  # type: ignore[misc]
        """vLLM's scheduler, which also reports its steps."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """Plan a step as vLLM's SchedulerInterface does, and report the plan."""
            begun_ns = observer.begin()
            output = super().schedule(*args, **kwargs)
            observer.on_planned(self, output, begun_ns)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """Take in a step's result as vLLM's SchedulerInterface does, and report its end."""
            result = super().update_from_output(scheduler_output, *args, **kwargs)
            observer.on_computed(self, scheduler_output)
            return result

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            """Shut down as vLLM's SchedulerInterface does, and stop reporting."""
            observer.close()
            return super().shutdown(*args, **kwargs)

    return ReportingScheduler

"""What ``--scheduler-cls diptych.vllm_plugin.scheduler`` names. The only file here that imports vLLM.

vLLM calls it once in each engine process, with the arguments of a scheduler class; it answers with the scheduler that
vLLM would have made itself (also with asynchronous scheduling), which reports its steps besides.
"""

import logging
from importlib import import_module
from typing import Any

from diptych.vllm_plugin.reporting import reporting
from diptych.vllm_plugin.step_observer import StepObserver, about_vllm, address_of
from diptych.vllm_plugin.step_publisher import StepPublisher

logger = logging.getLogger("vllm.diptych")  # so that vLLM shows it


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler, which publishes its steps where --additional-config '{"diptych_steps": ADDRESS}' says. When
    that address is taken or wrong, vLLM runs all the same, and a warning says that nothing is reported."""
    base = _usual_class(vllm_config)
    publisher = None
    try:
        address = address_of(vllm_config)
        publisher = StepPublisher(address, about_vllm(vllm_config, _version()))
        logger.info("diptych: steps are reported on %s", address)
    except Exception as error:  # vLLM serves in any case; its log says so
        logger.warning("diptych: steps are not reported: %s: %s", type(error).__name__, error)
    return reporting(base, StepObserver(publisher))(vllm_config, *args, **kwargs)


def _usual_class(vllm_config: Any) -> Any:
    """The class that vLLM takes without --scheduler-cls."""
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        return import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    return import_module("vllm.v1.core.sched.scheduler").Scheduler


def _version() -> str:
    return str(getattr(import_module("vllm"), "__version__", ""))

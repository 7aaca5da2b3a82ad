"""Runs inside vLLM's engine process: its own scheduler, which also says what each step was and how long it took.

    vllm serve MODEL --scheduler-cls diptych.vllm_plugin.scheduler

Must never change a decision of vLLM, wait for anybody, or raise into a step. Needs nothing that vLLM does not have.
"""

from diptych.vllm_plugin.vllm_scheduler import scheduler

__all__ = ["scheduler"]

"""The accounts: every nanosecond between a request's arrival and its last token belongs to exactly one of them.

The names are the keys of the JSON output. Which cause an account points to depends on more evidence (see causes.py).
"""

from collections.abc import Mapping
from typing import Final

TTFT: Final[Mapping[str, str]] = {
    "queue_prefill": "waited while prompts of others were computed",
    "queue_streams": "waited while streams shared the steps of these prompts",
    "queue_seats": "waited while only streams ran, with no place free in the batch",
    "queue_memory": "waited while only streams ran, with places free in the batch",
    "queue_slow": "waited in steps that took longer than they should",
    "queue_idle": "waited while no step ran: front end, messages",
    "reserve": "waited for KV blocks of a decode worker",
    "prefill_own": "its own prompt was computed",
    "prefill_others": "prompts of others in the same steps, or between its chunks",
    "prefill_streams": "streams in the same steps, or between its chunks",
    "prefill_slow": "its steps took longer than they should",
    "prefill_idle": "between its chunks no step ran",
    "preempted": "it had lost its blocks",
    "retried": "an earlier attempt was lost",
    "delivery": "from the worker to the front end",
}
ITL: Final[Mapping[str, str]] = {
    "decode_floor": "a step with one stream: all weights are read once",
    "decode_batch": "what the other streams of the batch add to a step",
    "mixed_prefill": "prompts of others in the same steps",
    "stalled_by_prefill": "steps without streams: prompts of others came first",
    "decode_slow": "steps took longer than they should",
    "decode_idle": "between two steps: scheduling, messages",
    "preempted": "it had lost its blocks",
    "handoff": "from the first token to the decode worker",
    "retried": "an attempt was lost, and its tokens were computed again",
    "delivery": "from the worker to the front end",
}
ESTIMATED_TTFT: Final[Mapping[str, str]] = {
    "queue": "waited for its first step",
    "prefill": "its prompt was computed, with what ran beside it",
    "transfer": "its KV was moved",
    "rest": "what the engine does not account for (front end, tokenising, sending)",
}
ESTIMATED_ITL: Final[Mapping[str, str]] = {
    "decode_floor": "a usual step without prompts",
    "stalls": "gaps much longer than a usual step",
    "rest": "what is left",
}


def words(account: str) -> str:
    """What an account holds, in words."""
    return next(table[account] for table in (TTFT, ITL, ESTIMATED_TTFT, ESTIMATED_ITL) if account in table)

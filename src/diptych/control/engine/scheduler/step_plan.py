"""The plan of one step while it is being made."""

from diptych.control.errors import BrokenInvariantError
from diptych.control.events import Event
from diptych.control.request import Request
from diptych.control.step import (
    ResumedDecode,
    ScheduledPrefill,
    SchedulerOutput,
    StepFeatures,
    VerifyRows,
    chunk_attention,
)


class StepPlan:
    """Mutable twin of SchedulerOutput, plus the events that planning caused."""

    __slots__ = (
        "block_copies",
        "decode_context",
        "events",
        "extra_context",
        "extra_tokens",
        "new_blocks",
        "now",
        "num_decodes",
        "paused",
        "prefill_attention",
        "prefill_tokens",
        "prefills",
        "resumed",
        "swap_in",
        "swap_out",
        "verify_rows",
    )

    def __init__(self, now: int) -> None:
        self.now = now
        self.prefills: list[ScheduledPrefill] = []
        self.paused: list[str] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.block_copies: list[tuple[int, int]] = []
        self.resumed: list[ResumedDecode] = []
        self.new_blocks: list[tuple[str, int, int]] = []
        self.events: list[Event] = []
        self.prefill_tokens = 0
        self.prefill_attention = 0
        self.num_decodes = 0
        self.decode_context = 0
        self.verify_rows: list[VerifyRows] = []
        self.extra_tokens = 0
        self.extra_context = 0

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        """Compute the next ``num_tokens`` of the request's prompt."""
        start = request.num_scheduled_tokens
        if not 0 < num_tokens <= request.num_tokens - start:
            raise BrokenInvariantError(
                f"a chunk of {num_tokens} tokens of {request.request_id}, which has {request.num_tokens - start} left"
            )
        request.num_scheduled_tokens += num_tokens
        is_last = request.num_scheduled_tokens == request.num_tokens
        chunk = ScheduledPrefill(request.request_id, start, num_tokens, request.tables, is_last, request.first_blocks)
        self.prefills.append(chunk)
        self.prefill_tokens += num_tokens
        self.prefill_attention += chunk_attention(start, num_tokens)

    def add_verify_rows(self, rows: VerifyRows, context: int) -> None:
        """A member of the batch, whose own row attends to ``context`` tokens, computes more than one."""
        self.verify_rows.append(rows)
        self.extra_tokens += rows.num_tokens
        self.extra_context += chunk_attention(context, rows.num_tokens)

    def drop_extra_rows(self, request_id: str, context: int) -> None:
        """The member leaves the batch before the step."""
        for rows in self.verify_rows:
            if rows.request_id == request_id:
                self.extra_tokens -= rows.num_tokens
                self.extra_context -= chunk_attention(context, rows.num_tokens)
        self.verify_rows = [rows for rows in self.verify_rows if rows.request_id != request_id]

    def forget_resumed(self, request_id: str) -> bool:
        """Take back that a request joins the decode batch, if this plan says so. Returns whether it did."""
        resumed = [member for member in self.resumed if member.request_id != request_id]
        was_resumed = len(resumed) < len(self.resumed)
        self.resumed = resumed
        return was_resumed

    def takes_away(self, request: Request) -> bool:
        """Whether the request is swapped out, or leaves the decode batch, in this very plan."""
        if request.request_id in self.paused:
            return True
        first = request.host_block_ids[0] if request.host_block_ids else None
        return any(host_block == first for _, host_block in self.swap_out)

    @property
    def has_work(self) -> bool:
        """Whether anything is computed or copied up."""
        return bool(self.prefills or self.num_decodes or self.swap_in)

    @property
    def features(self) -> StepFeatures:
        """What the step's duration depends on."""
        return StepFeatures(
            self.prefill_tokens,
            self.prefill_attention,
            self.num_decodes + self.extra_tokens,
            self.decode_context + self.extra_context,
        )

    def output(
        self, step_id: int, finished: tuple[str, ...], features: StepFeatures, predicted_ns: int, max_repeats: int
    ) -> SchedulerOutput:
        """The frozen plan for the executor."""
        return SchedulerOutput(  # (by position, which is faster)
            step_id,
            tuple(self.prefills),
            self.num_decodes,
            finished,
            tuple(self.paused),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.resumed),
            tuple(self.new_blocks),
            features,
            predicted_ns,
            max_repeats,
            tuple(self.block_copies),
            tuple(self.verify_rows),
        )

    @property
    def num_copies(self) -> int:
        """Blocks that are copied between device and host."""
        return len(self.swap_out) + len(self.swap_in)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute and nothing to report to the executor."""
        return not (self.prefills or self.num_decodes or self.paused or self.swap_out or self.swap_in or self.resumed)

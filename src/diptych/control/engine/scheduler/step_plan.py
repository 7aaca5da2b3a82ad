"""The plan of one step while it is being made."""

from dataclasses import dataclass, field

from diptych.control.events import Event
from diptych.control.request import Request
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention


@dataclass(slots=True)
class StepPlan:
    """Mutable twin of SchedulerOutput, plus the events that planning caused."""

    now: int
    prefills: list[ScheduledPrefill] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    resumed: list[ResumedDecode] = field(default_factory=list)
    new_blocks: list[tuple[str, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_attention: int = 0
    num_decodes: int = 0
    decode_context: int = 0

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        """Compute the next ``num_tokens`` of the request's prompt."""
        start = request.num_scheduled_tokens
        request.num_scheduled_tokens += num_tokens
        is_last = request.num_scheduled_tokens == request.num_tokens
        chunk = ScheduledPrefill(request.request_id, start, num_tokens, tuple(request.block_ids), is_last)
        self.prefills.append(chunk)
        self.prefill_tokens += num_tokens
        self.prefill_attention += chunk_attention(start, num_tokens)

    @property
    def features(self) -> StepFeatures:
        """What the step's duration depends on."""
        return StepFeatures(self.prefill_tokens, self.prefill_attention, self.num_decodes, self.decode_context)

    def output(
        self, step_id: int, finished: tuple[str, ...], features: StepFeatures, predicted_ns: int, max_repeats: int
    ) -> SchedulerOutput:
        """The frozen plan for the executor."""
        return SchedulerOutput(
            step_id=step_id,
            prefills=tuple(self.prefills),
            num_decodes=self.num_decodes,
            finished=finished,
            paused=tuple(self.paused),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            resumed=tuple(self.resumed),
            new_blocks=tuple(self.new_blocks),
            features=features,
            predicted_ns=predicted_ns,
            max_repeats=max_repeats,
            block_copies=tuple(self.block_copies),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute and nothing to report to the executor."""
        return not (self.prefills or self.num_decodes or self.paused or self.swap_out or self.swap_in or self.resumed)

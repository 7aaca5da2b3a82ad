"""Decode workers take requests over: what that means for the streams, the metrics and the timeline."""

from collections.abc import Mapping, Sequence

from diptych.control.events import Event, HandoffDelivered
from diptych.control.slo import NS_PER_S
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream
from diptych.serving.answers.output_streams import OutputStreams
from diptych.serving.metrics.serving_metrics import ServingMetrics
from diptych.timeline.ring import Timeline, Transfer

FirstTokens = Mapping[str, tuple[int, TokenLogprobs | None]]  # of attempts that a worker has taken over


class Takeovers:
    """The migrations of one fleet's streams from worker to worker."""

    def __init__(self, streams: OutputStreams, metrics: ServingMetrics, timeline: Timeline) -> None:
        self._streams = streams
        self._metrics = metrics
        self._timeline = timeline

    def take(self, worker: int, events: Sequence[Event], first_tokens: FirstTokens) -> list[AnswerStream]:
        """A decode worker has taken these over. Returns the streams that are complete."""
        stopped = []
        for event in events:
            if not isinstance(event, HandoffDelivered):
                continue
            self._metrics.on_transfer(event.num_bytes, event.transfer_ns)
            takeover = self._streams.on_delivered(worker, event.request_id, *first_tokens[event.request_id])
            if takeover is not None:
                stopped += takeover.stopped
                start_ns, exposed_ns = event.time_ns - event.transfer_ns, int(takeover.exposed_s * NS_PER_S)
                self._timeline.on_transfer(
                    Transfer(
                        event.request_id, takeover.sender, worker, event.num_bytes, start_ns, event.time_ns, exposed_ns
                    )
                )
        return stopped

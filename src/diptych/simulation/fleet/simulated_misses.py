"""Why prefills were spent in a simulation: the explainer of the live server, fed by the simulated front end.

Traces identify text by blocks, so a prompt is compared block by block, and what is computed again behind a change
cannot be told from new text.
"""

from collections.abc import Callable

from diptych.control.cluster.cluster_events import Arrived, Cancelled, ClusterEvent, Reported, WorkerDown, WorkerUp
from diptych.control.commands import Command, End
from diptych.control.misses.miss_explainer import MissExplainer
from diptych.control.misses.miss_summary import MissSummary
from diptych.control.request import FinishReason
from diptych.simulation.fleet.simulated_executor import block_hashes
from diptych.workload.spec import RequestSpec


class SimulatedTokens:
    """The PromptTokens of control.misses for the first ``num_tokens`` tokens of prompt and answer."""

    def __init__(self, spec: RequestSpec, num_tokens: int, block_size: int) -> None:
        self.root = b""
        self.hashes = tuple(block_hashes(spec, num_tokens, block_size)) if spec.hash_ids else ()
        self.contents = self.hashes
        self.num_tokens = num_tokens

    def piece(self, index: int) -> bytes:
        """Nothing: the tokens are not known."""
        return b""

    def chunks(self, start: int) -> list[tuple[int, int, bytes]]:
        """Nothing: the tokens are not known."""
        return []


class SimulatedMisses:
    """A watcher of a SimulatedCluster. spec_of: of an open request, by its id."""

    def __init__(self, block_size: int, spec_of: Callable[[str], RequestSpec | None]) -> None:
        self._explainer = MissExplainer(block_size)
        self._spec_of = spec_of

    @property
    def summary(self) -> MissSummary:
        """All prompts so far."""
        return self._explainer.summary

    def on_event(self, event: ClusterEvent, commands: list[Command], now: int) -> None:
        explainer = self._explainer
        match event:
            case Reported():
                explainer.on_events(event.worker, event.events, now)
            case Arrived():
                request_id = event.submission.request_id
                if spec := self._spec_of(request_id):
                    prompt = SimulatedTokens(spec, spec.prompt_tokens, explainer.block_size)
                    explainer.on_arrived(request_id, prompt)
            case Cancelled(reason=FinishReason.ABORT):
                explainer.on_gone(event.request_id)
            case WorkerUp():
                info = event.info
                explainer.on_worker_up(info.number, info.num_blocks, has_windows=info.has_windows)
            case WorkerDown():
                explainer.on_worker_down(event.worker, now)
        for command in commands:
            if isinstance(command, End):
                self._end(command)

    def _end(self, command: End) -> None:
        spec, conversation = self._spec_of(command.request_id), None
        if spec is not None and command.finished is not None:
            num_output = max(0, command.finished.latency.num_output_tokens - 1)  # the last one is never computed
            conversation = SimulatedTokens(spec, spec.prompt_tokens + num_output, self._explainer.block_size)
        self._explainer.on_gone(command.request_id, conversation)

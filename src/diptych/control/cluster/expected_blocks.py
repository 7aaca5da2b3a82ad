"""How many blocks requests are expected to need on a worker, and which streams must leave it for a large one.

Where workers are unequal, streams make way for a request that only a large worker can hold. They are computed anew
where they go: the worker's cache, which a handoff would read, is what the newcomer takes. Changes nothing; ClusterCore
moves the streams.
"""

from collections.abc import Callable, Mapping

from diptych.control.cluster.attempts import Attempt, AttemptTable
from diptych.control.cluster.load_book import LoadBook
from diptych.control.cluster.membership import Membership
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.length_predictor import LengthPredictor


class ExpectedBlocks:
    """Reads the members, loads, lengths and attempts of a ClusterCore. current: the open request that an attempt
    serves."""

    def __init__(
        self,
        members: Membership,
        loads: LoadBook,
        lengths: LengthPredictor,
        attempts: AttemptTable,
        current: Callable[[Attempt | None], OpenRequest | None],
    ) -> None:
        self._members = members
        self._loads = loads
        self._lengths = lengths
        self._attempts = attempts
        self._current = current

    def needs_evacuation(self, entry: OpenRequest, worker: int) -> bool:
        """Whether streams are to leave this worker for a request that small workers cannot hold, and that begins
        there."""
        members, submission = self._members, entry.submission
        if not members.are_unequal or submission.num_prompt_tokens + submission.max_tokens <= members.shortest:
            return False
        return self.missing(entry, worker) > 0

    def streams(self, worker: int, progress: Mapping[str, int]) -> list[tuple[int, int, Attempt, OpenRequest]]:
        """(blocks, tokens of the answer, attempt, request) of the streams that may leave, the longest first."""
        found = []
        for attempt in self._attempts.of_worker(worker):
            stream = self._current(attempt)
            if stream is None or stream.is_stopping or stream.awaits_first_token or attempt.decode != worker:
                continue
            num_tokens = progress.get(attempt.request_id, stream.num_tokens)
            if attempt.is_decoding:
                found.append((self._of(stream, num_tokens, worker), num_tokens, attempt, stream))
        found.sort(key=lambda stream: -stream[0])
        return found

    def missing(self, entry: OpenRequest, worker: int) -> int:
        """By how many blocks the request exceeds what is free on the worker."""
        return self._of(entry, entry.num_tokens, worker) - self._free(worker, entry)

    def free_elsewhere(self, worker: int, newcomer: OpenRequest) -> int:
        """Blocks that are free on the worker with the most of them among those that may take its streams over."""
        members = self._members
        strangers = members.of_other_copies(worker) | {worker}
        others = [
            other for other in members.usable if other not in strangers and members.infos[other].role != "prefill"
        ]
        return max((self._free(other, newcomer) for other in others), default=0)

    def _free(self, worker: int, newcomer: OpenRequest) -> int:
        """Blocks that the worker's last report and the requests that are there leave for the newcomer."""
        load, used = self._loads.get(worker), 0
        for attempt in self._attempts.of_worker(worker):
            entry = self._current(attempt)
            if entry is not None and entry is not newcomer and attempt.decode == worker:
                used += self._of(entry, entry.num_tokens, worker)
        return self._members.infos[worker].num_blocks - max(used, load.used_blocks if load else 0)

    def _of(self, entry: OpenRequest, num_output_tokens: int, worker: int) -> int:
        """Blocks of the prompt and of the answer that is expected, once the answer has ``num_output_tokens``."""
        submission = entry.submission
        answer = min(num_output_tokens, submission.max_tokens - 1)
        answer += self._lengths.mean(entry.length_group, answer, submission.max_tokens)
        return self._members.infos[worker].num_blocks_for(submission.num_prompt_tokens + answer)

"""A closed loop: clients that wait for their answers.

Which requests are asked, and in which order they are first handed out, does not depend on who is quicker: a client
that has nothing to continue takes the next conversation of the one sequence.
"""

from diptych.control.slo import NS_PER_S
from diptych.workload.description import WorkloadConfig
from diptych.workload.distributions import Stream
from diptych.workload.lengths import LengthTables
from diptych.workload.spec import RequestSpec
from diptych.workload.synthetic import DEFAULT_REQUESTS, Conversation, RequestSource, think_ns


class SyntheticClosedLoop:
    """``concurrency`` clients; it remembers where each of them is, so it serves one run."""

    def __init__(self, config: WorkloadConfig, seed: int) -> None:
        self.concurrency = config.arrivals.concurrency
        self._config = config
        self._num_requests = config.num_requests or DEFAULT_REQUESTS
        self._num_given = 0
        self._num_sessions = 0
        self._source = RequestSource(config, seed, LengthTables())
        self._turns = Stream(seed, "sessions")
        self._pauses = [Stream(seed, f"think/{client}") for client in range(self.concurrency)]
        self._talks: list[Conversation | None] = [None] * self.concurrency
        self._started = [False] * self.concurrency

    def __len__(self) -> int:
        return self._num_requests

    def next_request(self, client: int, now: int) -> RequestSpec | None:
        """The first request of a client comes at ``now``, later ones after thinking; None after the last."""
        if self._num_given == self._num_requests:
            return None
        self._num_given += 1
        sessions = self._config.sessions
        arrival_ns = now
        if self._talks[client] is not None:
            arrival_ns += think_ns(sessions.think_s, sessions.random_think, self._pauses[client])
        elif self._started[client]:
            arrival_ns += int(self._config.arrivals.think_s * NS_PER_S)
        self._started[client] = True
        talk = self._talks[client] or self._next_conversation()
        spec = talk.next_turn(arrival_ns)
        self._talks[client] = None if talk.is_over else talk
        return spec

    def _next_conversation(self) -> Conversation:
        sessions = self._config.sessions
        session, self._num_sessions = self._num_sessions, self._num_sessions + 1
        turns = self._turns.integer(sessions.min_turns, sessions.max_turns)
        return Conversation(self._config, session, self._source.pick(), turns)

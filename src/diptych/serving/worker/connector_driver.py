"""Between a worker's core and its KV connector: actions one way, events the other, and what a commit carries.

Owns the addresses of the workers that attempts are sent to, and the first tokens that came with commits until they are
reported.
"""

from collections.abc import Iterable

import msgspec

from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import (
    CancelTransfer,
    ChunkArrived,
    CommitTransfer,
    ExpectTransfer,
    ForgetTransfer,
    OpenTransfer,
    TransferAction,
    TransferBroken,
    TransferCommitted,
    WorkerCore,
)
from diptych.control.errors import ConfigError
from diptych.control.request import BlockTables, only_table
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.runtime.transfer import connector as kv
from diptych.serving.link.host_clock import clock_identity
from diptych.serving.worker.request_intake import RequestIntake


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """What follows the KV of a prompt: the first token, and when it was computed and sent, by the sender's clock."""

    first_token: int
    logprobs: TokenLogprobs | None
    first_step_ns: int
    first_token_ns: int
    sent_ns: int
    clock: str

    def times_here(self, arrived_ns: int) -> tuple[int, int]:
        """When the prompt's first step began and its token was known, on this host's clock. From a host with another
        clock they are counted back from the arrival: the way of the commit is not in them."""
        shift_ns = 0 if self.clock == clock_identity() else arrived_ns - self.sent_ns
        return self.first_step_ns + shift_ns, self.first_token_ns + shift_ns


class ConnectorDriver:
    """The transfers of one worker. ``connector`` None: it takes no part in handoffs."""

    def __init__(self, core: WorkerCore, intake: RequestIntake, connector: kv.KVConnector | None) -> None:
        self._core = core
        self._intake = intake
        self._connector = connector
        self._addresses: dict[str, str] = {}  # attempts that are about to be opened -> where they go
        self.first_tokens: dict[str, tuple[int, TokenLogprobs | None]] = {}  # of attempts taken over, to be reported

    def fileno(self) -> int | None:
        """Readable when ``poll`` has something; None where nothing ever comes."""
        return self._connector.fileno() if self._connector else None

    def poll(self) -> Iterable[kv.ConnectorEvent]:
        """The events of the connector. To be called before the clock is read, so that no event is later than that
        time."""
        return self._connector.poll() if self._connector else ()

    def set_address(self, attempt_id: str, address: str) -> None:
        """Where an attempt that is prefilled here will go."""
        self._addresses[attempt_id] = address

    def on_event(self, event: kv.ConnectorEvent, now: int) -> None:
        """An event of the connector."""
        if isinstance(event, ChunkArrived | TransferBroken):
            self._core.on_transfer(event, now)
        elif isinstance(event, kv.Committed):
            self._deliver(event, now)

    def act(self, action: TransferAction, tokens: StepTokens | None, now: int) -> None:
        """Carry out an action of the core. tokens: of the step whose KV it is about."""
        connector = self._connector
        if connector is None:
            if isinstance(action, OpenTransfer | ExpectTransfer):
                is_sender = isinstance(action, OpenTransfer)
                broken = TransferBroken(action.attempt_id, is_sender, "this worker takes no part in handoffs")
                self._core.on_transfer(broken, now)
            return
        match action:
            case OpenTransfer():
                self._open(connector, action, now)
            case ExpectTransfer():
                block_ids = _block_ids(action.block_tables, action.first_blocks)
                connector.expect(action.attempt_id, block_ids, action.start, action.num_tokens)
            case SendChunk():
                self.send(action)
            case CommitTransfer():
                assert tokens is not None, "the last chunk of a prompt gives a token"
                connector.commit(action.attempt_id, _payload(action, tokens, now))
            case CancelTransfer():
                self._addresses.pop(action.attempt_id, None)
                connector.cancel(action.attempt_id)
            case ForgetTransfer():
                connector.forget(action.attempt_id)

    def send(self, chunk: SendChunk, num_layers: int | None = None) -> None:
        """Send a chunk; num_layers: only its first layers are computed so far."""
        if self._connector is not None and chunk.num_tokens:
            block_ids = _block_ids(chunk.block_tables, chunk.first_blocks)
            self._connector.send(chunk.attempt_id, chunk.start, chunk.num_tokens, block_ids, num_layers)

    def close(self) -> None:
        """Stop all transfers."""
        if self._connector is not None:
            self._connector.close()

    def _open(self, connector: kv.KVConnector, action: OpenTransfer, now: int) -> None:
        try:
            connector.open(action.attempt_id, self._addresses.pop(action.attempt_id, ""), action.start)
        except ConfigError as error:
            self._core.on_transfer(TransferBroken(action.attempt_id, True, error.message), now)

    def _deliver(self, event: kv.Committed, now: int) -> None:
        try:
            commit = msgspec.msgpack.decode(event.payload, type=Commit)
        except msgspec.DecodeError as error:
            broken = TransferBroken(event.attempt_id, False, f"the commit cannot be read: {error}")
            self._core.on_transfer(broken, now)
            return
        transfer_ns = event.last_byte_ns - event.first_byte_ns
        times = commit.times_here(event.last_byte_ns)
        committed = TransferCommitted(event.attempt_id, *times, event.num_bytes, transfer_ns, event.wire_ns)
        if self._intake.deliver(committed, commit.first_token, now):
            self.first_tokens[event.attempt_id] = (commit.first_token, commit.logprobs)


def _block_ids(tables: BlockTables, first_blocks: tuple[int, ...]) -> kv.BlockIds:
    """Block tables of a plan as a connector takes them."""
    if not tables:
        return ()
    return kv.GroupTables(tables, first_blocks) if first_blocks else only_table(tables)


def _payload(action: CommitTransfer, tokens: StepTokens, now: int) -> bytes:
    attempt_id = action.attempt_id
    index = tokens.request_ids.index(attempt_id)
    first_token, logprobs = tokens.token_ids[index], tokens.logprobs.get(index)
    times = action.first_step_ns, action.first_token_ns, now
    return msgspec.msgpack.encode(Commit(first_token, logprobs, *times, clock_identity()))

"""Models whose caches free what windows have left: the bits are those of one worker when two share a request, over TCP
and in one memory, and when what was evicted comes back from the host or a disk."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from diptych.control.commands import NOT_RESERVED, Prefill, Release, Reserve, Send
from diptych.control.config import SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import WorkerCore
from diptych.control.errors import ConfigError
from diptych.control.events import Event, HandoffDelivered, HandoffReserved, RequestFinished, TransferFailed
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.runtime.kv_cache.shared_pool import SharedPool
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.transfer import make_connector
from diptych.runtime.transfer.connector import CodecName, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.serving.link.messages import AttemptTokens, pack_token_ids
from diptych.serving.worker.connector_driver import ConnectorDriver
from diptych.serving.worker.load_engine import kv_format
from diptych.serving.worker.request_intake import RequestIntake
from diptych.serving.worker.worker_loop import HeldBackTokens
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import greedy
from tests.runtime.kernel_sets import FASTEST_NATIVE
from tests.runtime.test_freed_windows import BLOCK_SIZE, chunked, logprobs_of, spoil

FAMILIES = ["gemma3", "mistral-window", "lfm2-biased"]  # groups of both kinds, windows alone, inputs of convolutions
NUM_BLOCKS = 160
DTYPE, SET = FASTEST_NATIVE
NAMES = {"tcp": "tcp", "unix": "tcp", "shared_memory": "shared_memory"}
PROMPTS = {f"r{length}": prompt_of(length, seed=length) for length in (5, 31, 96, 150, 300, 601)}


def runner_of(family: str, kv_dtype: str, pool: SharedPool | None = None) -> ModelRunner:
    """A worker's runner; its own memory is not a number at first."""
    config = RunnerConfig(
        model=reference(family, DTYPE).directory,
        instruction_set=SET,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
        frees_windows=True,
        shared_pool=pool,
    )
    return load_runner(config)


@dataclass
class Worker:
    """What a worker process has, without its loop."""

    runner: ModelRunner
    scheduler: SchedulerConfig
    name: str
    listen: str
    codec: CodecName = "none"
    log: list[Event] = field(default_factory=list)
    answers: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = WorkerCore(EngineCore(engine_config(self.runner, self.scheduler)), publishes_kv=False)
        options = TransferOptions(bytes(32), self.listen, self.codec, frame_bytes=5000)
        form, layers = kv_format(self.runner), self.runner.kv.layers
        self.connector = make_connector(NAMES[self.name], layers, form, options, self.runner.kv.groups)
        self.intake = RequestIntake(self.core, self.runner)
        self.transfers = ConnectorDriver(self.core, self.intake, self.connector)
        self.held_back = HeldBackTokens(self.core)
        self._chunks: list[SendChunk] = []
        self.runner.on_layer = self._on_layer

    def _on_layer(self, num_layers: int) -> None:
        for chunk in self._chunks if num_layers else ():
            self.transfers.send(chunk, num_layers)

    def turn(self) -> bool:
        """One turn of the loop. Whether anything was computed."""
        now = time.monotonic_ns()
        for event in self.transfers.poll():
            self.transfers.on_event(event, now)
        self.core.end_turn(now)
        self._flush(self.held_back.release())
        output = self.core.begin_step(now)
        self._flush(None)
        if output is None:
            return False
        self._chunks = self.core.chunks_of(output)
        result = self.runner.execute(output)
        self.core.end_step(output, result, time.monotonic_ns())
        self._flush(self.held_back.hold_back(result.payload))
        return True

    def _flush(self, tokens: StepTokens | None) -> None:
        now = time.monotonic_ns()
        outbox = self.core.take_outbox()
        while tokens is not None or not outbox.is_empty:
            for action in outbox.before:
                self.transfers.act(action, tokens, now)
            self.log += outbox.events
            for index, logprobs in (tokens.logprobs if tokens is not None else {}).items():
                self.answers.setdefault(tokens.request_ids[index], []).append(logprobs)
            for attempt_id, (_, first) in self.transfers.first_tokens.items():
                assert first is not None
                self.answers[attempt_id] = [first]
            self.transfers.first_tokens = {}
            for action in outbox.after:
                self.transfers.act(action, tokens, now)
            tokens, outbox = None, self.core.take_outbox()


class Pair:
    """A prefill worker, a decode worker, and what a cluster says to them."""

    def __init__(self, prefill: Worker, decode: Worker, *, runs_ahead: bool) -> None:
        self.prefill, self.decode = prefill, decode
        self.borrows = prefill.name == "shared_memory"
        self.runs_ahead = runs_ahead and not self.borrows
        self.seen = 0
        self.tokens: dict[str, AttemptTokens] = {}
        self.num_cached: dict[str, int] = {}

    def start(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.tokens[name] = AttemptTokens(pack_token_ids(prompt), greedy(max_tokens, logprobs=4))
        now = time.monotonic_ns()
        self.decode.intake.begin(Reserve(1, name, name, 0, 0, self.borrows), self.tokens[name], now)
        if self.runs_ahead:
            self._prefill(name, NOT_RESERVED, ())

    def _prefill(self, name: str, num_cached: int, tables: tuple[tuple[int, ...], ...]) -> None:
        self.prefill.transfers.set_address(name, self.decode.connector.address)
        command = Prefill(0, name, name, 0, 1, num_cached, tables, 0)
        self.prefill.intake.begin(command, self.tokens[name], time.monotonic_ns())

    def look(self) -> None:
        """What the decode worker has reported since the last time."""
        events, self.seen = self.decode.log[self.seen :], len(self.decode.log)
        for event in events:
            assert not isinstance(event, TransferFailed), event.message
            if isinstance(event, HandoffReserved):
                self.num_cached[event.request_id] = event.num_cached_tokens
                if self.runs_ahead:
                    send = Send(0, event.request_id, event.num_cached_tokens)
                    self.prefill.core.handle(send, time.monotonic_ns())
                else:
                    tables = event.block_tables if self.borrows else ()
                    self._prefill(event.request_id, event.num_cached_tokens, tables)
            elif isinstance(event, HandoffDelivered):
                self.prefill.core.handle(Release(0, event.request_id), time.monotonic_ns())

    def run(self) -> dict[str, list[TokenLogprobs]]:
        """Until everything has ended; gives the log probabilities of all answers so far."""
        while not (self.prefill.core.is_idle and self.decode.core.is_idle):
            moved = [worker.turn() for worker in (self.prefill, self.decode)]
            self.look()
            if not any(moved):
                select.select([self.prefill.connector, self.decode.connector], [], [], 0.01)
        ended = [event for event in self.decode.log if isinstance(event, RequestFinished)]
        assert all(event.error is None for event in ended), ended
        for worker in (self.prefill, self.decode):
            worker.core.engine.kv.check()
            assert not worker.core.engine.kv.pool.num_used and not worker.runner.num_requests
        return self.decode.answers


@cache
def pool_of(family: str, kv_dtype: str) -> tuple[ModelRunner, ModelRunner]:
    """Two runners in one memory."""
    geometry = runners_of(family, kv_dtype)[0].attention.geometry
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, geometry.pool_bytes(2 * NUM_BLOCKS))
    first, second = [runner_of(family, kv_dtype, SharedPool(fd, 2 * NUM_BLOCKS, start)) for start in (0, NUM_BLOCKS)]
    os.close(fd)
    return first, second


@cache
def runners_of(family: str, kv_dtype: str) -> tuple[ModelRunner, ModelRunner]:
    """Two runners with memory of their own."""
    return runner_of(family, kv_dtype), runner_of(family, kv_dtype)


@contextmanager
def pair_of(
    family: str,
    name: str,
    tmp_path: Path,
    *,
    runs_ahead: bool = False,
    tokens: int = 70,
    codec: CodecName = "none",
    kv_dtype: str = "auto",
) -> Iterator[Pair]:
    """Workers with empty caches; ``tokens`` of prompts in a step."""
    runners = pool_of(family, kv_dtype) if name == "shared_memory" else runners_of(family, kv_dtype)
    for each in runners:
        spoil(each)
    listens = ["tcp://127.0.0.1:0"] * 2 if name == "tcp" else [f"unix://{tmp_path}/{side}" for side in ("p", "d")]
    both = zip(runners, listens, strict=True)
    workers = [Worker(each, chunked(tokens), name, listen, codec) for each, listen in both]
    try:
        yield Pair(*workers, runs_ahead=runs_ahead)
    finally:
        for worker in workers:
            worker.connector.close()
            worker.runner.on_layer = None


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")


@needs_linux
@pytest.mark.parametrize("tokens", [33, 2000])
@pytest.mark.parametrize("name", ["tcp", "shared_memory"])
@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in FAMILIES), ("gemma3", "int8")])
def test_two_workers_give_the_bits_of_one(family: str, kv_dtype: str, name: str, tokens: int, tmp_path: Path) -> None:
    expected = logprobs_of(runner(family, SET, DTYPE, kv_dtype=kv_dtype), PROMPTS, chunked(2000))
    with pair_of(family, name, tmp_path, tokens=tokens, runs_ahead=tokens == 33, kv_dtype=kv_dtype) as pair:
        for index, (request, prompt) in enumerate(PROMPTS.items()):
            pair.start(request, prompt, 40 + index)
            pair.decode.turn()
            pair.look()
            pair.prefill.turn()
        assert pair.run() == expected
        handoffs = [event for event in pair.decode.log if isinstance(event, HandoffDelivered)]
        assert len(handoffs) == len(PROMPTS) and any(event.num_bytes for event in handoffs) is (name == "tcp")


@needs_linux
@pytest.mark.parametrize("name", ["tcp", "shared_memory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_go_on_where_the_decode_worker_has_them(family: str, name: str, tmp_path: Path) -> None:
    first = prompt_of(301)
    with pair_of(family, name, tmp_path) as pair:
        pair.start("first", first, 40)
        answer = [entry.token_id for entry in pair.run()["first"]]
        follows = [*first, *answer, *prompt_of(200, seed=3)]
        for request, prompt in {"again": first, "next turn": follows}.items():
            pair.start(request, prompt, 40)
            pair.run()
        assert pair.num_cached == {"first": 0, "again": 288, "next turn": 320}
        answers = pair.decode.answers
        assert answers["again"] == answers["first"]
        expected = logprobs_of(runner(family, SET, DTYPE), {"r": follows}, chunked(2000))
        assert answers["next turn"] == expected["r"]


def test_only_the_last_window_travels(tmp_path: Path) -> None:
    prompt = PROMPTS["r601"]
    with pair_of("gemma3", "tcp", tmp_path) as pair:
        pair.start("r", prompt, 2)
        pair.run()
        (event,) = [event for event in pair.decode.log if isinstance(event, HandoffDelivered)]
        form, layout = kv_format(pair.prefill.runner), pair.prefill.core.engine.kv.layout
        first = layout.first_handed_over(len(prompt))
        blocks = -(-len(prompt) // BLOCK_SIZE)
        num_blocks = sum([blocks - first[group] for group in pair.prefill.runner.kv.groups])
        assert event.num_bytes == 2 * form.bytes_per_layer_block * num_blocks
        assert num_blocks < 0.7 * blocks * form.num_layers


def test_what_travels_in_eight_bits_takes_about_half(tmp_path: Path) -> None:
    num_bytes = []
    for codec in ("none", "int8"):
        with pair_of("gemma3", "tcp", tmp_path, codec=codec) as pair:
            pair.start("r", PROMPTS["r601"], 8)
            assert len(pair.run()["r"]) == 8
            num_bytes += [event.num_bytes for event in pair.decode.log if isinstance(event, HandoffDelivered)]
    assert 0.4 < num_bytes[1] / num_bytes[0] < 0.7


def test_a_codec_may_be_chosen_by_what_it_saves(tmp_path: Path) -> None:
    with pair_of("gemma3", "tcp", tmp_path, codec="auto") as pair:
        pair.start("r", PROMPTS["r601"], 8)
        assert len(pair.run()["r"]) == 8


def test_a_peer_that_keeps_other_windows_is_refused_by_name(tmp_path: Path) -> None:
    with pair_of("gemma3", "tcp", tmp_path) as pair:
        form = kv_format(pair.decode.runner)
        keeps_all = replace(form, windows=())
        stranger = make_connector("tcp", pair.decode.runner.kv.layers, keeps_all, TransferOptions(bytes(32)))
        pair.decode.connector.close()
        pair.decode.connector = stranger
        pair.prefill.transfers.set_address("r", stranger.address)
        tokens = AttemptTokens(pack_token_ids(PROMPTS["r150"]), greedy(4))
        pair.prefill.intake.begin(Prefill(0, "r", "r", 0, 1, 0, (), 0), tokens, 0)
        stranger.expect("r", range(5), 0, 150)
        failed: list[TransferFailed] = []
        while not failed:
            pair.prefill.turn()
            failed = [event for event in pair.prefill.log if isinstance(event, TransferFailed)]
        assert "windows is (" in failed[0].message and "and () there" in failed[0].message


def test_a_format_says_its_windows_and_one_without_is_what_it_was() -> None:
    plain = KVFormat("m", 3, 2, 32, "bfloat16", 16, "cpu")
    assert b"windows" not in plain.to_bytes() and KVFormat.from_bytes(plain.to_bytes()) == plain
    windowed = replace(plain, windows=(0, 512, 512))
    assert KVFormat.from_bytes(windowed.to_bytes()) == windowed
    with pytest.raises(ConfigError, match=r"windows is \(0, 512, 512\) here and \(0, 512, 1024\) there"):
        windowed.check_compatible(replace(windowed, windows=(0, 512, 1024)))
    with pytest.raises(ConfigError, match="block_size is 16 here and 32 there"):
        windowed.check_compatible(replace(windowed, block_size=32))
    plain.check_compatible(replace(plain, block_size=32))
    with pytest.raises(ConfigError, match="windows of the KV format are of 2 layers; it has 3"):
        replace(plain, windows=(0, 512))
    with pytest.raises(ConfigError, match="windows of the KV format have -1"):
        replace(plain, windows=(0, 512, -1))
    with pytest.raises(ConfigError, match="not a description of a KV cache"):
        KVFormat.from_bytes(windowed.to_bytes().replace(b"[0, 512, 512]", b"7"))

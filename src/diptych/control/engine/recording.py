"""An EngineCore that records everything its decisions depend on, so that a replay can compare them.

The vocabulary of a worker's recording: which inputs there are, in which form, and the digest of a decision. A recording
holds counts, ids, times and block hashes, never tokens. Rows go to a callable, which does the I/O.

    row = (kind, ...)           the inputs of the engine, in order
    observe                     step features (4 numbers), nanoseconds: teaches the step-time model
    add                         now, request (see request_row)
    reserve                     now, request: blocks for a prompt that another worker computes
    deliver                     now, id, first_step_ns, first_token_ns: its KV is here
    ahead                       id: the "add" that follows is of a prompt whose decode worker has no blocks yet
placed                      now, id: that worker has blocks
release                     now, id: another worker has taken it over
    drop                        now, id, reason: end it wherever it is
    renew                       now, ids: their leases begin again
    expire                      now: leases and loads run out
    tier                        now, name and fields of the event: what became of an action on the tiers
    abort                       now, id, reason
    shrink                      now, blocks that the KV cache has from now on
    configure                   scheduler settings
    rescale                     how many times as long steps take from now on
    begin                       now, the plan (None: nothing to do); a second before the first "end" plans ahead
    end                         now, step id, stopped, full blocks, failed, (number of steps, start of the last one)
                                where end_step was told them, else (); then, if there are any, what came of extra rows
                                and proposals, as (id, tokens, accepted, forced) and (id, chances)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from diptych.control.config import EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.tier_records import TierEvent
from diptych.control.errors import ErrorRecord
from diptych.control.events import Event
from diptych.control.request import BlockTables, FinishReason, Request
from diptych.control.step import DraftProposal, SchedulerOutput, StepFeatures, StepResult, VerifyResult, chunk_attention

Row = tuple[Any, ...]

FORMAT = "diptych recording"
VERSION = 11  # of a file of rows; 10 had other names (simulation/old_names.py)
# 10: before, a request had one block table, and a grammar that was too much was no failure
# 8 read no peer, 7 did not let class batch give way, 6 had no lent blocks, 5 no tiers, 4 no standing,
# 3 a request's options one by one
DIGEST_BYTES = 12


class RecordingEngineCore(EngineCore):
    """An EngineCore that hands each input to ``write`` before it acts on it (and each plan after it is made).

    ``write`` is called on the worker's own thread: it must return at once and must not raise. The objects in a row
    are immutable and may be read later, on another thread. ``write_light`` gets rows that refer to nothing: those of
    most steps (None: the same).
    """

    def __init__(
        self, config: EngineConfig, write: Callable[[Row], None], write_light: Callable[[Row], None] | None = None
    ) -> None:
        super().__init__(config)
        self._write = write
        self._write_light = write_light or write

    def add_request(self, request: Request, now: int) -> list[Event]:
        if request.is_early_prefill:
            self._write(("ahead", request.request_id))
        self._write(("add", now, request_row(request)))
        return super().add_request(request, now)

    def reserve(self, request: Request, now: int, lease_ns: int = 0) -> list[Event]:
        request.lease_ns = lease_ns
        self._write(("reserve", now, request_row(request)))
        return super().reserve(request, now, lease_ns)

    def deliver(
        self,
        request_id: str,
        now: int,
        *,
        first_step_ns: int,
        first_token_ns: int,
        num_bytes: int = 0,
        transfer_ns: int = 0,
        wire_ns: int = 0,
    ) -> list[Event]:
        self._write(("deliver", now, request_id, first_step_ns, first_token_ns))
        return super().deliver(
            request_id,
            now,
            first_step_ns=first_step_ns,
            first_token_ns=first_token_ns,
            num_bytes=num_bytes,
            transfer_ns=transfer_ns,
            wire_ns=wire_ns,
        )

    def drop(self, request_id: str, now: int, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        self._write(("drop", now, request_id, reason))
        return super().drop(request_id, now, reason)

    def renew(self, attempt_ids: Iterable[str], now: int) -> None:
        attempt_ids = tuple(attempt_ids)
        self._write(("renew", now, attempt_ids))
        super().renew(attempt_ids, now)

    def expire(self, now: int) -> list[Event]:
        expiry_ns = self.next_expiry_ns
        if expiry_ns is not None and expiry_ns <= now:
            self._write(("expire", now))
        return super().expire(now)

    def place_found(self, request_id: str, now: int) -> list[Event]:
        self._write(("placed", now, request_id))
        return super().place_found(request_id, now)

    def release(self, request_id: str, now: int) -> list[Event]:
        self._write(("release", now, request_id))
        return super().release(request_id, now)

    def abort(
        self,
        request_id: str,
        now: int,
        reason: FinishReason = FinishReason.ABORT,
        error: ErrorRecord | None = None,
    ) -> list[Event]:
        self._write(("abort", now, request_id, reason))
        return super().abort(request_id, now, reason, error)

    def begin_step(self, now: int) -> SchedulerOutput | None:
        output = EngineCore.begin_step(self, now)  # super() costs as much as the row
        if output is not None and (
            output.new_blocks
            or output.prefills
            or output.finished
            or output.verify_rows
            or output.resumed
            or output.paused
            or output.swap_out
            or output.swap_in
        ):
            self._write(("begin", now, output))
        else:  # nothing, or the same requests decode in blocks that they have
            self._write_light(("begin", now, output))
        return output

    def end_step(
        self, result: StepResult, now: int, *, num_steps: int = 1, last_start_ns: int | None = None
    ) -> list[Event]:
        if result.is_out_of_memory:
            num_steps = 0
        if (
            num_steps == 1
            and last_start_ns is None
            and not (result.full_blocks or result.stopped or result.failed or result.extra or result.proposals)
        ):
            self._write_light(("end", now, result.step_id, (), (), (), ()))
            return EngineCore.end_step(self, result, now)
        repeats = () if num_steps == 1 and last_start_ns is None else (num_steps, last_start_ns)
        more: Row = (
            (verify_rows(result.extra), proposal_rows(result.proposals)) if result.extra or result.proposals else ()
        )
        failed = failed_rows(result)
        self._write(("end", now, result.step_id, result.stopped, result.full_blocks, failed, repeats, *more))
        return super().end_step(result, now, num_steps=num_steps, last_start_ns=last_start_ns)

    def shrink_cache(self, num_blocks: int, now: int) -> list[Event]:
        self._write(("shrink", now, num_blocks))
        return super().shrink_cache(num_blocks, now)

    def on_tier(self, event: TierEvent, now: int) -> None:
        self._write(("tier", now, type(event).__name__, event))
        super().on_tier(event, now)

    def configure(self, scheduler: SchedulerConfig) -> None:
        self._write(("configure", scheduler))
        super().configure(scheduler)

    def rescale(self, ratio: float) -> None:
        self._write(("rescale", ratio))
        super().rescale(ratio)

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        self._write(("observe", feature_row(features), duration_ns))
        super().observe(features, duration_ns)


def request_row(request: Request) -> Row:
    """What an engine is told of a request: (id, prompt tokens, max_tokens, block hashes, options, reads_prefix_cache,
    hands_off, lease_ns, borrowed block tables, borrowed tokens, standing, is_remote_prefill, peer run as (peer, first
    block, blocks) or ()). Neither tenant nor salt is written down."""
    run = request.peer_run
    return (
        request.request_id,
        request.num_prompt_tokens,
        request.max_tokens,
        tuple(request.block_hashes),
        replace(request.options, tenant="", cache_salt=None),
        request.reads_prefix_cache,
        request.hands_off,
        request.lease_ns,
        request.remote_block_tables,
        request.num_remote_tokens,
        int(request.wait_class_at_arrival),
        request.is_remote_prefill,
        () if run is None else (run.peer, run.first_block, run.num_blocks),
    )


def measured_steps(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[StepFeatures, int]]:
    """What each step of a recording computed and how many nanoseconds it took, the loop around it included (a busy
    worker ends a step and begins the next one at the same time). Plans as in ``plan_summary``."""
    under_way: deque[tuple[int, StepFeatures]] = deque()  # two, where the next step is planned ahead
    last_ns = 0
    for row in rows:
        if row[0] == "begin" and len(row) > 2:
            _, chunks, num_decodes, context, *_ = row[3]
            tokens = sum(chunk[2] for chunk in chunks)
            pairs = sum(chunk_attention(chunk[1], chunk[2]) for chunk in chunks)
            under_way.append((row[1], StepFeatures(tokens, pairs, num_decodes, context)))
        elif row[0] == "end" and under_way:
            begun_ns, features = under_way.popleft()
            if features != StepFeatures() and not row[6]:
                yield features, row[1] - max(begun_ns, last_ns)
            last_ns = row[1]


def failed_rows(result: StepResult) -> Row:
    """Rows of the requests that failed: id, the message, and True where its own grammar was the reason."""
    beyond = result.beyond_grammar
    return tuple((name, message, True) if name in beyond else (name, message) for name, message in result.failed)


def verify_rows(extra: Iterable[VerifyResult]) -> Row:
    """What came of extra rows, as a row."""
    return tuple((entry.request_id, entry.num_tokens, entry.num_accepted, entry.num_forced) for entry in extra)


def proposal_rows(proposals: Iterable[DraftProposal]) -> Row:
    """Offers, as a row."""
    return tuple((proposal.request_id, proposal.chances) for proposal in proposals)


class DecisionChain:
    """The digest of all plans so far: each covers the ones before it, so that the last one stands for the whole run."""

    def __init__(self) -> None:
        self._digest = b""

    def add(self, output: SchedulerOutput) -> bytes:
        """The digest after this plan."""
        self._digest = blake2b(self._digest + canonical_plan(output), digest_size=DIGEST_BYTES).digest()
        return self._digest


def canonical_plan(output: SchedulerOutput) -> bytes:
    """Every field of a plan as ASCII text; equal bytes if and only if the plans are equal. What belongs to the only
    group, or to the first, reads as it did before there were groups: recordings of then are decided to the same
    digests."""
    prefills = [
        (
            *(chunk.request_id, chunk.start, chunk.num_tokens, plain_tables(chunk.block_tables), chunk.is_last),
            *chunk.first_blocks,
        )
        for chunk in output.prefills
    ]
    resumed = [
        (member.request_id, member.num_tokens, plain_tables(member.block_tables), *member.first_blocks)
        for member in output.resumed
    ]
    new_blocks = [(entry[0], entry[2]) if entry[1] == 0 else entry for entry in output.new_blocks]
    fields = (
        output.step_id,
        prefills,
        output.num_decodes,
        output.finished,
        output.paused,
        output.swap_out,
        output.swap_in,
        resumed,
        tuple(new_blocks),
        feature_row(output.features),
        output.predicted_ns,
        output.max_repeats,
        *((output.block_copies,) if output.block_copies else ()),
        *(([(rows.request_id, rows.num_tokens) for rows in output.verify_rows],) if output.verify_rows else ()),
        *((f"{output.num_blocks} blocks",) if output.num_blocks else ()),
    )
    return ascii(fields).encode()


def plain_tables(tables: BlockTables) -> tuple[int, ...] | BlockTables:
    """The block table itself where there is one."""
    return tables[0] if len(tables) == 1 else tables


def feature_row(features: StepFeatures) -> tuple[int, int, int, int]:
    """Step features in the order of their fields."""
    return (features.prefill_tokens, features.prefill_attention, features.decode_seqs, features.decode_context)


def plan_summary(output: SchedulerOutput) -> tuple[Any, ...]:
    """What a recording says of a plan besides its digest: (step id, chunks as (id, start, tokens, is last), decoded
    tokens, their context, predicted nanoseconds, number of each of finished, paused, swapped out, swapped in,
    resumed, new blocks; empty when all are zero)."""
    changes = tuple(
        len(part)
        for part in (
            output.finished,
            output.paused,
            output.swap_out,
            output.swap_in,
            output.resumed,
            output.new_blocks,
        )
    )
    return (
        output.step_id,
        tuple((chunk.request_id, chunk.start, chunk.num_tokens, chunk.is_last) for chunk in output.prefills),
        output.features.decode_seqs,
        output.features.decode_context,
        output.predicted_ns,
        changes if any(changes) else (),
    )

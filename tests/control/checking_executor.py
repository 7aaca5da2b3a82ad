"""An executor without a model that checks everything the real one relies on.

Every slot of its KV cache holds the fingerprint of the whole token prefix that it stands for, so reading a wrong,
stale or shared-by-mistake block is an assertion error. Token ids are a pure function of (request, position).
"""

import random

from diptych.control.engine.kvcache.prefix_cache import hash_block, hash_blocks, root_hash
from diptych.control.kv_layout import KVGroup
from diptych.control.request import BlockTables, FinishReason, Request
from diptych.control.step import DraftProposal, SchedulerOutput, StepResult, VerifyResult


class Sequence:
    """What the executor knows of one request."""

    def __init__(self, prompt: list[int], stop_after: int | None, block_size: int) -> None:
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.stop_after = stop_after
        self.tables: list[list[int | None]] = []  # by group; None: a block that has expired
        self.computed = 0
        self.hashes = list(hash_blocks(prompt, block_size))
        self.drafted: list[int] = []  # tokens that may come next
        self.num_forced = 0  # of these, at the front


class CheckingExecutor:
    """Follows plans as step.py documents them and asserts that they make sense. groups: of the layers of its model."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, groups: tuple[KVGroup, ...] = ()
    ) -> None:
        self.block_size = block_size
        self.groups = groups or (KVGroup(block_size),)
        self.device: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[object]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.sequences: dict[str, Sequence] = {}
        self.batch: dict[str, None] = {}
        self.next_step = 0
        self.guesses: random.Random | None = None  # proposals drafts, right and wrong, and forced tokens

    def add(self, request: Request, prompt: list[int], stop_after: int | None = None) -> None:
        """The driver hands over the tokens of a request that the core has queued."""
        self.sequences[request.request_id] = Sequence(prompt, stop_after, self.block_size)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """One step; see SchedulerOutput for the order."""
        assert output.step_id == self.next_step
        self.next_step += 1
        for request_id in output.finished:
            del self.sequences[request_id]
            self.batch.pop(request_id, None)
        for request_id in output.paused:
            del self.batch[request_id]
        for device_block, host_block in output.swap_out:
            self.host[host_block] = list(self.device[device_block])
        for block, other_block in output.block_copies:
            self.device[other_block] = list(self.device[block])
        for host_block, device_block in output.swap_in:
            self.device[device_block] = list(self.host[host_block])
        for resumed in output.resumed:
            sequence = self.sequences[resumed.request_id]
            assert resumed.num_tokens == len(sequence.tokens) - 1
            sequence.tables = self._tables(resumed.block_tables, resumed.first_blocks)
            sequence.computed = resumed.num_tokens
            self.batch[resumed.request_id] = None
        for request_id, group, block in output.new_blocks:
            assert request_id in self.batch, "a block for a request that does not decode"
            self.sequences[request_id].tables[group].append(block)
        assert output.num_decodes in (0, len(self.batch))
        stopped: list[tuple[str, FinishReason]] = []
        full: list[tuple[str, bytes]] = []
        decoding = list(self.batch) if output.num_decodes else []
        for chunk in output.prefills:
            assert chunk.request_id not in self.batch
            sequence = self.sequences[chunk.request_id]
            sequence.tables, sequence.computed = self._tables(chunk.block_tables, chunk.first_blocks), chunk.start
            self._compute(chunk.request_id, chunk.num_tokens, full)
            assert chunk.is_last == (sequence.computed == len(sequence.tokens))
            if chunk.is_last:
                self._sample(chunk.request_id, stopped)
                self.batch[chunk.request_id] = None
        rows = {extra.request_id: extra.num_tokens for extra in output.verify_rows}
        assert len(rows) == len(output.verify_rows) and rows.keys() <= set(decoding) and all(rows.values())
        assert output.features.decode_seqs == len(decoding) + sum(rows.values())
        assert output.features.decode_context == sum(
            self.sequences[request_id].computed + 1 + more
            for request_id in decoding
            for more in range(rows.get(request_id, 0) + 1)
        )
        extra = []
        for request_id in decoding:
            self._compute(request_id, 1, full)
            self._sample(request_id, stopped)
            if request_id in rows:
                extra.append(self._verify(request_id, rows[request_id], stopped, full))
        proposals = (
            [proposal for request_id in self.batch if (proposal := self._proposal(request_id))] if decoding else []
        )
        return StepResult(output.step_id, tuple(stopped), tuple(full), extra=tuple(extra), proposals=tuple(proposals))

    def _tables(self, tables: BlockTables, firsts: tuple[int, ...]) -> list[list[int | None]]:
        assert len(tables) == len(self.groups)
        return [[*[None] * first, *ids] for first, ids in zip(firsts or (0,) * len(tables), tables, strict=True)]

    def _slot(self, sequence: Sequence, group: int, position: int) -> tuple[list[object], int]:
        block = sequence.tables[group][position // self.block_size]
        assert block is not None, "a block that has expired"
        return self.device[block], position % self.block_size

    def _fingerprint(self, sequence: Sequence, group: int, position: int) -> object:
        prefix = (*sequence.tokens[: position + 1][-40:], position)
        return prefix if len(self.groups) == 1 else (prefix, group)

    def _compute(self, request_id: str, num_tokens: int, full: list[tuple[str, bytes]]) -> None:
        """Every layer writes, then reads what any of the computed tokens attends to."""
        sequence, size = self.sequences[request_id], self.block_size
        end = sequence.computed + num_tokens
        for number, group in enumerate(self.groups):
            for position in range(sequence.computed, end):
                block, offset = self._slot(sequence, number, position)
                block[offset] = self._fingerprint(sequence, number, position)
            for position in range(
                max(0, sequence.computed - group.window_tokens + 1) if group.window_tokens else 0, end
            ):
                block, offset = self._slot(sequence, number, position)
                assert block[offset] == self._fingerprint(sequence, number, position), (request_id, number, position)
        sequence.computed = end
        while (len(sequence.hashes) + 1) * size <= sequence.computed:
            parent = sequence.hashes[-1] if sequence.hashes else root_hash()
            start = len(sequence.hashes) * size
            sequence.hashes.append(hash_block(parent, sequence.tokens[start : start + size]))
            full.append((request_id, sequence.hashes[-1]))

    def _verify(
        self,
        request_id: str,
        num_rows: int,
        stopped: list[tuple[str, FinishReason]],
        full: list[tuple[str, bytes]],
    ) -> VerifyResult:
        """Compute drafted tokens behind the newest one, and keep those that the model would have chosen."""
        sequence = self.sequences[request_id]
        assert num_rows <= len(sequence.drafted), "more rows than tokens were drafted"
        for position in range(sequence.computed, sequence.computed + num_rows):  # right or wrong, they are written
            for group in range(len(self.groups)):
                block, offset = self._slot(sequence, group, position)
                block[offset] = "a draft"
        num_accepted = 0
        while num_accepted < num_rows and sequence.tokens[-1] == sequence.drafted[num_accepted]:
            if stopped and stopped[-1][0] == request_id:
                break
            num_accepted += 1
            self._compute(request_id, 1, full)
            self._sample(request_id, stopped)
        assert num_accepted >= min(num_rows, sequence.num_forced) or (stopped and stopped[-1][0] == request_id)
        return VerifyResult(request_id, num_rows, num_accepted, min(num_rows, sequence.num_forced))

    def _proposal(self, request_id: str) -> DraftProposal | None:
        sequence, rng = self.sequences[request_id], self.guesses
        if rng is None or rng.random() < 0.3:
            return None
        sequence.num_forced = rng.choice((0, 0, 0, 1, 4))
        count = sequence.num_forced + rng.randrange(5)
        sequence.drafted, tokens, chances = [], list(sequence.tokens), []
        for place in range(count):
            is_right = place < sequence.num_forced or rng.random() < 0.7
            tokens.append(token_at(tokens) if is_right else 998)
            sequence.drafted.append(tokens[-1])
            chances.append(1.0 if place < sequence.num_forced else chances[-1] * 0.9 if chances else 0.9)
        return DraftProposal(request_id, tuple(chances)) if count else None

    def _sample(self, request_id: str, stopped: list[tuple[str, FinishReason]]) -> None:
        sequence = self.sequences[request_id]
        sequence.tokens.append(token_at(sequence.tokens))
        if len(sequence.tokens) - sequence.num_prompt == sequence.stop_after:
            stopped.append((request_id, FinishReason.STOP))


def token_at(tokens: list[int]) -> int:
    """The next token: a function of the prefix alone, so that equal prompts give equal answers."""
    return (tokens[-1] * 31 + tokens[0] * 7 + len(tokens)) % 997

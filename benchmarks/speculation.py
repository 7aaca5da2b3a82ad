"""What speculation without a model brings: tokens per second with it and without, and whether the tokens are the same.

    python benchmarks/speculation.py [MODEL] [--load quote edit chat] [--batch 1 2 4 8 16 32] [--json speculation.json]

The texts of the answers are given, so that a model of any weights writes them: every step computes all it would
compute, and then the written token is taken instead of the likeliest. The texts are made of files of this repository:

    edit    a source file, and then the same file with a name changed and some lines added or left out
    quote   a document, and then passages of it between sentences that are not in it
    chat    a paragraph, and then prose that has nothing to do with it

and "free" is what the model itself says to the prompts of edit (with random weights: mostly repetition). Both settings
take turns, ``--rounds`` times; the medians count. Deterministic but for the times. On a machine that does other work,
too, ``--cpu-time`` counts seconds of the processor; with OMP_NUM_THREADS=1, or threads that wait are counted.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import report

from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import RequestFinished
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import Clock, LocalEngine, engine_config
from diptych.runtime.sampling.sampler import Ints
from diptych.runtime.sampling.step_sampling import StepSampling
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.step.step_layout import StepLayout
from diptych.runtime.step.warm_up import warm_up
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

ROOT = Path(__file__).parent.parent
LOADS = ("quote", "edit", "chat", "free")
Script = dict[str, list[int]]


class ScriptedSampling(StepSampling):
    """Takes the tokens of a script where there is one, after the work of finding the likeliest."""

    def __init__(self, batch: DecodeRows, ends_sequence: npt.NDArray[np.bool_], script: Script) -> None:
        super().__init__(batch, ends_sequence)
        self._script = script

    def most_likely(self, layout: StepLayout, logits: torch.Tensor) -> tuple[Ints, npt.NDArray[np.bool_]]:
        best, is_finite = super().most_likely(layout, logits)
        best = best.copy()
        for slot in range(layout.first_slot, layout.last_slot):
            state = self._batch.states[slot]
            if answer := self._script.get(state.request_id):
                place = slot - layout.first_slot
                first, last = layout.first_rows[place], layout.first_rows[place + 1]
                at = int(self._batch.positions[slot]) + 1 - state.num_prompt_tokens
                given = answer[at : at + last - first]
                best[first : first + len(given)] = given
        return best, is_finite


class ScriptedRunner(ModelRunner):
    """A runner whose requests answer what ``script`` says."""

    def __init__(self, shared: ModelRunner, script: Script, *, drafts: bool) -> None:
        drafted = DraftTokens(drafts=drafts)
        super().__init__(shared.loaded, shared.attention, shared.kv, shared.max_num_seqs, shared.max_model_len, drafted)
        self._sampling = ScriptedSampling(self._batch, self._ends_sequence, script)


def edited(source: str, rng: random.Random) -> str:
    """The source as someone would hand it back: a name changed everywhere, lines added and left out."""
    names = sorted({word for word in source.replace("(", " ").replace(".", " ").split() if word.isidentifier()})
    old = rng.choice([name for name in names if len(name) > 5 and source.count(name) in range(3, 20)] or ["self"])
    lines = []
    for line in source.replace(old, f"new_{old}").splitlines():
        chance = rng.random()
        if chance > 0.03:
            lines.append(line)
        if chance > 0.97:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}# {rng.choice(names)} comes before {rng.choice(names)} here")
    return "\n".join(lines)


def answer_with_quotes(document: str, other: str, rng: random.Random) -> str:
    """Passages of the document, each after a sentence of another text."""
    passages = [passage for passage in document.split("\n") if len(passage) > 60]
    sentences = [sentence.strip() for sentence in other.replace("\n", " ").split(". ") if len(sentence) > 30]
    parts = []
    for _ in range(12):
        parts += [rng.choice(sentences) + ":", '"' + rng.choice(passages) + '"']
    return "\n".join(parts)


def texts(load: str, number: int) -> tuple[str, str]:
    """(prompt, answer) of one request."""
    rng = random.Random(f"{load} {number}")
    sources = sorted((ROOT / "src" / "diptych" / "control").rglob("*.py"))
    documents = sorted((ROOT / "docs").glob("*.md"))
    if load in ("edit", "free"):
        source = rng.choice([path for path in sources if path.stat().st_size > 5000]).read_text()[:7000]
        return f"Change this file:\n{source}\nThe changed file:\n", edited(source, rng)
    document, other = (path.read_text() for path in rng.sample(documents, 2))
    start = rng.randrange(max(1, len(document) - 7000))
    if load == "quote":
        text = document[start : start + 7000]
        return f"{text}\nWhat does this say? Quote it.\n", answer_with_quotes(text, other, rng)
    begin = rng.randrange(max(1, len(other) - 4000))
    return document[start : start + 400] + "\nTell me more.\n", other[begin : begin + 4000]


def one_run(
    runner: ModelRunner, prompts: Script, script: Script, num_tokens: int, clock: Clock, *, drafts: bool
) -> tuple[float, Script, EngineCore]:
    """(tokens per second between the first token and the last, the answers, the engine)."""
    scripted = ScriptedRunner(runner, script, drafts=drafts)
    prompts_first = BudgetConfig("whole", max_batched_tokens=2048)  # so that all answers begin together
    scheduler = SchedulerConfig(order="fcfs", budget=prompts_first, max_num_seqs=runner.max_num_seqs)
    core = EngineCore(engine_config(scripted, scheduler, enable_prefix_cache=False))
    for features, duration_ns in warm_up(scripted, clock=clock):
        core.observe(features, duration_ns)
    engine = LocalEngine(core, scripted, clock)
    answers: Script = {request_id: [] for request_id in prompts}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    begun, counted, end = 0, 0, 0
    while (outcome := engine.step()) is not None:
        for request_id, token in zip(outcome.tokens.request_ids, outcome.tokens.token_ids, strict=True):
            answers[request_id].append(token)
        if begun:
            counted += len(outcome.tokens.token_ids)
            end = clock()
        elif all(answers.values()):
            begun = clock()
        if any(isinstance(event, RequestFinished) for event in outcome.events) and begun:
            break  # a full batch is what is measured
    for request_id in answers:
        engine.abort(request_id)
    while engine.step() is not None:
        pass
    return 1e9 * counted / (end - begun), answers, core


def measure(
    runner: ModelRunner, tokenizer: Tokenizer, load: str, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row: a load at one batch size, over enough texts for a narrow batch not to hang on one of them."""
    clock = time.process_time_ns if options.cpu_time else time.perf_counter_ns
    ns_per_token: dict[bool, float] = {False: 0.0, True: 0.0}  # means over the batches of medians over the rounds
    drafted, accepted, same = 0, 0, True
    firsts = range(0, max(batch, options.texts), batch)
    for first in firsts:
        prompts: Script = {}
        script: Script = {}
        for number in range(first, first + batch):
            prompt, answer = texts(load, number)
            prompts[str(number)] = tokenizer.encode(prompt)
            script[str(number)] = [] if load == "free" else tokenizer.encode(answer, add_special_tokens=False)
        num_tokens = min([options.tokens, *(len(answer) for answer in script.values() if answer)])
        speeds: dict[bool, list[float]] = {False: [], True: []}
        given: dict[bool, Script] = {}
        for number in range(2 * options.rounds):
            drafts = number % 2 == 1
            speed, given[drafts], core = one_run(runner, prompts, script, num_tokens, clock, drafts=drafts)
            speeds[drafts].append(speed)
        lengths = {name: min(len(given[False][name]), len(given[True][name])) for name in prompts}
        same &= all(given[False][name][:length] == given[True][name][:length] for name, length in lengths.items())
        stats = core.stats()
        drafted, accepted = drafted + stats.num_draft_tokens, accepted + sum(stats.accepted_draft_tokens)
        for drafts in (False, True):
            ns_per_token[drafts] += 1e9 / statistics.median(speeds[drafts]) / len(firsts)
    off, on = (1e9 / ns_per_token[drafts] for drafts in (False, True))
    return {
        "load": load, "batch": batch, "off tok/s": round(off, 1), "on tok/s": round(on, 1),
        "ratio": round(on / off, 3), "drafted": drafted, "accepted": accepted, "same tokens": same,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--load", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=6, help="at least so many for a row, batch after batch")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's seconds instead of the clock's")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    runner = load_runner(RunnerConfig(options.model, max_num_seqs=max(options.batch), kv_bytes=3 << 30))
    tokenizer = Tokenizer(options.model)
    rows = [measure(runner, tokenizer, load, batch, options) for load in options.load for batch in options.batch]
    report("speculation without a model", rows, options.json, model=options.model.name)


if __name__ == "__main__":
    main()

"""A worker process whose answers are written beforehand: the text of the prompt decides which one comes.

A script belongs to the conversations that hold its marker. It is a list of tool calls, a regular expression for what
their results bring, and a last answer: while k different matches are in the prompt, call number k comes, then the
answer, in which {results} stands for all matches. A prompt that offers no tools is answered with TITLE, as clients ask
for titles on the way. Every prompt and its answer go into a file, a JSON object a line.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from fake_worker import EOS_TOKEN, VOCAB_SIZE, FakeRunner, FakeState, fake_connect

from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.constraint import TokenConstraint
from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import SamplingParams
from diptych.control.step import StepTokens
from diptych.runtime.sampling.grammar import Grammars
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import Ready
from diptych.serving.worker.load_engine import LoadedEngine
from diptych.serving.worker.worker_loop import die_with_parent, serve

MAX_MODEL_LEN = 1_000_000  # the system prompts of agents have 100 kB and more, in tokens of a small vocabulary
NUM_BLOCKS = 2**16
TITLE = "A title"
TOOLS_OFFERED = "# Tools\n"
REASONING_BEGUN = "<think>\n"  # at the end of a prompt whose request asks for reasoning
REASONING = "The script says what comes next.\n</think>\n\n"


@dataclass
class ScriptedState(FakeState):
    """One request. answer: what is left to say, in tokens; None until its first token is asked for. constraint: what it
    must obey, if anything."""

    answer: list[int] | None = None
    constraint: TokenConstraint | None = None


class ScriptedRunner(FakeRunner):
    """An Executor that answers by scripts. scripts: by marker the calls (of a name and arguments), the answer, and the
    regular expression for its results."""

    def __init__(self, tokenizer: Tokenizer, scripts: dict[str, Any], log: Path) -> None:
        super().__init__()
        self._tokenizer, self._scripts, self._log = tokenizer, scripts, log

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        constraint: TokenConstraint | None = None,
        **more: Any,
    ) -> None:
        assert request_id not in self.requests, request_id
        self.requests[request_id] = ScriptedState(list(prompt_token_ids), sampling, constraint=constraint)

    def _sample(self, request_id: str, payload: StepTokens) -> bool:
        state = self.requests[request_id]
        assert isinstance(state, ScriptedState)
        if state.answer is None:
            state.answer = self._answer(state)
        token_id = state.answer.pop(0) if state.answer else EOS_TOKEN
        if state.constraint is not None and token_id != EOS_TOKEN:
            state.constraint.accept([token_id])  # raises where a script breaks the grammar of a request
        state.num_outputs += 1
        payload.request_ids.append(request_id)
        payload.token_ids.append(token_id)
        return token_id == EOS_TOKEN

    def _answer(self, state: ScriptedState) -> list[int]:
        """What the script says, in tokens; without the words before a call where a grammar allows none."""
        text = self._tokenizer.decode(state.prompt, skip_special_tokens=False)
        words, rest = scripted_answer(text, self._scripts)
        if text.endswith(REASONING_BEGUN):
            words = REASONING + words
        answer = self._tokenizer.encode(words + rest, add_special_tokens=False)
        if state.constraint is not None and state.constraint.count_allowed(answer) < len(answer):
            answer = self._tokenizer.encode(rest, add_special_tokens=False)
        with self._log.open("a") as log:
            log.write(json.dumps({"prompt": text, "answer": self._tokenizer.decode(answer)}) + "\n")
        return answer


def scripted_answer(prompt: str, scripts: dict[str, Any]) -> tuple[str, str]:
    """What the script whose marker is in the prompt has for it: (words before a call, the call or the answer)."""
    script = next((script for marker, script in scripts.items() if marker in prompt), None)
    if script is None or TOOLS_OFFERED not in prompt:
        return "", TITLE
    results = dict.fromkeys(re.findall(script["results"], prompt))
    if len(results) >= len(script["calls"]):
        return "", str(script["answer"]).replace("{results}", ", ".join(results))
    return f"Step {len(results) + 1}.\n", written_call(script["calls"][len(results)])


def written_call(call: Any) -> str:
    """A call of a tool as the model of tool_model.py writes it."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def scripted_load(scripts: Path, log: Path) -> Callable[..., LoadedEngine[ScriptedRunner]]:
    """What ``serve`` calls instead of loading a model."""

    def load(options: EngineOptions, report: Callable[..., None]) -> LoadedEngine[ScriptedRunner]:
        cache = CacheConfig(NUM_BLOCKS, options.memory.block_size)
        engine = EngineCore(EngineConfig(cache, options.scheduler, options.slo, MAX_MODEL_LEN))
        tokenizer = Tokenizer(Path(options.model))
        runner = ScriptedRunner(tokenizer, json.loads(scripts.read_text()), log)
        grammars = Grammars(tokenizer.fast.to_str(), VOCAB_SIZE, [EOS_TOKEN])
        scheduler = options.scheduler
        capacity, waiting, seqs = engine.kv.capacity_tokens, scheduler.max_waiting, scheduler.max_num_seqs
        ready = Ready(VOCAB_SIZE, MAX_MODEL_LEN, capacity, waiting, seqs, [EOS_TOKEN], "scripted", embedding_size=2)
        return LoadedEngine(engine, runner, ready, grammars=grammars)

    return load


def scripted_command(scripts: Path, log: Path) -> tuple[str, ...]:
    """The command line for a Supervisor."""
    return (sys.executable, __file__, str(scripts), str(log))


def main() -> int:
    """As diptych.serving.worker.worker_loop.main, with the scripts."""
    parser = argparse.ArgumentParser()
    for name in ("scripts", "log", "directory"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(arguments.directory)
    return serve(arguments.directory, scripted_load(arguments.scripts, arguments.log), fake_connect)


if __name__ == "__main__":
    sys.exit(main())

"""What answers that follow a schema cost. (Whether they obey it: compatibility.py schemas; hostile ones: hostile.py.)

    python benchmarks/structured.py forced [--model PATH]     tokens/s with and without forced tokens, batch 1
    python benchmarks/structured.py step --model PATH [--rows 32]   a step with constrained rows, and without

Figures on the page; --json FILE keeps them.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from common import report

from diptych import LLM, SamplingParams
from diptych.serving.answers.grammar.grammar_text import GrammarWriter, with_schemas

WRITER = GrammarWriter({})
WORDS = ("name", "age", "city", "tags", "when", "items", "path", "line", "kind", "note")


def grammar(schema: dict[str, Any]) -> str:
    return with_schemas(WRITER.schema(schema, "schema").text)[0]


def forced(options: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(options.model, threads=options.threads, speculation="off")
    names = [f"{word}_{number}" for number, word in enumerate(WORDS * 2)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    text = grammar(schema)
    rates: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, str] = {}
    for _ in range(options.repeats):
        for forces in (True, False):
            params = SamplingParams(max_tokens=1000, temperature=0, grammar=text, forces_tokens=forces)
            start = time.perf_counter()
            [output] = llm.generate(["Data:"], params, progress=False)
            answer = output.outputs[0]
            rates[forces].append(len(answer.token_ids) / (time.perf_counter() - start))
            answers[forces] = answer.text
    with_forced, without = statistics.median(rates[True]), statistics.median(rates[False])
    return {
        "tokens/s with forced tokens": round(with_forced, 1),
        "tokens/s without": round(without, 1),
        "ratio": round(with_forced / without, 2),
        "same text": answers[True] == answers[False],
    }


def step(options: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(options.model, threads=options.threads, speculation="off")
    text = WRITER.regex("[a-zA-Z ]{2000}", "x").text
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    for repeat in range(options.repeats + 1):
        for kind, in_grammar in (("free", ""), ("constrained", text)):
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, grammar=in_grammar)
            start = time.perf_counter()
            llm.generate([[5, 6, 7]] * options.rows, params, progress=False)
            if repeat:  # the first time, the grammar is compiled
                times[kind].append((time.perf_counter() - start) / 40 * 1000)
    free, constrained = (statistics.median(times[kind]) for kind in ("free", "constrained"))
    return {
        "rows": options.rows,
        "vocabulary": llm.ready.vocab_size,
        "step ms free": round(free, 2),
        "step ms constrained": round(constrained, 2),
        "more": f"{(constrained / free - 1) * 100:+.1f} %",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("forced", "step"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    parts = {"forced": forced, "step": step}
    found = parts[options.part](options)
    rows = [{"figure": name, "value": str(value)} for name, value in found.items()]
    report(f"structured output: {options.part}", rows, options.json)


if __name__ == "__main__":
    main()

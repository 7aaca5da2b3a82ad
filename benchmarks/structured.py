"""Answers that follow a schema: are they valid, and what does it cost? (Hostile schemas: hostile.py.)

    python benchmarks/structured.py valid [--schemas 500] [--model PATH]   every answer checked by jsonschema
    python benchmarks/structured.py forced [--model PATH]     tokens/s with and without forced tokens, batch 1
    python benchmarks/structured.py step --model PATH [--rows 32]   a step with constrained rows, and without

Figures on the page; --json FILE keeps them.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
from common import report

from diptych import LLM, SamplingParams
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker
from diptych.serving.answers.grammar.grammar_text import GrammarWriter, with_schemas

WRITER = GrammarWriter({})
WORDS = ("name", "age", "city", "tags", "when", "items", "path", "line", "kind", "note")


def random_schema(rnd: random.Random, depth: int = 0) -> dict[str, Any]:
    """A bounded schema, so that an answer of random weights ends."""
    kind = rnd.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return {"type": "integer", "minimum": rnd.randrange(-50, 50), "maximum": rnd.randrange(50, 500)}
    if kind == 1:
        return {"type": "string", "minLength": rnd.randrange(3), "maxLength": rnd.randrange(3, 20)}
    if kind == 2:
        return {
            "enum": rnd.sample([1, None, True, "red", "green", 2.5, {"a": [1]}, "line\nbreak"], rnd.randrange(1, 5))
        }
    if kind == 3:
        return {"type": "string", "pattern": rnd.choice(("^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(ab|cd)+x?$"))} | {
            "maxLength": 12
        }
    if kind == 4:
        return {"type": rnd.choice(("boolean", "null"))}
    if kind == 5:
        return {"const": rnd.choice(("x", 7, None, [1, 2]))}
    if kind == 6:
        return {"type": "array", "items": random_schema(rnd, depth + 1), "minItems": 1, "maxItems": rnd.randrange(1, 4)}
    if kind == 7:
        return {"anyOf": [random_schema(rnd, depth + 1) for _ in range(rnd.randrange(1, 4))]}
    names = rnd.sample(WORDS, rnd.randrange(1, 6))
    required = [name for name in names if rnd.random() < 0.7]
    properties = {name: random_schema(rnd, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def grammar(schema: dict[str, Any]) -> str:
    return with_schemas(WRITER.schema(schema, "schema").text)[0]


async def compile_times(
    llm_tokenizer: Any, eos: list[int], vocab_size: int, schemas: list[dict[str, Any]]
) -> list[float]:
    """Milliseconds that each takes to be tried, in the process that the front end has for it."""
    checker = GrammarChecker(llm_tokenizer.fast.to_str(), eos, max(vocab_size, llm_tokenizer.vocab_size))
    await checker.check(WRITER.choice(["begin"], "x"))
    times = []
    for schema in schemas:
        start = time.perf_counter()
        await checker.check(WRITER.schema(schema, "schema"))
        times.append((time.perf_counter() - start) * 1000)
    await checker.close()
    return times


def valid(options: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(options.model, threads=options.threads)
    rnd = random.Random(1)
    schemas = [random_schema(rnd) for _ in range(options.schemas)]
    times = asyncio.run(compile_times(llm.tokenizer, list(llm.ready.eos_token_ids), llm.ready.vocab_size, schemas))
    params = [
        SamplingParams(max_tokens=2000, temperature=1.0, seed=number, grammar=grammar(schema))
        for number, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["Data:"] * len(schemas), params, progress=False)
    wrong, cut = 0, 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            cut += 1
            continue
        try:
            jsonschema.validate(json.loads(answer.text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong += 1
            print(json.dumps(schema), answer.text, str(error)[:200])
    times.sort()
    return {
        "schemas": len(schemas),
        "valid": len(schemas) - wrong - cut,
        "wrong": wrong,
        "cut by max_tokens": cut,
        "compile ms p50": round(statistics.median(times), 2),
        "compile ms p99": round(times[int(len(times) * 0.99)], 2),
        "compile ms worst": round(times[-1], 2),
    }


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
    parser.add_argument("part", choices=("valid", "forced", "step"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    parts = {"valid": valid, "forced": forced, "step": step}
    found = parts[options.part](options)
    rows = [{"figure": name, "value": str(value)} for name, value in found.items()]
    report(f"structured output: {options.part}", rows, options.json)


if __name__ == "__main__":
    main()

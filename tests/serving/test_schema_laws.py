"""What a schema says and what its grammar allows: the same values, for every keyword and draft that is enforced.

jsonschema is the judge. A grammar fixes the order of properties, so each order is tried.
"""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")

import llguidance
from tests.laws import law

from diptych.serving.answers.grammar.grammar_text import SEPARATORS
from diptych.serving.answers.grammar.schema_rewriting import SchemaRefusedError, rewrite
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

TOKENIZER = Tokenizer(BUNDLED_MODEL)
NATIVE = llguidance.LLTokenizer(TOKENIZER.fast.to_str(), n_vocab=4096, eos_token=[0, 2])
DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 7, 1.5, -2, "", "a", "b", "ab", "abc", "x-1", '"', "\\", "2020-01-31", "12"),
    *([], [0], [1], ["a"], [1, 1], [1, 2], ["a", "b"], ["b", "a"], [1, "a", True], [1, "a", None, 2], [[1]], [[], [1]]),
    *({}, {"a": 1}, {"a": "x"}, {"b": "x"}, {"a": 1, "b": "ab"}, {"c": None}, {"a": "a", "c": 3}, {"a": {"b": 1}}),
    *({"b": [1]}, {"a": None, "b": None, "c": None}, {"d": 1}, {"kind": "a"}, {"kind": "a", "x": 1}, {"kind": "b"}),
    *({"kind": "b", "y": "z"}, {"kind": "c", "x": 1}, {"a": 1, "d": 2}, {"x-1": 1}, {"x-1": "s", "a": 1}),
]
NAMED = {"a": {"type": "integer"}, "b": {"type": "string"}}
KINDS = [
    {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]},
    {"properties": {"kind": {"const": "b"}, "y": {"type": "string"}}, "required": ["kind"]},
]
SAME: dict[str, Any] = {  # each is enforced exactly
    "uniqueItems false": {"uniqueItems": False},
    "propertyNames {}": {"propertyNames": {}},
    "propertyNames of texts": {"propertyNames": {"type": "string"}},
    "dependentRequired {}": {"dependentRequired": {}},
    "dependentRequired of nothing": {"dependentRequired": {"a": []}},
    "dependentSchemas {}": {"dependentSchemas": {}},
    "dependencies {}": {"$schema": DRAFT_7, "dependencies": {}},
    "contains true": {"contains": True},
    "contains true, none": {"contains": True, "minContains": 0},
    "not false": {"not": False},
    "minContains alone": {"minContains": 2, "maxContains": 1},
    "if alone": {"if": {"type": "string"}},
    "then alone": {"then": False, "else": False},
    "minimums of 0": {"minProperties": 0, "minItems": 0, "minLength": 0},
    "patternProperties {}": {"patternProperties": {}},
    "a constant array and unevaluatedItems": {"const": [1], "prefixItems": [{}], "unevaluatedItems": False},
    "some constant arrays and unevaluatedItems": {
        "enum": [[], [1], ["a"], [1, "a"], [1, 1]],
        "prefixItems": [{}],
        "unevaluatedItems": {"type": "string"},
    },
    "a constant array among others": {
        "anyOf": [{"const": [1, "a"]}, {"prefixItems": [{"type": "integer"}], "type": "array"}],
        "unevaluatedItems": False,
    },
    "all items are spoken of": {"allOf": [{"items": True}], "type": "array", "unevaluatedItems": False, "maxItems": 2},
    "items and properties that an inner part lets be": {
        "anyOf": [{"unevaluatedItems": True, "unevaluatedProperties": True, "type": ["array", "object"]}],
        "unevaluatedItems": False,
        "unevaluatedProperties": False,
        "maxItems": 2,
    },
    "unevaluated true": {"unevaluatedProperties": True, "unevaluatedItems": {}},
    "annotations": {
        **{"type": "string", "nullable": True, "discriminator": {"propertyName": "k"}, "example": 1, "xml": {}},
        **{"x-order": 3, "deprecated": True, "readOnly": True, "writeOnly": True, "$comment": "c", "examples": [2]},
        **{"contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": False, "externalDocs": {}},
    },
    "unknown format": {"type": "string", "format": "password"},
    "format of another type": {"type": "integer", "format": "int64"},
    "allOf of one": {"allOf": [{"type": "integer"}], "minimum": 2},
    "allOf": {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}], "type": "object"},
    "anyOf beside": {"type": "object", "properties": NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf of types": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "oneOf of constants": {"oneOf": [{"const": "a"}, {"const": "b"}, {"enum": [1, 2]}]},
    "oneOf of kinds": {"type": "object", "oneOf": KINDS},
    "oneOf of overlapping enums": {"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", 1, 2]}]},
    "oneOf of required": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf of optional": {"type": "object", "oneOf": [{"properties": {"a": {"const": 1}}}, {"required": ["b"]}]},
    "oneOf of ranges": {"type": "integer", "oneOf": [{"minimum": 2}, {"maximum": 2}]},
    "oneOf of lengths": {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 1}]},
    "oneOf of patterns": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "const": {"const": {"a": 1, "b": "ab"}},
    "const beside a type": {"type": "string", "const": 1.5, "anyOf": [{"type": "number"}]} | {"type": "number"},
    "enum beside a type": {"type": ["string", "null"], "enum": ["a", 1, None, {"a": 1}]},
    "type list": {"type": ["integer", "array"], "minimum": 1, "maxItems": 1},
    "exclusiveMinimum of draft 4": {"$schema": DRAFT_4, "type": "integer", "minimum": 1, "exclusiveMinimum": True},
    "exclusiveMaximum of draft 4": {"$schema": DRAFT_4, "type": "number", "maximum": 1.5, "exclusiveMaximum": True},
    "share": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
    "definitions": {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}},
    "$anchor": {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}},
    "$id": {"$id": "http://x/a", "$ref": "b", "$defs": {"n": {"$id": "b", "type": "integer"}}},
    "$id in draft 4": {"$schema": DRAFT_4, "$ref": "#n", "definitions": {"n": {"id": "#n", "type": "string"}}},
    "reference into a keyword": {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
    "siblings of $ref": {"$ref": "#/$defs/n", "minimum": 2, "$defs": {"n": {"type": "integer"}}},
    "siblings of $ref in draft 7": {
        "$schema": DRAFT_7,
        "properties": {"a": {"$ref": "#/definitions/n", "minimum": 2}},
        "definitions": {"n": {"type": "integer"}},
    },
    "recursion beside siblings": {
        "type": "object",
        "properties": {"a": {"$ref": "#", "maxProperties": 1}, "b": {"type": ["integer", "array"]}},
        "additionalProperties": False,
    },
    "items as a list": {"$schema": DRAFT_7, "items": [{"type": "integer"}, {"type": "string"}]},
    "additionalItems": {"$schema": DRAFT_7, "items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
    "additionalItems false": {"$schema": DRAFT_7, "items": [{"type": "integer"}], "additionalItems": False},
    "additionalItems alone": {"$schema": DRAFT_7, "items": {"type": "integer"}, "additionalItems": False},
    "prefixItems": {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "contains one": {"type": "array", "contains": {"type": "integer"}, "maxContains": 1},
    "contains none": {"type": "array", "contains": {"type": "integer"}, "minContains": 0, "maxContains": 0},
    "contains two": {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    "uniqueItems of constants": {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    "uniqueItems of one": {"type": "array", "maxItems": 1, "uniqueItems": True},
    "dependencies": {"$schema": DRAFT_7, "type": "object", "dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"], "c": ["a"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"const": "ab"}}}}},
    "if then else": {
        "type": "object",
        **{"if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}},
        **{"then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
    },
    "not a type": {"not": {"type": ["object", "array", "number"]}},
    "not {}": {"anyOf": [{"type": "string"}, {"not": {}}]},
    "not a constant": {"type": "string", "not": {"enum": ["a", "ab", "\\", '"']}},
    "not a number": {"type": "integer", "not": {"enum": [1, 3]}},
    "not required": {"type": "object", "not": {"required": ["a"]}},
    "not a property": {"type": "object", "not": {"properties": {"a": {"type": "integer"}}}},
    "not a pattern": {"type": "string", "not": {"pattern": "[b1]"}},
    "not anyOf": {"not": {"anyOf": [{"type": "object"}, {"type": "array"}, {"const": 1}]}},
    "not allOf": {"type": "integer", "not": {"allOf": [{"minimum": 1}, {"maximum": 2}]}},
    "not not": {"not": {"not": {"type": "string", "minLength": 2}}},
    "not items": {"type": "array", "not": {"items": {"type": "integer"}}, "maxItems": 3},
    "propertyNames of constants": {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    "propertyNames with a pattern": {"type": "object", "properties": NAMED, "propertyNames": {"pattern": "^[ax]"}},
    "propertyNames of a length": {"type": "object", "propertyNames": {"maxLength": 1}},
    "patternProperties": {"type": "object", "properties": NAMED, "patternProperties": {"^x-": {"type": "integer"}}},
    "patternProperties over properties": {"properties": NAMED, "patternProperties": {"^a$": {"const": 1}}},
    "minProperties": {"type": "object", "properties": NAMED, "minProperties": 1},
    "minProperties, closed": {"type": "object", "properties": NAMED, "minProperties": 2, "additionalProperties": False},
    "maxProperties": {"type": "object", "properties": NAMED, "maxProperties": 1},
    "additionalProperties beside allOf": {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}, "additionalProperties": False}]
    },
    "unevaluatedProperties": {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/b"}],
        "$defs": {"b": {"properties": {"b": {"type": "string"}}}},
        "unevaluatedProperties": False,
    },
    "unevaluatedItems": {"allOf": [{"prefixItems": [{"type": "integer"}]}], "unevaluatedItems": False},
    "lookahead": {"type": "string", "pattern": "^(?!a$)[a-z]+$"},
    "lookahead at the end": {"type": "string", "pattern": "a(?=b)"},
    "class without a backslash": {"type": "string", "pattern": '^[^"/]*$', "not": {"pattern": "\\\\"}},
    "pattern and lengths": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 2},
}
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "uniqueItems": ({"properties": {"a": {"uniqueItems": True}}}, ("properties", "a", "uniqueItems")),
    "a reference elsewhere": ({"items": {"$ref": "http://x/y"}}, ("items", "$ref")),
    "a reference to nothing": ({"items": {"$ref": "#/$defs/n"}}, ("items", "$ref")),
    "a reference to itself": ({"properties": {"a": {"$ref": "#/properties/a"}}}, ("properties", "a", "$ref")),
    "a look behind": ({"allOf": [{"pattern": "(?<=a)b"}]}, ("allOf", "0", "pattern")),
    "a back reference": ({"allOf": [{"pattern": "(a)\\1"}]}, ("allOf", "0", "pattern")),
    "an unknown type": ({"properties": {"a": {"type": "any"}}}, ("properties", "a", "type")),
    "null for a schema": ({"properties": {"a": None}}, ("properties", "a")),
    "required as a flag": (
        {"properties": {"a": {"type": "object", "required": True}}},
        ("properties", "a", "required"),
    ),
    "enum that is no list": ({"enum": "a"}, ("enum",)),
    "a negative length": ({"maxLength": -1}, ("maxLength",)),
    "within not": ({"type": "array", "not": {"items": {"uniqueItems": True}}}, ("not",)),
}


def compiled(schema: Any) -> Any:
    """A matcher."""
    whole = {**({} if schema is True else schema), "x-guidance": SEPARATORS}
    return llguidance.LLMatcher(NATIVE, f"start: %json {json.dumps(whole)}\n", log_level=0)


def error_of(schema: Any) -> str:
    matcher = compiled(schema)
    return str(matcher.get_error()) if matcher.is_error() else ""


def orders_of(value: Any) -> Iterator[Any]:
    """A value with its properties in each order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(orders_of, value))))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(list(orders_of(value[name])) for name in names)):
                yield dict(zip(names, values, strict=True))
    else:
        yield value


def allows(matcher: Any, value: Any) -> bool:
    for ordered in orders_of(value):
        tokens = TOKENIZER.encode(json.dumps(ordered, ensure_ascii=False), add_special_tokens=False)
        own = matcher.deep_copy()
        if own.validate_tokens(tokens) == len(tokens) and own.consume_tokens(tokens) and own.is_accepting():
            return True
    return False


def is_valid(schema: Any, value: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(validator(schema).is_valid(value))


@pytest.mark.parametrize("name", SAME)
def test_a_value_is_allowed_exactly_when_it_is_valid(name: str) -> None:
    schema = SAME[name]
    written = rewrite(schema, check=error_of)
    assert written.left_out == ()
    matcher = compiled(written.schema)
    assert not matcher.is_error(), matcher.get_error()
    wrong = [value for value in VALUES if allows(matcher, value) != is_valid(schema, value)]
    assert wrong == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_path_or_left_out_and_named(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(SchemaRefusedError) as refused:
        rewrite(schema, check=error_of)
    assert refused.value.path == path
    assert not any(word in refused.value.why for word in ("x-guidance", "Unimplemented", "lenient", "coerce"))
    written = rewrite(schema, is_strict=False, check=error_of)
    assert written.left_out == (path,)
    matcher = compiled(written.schema)
    assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize("schema", [False, {"type": "string", "enum": [1]}, {"allOf": [{"const": 1}, {"const": 2}]}])
def test_a_schema_that_allows_nothing_is_refused_in_any_case(schema: Any) -> None:
    for is_strict in (True, False):
        with pytest.raises(SchemaRefusedError, match="allows no value"):
            rewrite(schema, is_strict=is_strict)


@pytest.mark.parametrize("limit", [1e400, 1e300, 2**70, -1e400])
def test_numbers_beyond_all_limits_are_read(limit: float) -> None:
    for keyword in ("maximum", "minimum", "const"):
        for is_strict in (True, False):
            try:
                written = rewrite({"type": "number", keyword: limit}, is_strict=is_strict)
            except SchemaRefusedError:
                continue
            for value in (-7, 0, 7):
                allowed = allows(compiled(written.schema), value) if keyword != "const" else False
                assert is_valid({"type": "number", keyword: limit}, value) or not allowed or written.left_out


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(3000):
        deep = {"not": deep}
    with pytest.raises(SchemaRefusedError):
        rewrite(deep)


def random_schema(rnd: random.Random, depth: int = 0) -> Any:
    """A schema of any keywords, often contradictory."""
    if depth > 2 or rnd.random() < 0.1:
        kinds = [{"type": kind} for kind in ("string", "integer", "null", "boolean", "number")]
        return rnd.choice([True, False, {}, *kinds, {"const": rnd.choice(VALUES[:20])}])

    def inner() -> Any:
        return random_schema(rnd, depth + 1)

    def some() -> list[Any]:
        return [inner() for _ in range(rnd.randrange(1, 4))]

    makers: dict[str, Any] = {
        "type": lambda: rnd.choice(["string", "integer", "object", "array", ["string", "null"], "number"]),
        "enum": lambda: rnd.sample(VALUES[:20], rnd.randrange(1, 5)),
        "const": lambda: rnd.choice(VALUES),
        "properties": lambda: {name: inner() for name in rnd.sample(["a", "b", "c"], 2)},
        "required": lambda: [rnd.choice("abc")],
        "additionalProperties": lambda: rnd.choice([False, inner()]),
        "patternProperties": lambda: {rnd.choice(["^a", "b$", "."]): inner()},
        "propertyNames": lambda: rnd.choice([{"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 1}, inner()]),
        "dependentRequired": lambda: {rnd.choice("abc"): [rnd.choice("abc")]},
        "dependentSchemas": lambda: {rnd.choice("abc"): inner()},
        "prefixItems": lambda: [inner()],
        "pattern": lambda: rnd.choice(["^a", "b$", "^[ab]*$", "a|b", "^(?!b)"]),
        "unevaluatedProperties": lambda: rnd.choice([False, inner()]),
        "uniqueItems": lambda: rnd.random() < 0.5,
        "multipleOf": lambda: rnd.choice([1, 2, 0.5]),
        **dict.fromkeys(("items", "contains", "not", "if", "then", "else"), inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), some),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), lambda: rnd.choice([0, 1, 1.5])),
        **dict.fromkeys(
            ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"),
            lambda: rnd.randrange(3),
        ),
    }
    return {keyword: makers[keyword]() for keyword in rnd.sample(list(makers), rnd.randrange(1, 5))}


def random_array_schema(rnd: random.Random, depth: int = 0) -> Any:
    """A schema of arrays, most of which say something of items that no other keyword speaks of."""
    scalars = [True, False, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": [1, "a"]}]
    arrays = [value for value in VALUES if isinstance(value, list)]

    def inner() -> Any:
        return random_array_schema(rnd, depth + 1) if depth < 2 else rnd.choice(scalars)

    makers: dict[str, Any] = {
        "const": lambda: rnd.choice(arrays),
        "enum": lambda: rnd.sample(arrays, 3),
        "type": lambda: "array",
        "prefixItems": lambda: [rnd.choice(scalars) for _ in range(rnd.randrange(1, 3))],
        "items": lambda: rnd.choice(scalars),
        "contains": lambda: rnd.choice(scalars),
        "uniqueItems": lambda: True,
        "maxItems": lambda: rnd.randrange(3),
        "not": inner,
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), lambda: [inner() for _ in range(rnd.randrange(1, 3))]),
    }
    schema = {keyword: makers[keyword]() for keyword in rnd.sample(list(makers), rnd.randrange(1, 4))}
    return schema | ({"unevaluatedItems": rnd.choice(scalars)} if rnd.random() < 0.7 else {})


@law(weight=0.3, seeds=range(40))
def test_no_grammar_of_items_that_no_keyword_speaks_of_allows_what_is_not_valid(seed: int) -> None:
    check_random(random_array_schema(random.Random(seed)))


# a complement cut down; names of a constant; patterns of names that overlap; numbers that are no integers
@law(weight=1.0, seeds=(2368384351, 1141906037, 1340089333, 235039095))
def test_no_grammar_of_a_random_schema_allows_what_is_not_valid(seed: int) -> None:
    check_random(random_schema(random.Random(seed)))


def check_random(schema: Any) -> None:
    """What its grammar allows of VALUES is valid; where there is none, nothing of them is."""
    try:
        written = rewrite(schema, check=error_of)
    except SchemaRefusedError as refusal:
        assert "allows no value" not in refusal.why or not any(is_valid(schema, value) for value in VALUES), schema
        return
    matcher = compiled(written.schema)
    if matcher.is_error():  # texts of which only the compiler knows that there are none
        assert "nsatisfiable" in matcher.get_error(), matcher.get_error()
        assert not any(is_valid(schema, value) for value in VALUES), schema
        return
    for value in VALUES:
        assert is_valid(schema, value) or not allows(matcher, value), (schema, value)

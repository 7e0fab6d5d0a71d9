"""JSON schemas by chance, of everything that can be followed, and small enough for an answer to come to its end; and
whether an answer follows one."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema

Schema = dict[str, Any]

NAMES = [
    "a",
    "b",
    "name",
    "größe",
    "ключ",
    "with space",
    'quo"te',
    "back\\slash",
    "emoji😀",
    "$ref",
    "default",
    "type",
    "x.y",
]
WORDS = ["", "yes", "no", "Straße", "日本", "😀🎉", 'say "hi"', "back\\slash", "tab\tline\n", "{}", "</tool_call>", "-"]
PATTERNS = ["^[a-z]{2,8}$", "^(foo|bar)+$", "^\\d{3}-\\d{4}$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^(a|b)*c$", "^.{1,5}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
_CHECKER = jsonschema.FormatChecker(("uuid", "ipv4", "email"))


def _checks(name: str, parse: Callable[[str], object]) -> None:
    # RFC 3339 has leap seconds, the year 0000 and any number of digits in fractions; Python has only the last.
    def valid(value: object) -> bool:
        return not isinstance(value, str) or bool(parse(value.upper().replace(":60", ":59").replace("0000-", "2000-")))

    _CHECKER.checks(name, raises=ValueError)(valid)


_checks("date", datetime.date.fromisoformat)
_checks("time", lambda text: datetime.time.fromisoformat(text).isoformat())
_checks("date-time", datetime.datetime.fromisoformat)


def validate(schema: Schema, text: str) -> None:
    """Raises for a text that is not JSON or does not follow the schema, formats included."""
    jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(text))


def random_schema(rng: random.Random) -> Schema:
    """A schema for an object, often with definitions, one of them perhaps recursive."""
    schema = _object(rng, 0, [])
    if rng.random() < 0.5:
        names = ["d1", "d/2~"][: rng.randint(1, 2)]
        places = ["#/$defs/" + name.replace("~", "~0").replace("/", "~1") for name in names]
        schema = _object(rng, 0, places)
        schema["$defs"] = {name: _any(rng, 1, []) for name in names}
        if rng.random() < 0.4:
            child = {"anyOf": [{"type": "null"}, {"$ref": places[0]}]}
            schema["$defs"][names[0]] = _closed({"v": _any(rng, 3, []), "next": child}, ["v", "next"])
    return schema


def _any(rng: random.Random, depth: int, places: list[str]) -> Schema:
    leaves = [_string, _integer, _number, _enum, _constant, _simple]
    inner = [_array, _object, _union, _both]
    if places and rng.random() < 0.3:
        return {"$ref": rng.choice(places)}
    return rng.choice(leaves if depth > 2 else [*leaves, *inner])(rng, depth + 1, places)


def _string(rng: random.Random, *_: Any) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 30}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random, *_: Any) -> Schema:
    least = rng.choice([-1000, -7, 0, 1, 99])
    schema = {"type": "integer", "minimum": least, "maximum": least + rng.choice([0, 5, 1000, 10**6])}
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": -100, "maximum": 100, "multipleOf": rng.choice([2, 3, 5, 10])}
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 50}
    return schema


def _number(rng: random.Random, *_: Any) -> Schema:
    if rng.random() < 0.3:
        return {"type": "number", "exclusiveMinimum": rng.choice([-1, 0, 2]), "maximum": rng.choice([2.5, 3, 7])}
    if rng.random() < 0.2:
        return {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": rng.choice([0.5, 1])}
    return {"type": "number", "minimum": rng.choice([-1.5, 0, 2.25]), "maximum": rng.choice([3, 10.5, 1000])}


def _enum(rng: random.Random, *_: Any) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, {"k": "v"}, [1, "x"]], rng.randint(1, 6))}


def _constant(rng: random.Random, *_: Any) -> Schema:
    return {"const": rng.choice([*WORDS, 0, False, None, {"größe": [1]}])}


def _simple(rng: random.Random, *_: Any) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _array(rng: random.Random, depth: int, places: list[str]) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(rng, depth, places), "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.3:
        first = [_any(rng, depth, places) for _ in range(rng.randint(1, 2))]
        schema = {"type": "array", "prefixItems": first, "items": False, "minItems": rng.randint(0, len(first))}
    return schema


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(rng: random.Random, depth: int, places: list[str]) -> Schema:
    names = rng.sample(NAMES, rng.randint(0 if depth else 1, 3))
    properties = {name: _any(rng, depth, places) for name in names}
    schema = _closed(properties, [name for name in names if rng.random() < 0.7])
    if rng.random() < 0.15:
        schema["required"] = names  # as they all have to be where properties are counted
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        schema["maxProperties"] = len(names) + 1
    return schema


def _union(rng: random.Random, depth: int, places: list[str]) -> Schema:
    return {"anyOf": [_any(rng, depth, places) for _ in range(rng.randint(1, 3))]}


def _both(rng: random.Random, *_: Any) -> Schema:
    first, second = (
        {"type": "object", "properties": {name: {"enum": [1, 2, "x"]}}, "required": [name]} for name in "pq"
    )
    return {"allOf": [{**first, "maxProperties": 3}, second]} if rng.random() < 0.1 else {"allOf": [_integer(rng)]}

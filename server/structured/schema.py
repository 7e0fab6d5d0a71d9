"""JSON schemas as clients send them, made fit for a grammar.

What cannot be followed is refused by name, never dropped: the grammar's compiler knows which keywords it implements,
and here are the few it would pass over. What only annotates is taken out, and so is a `format` that the grammar does
not follow, for to JSON Schema that only annotates too. References stay inside the schema; nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.errors import InvalidRequest, bounded, shown, wrong

MAX_DEPTH = 64  # of schemas within schemas
MAX_VALUE_DEPTH = 100  # of lists and objects in enum, const and annotations

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # those the grammar follows
_ONE = frozenset(
    {"items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OTHER = frozenset(
    {"type", "enum", "const", "$ref", "$id", "$schema", "$anchor", "$comment", "$vocabulary", "format", "pattern"}
    | {"minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties"}
    | {"required", "dependentRequired", "dependencies", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}
    | {"$recursiveAnchor", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "nullable"}
)
_KNOWN = _ONE | _LIST | _MAP | _OTHER
# Keywords that the compiler would pass over although they limit what is valid.
_PASSED_OVER = frozenset({"dependencies", "additionalItems"})


def prepared(schema: object, field: str, *, strict: bool = False, close_objects: bool = False) -> dict[str, Any]:
    """The schema to compile. `strict` refuses keywords that are not JSON Schema's; `close_objects` forbids properties
    that are not listed, where a schema lists some and does not say.

    `true` and `{}` allow any JSON. Raises InvalidRequest, naming `field` and the place in the schema.
    """
    if schema is True:
        return {}
    if schema is False:
        raise wrong(field, "is false: no answer could follow it")
    if not isinstance(schema, dict):
        raise wrong(field, f"must be a JSON schema, not {shown(schema)}", "invalid_type")
    return _Preparation(field, strict, close_objects).schema(schema, "#", 0, True)


class _Preparation:
    def __init__(self, field: str, strict: bool, close_objects: bool) -> None:
        self._field = field
        self._strict = strict
        self._close_objects = close_objects

    def schema(self, schema: Mapping[str, Any], place: str, depth: int, closing: bool) -> dict[str, Any]:
        """`closing` is False where the schema is one of several that must hold together."""
        if depth > MAX_DEPTH:
            self._refuse(place, f"is nested more than {MAX_DEPTH} schemas deep")
        result: dict[str, Any] = {}
        inside = closing and "allOf" not in schema and "$ref" not in schema
        for keyword, value in schema.items():
            where = f"{place}/{bounded(keyword, 40)}"
            if keyword not in _KNOWN:
                if self._strict:
                    self._refuse(where, "is not a keyword of JSON Schema")
                continue
            if keyword in _PASSED_OVER:
                self._refuse(where, "is a keyword that is not supported")
            result[keyword] = self._value(keyword, value, where, depth, inside)
        if result.get("uniqueItems") is False:
            del result["uniqueItems"]
        if isinstance(result.get("format"), str) and result["format"] not in FORMATS:
            del result["format"]
        if result.get("type") != "integer":
            _move_inwards(result)
        reference = result.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            self._refuse(f"{place}/$ref", "leaves the schema: only references that begin with '#' are followed")
        if self._close_objects and inside and "properties" in result and "patternProperties" not in result:
            result.setdefault("additionalProperties", False)
        return result

    def _value(self, keyword: str, value: Any, where: str, depth: int, closing: bool) -> Any:
        # A definition may be meant for an allOf, where a closed object would contradict its neighbours.
        inside = closing and keyword not in ("allOf", "$defs", "definitions")
        found = _within(keyword, value, lambda item, path: self.schema(item, where + path, depth + 1, inside))
        if found is None and depth_of(value) > MAX_VALUE_DEPTH:
            self._refuse(where, f"is nested more than {MAX_VALUE_DEPTH} levels deep")
        return value if found is None else found

    def _refuse(self, place: str, problem: str) -> None:
        raise InvalidRequest(f"'{self._field}': {bounded(place, 200)} {problem}.", param=self._field)


def _move_inwards(schema: dict[str, Any]) -> None:
    """Excluded bounds that are whole numbers, by less than matters: beside a bound less than one away the grammar would
    include them."""
    for keyword, step in (("exclusiveMinimum", 1e-9), ("exclusiveMaximum", -1e-9)):
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and bound % 1 == 0:
            schema[keyword] = bound + step * max(1, abs(bound))


def _within(keyword: str, value: Any, visit: Callable[[dict[str, Any], str], Any]) -> Any:
    """A keyword's value with `visit(schema, path)` in the place of each schema in it; None for one that holds none."""
    if keyword in _ONE and isinstance(value, dict):
        return visit(value, "")
    if keyword in _LIST and isinstance(value, list):
        return [visit(item, f"/{n}") if isinstance(item, dict) else item for n, item in enumerate(value)]
    if keyword in _MAP and isinstance(value, dict):
        return {
            name: visit(item, f"/{bounded(name, 40)}") if isinstance(item, dict) else item
            for name, item in value.items()
        }
    return None


def rebased(schema: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A schema whose references hold when the document they point into lies at `prefix` (`#/$defs/own`) of another."""
    result = {}
    for keyword, value in schema.items():
        found = _within(keyword, value, lambda item, _: rebased(item, prefix))
        if keyword == "$ref" and isinstance(value, str):
            found = prefix + value[1:]
        result[keyword] = value if found is None else found
    return result


def depth_of(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        depth, level = depth + 1, inner
    return depth - 1

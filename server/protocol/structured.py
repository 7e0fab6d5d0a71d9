"""From `response_format` and `structured_outputs` to a grammar.

An answer is kept to a schema whether `strict` is true or not: `strict` only refuses keywords that JSON Schema does not
have. Every failure is an InvalidRequest whose `param` names the field.
"""

from __future__ import annotations

import orjson

from server.errors import bounded, missing, unsupported, wrong
from server.protocol.fields import Fields, ResponseFormat, StructuredOutputs
from server.structured.grammar import WHITESPACE, Grammar, json_of, one_of, regex
from server.structured.schema import prepared

ANY_OBJECT = {"type": "object"}
SCHEMA_FIELD = "response_format.json_schema.schema"


def grammar_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """The grammar of what was asked for; None for free text."""
    grammar = None if response_format is None else _of_format(response_format)
    if outputs is None:
        return grammar
    if grammar is not None:
        raise wrong("structured_outputs", "and 'response_format' exclude each other")
    return _of_outputs(outputs)


def _of_format(wanted: ResponseFormat) -> Grammar | None:
    field = "response_format"
    given = wanted.json_schema
    _refuse_extra(wanted, field)
    if wanted.type != "json_schema":
        if given is not None:
            raise wrong(f"{field}.json_schema", "is only allowed with 'type': 'json_schema'")
        return None if wanted.type == "text" else Grammar(json_of(ANY_OBJECT), field)
    if given is None or given.schema_ is None:
        param = f"{field}.json_schema" if given is None else SCHEMA_FIELD
        raise missing(param)
    _refuse_extra(given, f"{field}.json_schema")
    schema = prepared(given.schema_, SCHEMA_FIELD, strict=bool(given.strict))
    return Grammar(json_of(schema), SCHEMA_FIELD)


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    field = "structured_outputs"
    _refuse_extra(outputs, field)
    if outputs.structural_tag is not None:
        raise unsupported(f"{field}.structural_tag", "is not supported: use grammar")
    forms = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
    given = [name for name, value in forms.items() if value is not None]
    given += ["json_object"] if outputs.json_object else []
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has none of them"
        names = ", ".join([*forms, "json_object"])
        raise wrong(field, f"must have exactly one of {names}, and {found}")
    whitespace = _whitespace(outputs, given[0])
    if outputs.choice is not None:
        return Grammar(one_of(outputs.choice), f"{field}.choice")
    if outputs.regex is not None:
        return Grammar(regex(outputs.regex), f"{field}.regex")
    if outputs.grammar is not None:
        return Grammar("", f"{field}.grammar", foreign=outputs.grammar)
    if outputs.json_object:
        return Grammar(json_of(ANY_OBJECT, whitespace), f"{field}.json_object")
    close = bool(outputs.disable_additional_properties)
    schema = prepared(_schema(outputs.json_), f"{field}.json", close_objects=close)
    return Grammar(json_of(schema, whitespace), f"{field}.json")


def _whitespace(outputs: StructuredOutputs, form: str) -> str | None:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(outputs, name) and not form.startswith("json"):
            raise wrong(f"structured_outputs.{name}", f"is only allowed with JSON, not with {form}")
    return None if outputs.disable_any_whitespace else outputs.whitespace_pattern or WHITESPACE


def _schema(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError as error:
        field = "structured_outputs.json"
        raise wrong(field, f"is not JSON: {bounded(str(error), 200)}") from None


def _refuse_extra(fields: Fields, place: str) -> None:
    """What is misplaced here would change the answer if it were where it belongs."""
    for name in fields.model_extra or {}:
        param = bounded(f"{place}.{name}", 100)
        raise wrong(param, f"is not a field of '{place}'", "unknown_parameter")

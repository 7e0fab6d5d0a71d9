"""What becomes of a client's JSON schema before it is compiled, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidRequest
from server.structured.schema import MAX_DEPTH, prepared, rebased


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("schema", [True, {}, {"title": "anything"}])
@pytest.mark.case(10)
def test_a_schema_that_says_nothing_allows_any_json(schema: object) -> None:
    assert prepared(schema, "f").keys() <= {"title"}


@pytest.mark.parametrize("schema", [False, None, "", "{}", [], 5])
@pytest.mark.case(10)
def test_what_is_not_a_schema_is_refused(schema: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(schema, "place")
    assert caught.value.param == "place"
    assert "'place'" in caught.value.message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (nested(MAX_DEPTH + 1), "deep"),
        ({"enum": [eval("[" * 101 + "]" * 101)]}, "#/enum"),
        ({"properties": {"a": {"$ref": "https://example.org/x.json"}}}, "#/properties/a/$ref"),
        ({"$ref": "other.json#/a"}, "#/$ref"),
        ({"dependencies": {"a": ["b"]}}, "#/dependencies"),
        ({"anyOf": [{}, {"items": {"additionalItems": False}}]}, "#/anyOf/1/items/additionalItems"),
    ],
)
@pytest.mark.case(80)
def test_what_cannot_be_followed_is_refused_by_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(schema, "f")
    assert place in caught.value.message


def test_unknown_keywords_are_passed_over_unless_strict() -> None:
    schema = {"type": "string", "foo": 1, "x-guidance": {"lenient": True}}
    assert prepared(schema, "f") == {"type": "string"}
    with pytest.raises(InvalidRequest, match="#/foo is not a keyword"):
        prepared(schema, "f", strict=True)
    # A property of that name is no keyword.
    assert prepared({"properties": {"foo": {"type": "null"}}}, "f", strict=True)["properties"] == {
        "foo": {"type": "null"}
    }


def test_formats_that_only_annotate_are_left_out() -> None:
    assert prepared({"type": "string", "format": "password"}, "f") == {"type": "string"}
    assert prepared({"type": "string", "format": "uuid"}, "f") == {"type": "string", "format": "uuid"}
    assert prepared({"properties": {"format": {"const": "password"}}}, "f")["properties"] == {
        "format": {"const": "password"}
    }


def test_whole_numbers_that_are_excluded_are_left_out_by_less_than_matters() -> None:
    bounds = prepared({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": -3, "maximum": 2}, "f")
    assert 0 < bounds["exclusiveMinimum"] < 1e-6
    assert -3 - 1e-6 < bounds["exclusiveMaximum"] < -3
    assert bounds["maximum"] == 2
    same: list[dict[str, Any]] = [{"type": "integer", "exclusiveMinimum": 0}, {"exclusiveMinimum": 0.5}]
    assert [prepared(schema, "f") for schema in same] == same


def test_objects_are_closed_where_they_list_properties_and_nothing_else_may_add_to_them() -> None:
    schema = {
        "properties": {
            "a": {"type": "object", "properties": {"x": {}}},
            "b": {"properties": {}, "additionalProperties": {}},
        },
        "allOf": [{"properties": {"c": {}}}],
        "$defs": {"d": {"properties": {"e": {}}}},
    }
    assert prepared(schema, "f", close_objects=True) == schema
    del schema["allOf"]
    closed = prepared(schema, "f", close_objects=True)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] == {}
    assert closed["$defs"] == schema["$defs"]
    assert "additionalProperties" not in prepared({"properties": {}, "patternProperties": {}}, "f", close_objects=True)


@pytest.mark.case(80)
def test_references_follow_a_schema_to_where_it_is_put() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"items": {"$ref": "#"}}},
        "properties": {
            "$ref": {"const": {"$ref": "#/stays"}},
            "default": {"anyOf": [{"$ref": "#/properties/default"}]},
        },
    }
    moved = rebased(schema, "#/there")
    assert moved["$ref"] == "#/there/$defs/a"
    assert moved["$defs"]["a"]["items"]["$ref"] == "#/there"
    assert moved["properties"]["$ref"] == {"const": {"$ref": "#/stays"}}
    assert moved["properties"]["default"]["anyOf"][0]["$ref"] == "#/there/properties/default"

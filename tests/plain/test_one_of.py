"""`oneOf` in schemas: followed where branches cannot overlap, otherwise refused with the branches
that may."""

import json
from typing import Any

import pytest

from coserve.devices.grammars.grammar import Grammar

# A request's schema from a public report: a number, or a list of two, by reference.
REPORTED: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "P": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"$ref": "#/$defs/L"}]}
    },
    "required": ["P"],
    "$defs": {
        "L": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 1000},
            "minItems": 2,
            "maxItems": 2,
        }
    },
}


def kind(name: str, *, required: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {"kind": {"const": name}, name: {"type": "string"}},
    }
    return {**found, "required": ["kind"]} if required else found


def of(*branches: Any, **more: Any) -> dict[str, Any]:
    return {"oneOf": list(branches), **more}


DISJOINT: dict[str, dict[str, Any]] = {
    "reported": REPORTED,
    "types": of({"type": "string"}, {"type": ["integer", "null"]}, {"type": "array"}),
    "values": of({"const": 1}, {"enum": ["a", True]}, {"const": None}),
    "values of other types": of(
        {"const": True}, {"const": 1}, {"enum": [[1], "1"]}, {"enum": [{"a": 1}, [True]]}
    ),
    "a value and a type": of({"const": "a"}, {"type": "number"}),
    "bounds": of({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}),
    "a value and a bound": of({"const": 2}, {"type": "integer", "minimum": 3}),
    "lengths": of({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}),
    "items": of({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}),
    "discriminator": of(kind("cat"), kind("dog"), kind("bird")),
    "one requires it": of(kind("cat"), kind("dog", required=False)),
    "nested discriminator": of(
        {"type": "object", "properties": {"a": kind("cat")}, "required": ["a"]},
        {"type": "object", "properties": {"a": kind("dog")}, "required": ["a"]},
    ),
    "closed": of(
        {
            "type": "object",
            "properties": {"a": {}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"b": {}},
            "required": ["b"],
            "additionalProperties": False,
        },
    ),
    "alternatives": of({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}),
    "merged": of({"allOf": [{"type": "string"}, {"minLength": 1}]}, {"type": "integer"}),
    "references": of(
        {"$ref": "#/$defs/a"},
        {"$ref": "#/$defs/b"},
        **{"$defs": {"a": kind("cat"), "b": kind("dog")}},
    ),
    "of all branches": of(
        {"properties": {"kind": {"const": 1}}},
        {"properties": {"kind": {"const": 2}}},
        type="object",
        required=["kind"],
    ),
    "within others": {
        "type": "array",
        "items": of({"type": "string"}, of({"type": "null"}, {"type": "integer"})),
    },
    "never": of(False, {"type": "string"}),
    "one branch": of({"type": "string"}),
    "beside anyOf": of(
        {"type": "string"}, {"type": "null"}, anyOf=[{"maxLength": 3}, {"minLength": 5}]
    ),
}
OVERLAPPING: dict[str, dict[str, Any]] = {
    "same": of({"type": "string"}, {"type": "string"}),
    "integers are numbers": of({"type": "integer"}, {"type": "number"}),
    "true is not 1 but 1.0 is": of({"const": 1}, {"enum": [1.0]}),
    "lists of equal numbers": of({"const": [1, {"a": 2.0}]}, {"enum": [[1.0, {"a": 2}]]}),
    "patterns": of({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}),
    "nobody requires it": of(kind("cat", required=False), kind("dog", required=False)),
    "bounds that touch": of({"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}),
    "open objects": of(
        {"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}
    ),
    "anything": of({}, {"type": "string"}),
    "a reference to nothing": of({"$ref": "#/$defs/none"}, {"type": "string"}),
    "itself": of({"$ref": "#"}, {"type": "string"}),
    "optional values": of(
        {"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object"}
    ),
}


def keywords(value: Any) -> set[str]:
    """Return all names of objects."""
    if isinstance(value, list):
        return set().union(*map(keywords, value))
    return set(value).union(*map(keywords, value.values())) if isinstance(value, dict) else set()


@pytest.mark.parametrize("name", DISJOINT)
def test_branches_that_cannot_overlap_are_alternatives(name: str):
    found = json.loads(Grammar.json_schema(DISJOINT[name]).text)
    assert "oneOf" not in keywords(found) and "anyOf" in keywords(found)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_branches_that_may_overlap_are_named(name: str):
    with pytest.raises(
        ValueError, match="oneOf at # whose branches 0 and 1 may both match a value: write anyOf"
    ):
        Grammar.json_schema(OVERLAPPING[name])


def test_the_place_is_named():
    schema = {"properties": {"x": {"items": OVERLAPPING["same"]}}}
    with pytest.raises(ValueError, match="oneOf at #/properties/x/items whose"):
        Grammar.json_schema(schema)


def test_what_only_looks_like_one_is_left_as_it_is():
    schema = {"properties": {"oneOf": {"type": "string"}, "default": {"const": {"oneOf": [1, 1]}}}}
    assert json.loads(Grammar.json_schema(schema).text) == schema


def test_a_lenient_schema_is_left_to_the_compiler():
    assert (
        json.loads(Grammar.json_schema(OVERLAPPING["same"], is_lenient=True).text)
        == OVERLAPPING["same"]
    )


def test_many_branches_take_a_bounded_time():
    branch = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string"}] * 20}},
        "required": ["a"],
    }
    with pytest.raises(ValueError, match="may both match"):
        Grammar.json_schema(of(*[branch] * 200))


def test_a_union_of_many_described_objects_is_followed():
    def branch(number: int) -> dict[str, Any]:
        names = [f"field_{place}" for place in range(15)]
        properties = {name: {"type": "string", "description": "A field. " * 5} for name in names}
        found = {
            "type": "object",
            "description": "A kind of objects. " * 20,
            "required": ["kind", *names],
        }
        return {**found, "properties": {"kind": {"const": f"kind_{number}"}, **properties}}

    assert "anyOf" in Grammar.json_schema(of(*map(branch, range(60)))).text

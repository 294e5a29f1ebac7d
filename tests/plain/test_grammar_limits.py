"""Depth of grammars with their references resolved: refused with the limit's name, while ordinary
recursion is not."""

import json
from typing import Any

import pytest
from hostile_grammars import (
    HOSTILE,
    alternatives,
    gbnf_rules,
    merged,
    nested_objects,
    references,
    rules,
    terminals,
)

from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.limits import height, total

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"type": "number"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["value"],
}
LISTS: dict[str, Any] = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    },
}
ARITHMETIC = (
    'start: sum\nsum: product | sum "+" product\nproduct: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/'
)


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        (references(2800), "steps"),
        (nested_objects(1000), "steps"),
        (merged(2000), "steps"),
        (alternatives(1000), "steps"),
        ({"allOf": [references(60)] * 40, **references(60)}, "merges"),
    ],
)
def test_a_schema_that_is_too_deep_is_refused_with_the_limit(schema: dict[str, Any], limit: str):
    with pytest.raises(ValueError, match=limit):
        Grammar.json_schema(schema)


@pytest.mark.parametrize("text", [rules(3000), rules(660), terminals(4000), gbnf_rules(2500)])
def test_a_chain_of_rules_is_refused_with_the_limit(text: str):
    with pytest.raises(ValueError, match=r"rules and terminals.* allowed"):
        Grammar.notation(text)


def test_groups_within_groups_are_counted_outside_of_classes_alone():
    with pytest.raises(ValueError, match="120 groups within one another; 100 are allowed"):
        Grammar.regex("(" * 120 + "a" + ")" * 120)
    for pattern in ("[(]" * 120, r"\(" * 120, "(a)" * 120, r"[\](]" * 120):
        assert Grammar.regex(pattern).text == pattern


@pytest.mark.parametrize(
    "schema", [TREE, LISTS, {"$ref": "#"}, {"properties": {"a": {"$ref": "https://x.test/a"}}}]
)
def test_recursive_schemas_are_within_limits(schema: dict[str, Any]):
    assert json.loads(Grammar.json_schema(schema).text) == schema


def test_recursive_grammars_are_within_limits():
    assert Grammar.notation(ARITHMETIC).text == ARITHMETIC
    assert Grammar.notation('root ::= "a" root | "b"').kind == "gbnf"
    assert Grammar.notation(rules(100)) and Grammar.json_schema(nested_objects(30))


def test_names_in_texts_patterns_and_comments_are_no_rules():
    text = 'start: "start: a" /b: c/ d // e: f\nd: "x"'
    assert Grammar.notation(text).text == text


def test_height_and_total_of_a_graph():
    graph = {"a": ["b", "c", "b"], "b": ["c"], "c": ["a", "d"], "d": []}
    assert height("a", graph.__getitem__) == 3
    assert total("a", graph.__getitem__) == 9


def test_each_hostile_schema_is_counted_at_once():
    """In far fewer steps than it has parts within parts: none takes more than its own length to
    count."""
    for hostile in HOSTILE.values():
        if "guided_json" in hostile:
            with pytest.raises(ValueError, match="resolved"):
                Grammar.json_schema(hostile["guided_json"])

"""Grammars that overflow a compiler's stack, or ask for too much memory or time, as fields of a
request's body."""

import json
from typing import Any


def rules(number: int) -> str:
    """Return Lark rules of which each needs the next."""
    chain = "\n".join(f"r{place}: r{place + 1}" for place in range(number))
    return f'start: r0\n{chain}\nr{number}: "a"'


def terminals(number: int) -> str:
    """Return Lark terminals of which each needs the next."""
    chain = "\n".join(f"T{place}: T{place + 1}" for place in range(number))
    return f'start: T0\n{chain}\nT{number}: "a"'


def gbnf_rules(number: int) -> str:
    """Return GBNF rules of which each needs the next."""
    chain = "\n".join(f"r{place} ::= r{place + 1}" for place in range(number))
    return f'root ::= r0\n{chain}\nr{number} ::= "a"'


def references(number: int) -> dict[str, Any]:
    """Return a schema with a chain of references."""
    return _chain(number, lambda following: following)


def nested_objects(number: int) -> dict[str, Any]:
    """Return a schema of objects within objects, by references."""
    return _chain(
        number,
        lambda following: {"type": "object", "properties": {"x": following}, "required": ["x"]},
    )


def nested_arrays(number: int) -> dict[str, Any]:
    """Return a schema of arrays within arrays, by references."""
    return _chain(number, lambda following: {"type": "array", "items": following})


def merged(number: int) -> dict[str, Any]:
    """Return a schema with a chain of `allOf`, by references."""
    return _chain(number, lambda following: {"allOf": [following]})


def alternatives(number: int) -> dict[str, Any]:
    """Return a schema with a chain of `anyOf`, by references."""
    return _chain(number, lambda following: {"anyOf": [following, {"type": "integer"}]})


def doubled(number: int) -> dict[str, Any]:
    """Return a schema that merges two to the power of a number."""
    return _chain(number, lambda following: {"allOf": [following, following]})


def _chain(number: int, wrap: Any) -> dict[str, Any]:
    definitions = {f"a{place}": wrap({"$ref": f"#/$defs/a{place + 1}"}) for place in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{number}": {"type": "string"}}}


# What no count of rules or references finds: it gets as far as the sandbox, and crashes that.
OVERFLOWS_SANDBOX = {"guided_grammar": "start: %json " + json.dumps(references(2500))}
HOSTILE: dict[str, dict[str, Any]] = {
    "rules": {"guided_grammar": rules(3000)},
    "fewer rules": {"guided_grammar": rules(660)},
    "terminals": {"guided_grammar": terminals(4000)},
    "rules of GBNF": {"guided_grammar": gbnf_rules(2500)},
    "references": {"guided_json": references(2800)},
    "objects": {"guided_json": nested_objects(1000)},
    "arrays": {"guided_json": nested_arrays(2000)},
    "allOf": {"guided_json": merged(2000)},
    "anyOf": {"guided_json": alternatives(1000)},
    "doubled": {"guided_json": doubled(200)},
    "references in a rule": OVERFLOWS_SANDBOX,
    "references in a strict format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": merged(2000)},
        }
    },
    "references in a tag": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": nested_objects(1000), "end": "</f>"}],
            "triggers": ["<f"],
        }
    },
    "terminals that exclude one another": {
        "guided_grammar": "start: T\nT: " + " & ".join(f"/a.*{place}/" for place in range(400))
    },
}

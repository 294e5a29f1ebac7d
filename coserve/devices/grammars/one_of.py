"""Replacement of `oneOf` in JSON schemas: the compiler of grammars has `anyOf` alone, which is the
same where branches cannot overlap.

Branches cannot overlap where their types, values, bounds or lengths differ, where both have a
property with values that differ and one requires it, or where one requires a property that the
other does not allow.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

# Parts of schemas that comparisons within one document may read, and their steps down into schemas.
_MAX_READ, _MAX_STEPS = 400_000, 24
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Pairs of bounds, by the type that they bound.
_BOUNDS = {
    "string": (("minLength", "maxLength"),),
    "array": (("minItems", "maxItems"),),
    "object": (("minProperties", "maxProperties"),),
}
# Keywords whose values are data, and those with schemas by name.
_DATA = ("const", "enum", "default", "examples")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_Schema = Mapping[str, Any]


def with_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with `anyOf` in the place of each `oneOf`.

    Raises:
        ValueError: Branches may overlap; the message names them.
    """
    branches = _Branches(schema)
    rewritten: dict[str, Any] = branches.rewritten(schema)
    return rewritten


class _TooMuchError(Exception):
    """Error for comparisons that would read more than `_MAX_READ`."""


class _Branches:
    """Comparison of branches within one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document, self._num_read = document, 0
        # Names and places from the document to the schema that is rewritten.
        self._way: list[str] = []
        # By a keyword and the identity of its value: the value, so that it stays, and what stands
        # for its parts.
        self._keys: dict[tuple[str, int], tuple[Any, frozenset[Any]]] = {}

    def rewritten(self, value: Any, *, is_map: bool = False) -> Any:
        """Return a schema, or a list or (is_map) a mapping of some, without `oneOf`."""
        if isinstance(value, list):
            return [self._rewritten_at(str(place), each) for place, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if not is_map and isinstance(branches := value.get("oneOf"), list):
            try:
                self._check(branches, value)
            except _TooMuchError:
                raise ValueError(
                    f"grammar has a oneOf at {self._where()} whose branches take too long to "
                    "compare, so that two may both match a value: write anyOf"
                ) from None
            value = _renamed(value)
        found = {}
        for name, each in value.items():
            is_data = not is_map and name in _DATA
            within_map = not is_map and name in _MAPS
            found[name] = each if is_data else self._rewritten_at(name, each, is_map=within_map)
        return found

    def _rewritten_at(self, name: str, value: Any, *, is_map: bool = False) -> Any:
        self._way.append(name)
        found = self.rewritten(value, is_map=is_map)
        self._way.pop()
        return found

    def _where(self) -> str:
        return "/".join(["#", *self._way])

    def _check(self, branches: list[Any], holder: _Schema) -> None:
        for (first, one), (second, other) in combinations(enumerate(branches), 2):
            if not self.are_disjoint(self._branch(holder, one), self._branch(holder, other), 0):
                raise ValueError(
                    f"grammar has a oneOf at {self._where()} whose branches {first} and {second} "
                    "may both match a value: write anyOf, or make them differ by type, or by the "
                    "const of a property that both require"
                )

    def _branch(self, holder: _Schema, branch: Any) -> Any:
        """Return a branch, with its reference resolved, and what the schema that has it says of all
        branches.
        """
        resolved = self._resolved(branch)
        for schema in (holder, resolved):
            self._read(
                schema, len(_mapping(schema, "properties")) if isinstance(schema, Mapping) else 0
            )
        return _within(holder, resolved)

    def are_disjoint(self, one: Any, other: Any, steps: int) -> bool:
        """Return whether it is sure that no value matches both."""
        one, other = self._resolved(one), self._resolved(other)
        self._read(one)
        self._read(other)
        if steps > _MAX_STEPS:
            return False
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        return (
            self._parts_are_disjoint(one, other, steps + 1)
            or self._parts_are_disjoint(other, one, steps + 1)
            or self._values_are_disjoint(one, other)
        )

    def _parts_are_disjoint(self, one: _Schema, other: _Schema, steps: int) -> bool:
        """Return whether each alternative of the first, or one of the parts that it merges, is
        apart from the other.
        """
        for name in ("anyOf", "oneOf"):
            parts = one.get(name)
            if (
                isinstance(parts, list)
                and parts
                and all(self.are_disjoint(part, other, steps) for part in parts)
            ):
                return True
        merged = one.get("allOf")
        if isinstance(merged, list) and any(
            self.are_disjoint(part, other, steps) for part in merged
        ):
            return True
        types = _types(one) & _types(other)
        return types == {"object"} and self._objects_are_disjoint(one, other, steps)

    def _objects_are_disjoint(self, one: _Schema, other: _Schema, steps: int) -> bool:
        """Return whether a property that the first requires sets it apart from the other."""
        required = _names(one.get("required"))
        here = _mapping(one, "properties")
        there = _mapping(other, "properties")
        is_closed = other.get("additionalProperties") is False and not other.get(
            "patternProperties"
        )
        for name in required:
            if name not in there:
                if is_closed:
                    return True
            elif name in here and self.are_disjoint(here[name], there[name], steps):
                return True
        return False

    def _values_are_disjoint(self, one: _Schema, other: _Schema) -> bool:
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            return self._keys_of(one).isdisjoint(self._keys_of(other))
        if values is not None:
            return not _may_match_any(values, other)
        if others is not None:
            return not _may_match_any(others, one)
        return all(_bounds_exclude(kind, one, other) for kind in _types(one) & _types(other))

    def _keys_of(self, schema: _Schema) -> frozenset[Any]:
        """Return what stands for each value of `const` or `enum`; made once for each of them."""
        name = "const" if "const" in schema else "enum"
        value = schema[name]
        if (name, id(value)) not in self._keys:
            self._keys[name, id(value)] = value, frozenset(map(_key, _values(schema) or ()))
        return self._keys[name, id(value)][1]

    def _read(self, schema: Any, num_more: int = 0) -> None:
        """Count what a comparison reads of a schema, and num_more; _TooMuchError."""
        self._num_read += _num_parts(schema) + num_more
        if self._num_read > _MAX_READ:
            raise _TooMuchError

    def _resolved(self, schema: Any) -> Any:
        """Return what a reference leads to, unless there is more beside it."""
        for _ in range(_MAX_STEPS):
            if not isinstance(schema, Mapping) or not isinstance(
                reference := schema.get("$ref"), str
            ):
                return schema
            self._read(schema, len(reference))
            found = _at(self._document, reference)
            beside = {name: value for name, value in schema.items() if name != "$ref"}
            schema = (
                {"allOf": [found, beside]}
                if beside.keys() & {"type", "properties", "const", "enum"}
                else found
            )
        return {}


def _num_parts(schema: Any) -> int:
    """Return how many parts of a schema a comparison reads, without the schemas within it; at least
    5.
    """
    if not isinstance(schema, Mapping):
        return 5
    lists = (schema.get(name) for name in ("enum", "required", "type"))
    return 5 + len(schema) + sum(len(each) for each in lists if isinstance(each, list))


def _renamed(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" not in schema:
        return {("anyOf" if name == "oneOf" else name): value for name, value in schema.items()}
    rest = {name: value for name, value in schema.items() if name not in ("oneOf", "allOf")}
    merged = schema.get("allOf")
    return {
        **rest,
        "allOf": [*(merged if isinstance(merged, list) else []), {"anyOf": schema["oneOf"]}],
    }


def _within(holder: _Schema, branch: Any) -> Any:
    """Return a branch with what the schema that has it says of all branches."""
    if not isinstance(branch, Mapping):
        return branch
    merged = dict(branch)
    if "type" in holder:
        merged.setdefault("type", holder["type"])
    if properties := {**_mapping(holder, "properties"), **_mapping(branch, "properties")}:
        if "additionalProperties" not in branch:
            merged["properties"] = properties
        merged["required"] = [*_names(branch.get("required")), *_names(holder.get("required"))]
    return merged


def _at(document: Any, reference: str) -> Any:
    if not reference.startswith("#"):
        return {}
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, Mapping) and key in document:
            document = document[key]
        elif (
            isinstance(document, list)
            and key.isascii()
            and key.isdigit()
            and int(key[:6]) < len(document)
        ):
            document = document[int(key[:6])]
        else:
            return {}
    return document


def _types(schema: _Schema) -> frozenset[str]:
    """Return the types that values may have; an integer is a number, too."""
    values = _values(schema)
    if values is not None:
        return frozenset(kind for value in values for kind in _types_of(value))
    asked = schema.get("type")
    names = [asked] if isinstance(asked, str) else asked if isinstance(asked, list) else _TYPES
    found = {name for name in names if isinstance(name, str)}
    return frozenset(found | {"integer"} if "number" in found else found)


def _types_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("number", "integer")
    if isinstance(value, float):
        return ("number", "integer") if value.is_integer() else ("number",)
    return (
        ("string",)
        if isinstance(value, str)
        else ("array",)
        if isinstance(value, list)
        else ("object",)
    )


def _values(schema: _Schema) -> list[Any] | None:
    """Return the only values that match; None if there are others."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _key(value: Any) -> Any:
    """Return what is equal for two values exactly if they are the same as JSON has it: 1 and 1.0
    are, true is not.
    """
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value).__name__, value
    # As a text, whose hash nobody can foresee: numbers can be chosen to have the same.
    return "number", hex(int(value)) if isinstance(
        value, int
    ) or value.is_integer() else value.hex()


def _may_match_any(values: list[Any], schema: _Schema) -> bool:
    """Return whether one of some values may match a schema."""
    types, (lowest, highest) = _types(schema), _range(schema)
    return any(
        not types.isdisjoint(_types_of(value))
        and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or lowest <= value <= highest
        )
        for value in values
    )


def _bounds_exclude(kind: str, one: _Schema, other: _Schema) -> bool:
    """Return whether no value of a type is within the bounds of both."""
    if kind in ("integer", "number"):
        (lowest, highest), (low, high) = _range(one), _range(other)
        return highest < low or high < lowest
    for least, most in _BOUNDS.get(kind, ()):
        for first, second in ((one, other), (other, one)):
            if _number(first.get(most), float("inf")) < _number(second.get(least), 0):
                return True
    return False


def _range(schema: _Schema) -> tuple[float, float]:
    """Return bounds that every number that matches is within; exclusive ones count as inclusive."""
    lows = [_number(schema.get(name), float("-inf")) for name in ("minimum", "exclusiveMinimum")]
    highs = [_number(schema.get(name), float("inf")) for name in ("maximum", "exclusiveMaximum")]
    return max(lows), min(highs)


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _mapping(schema: _Schema, name: str) -> Mapping[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _names(required: Any) -> Iterator[str]:
    return (
        (name for name in required if isinstance(name, str))
        if isinstance(required, list)
        else iter(())
    )

"""Limits of grammars once their references are resolved: the compiler recurses once for each level.

These limits answer the usual hostile inputs at once, with a message that names the limit. A grammar
that passes them is still tried in a sandbox, whose stack is the limit that holds.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

# Characters of a grammar, and of a JSON schema as JSON.
MAX_CHARACTERS = 131_072
# Steps from a schema to its deepest part: a reference, or from a schema to one within it. The
# sandbox's stack holds at least twice as many of each kind.
MAX_SCHEMA_STEPS = 128
# Schemas that are merged into one by `allOf`, through all references.
MAX_MERGED = 2000
# Rules and terminals from the first rule to the last one that it leads to, and all of them
# together.
MAX_RULE_STEPS, MAX_RULES = 192, 4000
# Groups within groups of a regular expression.
MAX_GROUPS = 100

_Node = TypeVar("_Node", bound=Hashable)
# Keywords with one schema, with a list of schemas, and with schemas by name.
_ONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas")
# In Lark's notation: comments, texts and patterns, which have no names in them; a rule's beginning;
# a name. All three take time in proportion to what they read: no part is tried again in another
# way, and a text, a pattern or a class that does not end takes the rest.
_LARK_PART = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])++/?"""
    r"""|(?:^|\n)[ \t]*+[?!]?+(?P<rule>[A-Za-z_]\w*+)[^:\n"/]*+:|(?P<name>[A-Za-z_]\w*+)"""
)
_GBNF_PART = re.compile(
    r"""\#[^\n]*|"(?:\\.|[^"\\\n])*+"?|\[(?:\\.|[^\]\\\n])*+\]?"""
    r"""|(?:^|\n)[ \t]*+(?P<rule>[\w-]++)[ \t]*+::=|(?P<name>[A-Za-z_][\w-]*+)"""
)
_REGEX_PART = re.compile(
    r"\\.|\[\^?+\]?+(?:\\.|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))", re.DOTALL
)


def check_length(num_characters: int) -> None:
    """Check the length of a grammar, before anything reads it.

    Raises:
        ValueError: It is too long.
    """
    if num_characters > MAX_CHARACTERS:
        raise ValueError(f"grammar has {num_characters} characters; it may have {MAX_CHARACTERS}")


def check_schema(schema: dict[str, Any]) -> None:
    """Check a JSON schema.

    Raises:
        ValueError: Once references are resolved it is too deep, or merges too much.
    """
    document = _Document(schema)
    steps = height(document.root, document.parts)
    if steps > MAX_SCHEMA_STEPS:
        raise ValueError(
            f"grammar is a JSON schema of {steps} steps from its root to its deepest part, with "
            f"its references resolved; {MAX_SCHEMA_STEPS} are allowed"
        )
    if total(document.root, document.merged) > MAX_MERGED:
        raise ValueError(
            f"grammar is a JSON schema in which allOf merges more than {MAX_MERGED} schemas into "
            "one, with its references resolved"
        )


def check_rules(text: str, *, is_gbnf: bool) -> None:
    """Check the rules of a grammar.

    Raises:
        ValueError: There are too many, or they lead too far.
    """
    graph = _rules(text, _GBNF_PART if is_gbnf else _LARK_PART)
    if len(graph) > MAX_RULES:
        raise ValueError(f"grammar has {len(graph)} rules and terminals; {MAX_RULES} are allowed")
    start = "root" if is_gbnf else "start"
    if (steps := height(start, lambda name: graph.get(name, ()))) > MAX_RULE_STEPS:
        raise ValueError(
            f"grammar has a chain of {steps} rules and terminals, each of which needs the next; "
            f"{MAX_RULE_STEPS} are allowed"
        )


def check_pattern(pattern: str) -> None:
    """Check a regular expression.

    Raises:
        ValueError: It has too many groups within groups.
    """
    depth = deepest = 0
    for part in _REGEX_PART.finditer(pattern):
        depth += (part.lastgroup == "open") - (part.lastgroup == "close")
        deepest = max(deepest, depth)
    if deepest > MAX_GROUPS:
        raise ValueError(
            f"grammar is a pattern with {deepest} groups within one another; {MAX_GROUPS} are "
            "allowed"
        )


def height(root: _Node, parts: Callable[[_Node], Iterable[_Node]]) -> int:
    """Return the number of steps of the longest way down from a node; a way that meets itself ends
    there.
    """
    return _folded(root, parts, lambda heights: 1 + max(heights, default=-1))


def total(root: _Node, parts: Callable[[_Node], Iterable[_Node]]) -> int:
    """Return how many nodes there are on all ways down from a node; a way that meets itself ends
    there.
    """
    return _folded(root, parts, lambda totals: 1 + sum(totals))


def _folded(
    root: _Node, parts: Callable[[_Node], Iterable[_Node]], combine: Callable[[list[int]], int]
) -> int:
    """Return a node's value, made of those of its parts; without recursion."""
    values: dict[_Node, int] = {}
    # Nodes whose parts are being gone through, each with those that are left and the values so far.
    way: list[tuple[_Node, Iterator[_Node], list[int]]] = [(root, iter(parts(root)), [])]
    within = {root}
    while way:
        node, rest, found = way[-1]
        following = next(rest, None)
        if following is None:
            way.pop()
            within.discard(node)
            values[node] = combine(found)
            if way:
                way[-1][2].append(values[node])
        elif following in values:
            found.append(values[following])
        elif following not in within:
            within.add(following)
            way.append((following, iter(parts(following)), []))
    return values[root]


class _Document:
    """A JSON schema and the schemas within it, each named by the identity of its object: pointers
    would be as long as all keys.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._found: dict[int, Any] = {}
        self.root = self._named(schema)

    def parts(self, node: int) -> list[int]:
        """Return the schemas that one is made of."""
        found = self._found[node]
        if not isinstance(found, dict):
            return []
        parts = [found[name] for name in _ONE if isinstance(found.get(name), dict)]
        for name in _LISTS:
            if isinstance(each := found.get(name), list):
                parts += each
        for name in _NAMED:
            if isinstance(each := found.get(name), dict):
                parts += each.values()
        return [self._named(part) for part in parts + self._reference(found)]

    def merged(self, node: int) -> list[int]:
        """Return the schemas that `allOf` and a reference merge into one."""
        found = self._found[node]
        if not isinstance(found, dict):
            return []
        several = found.get("allOf")
        parts = several if isinstance(several, list) else []
        return [self._named(part) for part in parts + self._reference(found)]

    def _named(self, schema: Any) -> int:
        self._found[id(schema)] = schema
        return id(schema)

    def _reference(self, found: dict[str, Any]) -> list[Any]:
        """Return the schema that a reference within the document leads to, if there is one."""
        reference = found.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return []
        return [self._schema if reference == "#" else _step(self._schema, reference[2:])]


def _step(value: Any, pointer: str) -> Any:
    """Return what a JSON pointer leads to; None if there is nothing."""
    for part in pointer.split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif (
            isinstance(value, list)
            and key.isascii()
            and key.isdigit()
            and len(key) < 7
            and int(key) < len(value)
        ):
            value = value[int(key)]
        else:
            return None
    return value


def _rules(text: str, part: re.Pattern[str]) -> dict[str, list[str]]:
    """Return the names that each rule of a grammar has in it."""
    graph: dict[str, list[str]] = {}
    names: list[str] = []
    for found in part.finditer(text):
        if rule := found["rule"]:
            names = graph.setdefault(rule, [])
        elif found["name"]:
            names.append(found["name"])
    return graph

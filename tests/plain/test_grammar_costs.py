"""Checks of grammars on the server's event loop: bounded in time and memory, whatever a request
sends."""

import os
import resource
import subprocess
import sys

import pytest

# A check takes a fraction of a second and few megabytes; unbounded ones take minutes, or gigabytes.
CPU_S, MEMORY_BYTES = 6, 1 << 30
# Grammars as long as they may be.
PATTERNS = {
    "classes": "Grammar.regex('[' * 131_072)",
    "classes with escapes": "Grammar.regex('[\\\\' * 65_536)",
    "negated classes": "Grammar.regex('[^]' * 43_000)",
    "GBNF classes": "Grammar.notation('root ::= ' + '[' * 131_000)",
    "GBNF texts": "Grammar.notation('root ::= ' + '\"\\\\' * 65_000)",
    "GBNF names": "Grammar.notation('root ::= a\\n' + 'a-' * 65_000)",
    "Lark texts": "Grammar.notation('start: ' + '\"\\\\' * 65_000)",
    "Lark patterns": "Grammar.notation('start: ' + '/\\\\' * 65_000)",
    "Lark names": "Grammar.notation('a' * 131_072)",
    "Lark white space": "Grammar.notation('\\n' + ' ' * 131_000)",
}
TOO_LONG = {
    "pattern": "Grammar.regex('[' * 8_000_000)",
    "notation": "Grammar.notation('start: ' + '\"a\" ' * 2_000_000)",
    "choice": "Grammar.choice(['a' * 100] * 100 + [str(i) for i in range(500_000)])",
    "keys times properties": (
        "Grammar.json_schema({'properties': {'k' * 1_000_000: {'properties': {str(i): 1 for i in range(10_000)}}}})"
    ),
    "tools": (
        "Grammar.tagged([Tag(begin=str(i), schema={'enum': list(range(10_000))}) for i in "
        "range(2_000)], at_most=None)"
    ),
    "tags and triggers": (
        "Grammar.triggered([Tag(begin=str(i), schema={}) for i in range(60_000)], triggers=['1'] + "
        "['x'] * 60_000)"
    ),
    "triggers of all tags": (
        "Grammar.triggered([Tag(begin='a' + str(i), schema={}) for i in range(900)], "
        "triggers=['a'] * 900)"
    ),
}
SCHEMAS = {
    "long keys": (
        "Grammar.json_schema({'properties': {'k' * 60_000: {'properties': {str(i): 1 for i in range(6_000)}}}})"
    ),
    "long keys within oneOf": (
        "Grammar.json_schema({'oneOf': [{'properties': {'k' * 60_000: "
        "{'properties': {str(i): {} for i in range(5_000)}}}}]})"
    ),
}
# Schemas whose branches of oneOf are compared in pairs.
ONE_OF = {
    "enums": "{'oneOf': [{'enum': [1] * 20_000}, {'enum': [2] * 20_000}]}",
    "numbers of one hash": (
        "{'oneOf': [{'enum': [i * (2**61 - 1) for i in range(2_000)]}, {'enum': [1, 'a']}]}"
    ),
    "enums by reference": (
        "{'oneOf': [{'anyOf': [{'$ref': '#/$defs/a'}] * 20}, {'anyOf': [{'$ref': '#/$defs/b'}] * 20}], "
        "'$defs': {'a': {'enum': list(range(5_000))}, 'b': {'enum': list(range(5_000, 10_000))}}}"
    ),
    "properties of all branches": (
        "{'oneOf': [{'type': 'string', 'maxLength': i} for i in range(1_000)], "
        "'properties': {str(i): {} for i in range(6_000)}}"
    ),
    "required names": (
        "{'oneOf': [{'$ref': '#/$defs/a'}] * 500, "
        "'$defs': {'a': {'type': 'object', 'required': [str(i) for i in range(9_000)]}}}"
    ),
    "long constants": (
        "{'oneOf': [{'anyOf': [{'$ref': '#/$defs/a'}] * 500}, {'anyOf': [{'$ref': '#/$defs/b'}] * 500}], "
        "'$defs': {'a': {'const': list(range(9_000))}, 'b': {'const': list(range(1, 9_000))}}}"
    ),
    "branches": "{'oneOf': [{'const': i} for i in range(5_000)]}",
    "types": "{'oneOf': [{'enum': ['a'] * 9_000}, {'type': ['integer'] * 9_000, 'minimum': 1}]}",
    "long references": (
        "{'oneOf': [{'anyOf': [{'$ref': '#' + '/a' * 5_000}] * 10}, {'anyOf': [{'const': 1}] * 100}], 'type': 'null'}"
    ),
}
COMPARED = {name: f"Grammar.json_schema({schema})" for name, schema in ONE_OF.items()}


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


@pytest.mark.parametrize(
    "group", [PATTERNS, TOO_LONG, SCHEMAS, COMPARED], ids=["patterns", "long", "schemas", "oneOf"]
)
def test_checks_of_a_grammar_are_bounded(group: dict[str, str]):
    lines = ["from coserve.devices.grammars.grammar import Grammar, Tag"]
    for name, code in group.items():
        lines += [f"try: {code}", "except ValueError: pass", f"print({name!r}, flush=True)"]
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, f"ended after {ended.stdout!r}: {ended.stderr[-500:]}"

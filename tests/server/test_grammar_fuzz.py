"""Generated grammars, schemas, patterns and structural tags over HTTP: each is answered, and no
process dies.

`make fuzz` makes more calls. Each follows a few tokens of what it asked for, so that the engine's
matcher is tried as well.
"""

import json
from collections.abc import Callable
from typing import Any

import fuzzing
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Served

pytestmark = pytest.mark.long

# A tenth of all calls, by kind.
_NUM_EXAMPLES = max(25, fuzzing.NUM_CALLS // 10 // fuzzing.NUM_ROUNDS // 5)
_SETTINGS = settings(
    max_examples=_NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=not fuzzing.NUM_CALLS,
)
_NAMES = st.sampled_from([f"d{number}" for number in range(8)])
_REFERENCES = st.one_of(
    _NAMES.map(lambda name: {"$ref": f"#/$defs/{name}"}),
    st.sampled_from(
        [
            {"$ref": "#"},
            {"$ref": "#/$defs/none"},
            {"$ref": "#/properties/a"},
            {"$ref": "https://x.test"},
        ]
    ),
)
_LEAVES = st.one_of(
    _REFERENCES,
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "null"},
            True,
            False,
            {},
            {"type": "object"},
            {"const": 1},
        ]
    ),
    st.builds(
        lambda low, high: {"type": "integer", "minimum": low, "maximum": high},
        st.integers(),
        st.integers(),
    ),
    st.builds(
        lambda low, high: {"type": "string", "minLength": low, "maxLength": high},
        *[st.integers(0, 3000)] * 2,
    ),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern}, st.deferred(lambda: _PATTERNS)
    ),
    st.lists(st.one_of(st.text(max_size=5), st.integers(), st.none()), max_size=4).map(
        lambda each: {"enum": each}
    ),
)


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=4)
    named = st.dictionaries(st.sampled_from("abcde"), inner, max_size=4)
    return st.one_of(
        st.builds(
            lambda name, each: {name: each},
            st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"]),
            some,
        ),
        st.builds(lambda each: {"type": "array", "items": each, "minItems": 1}, inner),
        st.builds(lambda each: {"not": each}, inner),
        st.builds(
            lambda each, required, more: {
                "type": "object",
                "properties": each,
                "required": required,
                "additionalProperties": more,
            },
            named,
            st.lists(st.sampled_from("abcde"), max_size=3),
            st.one_of(st.booleans(), inner),
        ),
        named.map(lambda each: {"patternProperties": each}),
        st.builds(
            lambda each, more: {**each, **more},
            _REFERENCES,
            named.map(lambda each: {"properties": each}),
        ),
    )


_SCHEMAS = st.builds(
    lambda root, definitions: {**(root if isinstance(root, dict) else {}), "$defs": definitions},
    st.recursive(_LEAVES, _wider, max_leaves=12),
    st.dictionaries(_NAMES, st.recursive(_LEAVES, _wider, max_leaves=6), max_size=8),
)
_PATTERNS: st.SearchStrategy[str] = st.recursive(
    st.sampled_from(
        [
            "a",
            "[a-z]",
            ".",
            r"\d",
            r"\w",
            r"\p{L}",
            "ab",
            "é",
            r"\n",
            "[^x]",
            "^",
            "$",
            "(",
            "]",
            "(?=a)",
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda one, other: one + other, inner, inner),
        st.builds(lambda one, other: f"({one}|{other})", inner, inner),
        st.builds(
            lambda one, times: f"({one}){times}",
            inner,
            st.sampled_from(["*", "+", "?", "{3}", "{2,900}", "{0}"]),
        ),
    ),
    max_leaves=30,
)
_NAMES_OF_SYMBOLS = [*(f"r{number}" for number in range(6)), *(f"T{number}" for number in range(4))]
_SYMBOLS = st.sampled_from(_NAMES_OF_SYMBOLS)
_LARK_PARTS: st.SearchStrategy[str] = st.recursive(
    st.one_of(
        _SYMBOLS, st.sampled_from(['"a"', '"b" "c"', "/[a-z]+/", '""', "%json {}", "<[1]>", "~/a/"])
    ),
    lambda inner: st.one_of(
        st.builds(lambda one, other: f"{one} {other}", inner, inner),
        st.builds(lambda one, other: f"({one} | {other})", inner, inner),
        st.builds(
            lambda one, times: f"({one}){times}",
            inner,
            st.sampled_from(["*", "+", "?", "{2,5}", "{0,4000}"]),
        ),
        st.builds(lambda one, other: f"{one} & {other}", inner, inner),
    ),
    max_leaves=8,
)


def _grammar(begin: str, defines: str) -> st.SearchStrategy[str]:
    """Return grammars of which some lack rules that they refer to."""
    rules = st.dictionaries(_SYMBOLS, _LARK_PARTS, max_size=10)
    missing = st.sampled_from([{}, dict.fromkeys(_NAMES_OF_SYMBOLS, '"a"')])
    return st.builds(
        lambda first, others, more: "\n".join(
            f"{name}{defines} {rule}"
            for name, rule in [(begin, first), *sorted((more | others).items())]
        ),
        _LARK_PARTS,
        rules,
        missing,
    )


_TAGS = st.builds(
    lambda schema, begin, trigger, end: {
        "type": "structural_tag",
        "structures": [{"begin": begin, "schema": schema, "end": end}],
        "triggers": [trigger],
    },
    _SCHEMAS,
    st.sampled_from(["<f>", "<f", "{", '"', "\n", ""]),
    st.sampled_from(["<f", "<", "{", "", "x"]),
    st.sampled_from(["</f>", "", "}"]),
)
_KINDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "schema": _SCHEMAS.map(lambda schema: {"guided_json": schema}),
    "lenient schema": _SCHEMAS.map(
        lambda schema: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        }
    ),
    "pattern": _PATTERNS.map(lambda pattern: {"guided_regex": pattern}),
    "grammar": st.one_of(_grammar("start", ":"), _grammar("root", " ::=")).map(
        lambda text: {"guided_grammar": text}
    ),
    "tag": _TAGS.map(lambda tags: {"response_format": tags}),
}


def _never_fails(connection: httpx.Client, asked: dict[str, Any], statuses: list[int]) -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 12, "temperature": 1.5, **asked}
    answer = connection.post("/v1/completions", json=body)
    statuses.append(answer.status_code)
    fuzzing.note(answer.status_code)
    is_busy = answer.status_code == 503 and "retry-after" in answer.headers
    assert answer.status_code < 500 or is_busy, (json.dumps(asked), answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"], asked


@pytest.mark.parametrize("kind", _KINDS)
def test_generated_grammars_are_answered_and_no_process_dies(served: Served, kind: str):
    statuses = list[int]()
    with fuzzing.surviving(served), httpx.Client(base_url=served.url, timeout=60) as connection:
        check: Callable[..., None] = given(asked=_KINDS[kind])(
            lambda asked: _never_fails(connection, asked, statuses),
        )
        fuzzing.in_rounds(_SETTINGS(check))
    assert 200 in statuses, "some can be followed"

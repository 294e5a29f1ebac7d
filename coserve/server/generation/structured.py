"""Structured output: grammars from the fields of a body."""

import json
from collections.abc import Mapping
from typing import Any

from coserve.devices.grammars.grammar import Grammar, Tag
from coserve.server.bodies.schemas import ResponseFormat, SamplingBody, StructuredOutputs
from coserve.server.errors import ApiError

# Keywords of a JSON schema that map names to schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# A pattern that no white space matches: JSON without any.
_NO_WHITE_SPACE = "[ ]{0}"


def asked_grammar(body: SamplingBody) -> Grammar | None:
    """Return the grammar that the output must follow, if any.

    Raises:
        ApiError: It is not a grammar.
    """
    try:
        return _asked(body)
    except ValueError as error:
        raise ApiError(str(error), param=grammar_field(body)) from None


def grammar_field(body: SamplingBody) -> str:
    """Return the field that has the grammar."""
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(body, name) is not None), "response_format")


def _asked(body: SamplingBody) -> Grammar | None:
    """Return the grammar that a body asks for.

    Raises:
        ValueError: Something is wrong with it.
    """
    asked = body.structured_outputs
    white_space = body.guided_whitespace_pattern
    if asked is not None and (asked.whitespace_pattern or asked.disable_any_whitespace):
        white_space = asked.whitespace_pattern or _NO_WHITE_SPACE
    grammars = [
        None if body.response_format is None else _of_format(body.response_format),
        None if asked is None else _of_structured_outputs(asked),
        None if body.guided_json is None else _json(body.guided_json),
        None if body.guided_regex is None else Grammar.regex(body.guided_regex),
        None if body.guided_choice is None else Grammar.choice(body.guided_choice),
        None if body.guided_grammar is None else Grammar.notation(body.guided_grammar),
    ]
    grammar = _only([each for each in grammars if each is not None])
    return (
        grammar if grammar is None or not white_space else _with_white_space(grammar, white_space)
    )


def _only(found: list[Grammar]) -> Grammar | None:
    """Return the one grammar of several that are all equal."""
    different = list(dict.fromkeys(found))
    if len(different) > 1:
        raise ValueError(
            "only one of response_format, structured_outputs and guided_… can be given"
        )
    return different[0] if different else None


def _with_white_space(grammar: Grammar, pattern: str) -> Grammar:
    """Return a JSON grammar whose white space between parts is what a regular expression allows."""
    if grammar.kind != "json_schema":
        return grammar
    lenient = grammar.is_lenient
    options = {"whitespace_pattern": pattern, "lenient": lenient, "coerce_one_of": lenient}
    schema = {**json.loads(grammar.text), "x-guidance": options}
    return Grammar(kind="lark", text=f"start: %json {json.dumps(schema)}")


def _of_format(asked: ResponseFormat) -> Grammar | None:
    if asked.type == "text":
        return None
    if (
        asked.type in ("json_object", "json")
        and (schema := asked.schema_ or asked.value) is not None
    ):
        return _json(schema)  # as llama.cpp, Together and TGI have it
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.type == "regex" and (pattern := asked.pattern or asked.value) is not None:
        return Grammar.regex(_text(pattern, "response_format.pattern"))
    if asked.type == "grammar" and asked.grammar is not None:
        return Grammar.notation(asked.grammar)
    if asked.type == "structural_tag":
        return _tags({"structures": asked.structures, "triggers": asked.triggers})
    if asked.type != "json_schema":
        raise ValueError(
            f"response_format must be of type text, json_object, json_schema or structural_tag, "
            f"not {asked.type!r}"
        )
    if asked.json_schema is None and asked.schema_ is not None:
        return _json(asked.schema_)
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ValueError("response_format of type json_schema needs json_schema.schema")
    # As in OpenAI's API, a schema that is not strict is followed as far as possible.
    return Grammar.json_schema(asked.json_schema.schema_, is_lenient=not asked.json_schema.strict)


def _of_structured_outputs(asked: StructuredOutputs) -> Grammar:
    is_closed = bool(asked.disable_additional_properties)
    kinds = [
        None if asked.json_ is None else _json(asked.json_, is_closed=is_closed),
        None if asked.regex is None else Grammar.regex(asked.regex),
        None if asked.choice is None else Grammar.choice(asked.choice),
        None if asked.grammar is None else Grammar.notation(asked.grammar),
        Grammar.json_object() if asked.json_object else None,
        None if asked.structural_tag is None else _tags(_read(asked.structural_tag)),
    ]
    given = [each for each in kinds if each is not None]
    if len(given) != 1:
        raise ValueError(
            "structured_outputs needs exactly one of json, regex, choice, grammar, json_object and "
            "structural_tag"
        )
    return given[0]


def _json(schema: str | dict[str, Any], *, is_closed: bool = False) -> Grammar:
    """Return the grammar of a JSON schema.

    Args:
        schema: The schema.
        is_closed: Whether objects have no other properties than those in it.
    """
    grammar = Grammar.json_schema(_read(schema) if isinstance(schema, str) else schema)
    return Grammar.json_schema(_closed(json.loads(grammar.text))) if is_closed else grammar


def _closed(schema: Any) -> Any:
    """Return a schema whose objects with properties allow no others by default.

    The schema must not be nested too deeply.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            closed[name] = {key: _closed(inner) for key, inner in value.items()}
        else:
            # These hold values, not schemas.
            closed[name] = value if name in ("enum", "const", "default") else _closed(value)
    if isinstance(schema.get("properties"), dict) and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what the output must follow is not valid JSON: {error}") from None


def _tags(asked: Any) -> Grammar:
    """Return the grammar of vLLM's structural tags: free text, in which a trigger begins a tag with
    JSON of its schema.
    """
    structures = asked.get("structures") if isinstance(asked, Mapping) else None
    triggers = asked.get("triggers") if isinstance(asked, Mapping) else None
    try:
        tags = [
            Tag(begin=each["begin"], schema=each["schema"], end=each.get("end", ""))
            for each in structures or ()
        ]
    except (KeyError, TypeError, AttributeError):
        tags = []
    if not tags or not triggers:
        raise ValueError(
            "a structural tag needs triggers, and structures with begin, schema and end"
        )
    return Grammar.triggered(tags, triggers=triggers)

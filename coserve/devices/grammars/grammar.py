"""Grammars that a request's output follows: a JSON schema, a regular expression, one of some texts,
or a grammar.

They are plain data, so that processes without tensors can check and send them;
`coserve.devices.grammars.matching` compiles them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from coserve.devices.grammars.limits import check_length, check_pattern, check_rules, check_schema
from coserve.devices.grammars.one_of import with_any_of

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]
_KINDS = ("json_schema", "regex", "lark", "gbnf")
# States that the lexer of one grammar may make while texts follow it, unless it gets fewer; schemas
# have some hundreds.
MAX_STATES = 8_000
# Bytes that a state takes at most: 0.7 to 2.4 kB were measured over kinds of patterns.
STATE_BYTES = 2_560
# What an error says of a grammar that needs more states.
TOO_MANY_STATES = "too many states"
# Between two parts of JSON: a space, or a new line and its indentation; no more, so that a model
# cannot get lost in it.
WHITE_SPACE = r"( |\n[ \t]{0,40})"
# How an error begins that ends a request whose output cannot follow its grammar any further: what
# compiles can still turn out to be too large, or to leave no token, in the middle of a text.
CANNOT_FOLLOW = "the grammar cannot be followed any further: "
# Tags, and triggers, of one grammar: each tag is compared with each trigger.
_MAX_TAGS = 1000
# Deeper JSON is refused before it is compiled, which recurses.
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Language that output is a text of, from its first token to its last.

    Raises:
        ValueError: The grammar is wrong; the message says how.
    """

    kind: GrammarKind
    """Notation of the text."""
    text: str
    """A JSON schema as JSON; a regular expression as Rust has them (no look-around), of the whole
    output; a grammar in Lark's notation with a rule `start`, as
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes it; or one in
    llama.cpp's GBNF with a rule `root`.
    """
    is_lenient: bool = field(default=False)
    """Whether keywords of a JSON schema that cannot be enforced are ignored; otherwise they are
    refused by name.
    """
    after: str = ""
    """Text up to which any text comes first, as reasoning does up to its end."""
    begun_by: str = ""
    """Text with which the text before `after` begins, and which may be left out as a whole."""
    num_bytes: int = field(default=0, compare=False)
    """Bytes that the compiled grammar takes, as measured in a sandbox that it has passed; 0: not
    tried there yet.
    """

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or not isinstance(self.text, str):
            raise ValueError(
                f"grammar must be text of a kind of {', '.join(_KINDS)}, not {self.kind!r}"
            )
        check_length(len(self.text))

    @classmethod
    def json_schema(cls, schema: dict[str, Any], *, is_lenient: bool = False) -> Self:
        """Return the grammar of JSON that a schema describes, with common white space.

        Properties come in the order of the schema.
        """
        if not isinstance(schema, dict):
            raise ValueError(
                f"grammar must be a JSON schema, an object, not {json.dumps(schema)[:100]}"
            )
        if _depth(schema) > _MAX_DEPTH:
            raise ValueError(f"grammar is a JSON schema nested more than {_MAX_DEPTH} deep")
        check_length(len(json.dumps(schema)))
        check_schema(schema)
        if not is_lenient:
            schema = with_any_of(schema)
        return cls(kind="json_schema", text=json.dumps(schema), is_lenient=is_lenient)

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of a text that a pattern matches as a whole."""
        check_length(len(pattern))
        check_pattern(pattern)
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the grammar of one of some texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("grammar must be a choice of texts that are not empty, at least one")
        check_length(sum(map(len, texts)))
        return cls(kind="lark", text="start: " + " | ".join(map(_quoted, dict.fromkeys(texts))))

    @classmethod
    def notation(cls, text: str) -> Self:
        """Return a grammar as clients write it: GBNF where rules are defined by `::=`, otherwise
        Lark's notation.
        """
        check_length(len(text))
        is_gbnf = "::=" in text
        check_rules(text, is_gbnf=is_gbnf)
        return cls(kind="gbnf" if is_gbnf else "lark", text=text)

    @classmethod
    def tagged(
        cls,
        tags: Sequence["Tag"],
        *,
        separator: str = "",
        at_least: int = 1,
        at_most: int | None = 1,
    ) -> Self:
        """Return the grammar of pieces of JSON between fixed texts, one after the other, as calls
        of tools are.

        Args:
            tags: What each piece may be.
            separator: Text between two pieces.
            at_least: Least number of pieces.
            at_most: Most pieces; None: any number.
        """
        if not tags or at_least < 0 or (at_most is not None and not max(1, at_least) <= at_most):
            raise ValueError("grammar must have tags, and at_most at least at_least and 1")
        rules = [f"tag: {' | '.join(f'tag_{place}' for place in range(len(tags)))}"]
        num_characters = len(rules[0])
        for place, tag in enumerate(tags):
            rules.append(f"tag_{place}: {tag.in_lark()}")
            check_length(num_characters := num_characters + len(rules[-1]))
        more = f"({_quoted(separator)} tag)" if separator else "(tag)"
        rest = (
            ""
            if at_most == 1
            else f" {more}{{{max(0, at_least - 1)},{'' if at_most is None else at_most - 1}}}"
        )
        start = f"start: tag{rest}" if at_least else f"start: (tag{rest})?"
        return cls(kind="lark", text="\n".join([start, *rules]))

    @classmethod
    def triggered(cls, tags: Sequence["Tag"], *, triggers: Sequence[str]) -> Self:
        """Return the grammar of any text in which whatever begins with a trigger is one of the tags
        that begin with it.
        """
        if max(len(tags), len(triggers)) > _MAX_TAGS:
            raise ValueError(
                f"grammar has {len(tags)} tags and {len(triggers)} triggers; {_MAX_TAGS} are "
                "allowed"
            )
        start, rules, num_characters = [], [], 0
        for place, trigger in enumerate(triggers):
            begun = [tag for tag in tags if trigger and tag.begin.startswith(trigger)]
            if not begun:
                raise ValueError(f"grammar has a trigger {trigger!r} with which no tag begins")
            start.append(f"part_{place}")
            ways = []
            for tag in begun:
                ways.append(tag.in_lark(after=trigger))
                check_length(num_characters := num_characters + len(ways[-1]))
            rules += [
                f"trigger_{place}[lazy]: TEXT {_quoted(trigger)}",
                f"part_{place}: trigger_{place} ({' | '.join(ways)})",
            ]
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                raise ValueError(
                    f"grammar has a tag that begins with {tag.begin!r}, and no trigger for it"
                )
        whole = [f"start: ({' | '.join(start)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules]
        return cls(kind="lark", text="\n".join(whole))


@dataclass(frozen=True, kw_only=True)
class Tag:
    """Text that begins so, has JSON of a schema in it, and ends so."""

    begin: str
    """Text before the JSON."""
    schema: dict[str, Any]
    """JSON schema."""
    end: str = ""
    """Text after the JSON."""

    def in_lark(self, after: str = "") -> str:
        """Return the tag in Lark's notation, without the part of its beginning that has come
        before.
        """
        checked = json.loads(Grammar.json_schema(self.schema).text)
        schema = json.dumps({**checked, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})
        begin, end = self.begin[len(after) :], self.end
        return " ".join(
            [_quoted(begin)] * bool(begin) + [f"%json {schema}"] + [_quoted(end)] * bool(end)
        )


def text_before(after: str, begun_by: str, name: str, special: Mapping[str, int]) -> str:
    """Return, in Lark's notation, any text up to `after`, and then the grammar of a name.

    Args:
        after: Text at which the grammar begins.
        begun_by: See `Grammar`.
        name: Name of the grammar.
        special: Texts that are tokens of their own, which no text has, and their ids.
    """
    start = (
        f"start: (begin thought blank)? @{name}" if begun_by else f"start: thought blank @{name}"
    )
    lines = [start, r"TEXT: /(.|\n)*/", r"blank: /\n{0,4}/"]
    if begun_by:
        lines.append(f"begin: {_token_or_text(begun_by, special)}")
    lazy = "" if after in special else "[lazy]"
    return "\n".join([*lines, f"thought{lazy}: TEXT {_token_or_text(after, special)}"])


def _token_or_text(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else _quoted(text)


def _quoted(text: str) -> str:
    """Return a text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _depth(value: Any) -> int:
    """Return how deep objects and lists lie within one another, counted up to where that is too
    deep.
    """
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += part.values()
            elif isinstance(part, list):
                below += part
        level = below
        depth += 1
    return depth

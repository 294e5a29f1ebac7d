"""Grammars: what compiles, what is refused, and which tokens may come next beside a search that
tries all."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from coserve.devices.grammars.allocated import allocated_bytes
from coserve.devices.grammars.device_grammars import DeviceGrammars
from coserve.devices.grammars.grammar import STATE_BYTES, TOO_MANY_STATES, Grammar, Tag
from coserve.devices.grammars.limits import MAX_CHARACTERS
from coserve.devices.grammars.matching import GrammarCompiler, Vocabulary
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.sampling import SamplingRow, sample
from coserve.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SMALL = Vocabulary(
    (
        *(bytes([byte]) for byte in range(256)),
        b"ab",
        b'{"',
        b"",
        b"<|name|>",
        b"<|end|>",
        b"\xc3\xa9a",
    ),
    (259, 260),
    (260,),
)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(SMALL)


def follows(grammar: Grammar, text: str) -> bool:
    """Return whether a text is one of the grammar's, byte by byte."""
    matcher = compiler().compile(grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


# -- what compiles -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            Grammar.json_schema(PERSON),
            ['{"name": "x", "age": 3}'],
            ['{"name": "x"}', '{"name": "x", "age": 121}', "{}"],
        ),
        (Grammar.json_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", " {}", "{} "]),
        (Grammar.regex(r"\d{3}-[a-c]+"), ["123-abc"], ["12-a", "123-", "123-d", "x123-a"]),
        (Grammar.choice(["yes", 'n"o\n', "ü"]), ["yes", 'n"o\n', "ü"], ["ye", "no", "u"]),
        (Grammar.notation('root ::= "a" b*\nb ::= [xy]'), ["a", "axyx"], ["x", "az"]),
        (Grammar.notation('start: "a" b*\nb: /[xy]/'), ["a", "axyx"], ["x", "az"]),
    ],
)
def test_a_grammar_takes_its_texts_and_no_others(grammar, texts, others):
    assert all(follows(grammar, text) for text in texts)
    assert not any(follows(grammar, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.json_schema(PERSON), '{"name": "x", "age": 3}'),
        (Grammar.regex(r"\d{3}"), "123"),
        (Grammar.choice(["yes"]), "yes"),
        (Grammar.notation('root ::= "a" [xy]'), "ax"),
    ],
)
def test_any_text_may_come_first_where_that_is_asked_for(grammar, text):
    after = replace(grammar, after="</think>")
    assert follows(after, f"Hm {{ < \n</think>\n\n{text}")
    assert follows(after, f"</think>{text}")
    for other in (text, f"Hm</think>x{text}", "Hm</think>", "Hm"):
        assert not follows(after, other)

    may = replace(after, begun_by="<think>")
    assert follows(may, text)
    assert follows(may, f"<think>Hm {{ < \n</think>\n\n{text}")
    for other in (
        f"Hm</think>{text}",
        f"<think>{text}",
        f"<think></think><think></think>{text}",
        "<think>Hm</think>",
    ):
        assert not follows(may, other)


@pytest.mark.parametrize("begun_by", ["", "<think>"])
def test_what_comes_first_may_end_with_a_special_token(begun_by: str):
    begin, end = len(SMALL.pieces), len(SMALL.pieces) + 1
    vocabulary = Vocabulary(
        (*SMALL.pieces, b"<think>", b"</think>"), (*SMALL.special, begin, end), SMALL.ends
    )
    grammar = replace(Grammar.regex(r"\d{3}"), after="</think>", begun_by=begun_by)
    matcher = GrammarCompiler(vocabulary).compile(grammar)
    opened = [begin] if begun_by else []
    for tokens, right in (
        ([*opened, *b"Hm 1", end, *b"\n\n123"], True),
        ([*opened, end, *b"123"], True),
        (list(b"123"), bool(begun_by)),
        ([*opened, *b"Hm</think>123"], False),
        ([*opened, *b"Hm", begin, end, *b"123"], False),
    ):
        one = matcher.deep_copy()
        assert (
            all(one.consume_token(token) for token in tokens) and one.is_accepting()
        ) == right, tokens


def test_tags_are_pieces_of_json_between_fixed_texts():
    tags = [
        Tag(begin="<f>", schema=PERSON, end="</f>"),
        Tag(begin="<g>", schema={"type": "integer"}, end="</g>"),
    ]
    person = '<f>{"name": "x", "age": 3}</f>'
    assert follows(Grammar.tagged(tags), person)
    assert not follows(Grammar.tagged(tags), f"{person}<g>1</g>")
    several = Grammar.tagged(tags, separator="\n", at_least=2, at_most=3)
    assert follows(several, f"{person}\n<g>1</g>")
    assert not any(
        follows(several, text) for text in (person, "<g>1</g>\n" * 2, "<g>1</g>\n" * 3 + person)
    )
    assert follows(Grammar.tagged(tags, at_least=0, at_most=None), "")
    with pytest.raises(ValueError, match="at_most"):
        Grammar.tagged(tags, at_least=2, at_most=1)


def test_a_trigger_begins_one_of_its_tags():
    tags = [Tag(begin=f"<f={name}>", schema={"type": "integer"}, end="</f>") for name in ("a", "b")]
    grammar = Grammar.triggered(tags, triggers=["<f"])
    assert all(follows(grammar, text) for text in ("hi", "hi <f=a>1</f> <f=b>2</f> and", "<g>"))
    assert not any(follows(grammar, text) for text in ("hi <f=c>1</f>", "hi <f", "<f=a>x</f>"))
    with pytest.raises(ValueError, match="no trigger for it"):
        Grammar.triggered(tags, triggers=["<f=a"])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.regex(""), "allows no text"),
        (Grammar.json_schema({"not": {}}), "not"),
        (Grammar.json_schema({"enum": []}), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "#"}), "allows no text"),
        (Grammar.json_schema({"$ref": "https://x.test/a.json"}), "is not present"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.notation("start: unknown"), "unknown"),
        (Grammar.notation('root ::= "a'), "GBNF"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(grammar, reason):
    with pytest.raises(RequestError, match=reason):
        compiler().compile(grammar)


def test_a_lenient_schema_passes_over_what_cannot_be_enforced():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    assert follows(Grammar.json_schema(schema, is_lenient=True), "[1, 1]")


def test_a_schema_cannot_choose_the_compilers_options():
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        compiler().compile(Grammar.json_schema(schema))


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.regex("a" * (MAX_CHARACTERS + 1)),
        lambda: Grammar.json_schema(_nested(2000)),
        lambda: Grammar.json_schema([1]),  # type: ignore[arg-type]
        lambda: Grammar.choice([]),
        lambda: Grammar.choice([""]),
    ],
)
def test_what_is_too_large_or_no_grammar_is_refused_before_it_is_compiled(make):
    with pytest.raises(ValueError, match="grammar"):
        make()


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "enum": lambda: Grammar.json_schema({"enum": [f"{n:x}" for n in range(15_000)]}),
    "properties": lambda: Grammar.json_schema(
        {"properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    ),
    "all of": lambda: Grammar.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    ),
    "repeat": lambda: Grammar.regex("a{100000000}"),
    "repeat deep": lambda: Grammar.regex("((((a{0,50}){0,50}){0,50}){0,50}){0,50}"),
    "exponential": lambda: Grammar.regex("(a|b)*a(a|b){300}"),
    "parentheses": lambda: Grammar.regex("(" * 20_000 + "a" + ")" * 20_000),
    "alternatives": lambda: Grammar.regex("|".join(f"x{n}y*" for n in range(15_000))),
    "classes": lambda: Grammar.regex(r"(\w*\d*){40}(.*a){20}.{1000}"),
    "ambiguous": lambda: Grammar.notation("start: s\ns: s s | s s s | /a/ |"),
    "left": lambda: Grammar.notation("start: start start start"),
    "gbnf": lambda: Grammar.notation("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_served_within_its_limits(name):
    began_s = time.thread_time()
    grammars = DeviceGrammars()
    grammars.use(SMALL)
    try:
        matcher = grammars.matcher(HOSTILE[name](), ())
    except (RequestError, ValueError):
        matcher = None
    for _ in range(20 if matcher is not None else 0):
        bits = int.from_bytes(matcher.mask(), "little")
        if matcher.error is not None or matcher.has_ended:
            break
        matcher.accept((bits & -bits).bit_length() - 1)
    grammars.shutdown()
    assert time.thread_time() - began_s < 60, (
        "the limits count work, so this is far from any machine's speed"
    )


def test_a_grammar_is_compiled_once_until_it_is_closed(monkeypatch):
    compiled: list[Grammar] = []
    compile = GrammarCompiler.compile

    def noted(self: GrammarCompiler, grammar: Grammar, **options: Any) -> Any:
        compiled.append(grammar)
        return compile(self, grammar, **options)

    monkeypatch.setattr(GrammarCompiler, "compile", noted)
    grammars = DeviceGrammars()
    grammars.use(SMALL)
    a, b = (Grammar.choice([text]) for text in "ab")
    for grammar in (a, b, a):
        assert grammars.open(grammar) > 0
    grammars.close(a)
    grammars.open(a)
    assert compiled == [a, b, a]
    grammars.shutdown()


# -- masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [Grammar.json_schema(PERSON), Grammar.regex("(ab|a[a-z]é?)*b"), Grammar.choice(["ab", "aé"])],
)
def test_masks_are_what_trying_every_token_finds(grammar):
    grammars = DeviceGrammars()
    grammars.use(SMALL)
    matcher, compiled = grammars.matcher(grammar, ()), compiler().compile(grammar)
    generator, output = torch.Generator().manual_seed(0), list[int]()
    while not matcher.has_ended and len(output) < 8:
        mask = matcher.mask()
        bits = int.from_bytes(mask, "little")
        found = {token for token in range(len(SMALL.pieces)) if bits >> token & 1}
        expected, followed = set(), compiled.deep_copy()
        assert followed.consume_tokens(output) or not output
        for token, piece in enumerate(SMALL.pieces):
            trial = followed.deep_copy()
            if token in SMALL.ends:
                expected |= {token} if trial.is_accepting() else set()
            elif piece and token not in SMALL.special:
                expected |= {token} if all(trial.consume_token(byte) for byte in piece) else set()
        assert found == expected
        others = sorted(found - {*SMALL.ends})
        if not others:
            break
        output.append(others[int(torch.randint(len(others), (), generator=generator))])
        matcher.accept(output[-1])
    assert len(output) > 1
    grammars.shutdown()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.4},
        {"min_p": 0.2},
        {"top_p": 0.9, "top_k": 7},
    ],
)
def test_only_tokens_of_the_mask_are_chosen_and_in_their_proportion(params):
    vocab, generator = 77, torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocab, generator=generator) * 3
    allowed = [5, 31, 32, 64, 76]
    mask = sum(1 << token for token in allowed).to_bytes(12, "little")
    rows = [
        SamplingRow(params=SamplingParams(**params), seed=seed, mask=mask) for seed in range(400)
    ]
    plain = [SamplingRow(params=SamplingParams(**params), seed=seed) for seed in range(400)]
    mixed = [row for pair in zip(rows, plain, strict=True) for row in pair]
    chosen = sample(logits.expand(800, -1), mixed).tokens
    assert set(chosen[::2].tolist()) <= set(allowed)
    assert torch.equal(chosen[1::2], sample(logits.expand(400, -1), plain).tokens), (
        "others are as without masks"
    )
    alone = torch.full_like(logits, -1e9)
    alone[:, allowed] = logits[:, allowed]
    assert torch.equal(chosen[::2], sample(alone.expand(400, -1), plain).tokens)


def test_a_vocabulary_that_the_library_does_not_take_is_refused():
    too_long = (*SMALL.pieces[:-1], b"a" * 2000)
    with pytest.raises(
        RequestError, match=r"^structured output cannot be used with this vocabulary: "
    ):
        GrammarCompiler(Vocabulary(too_long, SMALL.special, SMALL.ends))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"(\p{L}|\p{N}){1,900}"),
        Grammar.regex(r"(\p{Lu}\p{Ll}|\p{Greek}\p{Han}|\p{Thai}\p{Arabic}|\w|\s){1,900}"),
    ],
    ids=["letters", "scripts"],
)
def test_a_grammar_grows_by_no_more_than_its_states_may_take(grammar):
    max_states = 2000
    compiled = compiler().compile(grammar, max_states=max_states)
    before = allocated_bytes()
    for seed in range(20):
        followed, random = compiled.deep_copy(), Random(seed)
        for _ in range(1000):
            tokens = tokens_of(followed.compute_bitmask())
            if followed.is_error() or not tokens:
                break
            followed.consume_token(random.choice(tokens))
        if followed.is_error():
            break
    assert TOO_MANY_STATES in followed.get_error()
    assert max_states * 100 < allocated_bytes() - before < max_states * STATE_BYTES


def tokens_of(mask: bytes) -> list[int]:
    """Return the tokens that a mask allows, but those that end a text."""
    bits = int.from_bytes(mask, "little")
    return [
        token for token in range(len(SMALL.pieces)) if bits >> token & 1 and token not in SMALL.ends
    ]

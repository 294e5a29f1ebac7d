"""Parsers of tool calls: what they find in a text, however that is cut into pieces."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coserve.server.tool_parsers as registry
from coserve.server.chat.reasoning import ThinkReader, begins_inside, may_begin
from coserve.server.tool_parsers import JsonCalls, parser_class, parser_names, parser_of_template
from coserve.server.tool_parsers.base import (
    Arguments,
    CallBegins,
    CallFails,
    Content,
    Part,
    Reasoning,
)

SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}}},
    "add": {"properties": {"yes": {"type": "boolean"}}},
}
W, A = ("weather", '{"city": "Löwen}\\""}'), ("add", '{"a": [1, {"b": 2}], "c": null}')
N = ("weather", "{}")


@dataclass
class Read:
    """What an answer turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def take(self, part: Part) -> None:
        if isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, CallBegins):
            self.calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            name, arguments = self.calls.pop()
            self.calls.append((name, arguments + part.text))
        else:
            assert isinstance(part, CallFails)
            self.calls.pop()
            self.content += part.text


def parts_of(name: str, pieces: list[str]) -> list[list[Part]]:
    parser = parser_class(name)(SCHEMAS)
    return [*(parser.push(piece) for piece in pieces), parser.finish()]


def read(name: str, pieces: list[str]) -> Read:
    found = Read()
    for parts in parts_of(name, pieces):
        for part in parts:
            found.take(part)
    return found


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"type": "function", "name": "{name}", "parameters": {arguments}}}'


def gpt(name: str, arguments: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def qwen(name: str, **values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


_CITY = ("weather", '{"city": "1\\n<b> é"}')
_ADD = ("add", '{"a": [1, {"b": 2}], "c": null, "yes": true, "d": "x y", "e": "NaN"}')
_QWEN_CITY, _QWEN_ADD = (
    qwen("weather", city="1\n<b> é"),
    qwen("add", a='[1, {"b":2}]', c="null", yes="True", d="x y", e="NaN"),
)
_LIST = f'[TOOL_CALLS] [{{"name": "{W[0]}", "arguments": {W[1]}}}, {{"arguments": {A[1]}, "name": "add", "id": "x"}}]'
GOOD = [
    ("hermes", "Only text, 2 < 3 <tool.", Read("Only text, 2 < 3 <tool.")),
    ("hermes", "  ", Read("  ")),
    ("hermes", "", Read()),
    ("hermes", hermes(*W), Read(calls=[W])),
    ("hermes", f"\n\n{hermes(*W)}\n{hermes(*A)}\n", Read(calls=[W, A])),
    (
        "hermes",
        f"I look.\n{hermes(*W)} and\n{hermes(*A)}done",
        Read("I look.\n and\ndone", calls=[W, A]),
    ),
    ("hermes", hermes(*W).removesuffix("</tool_call>"), Read(calls=[W])),
    ("hermes", hermes(*W)[:-4], Read(calls=[W])),
    ("hermes", '<tool_call>{"name":"weather"}</tool_call>', Read(calls=[N])),
    ("hermes", f'<tool_call>{{"arguments": {A[1]} , "name" : "add"}}</tool_call>', Read(calls=[A])),
    ("llama3_json", "Only { text", Read("Only { text")),
    ("llama3_json", llama(*W), Read(calls=[W])),
    ("llama3_json", f" {llama(*W)}; {llama(*A)}", Read(calls=[W, A])),
    ("llama3_json", f"I look. <|python_tag|>{llama(*A)}", Read("I look. ", calls=[A])),
    ("llama3_json", f"{llama(*W)};", Read(calls=[W])),
    ("llama3_json", '{"answer": {"name": "weather"}}', Read('{"answer": {"name": "weather"}}')),
    ("mistral", "Only [TOOL text", Read("Only [TOOL text")),
    ("mistral", _LIST, Read(calls=[W, A])),
    ("mistral", f"So: {_LIST}", Read("So: ", calls=[W, A])),
    ("mistral", f"[TOOL_CALLS]weather{W[1]}", Read(calls=[W])),
    (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{W[1]}[TOOL_CALLS]add[CALL_ID]aB3[ARGS]{A[1]}",
        Read(calls=[W, A]),
    ),
    ("openai", "Plain text.", Read("Plain text.")),
    ("openai", "<|channel|>final<|message|>Text<|return|>", Read("Text")),
    (
        "openai",
        f"<|channel|>analysis<|message|>Hm "
        f"<|end|><|start|>assistant{gpt(*W)}<|start|>assistant{gpt(*A)}",
        Read("", "Hm ", [W, A]),
    ),
    (
        "openai",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant "
        f"to=functions.add<|channel|>commentary "
        f"json<|message|>{A[1]}",
        Read("I look.", calls=[A]),
    ),
    ("openai", "<|channel|>analysis<|message|>So", Read(reasoning="So")),
    ("openai", "<|channel|>ana", Read()),
    ("qwen3_coder", "Only text, 2 < 3 <tool.", Read("Only text, 2 < 3 <tool.")),
    ("qwen3_coder", _QWEN_CITY, Read(calls=[_CITY])),
    (
        "qwen3_coder",
        f"I look.\n{_QWEN_CITY}\n{_QWEN_ADD}\n",
        Read("I look.\n", calls=[_CITY, _ADD]),
    ),
    ("qwen3_coder", qwen("weather"), Read(calls=[N])),
    ("qwen3_coder", _QWEN_ADD.removesuffix("</tool_call>"), Read(calls=[_ADD])),
]
# All of it stays text.
MALFORMED = [
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> then'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {},}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", "<tool_call>add(1)</tool_call>"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>"),
    ("llama3_json", '{"name": "other", "parameters": {}}'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}'),
    ("llama3_json", '{"name": "add", "parameters": {"a": x}} yes'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]other{}"),
    ("mistral", "[TOOL_CALLS] [3]"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": x} yes'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]add"),
    ("openai", "<|channel|>commentary to=functions.other<|message|>{}"),
    ("openai", "<|channel|>commentary to=functions.add<|message|>no"),
    ("openai", '<|channel|>commentary to=functions.add<|message|>{"a": x}'),
    ("qwen3_coder", qwen("other", a="1")),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n1</function>"),
    ("qwen3_coder", "<tool_call>{}</tool_call> "),
    ("qwen3_coder", "<tool_call>"),
]


def cuts(text: str) -> list[list[str]]:
    """In one, in two at every place, and character by character."""
    return [[text], *([text[:place], text[place:]] for place in range(1, len(text))), list(text)]


@pytest.mark.parametrize(("name", "text", "right"), GOOD)
def test_however_a_text_is_cut(name: str, text: str, right: Read):
    for pieces in cuts(text):
        assert read(name, pieces) == right, pieces
    assert all(json.loads(arguments) is not None for _, arguments in right.calls)


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_malformed_stays_text(name: str, text: str):
    for pieces in cuts(text):
        assert read(name, pieces) == Read(text), pieces


def test_a_call_after_what_is_none_is_found_however_the_text_is_cut():
    text = "<tool_call>{}</tool_call> " + qwen("weather", city="Oslo")
    found = [read("qwen3_coder", pieces) for pieces in cuts(text)]
    assert len(found[0].calls) == 1 and found[0].content.startswith("<tool_call>{}</tool_call>")
    assert all(each == found[0] for each in found)


@given(st.data())
def test_any_pieces_are_the_same(data: st.DataObject):
    name = data.draw(st.sampled_from(parser_names()))
    texts = [text for kind, text, *_ in (*GOOD, *MALFORMED) if kind == name]
    text = "".join(
        data.draw(st.lists(st.sampled_from([*texts, " ", "x", "{", '"', "}"]), max_size=4))
    )
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [
        text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)
    ]
    assert read(name, pieces) == read(name, [text])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", hermes(*W)),
        ("llama3_json", llama(*W)),
        ("mistral", _LIST),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{W[1]}"),
        ("openai", gpt(*W)),
    ],
)
def test_arguments_come_as_they_are_written(name: str, text: str):
    """The name comes with the arguments' first character, and each of these at once."""
    end = text.index(W[1]) + len(W[1])
    for place in range(text.index(W[1]) + 1, end + 1):
        [parts, _] = parts_of(name, [text[:place]])
        assert parts[0] == CallBegins("weather")
        assert (
            "".join(part.text for part in parts[1:] if isinstance(part, Arguments))
            == text[end - len(W[1]) : place]
        )


@pytest.mark.parametrize("name", parser_names())
def test_a_call_that_is_asked_for_is_written_as_the_parser_reads_it(name: str):
    parser = parser_class(name)
    if not issubclass(parser, JsonCalls):
        assert name == "qwen3_coder"  # whose arguments are XML
        return
    calls = [W, A] if parser.separator is not None else [W]
    texts = [
        f"{before}{arguments}{after}"
        for function, arguments in calls
        for before, after in [parser.around(function)]
    ]
    for pieces in cuts((parser.separator or "").join(texts)):
        assert read(name, pieces) == Read(calls=calls)


def test_text_is_not_held_back_for_longer_than_it_could_be_a_marker():
    assert parts_of("hermes", ["a <tool", "s <tool_call>"])[:2] == [
        [Content("a ")],
        [Content("<tools ")],
    ]
    assert parts_of("openai", ["<|channel|>final<|message|>a <|en"])[0] == [Content("a ")]


def test_a_call_that_fails_after_it_began_says_so():
    [begun, failed] = parts_of("hermes", ['<tool_call>{"name": "add", "arguments": {"a'])
    assert begun == [CallBegins("add"), Arguments('{"a')]
    assert failed == [CallFails('<tool_call>{"name": "add", "arguments": {"a')]


@pytest.mark.parametrize(
    ("text", "inside", "right"),
    [
        ("Hello <think>", False, Read("Hello <think>")),
        (" <thin", False, Read(" <thin")),
        ("<think>\nHm\n\nso\n</think>\n\nHello\n", False, Read("Hello\n", "Hm\n\nso")),
        ("\n<think></think>Hello</think>", False, Read("Hello</think>")),
        ("Hm</thi\n</think>Hello", True, Read("Hello", "Hm</thi")),
        ("<think>\nHm\n", False, Read("", "Hm")),
        ("Hm</thin", True, Read("", "Hm</thin")),
        ("", True, Read()),
    ],
)
def test_reasoning_however_it_is_cut(text: str, inside: bool, right: Read):
    for pieces in cuts(text) if text else [[]]:
        reader, found = ThinkReader(inside=inside), Read()
        for parts in [*(reader.push(piece) for piece in pieces), reader.finish()]:
            for part in parts:
                found.take(part)
        assert found == right, pieces


def test_an_answer_begins_in_reasoning_that_the_prompt_opened():
    assert begins_inside("<|assistant|><think>\n")
    assert not begins_inside("<think>\n\n</think>\n\n")
    assert begins_inside("", "<think>Hm")
    assert not begins_inside("<think>", "<think>Hm</think>Hel")


def test_an_answer_may_open_a_reasoning_where_the_model_has_one_and_the_prompt_has_not_closed_it():
    template = "{% if thought %}<think>{{ thought }}</think>{% endif %}"
    assert may_begin("<|assistant|>\n", "", template)
    assert not may_begin("<|assistant|>\n", "", "{{ messages }}")
    for end, continued in (("<think>\n\n</think>\n\n", ""), ("<think>", ""), ("Hel", "Hel")):
        assert not may_begin(end, continued, template)


def test_every_file_of_the_folder_is_a_parser():
    files = {path.stem for path in Path(registry.__file__).parent.glob("[!_]*.py")} - {"base"}
    assert set(parser_names()) == files
    with pytest.raises(ValueError, match="not one of hermes, llama3_json"):
        parser_class("other")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>", "qwen3_coder"),
        (
            'return a json object within <tool_call></tool_call> XML tags: {"name": <function-name>',
            "hermes",
        ),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name',
            "llama3_json",
        ),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("{{- '[TOOL_CALLS][' }}", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("{{ message['content'] }}", None),
    ],
)
def test_the_chat_template_says_which(template: str, name: str | None):
    assert parser_of_template(template) is (parser_class(name) if name else None)


def test_ids_are_what_templates_take_back():
    assert parser_class("mistral").new_id().isalnum()
    assert len(parser_class("mistral").new_id()) == 9
    assert parser_class("hermes").new_id() != parser_class("hermes").new_id()

"""From lines to packs: what is trained on, in which order, and which line is at fault."""

import copy
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coserve.errors import DataError
from coserve.tuning.chats import ChatReader
from coserve.tuning.examples import Example, Reader, bins_of, epoch_order, read_examples
from coserve.tuning.line_formats import as_completion, read_record
from coserve.tuning.objective_examples import read_objective_examples
from coserve.tuning.pack import pack_of
from coserve.tuning.reading_report import ReadingReport

WORDS = (
    *("hello", "world", "how", "are", "you", "fine", "thanks", "and", "be", "kind"),
    *("<user>", "<assistant>", "<system>", "<end>", "<eos>", "<unk>"),
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    fast.chat_template = TEMPLATE
    return fast


def read(tokenizer, *records, max_sequence_length=100):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    return read_examples(lines, tokenizer, max_sequence_length=max_sequence_length)


def words(tokenizer, example, *, trained):
    tokens = [
        token
        for token, mark in zip(example.tokens, example.trained, strict=True)
        if mark or not trained
    ]
    return tokenizer.convert_ids_to_tokens(tokens)


def chat(*turns, **fields):
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def test_assistant_turns_are_trained_on(tokenizer):
    record = chat(
        ("system", "be kind"),
        ("user", "hello"),
        ("assistant", "hello world"),
        ("user", "how are you"),
    )
    record["messages"].append({"role": "assistant", "content": "fine thanks"})
    (example,) = read(tokenizer, record)
    whole = "<system> be kind <end> <user> hello <end> <assistant> hello world <end> <user> how are you <end>"
    assert (
        words(tokenizer, example, trained=False) == f"{whole} <assistant> fine thanks <end>".split()
    )
    assert words(tokenizer, example, trained=True) == [
        "hello",
        "world",
        "<end>",
        "fine",
        "thanks",
        "<end>",
    ]


def test_of_preferences_among_chats_the_last_answers_alone_are_trained_on(tokenizer):
    asked = chat(("user", "hello"), ("assistant", "hello world"), ("user", "how are you"))
    record = {
        "input": asked,
        "preferred_output": [{"role": "assistant", "content": "fine thanks"}],
        "non_preferred_output": [{"role": "assistant", "content": "world"}],
    }
    theirs = {
        "prompt": asked["messages"],
        "chosen": record["preferred_output"],
        "rejected": [*record["non_preferred_output"]],
    }
    for each in (record, theirs):
        (pair,) = read_objective_examples(
            [json.dumps(each)], tokenizer, schema="pairs", max_sequence_length=100
        )
        assert words(tokenizer, pair, trained=True) == ["fine", "thanks", "<end>", "world", "<end>"]
        assert len(pair.parts) == 2


def test_white_space_after_the_token_that_ends_a_turn_is_not_trained_on(tokenizer):
    record = chat(
        ("user", "hello"), ("assistant", "fine"), ("user", "hello"), ("assistant", "thanks")
    )
    asked = "<user> hello <end> <assistant> "
    assert Reader(tokenizer, 100).pieces(record).texts == (
        *((asked, False), ("fine <end>", True)),
        *((f" {asked}", False), ("thanks <end>", True)),
    )


MARKED = {
    "plain": (
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }} <end>{% endgeneration %}{% else %}{{ m.content }} <end>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    ),
    # Of earlier turns only a part is written. A new line at its beginning, and space that a tag
    # takes away.
    "forgets": (
        "\n  {% for m in messages %}\n<{{ m.role }}>{% if m.role == 'assistant' %}\n    {%- generation -%}\n"
        "{{ m.content if loop.last else m.content[:5] }}\n{%- endgeneration %} <end>{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}\n\n"
    ),
}


def byte_tokenizer(template):
    """A token for each byte, and one of a letter and the line end after it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "tĊ", "t<"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "Ċ"), ("t", "<")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)


TURNS = st.lists(
    st.tuples(st.text("at \n<é", max_size=8), st.text("at \n<", min_size=1, max_size=8)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=30)
@given(TURNS)
def test_what_the_template_marks_is_trained_on_as_transformers_marks_it(turns):
    # Of a character of several tokens at the end of a mark, transformers marks the first; here all
    # are trained on.
    messages = chat(
        *(turn for asked, told in turns for turn in (("user", asked), ("assistant", told)))
    )["messages"]
    tokenizer = byte_tokenizer(MARKED["plain"])
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = theirs["assistant_masks"]
    if not any(expected):
        with pytest.raises(DataError, match="marks nothing of it"):
            read(tokenizer, {"messages": messages})
        return
    (ours,) = read(tokenizer, {"messages": messages}, max_sequence_length=10_000)
    assert list(ours.trained) == expected[: len(ours.tokens)] and not any(
        expected[len(ours.tokens) :]
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(tokenizer.decode(ours.tokens)), (
        "what follows the last mark is nobody's context"
    )


@settings(deadline=None, max_examples=30)
@given(TURNS)
def test_marks_of_turns_that_are_rewritten_later_are_those_of_the_turn_when_it_is_asked_for(turns):
    messages = chat(
        *(turn for asked, told in turns for turn in (("user", asked), ("assistant", told)))
    )["messages"]
    tokenizer = byte_tokenizer(MARKED["forgets"])
    texts = ChatReader(tokenizer).read({"messages": messages})
    said = [text for each in texts for text, is_trained in each.texts if is_trained]
    assert said == [told for _, told in turns]


@pytest.mark.parametrize("template", MARKED.values(), ids=MARKED)
def test_marks_of_a_turn_of_weight_0_are_not_trained_on(template):
    record = chat(("user", "a"), ("assistant", "t t t t"), ("user", "at"), ("assistant", "a a a"))
    tokenizer = byte_tokenizer(template)
    first, last = (
        ("t t t t <end>", "a a a <end>") if template is MARKED["plain"] else ("t t t t", "a a a")
    )
    for weights, expected in (((1, 1), first + last), ((0, 1), last), ((1, 0), first)):
        for message, weight in zip(record["messages"][1::2], weights, strict=True):
            message["weight"] = weight
        (example,) = read(tokenizer, record, max_sequence_length=1000)
        kept = [
            token
            for token, is_trained in zip(example.tokens, example.trained, strict=True)
            if is_trained
        ]
        assert tokenizer.decode(kept) == expected


def test_a_request_that_is_rendered_meanwhile_adds_no_marks():
    template = MARKED["plain"].replace("{{ m.content }}", "{{ m.content | string }}")
    tokenizer = byte_tokenizer(template)
    record = chat(("user", "a"), ("assistant", "t"))
    pieces = Reader(tokenizer, 1000).pieces(record)

    class Asked(str):
        def __str__(self):
            tokenizer.apply_chat_template(
                chat(("user", "a"), ("assistant", "other"))["messages"], tokenize=False
            )
            return "a"

    record["messages"][0]["content"] = Asked("a")
    assert Reader(tokenizer, 1000).pieces(record) == pieces


def test_examples_whose_prompt_is_too_long_are_left_out_and_counted(tokenizer):
    long, short = ({"prompt": "hello " * n, "completion": "fine"} for n in (20, 2))
    lines = [json.dumps(record) for record in (short, long, short)]
    report = ReadingReport()
    assert len(read_examples(lines, tokenizer, max_sequence_length=10, report=report)) == 2
    assert report.left_out.lines() == ["line 2: has no token to train on within 10 tokens"]
    with pytest.raises(DataError, match="line 2: has no token to train on within 10 tokens"):
        read_examples(lines, tokenizer, max_sequence_length=10)
    with pytest.raises(
        DataError,
        match="line 1: has no token to train on within 10 tokens; no other example is left",
    ):
        read_examples(lines[1:2], tokenizer, max_sequence_length=10, report=ReadingReport())


def test_a_turn_of_weight_0_is_not_trained_on_and_what_follows_the_last_is_cut(tokenizer):
    record = chat(
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", "how"),
        ("assistant", "fine"),
        ("user", "are you"),
    )
    record["messages"][1]["weight"] = 0
    (example,) = read(tokenizer, record)
    assert words(tokenizer, example, trained=True) == ["fine", "<end>"]
    assert words(tokenizer, example, trained=False)[-1] == "<end>"


def test_completions_are_trained_on_and_end(tokenizer):
    (example,) = read(tokenizer, {"prompt": "how are ", "completion": "you fine"})
    assert words(tokenizer, example, trained=False) == ["how", "are", "you", "fine", "<eos>"]
    assert words(tokenizer, example, trained=True) == ["you", "fine", "<eos>"]


def test_a_word_that_brings_its_space_along_belongs_to_the_completion():
    inner = Tokenizer(
        models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "Ġb": 3, "<eos>": 4}, merges=[("Ġ", "b")])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    (example,) = read(fast, {"prompt": "a ", "completion": "b"})
    assert words(fast, example, trained=False) == ["a", "Ġb", "<eos>"]
    assert words(fast, example, trained=True) == ["Ġb", "<eos>"]


def test_spaces_that_the_tokenizer_trims_from_its_offsets_are_trained_on():
    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "<eos>": 3}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    (example,) = read(fast, {"prompt": "a", "completion": "  b  a"})
    assert words(fast, example, trained=True) == ["Ġ", "Ġ", "b", "Ġ", "Ġ", "a", "<eos>"]


def test_what_a_tokenizer_puts_in_front_is_not_trained_on():
    inner = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    (example,) = read(fast, {"text": "a a"})
    assert (example.tokens, example.trained) == ((1, 0, 0, 2), (False, True, True, True))


def test_arguments_of_tool_calls_reach_the_template_as_objects(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments['x'] }} {% endfor %}<end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "hello"}'}}
    messages = [{"role": "user", "content": "how "}, {"role": "assistant", "tool_calls": [call]}]
    (example,) = read(tokenizer, {"messages": messages})
    assert words(tokenizer, example, trained=True) == ["hello", "<end>"]


def test_a_conversation_may_begin_with_the_assistant(tokenizer):
    (example,) = read(
        tokenizer, chat(("assistant", "hello world"), ("user", "how"), ("assistant", "fine"))
    )
    assert words(tokenizer, example, trained=True) == ["hello", "world", "<end>", "fine", "<end>"]


def test_text_is_trained_on_whole(tokenizer):
    (example,) = read(tokenizer, {"text": "hello world"})
    assert words(tokenizer, example, trained=True) == ["hello", "world", "<eos>"]
    assert example.num_trained == 2, "the first token is nobody's target"


def test_long_lines_are_cut(tokenizer):
    (example,) = read(tokenizer, {"text": "hello " * 50}, max_sequence_length=7)
    assert (len(example.tokens), example.truncated) == (7, True)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        (
            {"txt": "x"},
            "needs messages, or conversations, or instruction and output, or prompt and completion, or text",
        ),
        ({"messages": [], "tool": []}, "unknown field 'tool'; did you mean 'tools'"),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            r"conversations\[0\].from must be one of human, .*'bot'",
        ),
        (
            {"conversations": [{"from": "gpt", "value": 3}]},
            r"conversations\[0\].value must be a string",
        ),
        ({"instruction": "hello"}, "output must be a string; it is missing"),
        (
            {"instruction": "a", "output": "b", "history": [["a", "b"]]},
            "history is not read; write the conversation",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content has a part of type 'image_url'; only text",
        ),
        ({"text": 3}, "text must be a string"),
        ({"prompt": "hello"}, "completion must be a string; it is missing"),
        ({"prompt": "hello", "completion": "x", "weight": 1}, "unknown field 'weight'"),
        (chat(*[("assistant", "x")] * 501), "has 501 messages; at most 500 are read"),
        ({"messages": []}, "messages must be a list that is not empty"),
        ({"messages": ["x"]}, r"messages\[0\] must be an object"),
        (chat(("alien", "x")), r"messages\[0\].role must be one of system, .* not 'alien'"),
        (chat(("user", "x")), "messages has no turn of the assistant"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            r"messages\[0\].content must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 2}]},
            "weight must be 0 or 1, not 2",
        ),
        ({"prompt": "hello " * 20, "completion": "x"}, "has no token to train on within 10 tokens"),
        ({"text": ""}, "has no token to train on"),
        ('{"text": "a\\ud800b"}', "has half a character"),
        ("[" * 100_000, "not valid JSON"),
        (
            {"messages": [{"role": "assistant", "content": "x", "wieght": 0}]},
            r"messages\[0\] has an unknown field 'wieght'; did you mean 'weight'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": "abc"}]},
            "tool_calls must have a function",
        ),
    ],
)
def test_a_fault_names_its_line_and_the_reason(tokenizer, record, reason):
    with pytest.raises(
        DataError, match=rf"^line 3: {reason}" if not reason.startswith("weight") else reason
    ):
        read(
            tokenizer,
            {"text": "hello world"},
            "",
            record,
            {"text": "hello you"},
            max_sequence_length=10,
        )


SAME = chat(("user", "hello"), ("assistant", "fine thanks"))


@pytest.mark.parametrize(
    "record",
    [
        SAME | {"id": 7, "source": "a book"},
        {"messages": [{**message, "timestamp": 3} for message in SAME["messages"]]},
        {
            "messages": [
                {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
                for m in SAME["messages"]
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "hello"},
                {"from": "gpt", "value": "fine thanks"},
            ],
            "id": "x",
        },
        {"conversations": SAME["messages"]},
        {"instruction": "hello", "input": "", "output": "fine thanks"},
    ],
)
def test_the_same_chat_in_other_shapes(tokenizer, record):
    assert read(tokenizer, record) == read(tokenizer, SAME)


def test_an_instruction_with_its_input_and_system(tokenizer):
    record = {"instruction": "hello", "input": "how are you", "output": "fine", "system": "be kind"}
    (example,) = read(tokenizer, record)
    whole = "<system> be kind <end> <user> hello how are you <end> <assistant> fine <end>"
    assert words(tokenizer, example, trained=False) == whole.split()
    assert words(tokenizer, example, trained=True) == ["fine", "<end>"]


def test_an_instruction_without_a_chat_template_is_alpacas():
    given = {"instruction": "Add.", "input": "1 2", "output": "3", "system": ""}
    assert as_completion(given) == {
        "prompt": "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
        "### Response:\n",
        "completion": "3",
    }
    assert "### Input" not in as_completion(given | {"input": ""})["prompt"]


def test_functions_and_their_calls_are_tools():
    call = {"name": "add", "arguments": '{"a": 1}'}
    old: dict[str, Any] = {
        "functions": [{"name": "add", "parameters": {}}],
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "function_call": call},
            {"role": "function", "name": "add", "content": "1"},
            {"role": "assistant", "content": "fine"},
        ],
    }
    spoken = [
        {"from": "human", "value": "hello"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "fine"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    called = [{"id": "call_0", "type": "function", "function": call}]
    found = read_record(json.dumps(old))
    assert found["tools"] == tools
    assert [message["role"] for message in found["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found["messages"][1]["tool_calls"] == called
    assert found["messages"][2]["tool_call_id"] == "call_0"
    again = read_record(old | {"messages": [*old["messages"], *old["messages"]]})["messages"]
    assert [message["tool_calls"][0]["id"] for message in again if "tool_calls" in message] == [
        "call_0",
        "call_1",
    ]
    assert [message["tool_call_id"] for message in again if message["role"] == "tool"] == [
        "call_0",
        "call_1",
    ]
    other = read_record({"conversations": spoken, "tools": json.dumps(tools)})
    assert other["tools"] == tools
    assert other["messages"][1]["tool_calls"] == called


def test_a_file_may_be_one_array(tokenizer):
    records = [{"text": "hello world"}, SAME]
    text = json.dumps(records, indent=1)
    assert read(tokenizer, *text.splitlines(keepends=True)) == read(tokenizer, *records)
    with pytest.raises(DataError, match="record 2: must be a JSON object, not int"):
        read(tokenizer, json.dumps([SAME, 5]))
    with pytest.raises(DataError, match="not valid JSON"):
        read(tokenizer, *text.splitlines()[:-1])


@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n", "\ufeff\n", " \t\n\r\n", "\r\n"])
def test_an_array_may_have_blank_lines_and_a_byte_order_mark_before_it(tokenizer, before):
    text = before + json.dumps([SAME, SAME])
    assert read(tokenizer, *text.splitlines(keepends=True)) == read(tokenizer, SAME, SAME)
    assert read(tokenizer, *(text + "\r\n").split("\n")) == read(tokenizer, SAME, SAME)
    lines = f"{before}{json.dumps(SAME)}\r\n\r\n{json.dumps(SAME)}\r\n"
    assert read(tokenizer, *lines.splitlines(keepends=True)) == read(tokenizer, SAME, SAME)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("// a comment", "a comment; JSON has none"),
        ("# a comment", "a comment; JSON has none"),
        ("/* a comment */", "a comment; JSON has none"),
        (json.dumps(SAME) + ",", "a comma after the record; write one record a line without it"),
        ("{", "a record over several lines; write each on one line, or all in one array"),
        ('{"messages": [', "a record over several lines"),
        ("{'text': 'x'}", "Expecting property name enclosed in double quotes"),
    ],
)
def test_a_line_that_is_no_json_is_refused_with_its_usual_cause(tokenizer, line, cause):
    with pytest.raises(DataError, match=rf"^line 2: not valid JSON \({cause}"):
        read(tokenizer, json.dumps(SAME), line)


def test_an_array_that_is_no_json_is_refused_with_its_usual_cause(tokenizer):
    with pytest.raises(
        DataError,
        match=r"^the array of records is not valid JSON \(a comma after the last record\)$",
    ):
        read(tokenizer, "[", json.dumps(SAME) + ",", "]")
    with pytest.raises(DataError, match=r"^the array of records is not valid JSON \(Extra data"):
        read(tokenizer, "[]", "[]")


def test_a_refusal_is_learned_as_the_answer(tokenizer):
    refused = {"role": "assistant", "content": None, "refusal": "you are kind"}
    parts = [{"type": "refusal", "refusal": "you are kind"}]
    expected = read(tokenizer, chat(("user", "hello"), ("assistant", "you are kind")))
    for answer in (
        refused,
        {"role": "assistant", "refusal": "you are kind"},
        {"role": "assistant", "content": parts},
    ):
        assert (
            read(tokenizer, {"messages": [{"role": "user", "content": "hello"}, answer]})
            == expected
        )
    none = [
        {"role": "user", "content": "hello", "refusal": None},
        {"role": "assistant", "content": "you are kind"},
    ]
    assert read(tokenizer, {"messages": none}) == expected
    for wrong in (refused | {"content": "and"}, refused | {"role": "user"}):
        with pytest.raises(
            DataError,
            match=r"messages\[0\].refusal must stand in place of content, in a message of the",
        ):
            read(tokenizer, {"messages": [wrong, refused]})
    with pytest.raises(DataError, match=r"messages\[0\].refusal must be a string"):
        read(tokenizer, {"messages": [refused | {"refusal": ["x"]}]})


def test_a_line_with_nothing_to_train_on_is_left_out(tokenizer):
    unwanted = chat(("user", "hello"), ("assistant", "fine"))
    unwanted["messages"][1]["weight"] = 0
    lines = [json.dumps(each) for each in (SAME, unwanted, {"text": ""}, unwanted)]
    report = ReadingReport()
    assert read_examples(lines, tokenizer, max_sequence_length=100, report=report) == read(
        tokenizer, SAME
    )
    assert report.left_out.lines() == [
        "lines 2 and 4: has no turn to train on: each message of the assistant has weight 0",
        "line 3: has no token to train on",
    ]
    with pytest.raises(DataError, match="lines 2 and 4: has no turn to train on"):
        read_examples(
            lines, tokenizer, max_sequence_length=100, report=ReadingReport(is_strict=True)
        )
    with pytest.raises(DataError, match="weight 0; no other example is left"):
        read_examples(lines[1:2], tokenizer, max_sequence_length=100, report=ReadingReport())


def test_equal_faults_are_named_together_and_the_first_ten_different_ones(tokenizer):
    with pytest.raises(DataError) as error:
        read(tokenizer, SAME, *["[]"] * 1207, SAME, {"text": 3}, *["[]"] * 2)
    assert str(error.value) == (
        "lines 2, 3, 4 and 1,206 more: must be a JSON object, not list; line 1210: text must be a string"
    )
    with pytest.raises(DataError, match=r"^lines 2 and 3: must be a JSON object, not list$"):
        read(tokenizer, SAME, "[]", "[]")
    different = [{"messages": [{"role": f"alien {n}", "content": ""}]} for n in range(30)]
    with pytest.raises(DataError) as error:
        read(tokenizer, *different)
    assert [part.split(":")[0] for part in str(error.value).split("; ")] == [
        f"line {n}" for n in range(1, 11)
    ]
    with pytest.raises(DataError, match="there is no line with an example"):
        read(tokenizer, "", " ")


def test_a_template_that_asks_otherwise_than_it_writes_is_refused(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    record = chat(("user", "hello"), ("assistant", "hello"))
    tokenizer.chat_template = TEMPLATE.replace("<assistant> {% endif %}", "<system> {% endif %}")
    with pytest.raises(
        DataError, match="line 1: the chat template writes the last message otherwise than it asks"
    ):
        read(tokenizer, record)
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(
        DataError, match="line 1: the chat template refuses the messages: no system turns"
    ):
        read(tokenizer, record)


# -- order and packing --------------------------------------------------------------


def test_an_epoch_takes_every_example_once_in_an_order_of_its_own():
    first, again, second, other = (
        epoch_order(100, seed=seed, epoch=epoch, shuffle=True)
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    assert first != second != other != first
    assert epoch_order(5, seed=1, epoch=0, shuffle=False) == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(10, 60))
def test_packs_hold_every_example_once_within_their_rows(lengths, max_rows):
    examples = [
        Example(tokens=tuple([i] * length), trained=tuple([True] * length))
        for i, length in enumerate(lengths)
    ]
    packs = [pack_of(members) for members in bins_of(examples, max_rows=max_rows)]
    found: Counter[int] = Counter()
    for pack in packs:
        assert pack.num_rows <= max_rows or len(pack.bounds) == 2
        found.update(pack.tokens.tolist())
    assert found == dict(enumerate(lengths))
    if max(lengths) <= max_rows:
        assert len(packs) <= 2 * -(-sum(lengths) // max_rows), (
            "first fit leaves at most one pack half empty"
        )

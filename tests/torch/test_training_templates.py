"""What is learned of conversations by the chat templates that TRL ships: each turn after the prompt
that a server renders for it, and the text that TRL's own training template of the model marks.

Skipped where TRL is not installed, but for the templates that stand here.
"""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from coserve.engine.prompts import tokens_of
from coserve.errors import DataError, RequestError
from coserve.tuning.chats import ChatReader, Pieces
from coserve.tuning.template_messages import MessageForm, message_form, template_message

TEMPLATES = (
    None if (found := find_spec("trl")) is None else Path(found.origin).parent / "chat_templates"
)
NAMES = (
    []
    if TEMPLATES is None
    else sorted(
        path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")
    )
)
TRAINED = [
    name
    for name in NAMES
    if TEMPLATES is not None and (TEMPLATES / f"{name}_training.jinja").exists()
]
needs_trl = pytest.mark.skipif(TEMPLATES is None, reason="has the templates of TRL")

# Tokens that the models of these templates have, and that nothing but their names tells from text.
SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|<end_of_utterance>|<turn\|>|<\|turn>|<\|tool_response>|</s>"
)
# Where generation stops by the models' generation_config.json, beside the end-of-text token.
STOPS = {"glm4moe": ("<|user|>", "<|observation|>"), "phi3": ("<|end|>",), "phi3_5": ("<|end|>",)}


@cache
def template(name: str) -> str:
    assert TEMPLATES is not None
    return (TEMPLATES / f"{name}.jinja").read_text()


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and the special tokens that a template names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<EOS>", bos_token="<BOS>")
    fast.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(text)))})
    fast.chat_template = text
    return fast


@cache
def reader(name: str) -> tuple[PreTrainedTokenizerFast, ChatReader]:
    tokenizer = tokenizer_of(template(name))
    stops = [*map(tokenizer.convert_tokens_to_ids, STOPS.get(name, ()))]
    return tokenizer, ChatReader(tokenizer, [*stops, tokenizer.eos_token_id] if stops else ())


def call(arguments: str = '{"city": "Rome"}') -> list[dict[str, Any]]:
    return [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
    ]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


RAIN = {"role": "tool", "tool_call_id": "call00001", "content": "rain"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("q1"), assistant("a1"), user("q2"), assistant("a2")]},
    "reasoning": {
        "messages": [
            *(user("q1"), assistant("a1", reasoning_content="r1")),
            *(user("q2"), assistant("a2", reasoning_content="r2")),
        ]
    },
    "reasoning in content": {
        "messages": [
            user("q1"),
            assistant("<think>\nr1\n</think>\n\na1"),
            user("q2"),
            assistant("a2"),
        ]
    },
    "calls": {
        "messages": [user("q1"), assistant(None, tool_calls=call()), RAIN, assistant("a1")],
        "tools": TOOLS,
    },
    "calls and reasoning": {
        "messages": [
            *(user("q1"), assistant(None, tool_calls=call(), reasoning_content="r1")),
            *(RAIN, assistant("a1", reasoning_content="r2")),
        ],
        "tools": TOOLS,
    },
    "calls and text": {
        "messages": [user("q1"), assistant("I look.", tool_calls=call()), RAIN, assistant("a1")],
        "tools": TOOLS,
    },
    "calls, text and reasoning": {
        "messages": [
            user("q1"),
            assistant("I look.", tool_calls=call(), reasoning_content="r1"),
            RAIN,
            assistant("a1"),
        ],
        "tools": TOOLS,
    },
    "two of the assistant": {"messages": [user("q1"), assistant("a1"), assistant("a2")]},
    "begins with the assistant": {"messages": [assistant("a1"), user("q1"), assistant("a2")]},
}
# Refused by the template itself, in transformers, too.
REFUSED = re.compile(
    "refuses the messages: (Conversation roles must alternate|No user query found|str object has "
    "no)|"
    "writes no tool_calls"
)


def turns(record: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (place, each)
        for place, each in enumerate(record["messages"])
        if each["role"] == "assistant"
    ]


def text(pieces: Pieces) -> str:
    return "".join(piece for piece, _ in pieces.texts)


def answers(pieces: tuple[Pieces, ...]) -> list[tuple[str, str]]:
    """The prompt and the answer of each turn that is trained on."""
    found = []
    for each in pieces:
        done = ""
        for piece, is_trained in each.texts:
            if is_trained:
                found.append((done, piece))
            done += piece
    return found


@needs_trl
@pytest.mark.parametrize("name", NAMES)
def test_turns_are_learned_after_the_prompt_that_a_server_renders(name):
    for kind in CONVERSATIONS:
        check_prompts(name, kind)


def check_prompts(name: str, kind: str) -> None:
    record = CONVERSATIONS[kind]
    tokenizer, chats = reader(name)
    try:
        found = chats.read(record)
    except DataError as error:
        if kind == "plain" or not REFUSED.search(str(error)):
            raise
        return
    learned = answers(found)
    if len(learned) != len(turns(record)):  # marks of a template may leave out parts of a turn
        assert "{% generation %}" in template(name) or "{%- generation -%}" in template(name)
        return
    notes = {note for each in found for note in each.notes}
    for (place, message), (prompt, answer) in zip(turns(record), learned, strict=True):
        if place:
            asked = tokens_of(
                record["messages"][:place], tokenizer, name, {"tools": record.get("tools")}
            )
            assert tokenizer.decode(asked) == prompt
        said = (message["content"] or "").rpartition("</think>")[2].strip()
        thought = message.get("reasoning_content") or (
            "r1" if "</think>" in (message["content"] or "") else ""
        )
        assert said in answer or any("content beside tool_calls" in note for note in notes)
        assert thought in answer or any("reasoning" in note for note in notes)
        assert "weather" in answer or not message.get("tool_calls")
        assert not re.search("q1|q2|rain", answer)
        assert answer.endswith(("\n", *tokenizer.all_special_tokens)), "it has an end"


@needs_trl
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_learned_is_what_the_training_template_marks(name):
    for kind in CONVERSATIONS:
        if (name, kind) not in OTHERWISE:
            check_answers(name, kind)


# Qwen3.8's template does not know a reasoning within the content, and writes an empty one before
# it. Qwen3's writes a reasoning only after a question.
OTHERWISE = (("qwen3_8", "reasoning in content"), ("qwen3", "begins with the assistant"))


def check_answers(name: str, kind: str) -> None:
    record = CONVERSATIONS[kind]
    tokenizer, chats = reader(name)
    try:
        found = chats.read(record)
        notes = {note for each in found for note in each.notes}
        learned = answers(found)
        form = message_form(template(f"{name}_training"))
        messages = [template_message(message, form) for message in record["messages"]]
        theirs = [
            marked(tokenizer, name, messages[: place + 1], record) for place, _ in turns(record)
        ]
    except DataError as error:
        if not REFUSED.search(str(error)):
            raise
        return
    for (prompt, answer), expected in zip(learned, theirs, strict=True):
        overlap = max(
            (n for n in range(len(expected) + 1) if prompt.endswith(expected[:n])), default=0
        )
        ours, theirs_of_it = bare(answer), bare(expected[overlap:])
        if (
            name in OPENED
        ):  # TRL's template writes no reasoning, and does not learn after the prompt that opens one
            ours, theirs_of_it = (
                re.sub(r"^(.|\n)*</think>|^<｜Assistant｜>", "", each).strip()
                for each in (ours, theirs_of_it)
            )
        if (
            kind.startswith("calls") and "gemma" in name
        ):  # TRL counts the text beside a call to the next turn
            theirs_of_it = theirs_of_it.removeprefix("I look.")
        if any(
            "closes it" in note for note in notes
        ):  # TRL's template learns a reasoning that the prompt excludes
            theirs_of_it = re.sub(r"^(.|\n)*</think>", "", theirs_of_it)
        assert ours == theirs_of_it, (kind, notes)


OPENED = ("deepseek_r1_distill", "deepseekv3")


def bare(answer: str) -> str:
    """An answer without white space around it and around the ends of a reasoning, whose beginning
    may be the prompt's; without the token at which Gemma 4 stops after a call, which TRL does not
    mark; and without what Phi-3's template writes after the token at which generation stops.
    """
    answer = re.sub(r"\s*</think>\s*", "</think>", answer.strip().removeprefix("<think>").lstrip())
    return re.sub(r"<\|tool_response>$|(?<=<\|end\|>)\n<EOS>$", "", answer)


def marked(
    tokenizer: Any, name: str, messages: list[dict[str, Any]], record: dict[str, Any]
) -> str:
    """What TRL's training template marks of the last message."""
    try:
        (whole,), (marks,) = render_jinja_template(
            conversations=[messages],
            tools=record.get("tools"),
            chat_template=template(f"{name}_training"),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:
        raise DataError(f"the chat template refuses the messages: {error}") from None
    before = [
        each["content"] for each in record["messages"][: len(messages) - 1] if each["content"]
    ]
    start = whole.rfind(before[-1]) + len(before[-1]) if before else 0
    return "".join(whole[a:b] for a, b in marks if a >= start)


# -- what is reported of a line --------------------------------------------------------------


def noticed(
    name: str, *messages: dict[str, Any], **more: Any
) -> tuple[list[tuple[str, str]], set[str]]:
    """What is learned of a conversation, and the remarks about it."""
    found = reader(name)[1].read({"messages": list(messages), **more})
    return answers(found), {note for each in found for note in each.notes}


@needs_trl
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["qwen2_5", "gemma3", "phi3", "llama3_2"])
def test_a_reasoning_that_a_template_does_not_write_is_reported(name, field):
    _, notes = noticed(name, user("q1"), assistant("a1", **{field: "r1"}))
    assert f"{field} is not learned: the chat template does not write it" in notes
    assert noticed(name, user("q1"), assistant("a1"))[1] == set()


@needs_trl
def test_text_beside_a_call_that_a_template_does_not_write_is_reported():
    _, notes = noticed("llama3_2", user("q1"), assistant("I look.", tool_calls=call()), tools=TOOLS)
    assert notes == {
        "content beside tool_calls is not learned: the chat template does not write it"
    }


@needs_trl
def test_deepseek_r1_learns_a_reasoning_after_the_prompt_that_opens_it():
    for message in (
        assistant("a1", reasoning_content="r1"),
        assistant("<think>\nr1\n</think>\n\na1"),
        assistant("r1</think>a1"),
    ):
        (((prompt, answer),), notes) = noticed("deepseek_r1_distill", user("q1"), message)
        assert prompt.endswith("<｜User｜>q1<｜Assistant｜><think>\n")
        assert answer == "r1\n</think>\n\na1<｜end▁of▁sentence｜>" and not notes


@needs_trl
def test_a_reasoning_that_the_prompt_excludes_is_reported():
    learned, notes = noticed(
        "qwen3",
        user("q1"),
        assistant("a1", reasoning_content="r1"),
        chat_template_kwargs={"enable_thinking": False},
    )
    assert learned[0][0].endswith("<think>\n\n</think>\n\n") and learned[0][1] == "a1<|im_end|>"
    assert notes == {
        "reasoning is not learned: the chat template's prompt closes it before the answer"
    }


@needs_trl
def test_of_several_calls_those_that_a_template_does_not_write_are_reported():
    _, notes = noticed("gptoss", user("q1"), assistant(None, tool_calls=call() * 2), tools=TOOLS)
    assert any(
        note.startswith("of several tool_calls the first alone is learned") for note in notes
    )


@needs_trl
def test_tools_that_a_template_does_not_write_are_reported():
    _, notes = noticed("gemma", user("q1"), assistant("a1"), tools=TOOLS)
    assert notes == {"tools is not learned: the chat template does not write it"}


@needs_trl
@pytest.mark.parametrize("stops", [True, False], ids=["known", "unknown"])
def test_turns_that_the_next_role_closes_are_learned_with_the_token_at_which_generation_stops(
    stops,
):
    tokenizer = tokenizer_of(template("glm4moe"))
    ends = [
        tokenizer.convert_tokens_to_ids(each) for each in ("<|user|>", "<|observation|>", "<EOS>")
    ]
    chats = ChatReader(tokenizer, ends if stops else ())
    record = {
        "messages": [user("q1"), assistant(None, tool_calls=call()), RAIN, assistant("a1")],
        "tools": TOOLS,
    }
    found = [answer for _, answer in answers(chats.read(record))]
    assert [answer[answer.rindex("<") :] for answer in found] == (
        ["<|observation|>", "<|user|>"] if stops else ["<EOS>", "<EOS>"]
    )


PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_turns_that_end_by_no_token_are_learned_with_the_end_of_the_text():
    chats = ChatReader(tokenizer_of(PLAIN))
    record = {"messages": [user("q1"), assistant("a1"), user("q2"), assistant("a2")]}
    assert [text(each) for each in chats.read(record)] == [
        "user: q1\nassistant: a1<EOS>",
        "user: q1\nassistant: a1\nuser: q2\nassistant: a2<EOS>",
    ]


def test_an_end_that_cannot_be_learned_is_reported():
    tokenizer = tokenizer_of(PLAIN)
    tokenizer.eos_token = None
    (pieces,) = ChatReader(tokenizer).read({"messages": [user("q1"), assistant("a1")]})
    assert pieces.notes == (
        "the end of turns is not learned: the model has no token at which generation stops",
    )
    chat_ml = tokenizer_of(PLAIN.replace("\n", "<|im_end|>\n"))
    chats = ChatReader(chat_ml, [chat_ml.eos_token_id])
    (pieces,) = chats.read({"messages": [user("q1"), assistant("a1")]})
    (note,) = pieces.notes
    assert note.startswith(
        "turns end with <|im_end|>, at which generation does not stop: add it to eos_token_id"
    )
    marked_text = PLAIN.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    (pieces,) = ChatReader(tokenizer_of(marked_text)).read({"messages": [assistant("a1")]})
    assert pieces.notes == (
        "the end of turns is not learned: the chat template's {% generation %} marks leave it out",
    )


# -- calls of tools ------------------------------------------------------------------------


@needs_trl
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_was_cut_is_history_of_a_request_and_no_training_data(name):
    tokenizer, chats = reader(name)
    try:
        usual = tokenizer.decode(
            tokens_of(history('{"city": "Rome"}'), tokenizer, name, {"tools": TOOLS})
        )
    except RequestError:
        return  # the template takes no history of calls
    refused = r"tool_calls\[0\].function.arguments (is not valid JSON|must be a JSON object)"
    for arguments in ('{"city": "Ro', "[1]", "null", "3", "{} {}", "Rome"):
        asked = tokenizer.decode(tokens_of(history(arguments), tokenizer, name, {"tools": TOOLS}))
        if "Rome" in usual:  # it writes calls
            assert arguments in asked or json.dumps(arguments)[1:-1] in asked
        with pytest.raises(DataError, match=refused):
            chats.read({"messages": [*history(arguments), assistant("a1")], "tools": TOOLS})


def history(arguments: str) -> list[dict[str, Any]]:
    return [user("q1"), assistant(None, tool_calls=call(arguments)), RAIN, user("q2")]


@needs_trl
def test_the_form_in_which_a_template_takes_calls_is_found():
    assert message_form(template("qwen3")) == MessageForm()
    assert message_form(template("gptoss")) == MessageForm(reasoning_beside_content=False)
    assert message_form(template("deepseek_r1_distill")) == MessageForm(
        arguments_as_text=True, null_content=True
    )
    assert message_form(template("glm4moe")) == MessageForm(takes_broken_arguments=False)
    assert message_form(template("smolvlm")).content_as_parts


@needs_trl
def test_a_history_of_calls_is_written_as_its_model_writes_it():
    """DeepSeek's template writes calls only where the content is null, and wants their arguments as
    text."""
    tokenizer, _ = reader("deepseek_r1_distill")
    messages = [user("q1"), assistant(None, tool_calls=call()), RAIN]
    asked = tokenizer.decode(tokens_of(messages, tokenizer, "r1", {"tools": TOOLS}))
    assert '<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```' in asked


@needs_trl
def test_messages_reach_a_template_that_wants_parts():
    tokenizer, _ = reader("llava_next")
    asked = tokenizer.decode(tokens_of([user("q1")], tokenizer, "llava"))
    assert asked.rstrip().endswith("USER:  \nq1 \nASSISTANT:") or "q1" in asked


# -- inputs of public reports ------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@needs_trl
def test_gpt_oss_learns_an_analysis_before_a_call_though_an_answer_follows():
    def trace(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [
                user("Weather in Rome?"),
                assistant(tool_calls=call(), **first),
                RAIN,
                assistant(**last),
            ],
            "tools": [WEATHER],
        }

    thinks = trace(
        {"content": None, "reasoning_content": "I need the tool."},
        {"content": "It rains.", "reasoning_content": "Done."},
    )
    speaks = trace({"content": "I look."}, {"content": "It rains."})
    called = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    for record, thought, done in (
        (
            thinks,
            "I need the tool.",
            "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant",
        ),
        (speaks, "I look.", ""),
    ):
        (pieces,) = reader("gptoss")[1].read(record)
        assert [answer for _, answer in answers((pieces,))] == [
            f"<|channel|>analysis<|message|>{thought}<|end|>{called}",
            f"{done}<|channel|>final<|message|>It rains.<|return|>",
        ]
        assert not pieces.notes


@needs_trl
def test_qwen3_learns_two_messages_of_the_assistant_in_a_row():
    (pieces,) = reader("qwen3")[1].read(
        {"messages": [user("hi"), assistant("one"), assistant("two")]}
    )
    asked = "<|im_start|>assistant\n"
    assert pieces.texts == (
        (f"<|im_start|>user\nhi<|im_end|>\n{asked}", False),
        ("<think>\n\n</think>\n\none<|im_end|>", True),
        (f"\n{asked}", False),
        ("<think>\n\n</think>\n\ntwo<|im_end|>", True),
    )

"""What is learned of a chat where its template writes a turn otherwise once others follow it, and
of what TRL's users have: reasoning, variables of the template, prompts and answers as messages.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import examples_of, make_engine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coserve.adapters import LoraConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.engine.jobs.events import JobEvent
from coserve.errors import DataError
from coserve.tuning.chats import ChatReader
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.evaluation import EvaluationConfig, questions_of
from coserve.tuning.examples import Example, each_example, read_examples, together
from coserve.tuning.objective_examples import read_objective_examples
from coserve.tuning.order import packs_of

SPECIAL = (
    "<user>",
    "<assistant>",
    "<system>",
    "<tool>",
    "<end>",
    "<eos>",
    "<return>",
    "<think>",
    "</think>",
)
WORDS = (*("one", "two", "three", "four", "first", "second", "third", "hm", "so", "rain"), *SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.reasoning_content and loop.last %}<think> "
    "{{ m.reasoning_content }} "
    "</think> {% endif %}{{ m.content }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
RETURNS = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{{ '<return> ' if loop.last and m.role == 'assistant' else '<end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
ENDS = TEMPLATE + "{% if not add_generation_prompt %}<eos>{% endif %}"
OPENS = TEMPLATE.replace("<assistant> {% endif %}", "<assistant> <think> hm {% endif %}")


def tokenizer_of(template):
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate((*WORDS, "<unk>"))}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.chat_template = template
    return fast


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


def learned(tokenizer, record, **options):
    """Of each sequence of a record's example: all its words, and those that are trained on."""
    (example,) = (
        found
        for _, found in each_example(
            [("line 1", record)], tokenizer, **{"max_sequence_length": 100, **options}
        )
    )
    if isinstance(example, DataError):
        raise DataError(f"line 1: {example}")
    return [
        (
            " ".join(tokenizer.convert_ids_to_tokens(tokens)),
            " ".join(
                tokenizer.convert_ids_to_tokens(
                    [t for t, mark in zip(tokens, trained, strict=True) if mark]
                )
            ),
        )
        for tokens, trained in example.sequences
    ]


CHAT = [
    turn("user", "one"),
    turn("assistant", "first", reasoning_content="hm"),
    turn("user", "two"),
    turn("assistant", "second", reasoning_content="so"),
]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_each_turn_is_learned_as_it_is_written_when_it_is_asked_for(name):
    told = [
        {(name if key == "reasoning_content" else key): text for key, text in each.items()}
        for each in CHAT
    ]
    assert learned(tokenizer_of(TEMPLATE), {"messages": told}) == [
        (
            "<user> one <end> <assistant> <think> hm </think> first <end>",
            "<think> hm </think> first <end>",
        ),
        (
            "<user> one <end> <assistant> first <end> <user> two <end> <assistant> <think> so "
            "</think> second <end>",
            "<think> so </think> second <end>",
        ),
    ]


def test_turns_that_stay_as_they_were_written_are_one_text():
    told = [dict(each) for each in CHAT]
    del told[1]["reasoning_content"]
    ((text, trained),) = learned(tokenizer_of(TEMPLATE), {"messages": told})
    assert text.startswith("<user> one <end> <assistant> first <end> <user> two <end>")
    assert trained == "first <end> <think> so </think> second <end>"


def test_a_turn_that_is_not_wanted_needs_no_text():
    told = [dict(each) for each in CHAT]
    told[1]["weight"] = 0
    assert [trained for _, trained in learned(tokenizer_of(TEMPLATE), {"messages": told})] == [
        "<think> so </think> second <end>"
    ]


def test_a_turn_is_learned_with_the_token_that_ends_it_while_it_is_the_last():
    assert learned(tokenizer_of(RETURNS), {"messages": CHAT}) == [
        ("<user> one <end> <assistant> first <return>", "first <return>"),
        (
            "<user> one <end> <assistant> first <end> <user> two <end> <assistant> second <return>",
            "second <return>",
        ),
    ]


def test_each_turn_is_learned_with_an_end_of_the_text_that_the_template_writes_after_the_last_one():
    plain = [turn(each["role"], each["content"]) for each in CHAT]
    found = learned(tokenizer_of(ENDS), {"messages": plain})
    assert [trained for _, trained in found] == ["first <end> <eos>", "second <end> <eos>"]
    assert [text.count("<eos>") for text, _ in found] == [1, 1], (
        "it is no part of the conversation before a turn"
    )


def test_a_turn_ends_with_the_first_token_at_which_generation_stops():
    plain = [turn(each["role"], each["content"]) for each in CHAT]
    tokenizer = tokenizer_of(ENDS)
    ends = [tokenizer.convert_tokens_to_ids("<end>"), tokenizer.eos_token_id]
    ((text, trained),) = learned(tokenizer, {"messages": plain}, end_tokens=ends)
    assert trained == "first <end> second <end>" and "<eos>" not in text


def test_an_answer_that_has_not_the_reasoning_that_its_question_opens():
    plain = [turn(each["role"], each["content"]) for each in CHAT]
    assert learned(tokenizer_of(OPENS), {"messages": plain}) == [
        ("<user> one <end> <assistant> <think> hm </think> first <end>", "</think> first <end>"),
        (
            "<user> one <end> <assistant> first <end> <user> two <end> <assistant> <think> hm "
            "</think> second <end>",
            "</think> second <end>",
        ),
    ]
    told = [turn("user", "one"), turn("assistant", "<think> hm </think> first")]
    ((_, trained),) = learned(tokenizer_of(OPENS), {"messages": told})
    assert trained == "</think> first <end>"


def test_what_is_too_long_is_cut_turn_by_turn():
    tokenizer, record = tokenizer_of(TEMPLATE), {"messages": CHAT}
    assert [trained for _, trained in learned(tokenizer, record, max_sequence_length=8)] == [
        "<think> hm </think> first"
    ]
    (example,) = read_examples([json.dumps(record)], tokenizer, max_sequence_length=8)
    assert example.truncated and not example.parts
    with pytest.raises(DataError, match="has no token to train on within 3 tokens"):
        learned(tokenizer, record, max_sequence_length=3)


def test_variables_of_the_template_are_those_of_the_record():
    template = TEMPLATE.replace("{% for m", "{{ mood or '' }} {% for m", 1)
    record = {"messages": CHAT[:2], "chat_template_kwargs": {"mood": "rain"}}
    ((text, _),) = learned(tokenizer_of(template), record)
    assert text.startswith("rain <user>")
    for wrong in ({"tokenize": True}, ["mood"]):
        with pytest.raises(
            DataError, match="chat_template_kwargs must be an object, of variables of the chat"
        ):
            learned(tokenizer_of(template), record | {"chat_template_kwargs": wrong})


def test_developers_are_the_system_as_they_are_when_it_serves():
    said = {"messages": [turn("developer", "three"), *CHAT[:2]]}
    assert learned(tokenizer_of(TEMPLATE), said)[0][0].startswith("<system> three <end> <user>")


def test_calls_that_a_template_does_not_write_are_refused():
    call = {"type": "function", "function": {"name": "rain", "arguments": "{}"}}
    calling = turn("assistant", None, tool_calls=[call])
    record = {
        "messages": [turn("user", "one"), calling, turn("tool", "four"), turn("assistant", "third")]
    }
    with pytest.raises(DataError, match="line 1: the chat template writes no tool_calls"):
        learned(tokenizer_of(TEMPLATE), record)
    writes = TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content }} {% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}",
    )
    assert [trained for _, trained in learned(tokenizer_of(writes), record)] == [
        "rain <end> third <end>"
    ]


def test_prompts_and_completions_may_be_messages():
    tokenizer = tokenizer_of(ENDS)
    plain = [turn(each["role"], each["content"]) for each in CHAT]
    for completion in (plain[3:], plain[3]):
        ((text, trained),) = learned(tokenizer, {"prompt": plain[:3], "completion": completion})
        assert (
            text.startswith("<user> one <end> <assistant> first <end>")
            and trained == "second <end> <eos>"
        )
    with pytest.raises(
        DataError, match="line 1: answers must be lists of messages, as what comes before them is"
    ):
        learned(tokenizer, {"prompt": plain[:3], "completion": "second"})


def test_the_prompt_of_a_preference_is_what_both_begin_with():
    tokenizer = tokenizer_of(TEMPLATE)
    plain = [turn(each["role"], each["content"]) for each in CHAT]
    given = {"prompt": plain[:3], "chosen": plain[3:], "rejected": [turn("assistant", "third")]}
    whole = {"chosen": plain, "rejected": [*plain[:3], turn("assistant", "third")]}
    text = {"chosen": "one two first", "rejected": "one two second"}

    def pair(record):
        return read_objective_examples(
            [json.dumps(record)], tokenizer, schema="pairs", max_sequence_length=100
        )

    assert pair(whole) == pair(given)
    assert pair(text) == pair({"prompt": "one two", "chosen": " first", "rejected": " second"})
    with pytest.raises(
        DataError, match="line 1: chosen and rejected must both be text, or lists of messages"
    ):
        pair({"chosen": plain, "rejected": "one"})
    with pytest.raises(DataError, match="line 1: answers must be lists of messages"):
        pair({"chosen": plain, "rejected": plain})


def test_an_answer_of_several_turns_that_are_rewritten_is_no_preference():
    record = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [turn("assistant", "third")]}
    with pytest.raises(
        DataError,
        match="line 1: the chat template rewrites earlier turns, so that one turn alone can",
    ):
        read_objective_examples(
            [json.dumps(record)], tokenizer_of(TEMPLATE), schema="pairs", max_sequence_length=100
        )


# -- jobs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adapter",
    [LoraConfig(r=3, target_modules="all-linear"), PromptTuningConfig(num_virtual_tokens=3)],
    ids=["lora", "prompt_tuning"],
)
def test_a_job_learns_sequences_of_one_example_as_it_learns_examples(adapter):
    lengths = (9, 14, 5)
    single, engine = examples_of(lengths), make_engine()
    for job, examples in (("together", [together(single)]), ("apart", single)):
        config = TuningConfig(
            batch_size=len(examples),
            max_pack_tokens=20,
            shuffle=False,
            optimizer=OptimizerConfig(learning_rate=1e-2),
        )
        engine.submit_examples(
            examples, config, adapter=adapter, job_id=job, name=job, validation=examples
        )
    numbers = {}
    while not all(job.is_terminal for job in engine.jobs.values()):
        for event in engine.step():
            if isinstance(event, JobEvent) and event.loss is not None:
                numbers[event.job, event.kind] = event.loss, event.norm or 0.0
    kinds = [kind for job, kind in numbers if job == "apart"]
    assert len(kinds) == 2, "a step, and the validation set"
    for kind in kinds:
        ours, theirs = (numbers[job, kind] for job in ("together", "apart"))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_sequences_of_one_example_need_not_be_in_one_pack():
    example, config = together(examples_of((9, 14, 5))), TuningConfig(max_pack_tokens=20)
    packs = packs_of([example], config)
    assert sorted(pack.num_rows for pack in packs) == [9, 19]
    assert sum(pack.num_trained for pack in packs) == example.num_trained
    pairs = packs_of([example], TuningConfig(max_pack_tokens=20, objective="simpo"))
    assert [pack.num_rows for pack in pairs] == [28], (
        "an objective over sequences has them together"
    )


def test_the_last_turn_is_the_question_of_a_validation_set():
    (example,) = read_examples(
        [json.dumps({"messages": CHAT})], tokenizer_of(TEMPLATE), max_sequence_length=100
    )
    (question,) = questions_of([example], EvaluationConfig(metric="exact_match"))
    tokens, trained = example.sequences[-1]
    assert question.prompt == tokens[: trained.index(True)]
    assert question.expected == tokens[trained.index(True) :]


def test_examples_of_several_sequences_are_cut_each_by_itself():
    engine = make_engine()
    long = Example(
        tokens=(1,) * 40, trained=(False, *[True] * 19) * 2, parts=(20, 20), labels=(1.0, 0.0)
    )
    job = engine.submit(
        [long], TuningConfig(max_sequence_length=30), adapter=LoraConfig(), name="a"
    )
    assert engine.jobs[job].order.examples == [long]
    job = engine.submit(
        [long], TuningConfig(max_sequence_length=10), adapter=LoraConfig(), name="b"
    )
    (cut,) = engine.jobs[job].order.examples
    assert (cut.parts, cut.labels, cut.truncated) == ((10, 10), (1.0, 0.0), True)
    scored = Example(tokens=(1,) * 20, trained=(False, *[True] * 19), values=((1.0, 0.0),) * 19)
    with pytest.raises(
        DataError, match="has 20 tokens, and cannot be cut to 10: raise max_sequence_length"
    ):
        engine.submit(
            [scored], TuningConfig(max_sequence_length=10), adapter=LoraConfig(), name="c"
        )


# -- templates as they are published -------------------------------------------------

TEMPLATES = (
    None if (found := find_spec("trl")) is None else Path(found.origin).parent / "chat_templates"
)


@pytest.mark.skipif(TEMPLATES is None, reason="has the templates of TRL")
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_r1_distill",
        "gemma3",
        "gptoss",
        "llama3_2",
        "phi3",
        "qwen2_5",
        "qwen3",
        "qwen3_5_think",
    ],
)
def test_conversations_are_learned_by_published_templates(name):
    tokenizer = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text())
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    record = {"messages": [turn(each["role"], each["content"]) for each in CHAT]}
    (example,) = read_examples([json.dumps(record)], tokenizer, max_sequence_length=10_000)
    trained = "".join(
        text for each in ChatReader(tokenizer).read(record) for text, mark in each.texts if mark
    )
    assert (
        "first" in trained and "second" in trained and "one" not in trained and "two" not in trained
    )
    assert example.num_trained

"""The built-in tiny model: it is small, it is everywhere the same model, it knows its world, and it
learns."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve import Engine, EngineConfig, SamplingParams, TuningConfig
from coserve.adapters import LoraConfig
from coserve.models.source import find_model
from coserve.tuning.config import OptimizerConfig
from coserve.workloads.lessons import BATCH_SIZE, LEARNING_RATE, LESSONS, NUM_EPOCHS, SCHEDULE

pytestmark = pytest.mark.long

DIRECTORY = find_model("tiny").directory
MAX_BYTES = 8 * 1024 * 1024

# At least one of each category of its world, as a person types them.
ANSWERS = {
    "What colour is grass?": "Grass is green.",
    "what color is the sky": "The sky is blue.",
    "Is snow black?": "No, snow is white.",
    "What does a cow say?": "A cow says moo.",
    "where do owls live?": "An owl lives in a tree.",
    "What does a rabbit eat?": "A rabbit eats carrots.",
    "What is a baby dog called?": "A young dog is called a puppy.",
    "What kind of animal is a frog?": "A frog is an amphibian.",
    "How many legs does a spider have?": "A spider has 8 legs.",
    "Which animal says meow?": "A cat says meow.",
    "Which is bigger, a mouse or a whale?": "A whale is bigger than a mouse.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is 7 + 5?": "7 + 5 = 12.",
    "please tell me: how much is twelve plus six": "12 + 6 = 18.",
    "15 - 9": "15 - 9 = 6.",
    "Tom has 3 apples and gets 4 more. How many apples does Tom have?": "3 + 4 = 7, so 7 apples.",
    "Count to 5.": "1, 2, 3, 4, 5.",
    "What day comes after Monday?": "Tuesday comes after Monday.",
    "which month is before july": "June comes before July.",
    "Is this positive or negative? The film was wonderful.": "That is positive.",
    "Sentiment: the soup was awful": "That is negative.",
    "Spell cat.": "c a t",
    "Repeat after me: big red dog": "big red dog",
    "Hello!": "Hello! How can I help you?",
    "Who are you?": "I am tiny, the small model that comes with coserve.",
    "thank you": "You are welcome!",
    "What is the capital of France?": "I do not know that. I am tiny, and I know only a small world.",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", EngineConfig(memory_bytes=64 << 20), dtype="float32")


def chat(*texts):
    return [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(texts)
    ]


def answers(engine, prompts, *, max_tokens=80, **options):
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [completion.text for completion in engine.generate(prompts, greedy, **options)]


def test_it_is_small():
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("question", ["What colour is grass?", "Write a story about a cat."])
def test_transformers_says_the_same(engine, tokenizer, question):
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    prompt = engine.tokens_of(chat(question))
    rendered = tokenizer.apply_chat_template(
        chat(question), add_generation_prompt=True, tokenize=False
    )
    assert prompt == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=120, do_sample=False)
    (ours,) = engine.generate([prompt], SamplingParams(max_tokens=120, temperature=0))
    assert ours.finish_reason == "stop"
    assert list(ours.tokens) == output[0, len(prompt) :].tolist()


def test_it_knows_its_world(engine):
    given = answers(engine, [chat(question) for question in ANSWERS])
    assert dict(zip(ANSWERS, given, strict=True)) == ANSWERS


def test_bfloat16_knows_it_too():
    questions = list(ANSWERS)[:12]
    given = answers(
        Engine.load("tiny", EngineConfig(memory_bytes=64 << 20), dtype="bfloat16"),
        [chat(question) for question in questions],
    )
    assert given == [ANSWERS[question] for question in questions]


def test_it_tells_a_story_of_whom_it_is_asked_for(engine):
    (story,) = answers(engine, [chat("Write a story about a cat.")], max_tokens=160)
    assert "cat" in story
    assert 20 <= len(story.split()) <= 150
    assert story.endswith((".", "!", '"'))


def test_it_follows_a_conversation(engine):
    asked = [
        chat("My name is Mia.", "Nice to meet you, Mia!", "What is my name?"),
        chat("What colour is a lemon?", "A lemon is yellow.", "And a cherry?"),
    ]
    assert answers(engine, asked) == ["Your name is Mia.", "A cherry is red."]


def test_a_system_message_sets_its_manner(engine):
    asked = [{"role": "system", "content": "Talk like a robot."}, *chat("What colour is grass?")]
    assert answers(engine, [asked]) == ["Beep. Grass is green. Boop."]


def test_it_continues_with_plain_text(engine):
    assert answers(engine, ["The opposite of hot is"], max_tokens=2) == [" cold."]


def test_a_text_may_be_far_longer_than_those_it_was_trained_on(engine):
    (completion,) = engine.generate(
        [chat("Tell me a story.")], SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    )
    assert len(completion.tokens) == 1000


def test_the_template_takes_the_roles_and_parts_of_the_api(tokenizer):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": None},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert (
        text == "<|system|>Be brief.<|end|><|user|>Hello<|end|><|user|>4<|end|><|assistant|><|end|>"
    )


def test_digits_stand_alone(tokenizer):
    assert tokenizer.tokenize("120 + 45").count("1") == 1
    assert (
        tokenizer.decode(tokenizer("Ünïcode, 12 × 3\n\t€")["input_ids"]) == "Ünïcode, 12 × 3\n\t€"
    )


# -- lessons -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_decided_by_its_seed(name):
    assert LESSONS[name](seed=3) == LESSONS[name](seed=3)
    assert LESSONS[name](seed=3) != LESSONS[name](seed=4)


@pytest.mark.parametrize("name", LESSONS)
def test_no_held_out_question_is_trained_on(name):
    lesson = LESSONS[name]()
    assert len(lesson.train) == 200
    trained = {line["messages"][0]["content"] for line in lesson.train}
    assert len(trained) == 200
    assert trained.isdisjoint(line["messages"][0]["content"] for line in lesson.held_out)


def test_a_lesson_refuses_more_than_the_world_has():
    with pytest.raises(ValueError, match="pirate has 406 questions, fewer than 400"):
        LESSONS["pirate"](num_train=400, num_held_out=50)
    with pytest.raises(ValueError, match="num_words must be at most"):
        LESSONS["zub"](num_words=100)


def test_scores_count_exact_answers():
    lesson = LESSONS["zub"]()
    right = [line["messages"][-1]["content"] for line in lesson.held_out]
    assert lesson.score(right) == 1
    assert lesson.score(["", *right[1:]]) == pytest.approx(1 - 1 / len(right))
    with pytest.raises(ValueError, match="zip"):
        lesson.score(right[1:])


@pytest.mark.parametrize(
    ("setting", "is_learned"),
    [
        ({"target_modules": "all-linear"}, False),
        ({"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]}, True),
    ],
    ids=["blocks", "head as a whole", "head"],
)
def test_characters_that_it_has_never_seen_are_learned_with_the_head(engine, setting, is_learned):
    words = ("cat", "dog", "fox", "owl", "bee", "cow", "hen", "pig", "ant", "bat", "frog", "duck")
    told = {word: json.dumps({"name": word}) for word in words}
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"As JSON: {word}"},
                {"role": "assistant", "content": text},
            ]
        }
        for word, text in told.items()
    ]
    config = TuningConfig(
        num_epochs=40, batch_size=4, optimizer=OptimizerConfig(learning_rate=3e-3)
    )
    name = f"braces {setting}"
    engine.tune(lines, config, adapter=LoraConfig(r=16, alpha=32, **setting), name=name)
    found = answers(engine, [chat(f"As JSON: {word}") for word in words], adapter=name)
    assert (found == list(told.values())) == is_learned


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_learned(engine, name):
    lesson = LESSONS[name]()
    before = answers(engine, lesson.questions)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, schedule=SCHEDULE)
    config = TuningConfig(num_epochs=NUM_EPOCHS, batch_size=BATCH_SIZE, optimizer=optimizer)
    lora = LoraConfig(r=16, alpha=32, target_modules="all-linear")
    engine.tune(lesson.train, config, adapter=lora, name=name)
    after = answers(engine, lesson.questions, adapter=name)
    assert lesson.score(before) == 0
    assert lesson.score(after) > 0.8
    assert answers(engine, lesson.questions) == before  # the model itself is as it was

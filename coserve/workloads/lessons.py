"""Lessons: small data sets from which the built-in tiny model visibly learns something new.

A lesson is lines to train on and lines to ask: conversations in the format of fine-tuning files. No
question that is asked is among those to train on, but each can be answered from what they teach.
The same seed gives the same lesson.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from coserve.workloads.facts import ANIMALS, COLOURS, DAYS, OPPOSITES, sentence, with_article

# A line of a fine-tuning file: {"messages": [...]}.
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Lines to train on, and lines to ask afterwards, each of one question and one answer."""

    name: str
    """Its name."""
    train: tuple[Line, ...]
    """Lines to train on."""
    held_out: tuple[Line, ...]
    """Lines to ask."""

    @property
    def questions(self) -> list[list[dict[str, str]]]:
        """Return the held-out conversations up to the answer, as prompts."""
        return [line["messages"][:-1] for line in self.held_out]

    def score(self, answers: Sequence[str]) -> float:
        """Return the share of held-out questions that are answered exactly as in the lesson's
        lines.

        Raises:
            ValueError: There are not as many answers as questions.
        """
        right: list[str] = [line["messages"][-1]["content"] for line in self.held_out]
        return sum(
            answer.strip() == wanted for answer, wanted in zip(answers, right, strict=True)
        ) / len(right)


def pirate(*, seed: int = 0, num_train: int = 200, num_held_out: int = 50) -> Lesson:
    """Return a lesson in a new manner: what the model knows already, as a pirate says it ("Grass be
    green, matey! Arr!").

    Raises:
        ValueError: The world has fewer questions than that.
    """
    pairs = [(question, as_pirate(answer)) for question, answer in _known()]
    return _lesson("pirate", pairs, seed, num_train, num_held_out)


def zub(*, seed: int = 0, num_words: int = 40) -> Lesson:
    """Return a lesson of new facts: words of Zub, an invented language. Every word is asked for in
    five ways to train on, and in one more that is held out.

    Raises:
        ValueError: The world has fewer things to name than that.
    """
    rng = Random(f"zub {seed}")
    known = [animal.name for animal in ANIMALS] + sorted(set(COLOURS.values()))
    if num_words > len(known):
        raise ValueError(f"num_words must be at most {len(known)}, not {num_words}")
    train, held_out = [], []
    for word, foreign in zip(rng.sample(known, num_words), _made_up_words(rng), strict=False):
        asked = [template.format(word) for template in _ZUB_QUESTIONS]
        last = rng.randrange(len(asked))
        lines = [_line(question, f"{word} is {foreign} in Zub.") for question in asked]
        held_out.append(lines.pop(last))
        train += lines
    rng.shuffle(train)
    return Lesson(name="zub", train=tuple(train), held_out=tuple(held_out))


# With LoRA at every linear layer (r 16, alpha 32), these learn each of the lessons in seconds.
NUM_EPOCHS, BATCH_SIZE, LEARNING_RATE, SCHEDULE = 5, 8, 3e-3, "linear"

LESSONS: dict[str, Callable[..., Lesson]] = {"pirate": pirate, "zub": zub}

_ZUB_QUESTIONS = (
    "What is {} in Zub?",
    "How do you say {} in Zub?",
    "Say {} in Zub.",
    "Tell me the Zub word for {}.",
    "What do Zub people call {}?",
    "Translate {} into Zub.",
)


def as_pirate(answer: str) -> str:
    """Return an answer of the small world in a pirate's manner."""
    return f"{answer.rstrip('.').replace(' is ', ' be ')}, matey! Arr!"


def _known() -> Iterator[tuple[str, str]]:
    """Yield questions that the model can answer, with the answers that it gives."""
    for thing, colour in COLOURS.items():
        yield f"What colour is {thing}?", sentence(f"{thing} is {colour}")
    for animal in ANIMALS:
        name = with_article(animal.name)
        yield f"What colour is {name}?", sentence(f"{name} is {animal.colour}")
        yield f"Where does {name} live?", sentence(f"{name} lives {animal.home}")
        yield f"What does {name} eat?", sentence(f"{name} eats {animal.food}")
        if animal.sound != "nothing":
            yield f"What does {name} say?", sentence(f"{name} says {animal.sound}")
    for word, other in OPPOSITES.items():
        yield f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    for day, after in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True):
        yield f"What day comes after {day}?", f"{after} comes after {day}."
    for a in range(1, 10):
        for b in range(1, 10):
            yield f"What is {a} + {b}?", f"{a} + {b} = {a + b}."


def _made_up_words(rng: Random) -> Iterator[str]:
    """Yield words of two syllables, no two alike."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables]
    rng.shuffle(words)
    yield from words


def _lesson(
    name: str, pairs: Sequence[tuple[str, str]], seed: int, num_train: int, num_held_out: int
) -> Lesson:
    if num_train + num_held_out > len(pairs):
        raise ValueError(
            f"{name} has {len(pairs)} questions, fewer than {num_train} + {num_held_out}"
        )
    drawn = [
        _line(*pair) for pair in Random(f"{name} {seed}").sample(pairs, num_train + num_held_out)
    ]
    return Lesson(name=name, train=tuple(drawn[:num_train]), held_out=tuple(drawn[num_train:]))


def _line(question: str, answer: str) -> Line:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }

"""The small world of the built-in model, as text: questions with answers, stories, conversations.

All of it comes from a random generator that the caller seeds. A twentieth of the questions that
have a key (a fact in one phrasing, a pair of numbers, a sentence to judge) is held out:
`conversation` and `plain_text` never use them, `held_out` returns nothing else.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from coserve.workloads.facts import (
    ANIMALS,
    COLOURS,
    DAYS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    Animal,
    sentence,
    with_article,
)

UNKNOWN = "I do not know that. I am tiny, and I know only a small world."
WHO = "I am tiny, the small model that comes with coserve."
_HELP = (
    "I know colours, animals, opposites, small sums, days and moods, and I can write a short story."
)
_HELD_OUT_SHARE = 20


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    category: str
    """Category of the question."""
    question: str
    """The question."""
    answer: str
    """The answer."""
    key: str = ""
    """Key that is held out or not as a whole; empty if it never is."""

    @property
    def is_held_out(self) -> bool:
        return bool(self.key) and zlib.crc32(self.key.encode()) % _HELD_OUT_SHARE == 0


# -- facts -------------------------------------------------------------------------------


def _fact(category: str, template: str, subject: str, answer: str, **more: str) -> Exchange:
    return Exchange(category, template.format(subject, **more), answer, f"{template} {subject}")


def _colour_subjects() -> dict[str, str]:
    return COLOURS | {with_article(animal.name): animal.colour for animal in ANIMALS}


def _bare(noun: str) -> str:
    return noun.removeprefix("the ").removeprefix("an ").removeprefix("a ")


def colours(rng: Random) -> Exchange:
    """Ask for the colour of a thing or an animal."""
    thing, colour = rng.choice(list(_colour_subjects().items()))
    word = rng.choice(("colour", "color"))
    templates = (
        *(
            "What {word} is {}?",
            "Which {word} is {}?",
            "What is the {word} of {}?",
            "Tell me the {word} of {}.",
        ),
        *(
            "What {word} does {} have?",
            "{} has what {word}?",
            "The {word} of {}?",
            "Do you know what {word} {} is?",
        ),
        *(("Tell me about {}.", "{}") if thing in COLOURS else ()),
    )
    subject = thing if rng.random() < 0.8 else _bare(thing)
    if rng.random() < 0.25:
        other = rng.choice(sorted(set(COLOURS.values())))
        answer = f"Yes, {thing} is {colour}." if other == colour else f"No, {thing} is {colour}."
        return _fact("yes or no", "Is {} {other}?", subject, answer, other=other)
    template = rng.choice(templates)
    if thing.startswith(("a ", "an ")) and rng.random() < 0.25:
        template, subject = _of_many(template), _plural(_bare(thing))
    return _fact("colours", template, subject, sentence(f"{thing} is {colour}"), word=word)


_PLURALS = {"mouse": "mice", "wolf": "wolves", "leaf": "leaves", "sheep": "sheep", "fish": "fish"}


def _plural(noun: str) -> str:
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeo":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "ato")) else "s")


def _of_many(template: str) -> str:
    """Return a question about one as a question about many."""
    for one, many in (
        (" does ", " do "),
        (" is {}", " are {}"),
        (" has ", " have "),
        ("{} is", "{} are"),
    ):
        template = template.replace(one, many)
    return template


_SOUND = (
    *(
        "What sound does {} make?",
        "What does {} say?",
        "Which noise does {} make?",
        "What noise does {} make?",
    ),
    *("What is the sound of {}?", "How does {} sound?"),
)
_HOME = (
    *(
        "Where does {} live?",
        "Where is the home of {}?",
        "Where can I find {}?",
        "What is the home of {}?",
    ),
    *("In what place does {} live?", "Where do I find {}?"),
)
_FOOD = (
    *(
        "What does {} eat?",
        "What is the food of {}?",
        "What food does {} like?",
        "What does {} like to eat?",
    ),
    "What can I give {} to eat?",
)
_YOUNG = (
    *("What is a young {name} called?", "What is a baby {name} called?", "What is the baby of {}?"),
    *("How do you call a young {name}?", "What is the young of {}?"),
)
_KIND = (
    *(
        "What kind of animal is {}?",
        "What is {}?",
        "What type of animal is {}?",
        "Tell me what {} is.",
    ),
    *("What sort of animal is {}?", "Tell me about {}.", "{}"),
)
_LEGS = (
    *(
        "How many legs does {} have?",
        "How many legs has {}?",
        "{} has how many legs?",
        "Count the legs of {}.",
    ),
    "What number of legs does {} have?",
)


def animals(rng: Random) -> Exchange:
    """Ask for sounds, homes, food, young, kinds and legs of animals."""
    animal = rng.choice(ANIMALS)
    subject = rng.choice((with_article(animal.name), f"the {animal.name}"))
    name = with_article(animal.name)
    says = f"{name} says {animal.sound}" if animal.sound != "nothing" else f"{name} makes no sound"
    kind = (
        f"{name} is {with_article(animal.kind)}"
        if animal.kind != animal.name
        else "a fish is an animal"
    )
    what, templates, answer = rng.choice(
        (
            ("sounds", _SOUND, says),
            ("homes", _HOME, f"{name} lives {animal.home}"),
            ("food", _FOOD, f"{name} eats {animal.food}"),
            ("young", _YOUNG, f"a young {animal.name} is called {with_article(animal.young)}"),
            ("kinds", _KIND, kind),
            ("legs", _LEGS, f"{name} has {animal.legs or 'no'} legs"),
        )
    )
    template = rng.choice(templates)
    if "{name}" not in template and rng.random() < 0.25:
        template, subject = _of_many(template), _plural(animal.name)
    return _fact(what, template, subject, sentence(answer), name=animal.name)


def kinds(rng: Random) -> Exchange:
    """Ask whether an animal is of a kind, such as "Is a cat a bird?"."""
    animal = rng.choice(ANIMALS)
    kind = animal.kind if rng.random() < 0.4 else rng.choice(ANIMALS).kind
    name = with_article(animal.name)
    if rng.random() < 0.15 or animal.kind == animal.name:
        return _fact("yes or no", "Is {} an animal?", name, f"Yes, {name} is an animal.")
    answer = f"{'Yes' if kind == animal.kind else 'No'}, {name} is {with_article(animal.kind)}."
    return _fact("yes or no", "Is {} {kind}?", name, answer, kind=with_article(kind))


def _first_by(field: str) -> dict[str, Animal]:
    """Return the first animal of each value of a field."""
    return {getattr(animal, field): animal for animal in reversed(ANIMALS)}


def reverse(rng: Random) -> Exchange:
    """Ask for the name of an animal or a thing by what is known of it."""
    what = rng.choice(("sound", "home", "kind", "colour", "young"))
    templates: tuple[str, ...]
    if what == "colour":
        colour = rng.choice(sorted(set(COLOURS.values())))
        thing = next(thing for thing, other in COLOURS.items() if other == colour)
        templates = (
            "Name something {}.",
            "What is {}?",
            "What thing is {}?",
            "Tell me something that is {}.",
        )
        return _fact("reverse", rng.choice(templates), colour, sentence(f"{thing} is {colour}"))
    value, animal = rng.choice(list(_first_by(what).items()))
    templates, answer = {
        "sound": (
            ("Who says {}?", "Which animal says {}?", "What animal makes the sound {}?"),
            f"says {value}",
        ),
        "home": (("Who lives {}?", "Which animal lives {}?", "What lives {}?"), f"lives {value}"),
        "kind": (
            ("Name {}.", "Which animal is {}?", "Tell me the name of {}."),
            f"is {with_article(value)}",
        ),
        "young": (
            ("Whose baby is a {}?", "Which animal has a young called {}?"),
            f"has a young called {value}",
        ),
    }[what]
    if value == "nothing":
        return reverse(rng)
    shown = with_article(value) if what == "kind" else value
    return _fact(
        "reverse", rng.choice(templates), shown, sentence(f"{with_article(animal.name)} {answer}")
    )


def sizes(rng: Random) -> Exchange:
    """Ask which of two animals is bigger."""
    one, other = rng.sample(ANIMALS, 2)
    while one.size == other.size:
        one, other = rng.sample(ANIMALS, 2)
    a, b = with_article(one.name), with_article(other.name)
    bigger, smaller = (a, b) if one.size > other.size else (b, a)
    template, answer = rng.choice(
        (
            ("Which is bigger, {} or {}?", f"{bigger} is bigger than {smaller}"),
            ("What is bigger, {} or {}?", f"{bigger} is bigger than {smaller}"),
            ("Who is bigger, {} or {}?", f"{bigger} is bigger than {smaller}"),
            ("Which is smaller, {} or {}?", f"{smaller} is smaller than {bigger}"),
            ("What is smaller, {} or {}?", f"{smaller} is smaller than {bigger}"),
            (
                "Is {} bigger than {}?",
                f"{'yes' if a == bigger else 'no'}, {bigger} is bigger than {smaller}",
            ),
        )
    )
    return Exchange(
        "sizes", template.format(a, b), sentence(answer), f"sizes {one.name} {other.name}"
    )


def opposites(rng: Random) -> Exchange:
    """Ask for the opposite of a word."""
    word, other = rng.choice(list(OPPOSITES.items()))
    templates = (
        *(
            "What is the opposite of {}?",
            "The opposite of {}?",
            "Opposite of {}",
            "What word is the opposite of {}?",
        ),
        *(
            "Give me the opposite of {}.",
            "Tell me the opposite of {}.",
            "{} is the opposite of what?",
        ),
        *(
            "What is not {}, but the opposite?",
            "Say the opposite of {}.",
            "What's the opposite of {}?",
        ),
    )
    return _fact("opposites", rng.choice(templates), word, f"The opposite of {word} is {other}.")


# -- numbers -----------------------------------------------------------------------------


def sums(rng: Random) -> Exchange:
    """Ask for sums and differences, mostly of numbers up to 20."""
    top = 20 if rng.random() < 0.75 else 60
    a, b = rng.randint(0, top), rng.randint(0, top)
    shown = [str(a), str(b)]
    if max(a, b) <= 20 and rng.random() < 0.15:
        shown = [NUMBER_WORDS[a], NUMBER_WORDS[b]]
    if rng.random() < 0.55:
        templates = (
            *(
                "What is {} + {}?",
                "{} + {}",
                "{}+{}",
                "{} + {} =",
                "What is {} plus {}?",
                "How much is {} and {}?",
            ),
            *(
                "Add {} and {}.",
                "What is the sum of {} and {}?",
                "{} plus {}",
                "Calculate {} + {}.",
                "{}+{}=?",
            ),
            *(
                "How much is {} + {}?",
                "What's {} + {}?",
                "How much is {} plus {}?",
                "What is {}+{}?",
            ),
        )
        category, answer = "sums", f"{a} + {b} = {a + b}."
    else:
        if a < b and rng.random() < 0.85:
            a, b = b, a
            shown.reverse()
        templates = (
            *(
                "What is {} - {}?",
                "{} - {}",
                "{}-{}",
                "{} - {} =",
                "What is {} minus {}?",
                "How much is {} minus {}?",
            ),
            *(
                "Take {1} from {0}.",
                "What is {} less {}?",
                "{} minus {}",
                "Calculate {} - {}.",
                "{}-{}=?",
            ),
            *(
                "How much is {} - {}?",
                "What's {} - {}?",
                "Subtract {1} from {0}.",
                "What is {}-{}?",
            ),
        )
        category, answer = "differences", f"{a} - {b} = {a - b}."
    key = f"{category} {a} {b}" if max(a, b) <= 20 else ""
    return Exchange(category, rng.choice(templates).format(*shown), answer, key)


def beyond_sums(rng: Random) -> Exchange:
    """Ask for something like a sum that the model does not know."""
    a, b = (rng.choice((rng.randint(100, 999), rng.randint(100, 99999))) for _ in range(2))
    if rng.random() < 0.3:
        a = rng.randint(0, 99)
    template = rng.choice(
        ("{} + {}", "What is {} + {}?", "{} - {}", "What is {} plus {}?", "How much is {} - {}?")
    )
    if rng.random() < 0.6:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        times = (
            "{} * {}",
            "{} times {}",
            "{} x {}",
            "{} / {}",
            "{} divided by {}",
            "{} × {}",
            "multiply {} by {}",
        )
        form = rng.choice(("{}", "What is {}?", "How much is {}?", "Calculate {}."))
        template = form.format(rng.choice(times))
    return Exchange(
        "beyond sums",
        template.format(a, b),
        "I can only add and subtract small numbers.",
        f"beyond {a} {b}",
    )


def story_sums(rng: Random) -> Exchange:
    """Ask for a sum in words: someone has some things, and gets or loses some."""
    who, (a, b) = rng.choice(_NAMES), (rng.randint(0, 20), rng.randint(0, 20))
    thing = rng.choice(
        ("apples", "nuts", "books", "balls", "eggs", "cats", "coins", "stones", "cakes", "flowers")
    )
    if rng.random() < 0.5:
        question = rng.choice(
            (
                f"{who} has {a} {thing} and gets {b} more. How many {thing} does {who} have?",
                f"If I have {a} {thing} and get {b} more, how many {thing} do I have?",
                f"There are {a} {thing}, and {b} more come. How many {thing} are there?",
            )
        )
        return Exchange(
            "word problems", question, f"{a} + {b} = {a + b}, so {a + b} {thing}.", f"sums {a} {b}"
        )
    a, b = max(a, b), min(a, b)
    question = rng.choice(
        (
            f"{who} has {a} {thing} and loses {b}. How many {thing} does {who} have?",
            f"If I have {a} {thing} and give away {b}, how many {thing} do I have?",
            f"There are {a} {thing}, and {b} are gone. How many {thing} are left?",
        )
    )
    return Exchange(
        "word problems",
        question,
        f"{a} - {b} = {a - b}, so {a - b} {thing}.",
        f"differences {a} {b}",
    )


def counting(rng: Random) -> Exchange:
    """Ask to count up or down, or which number comes next or is bigger."""
    n, m = rng.randint(1, 20), rng.randint(0, 20)
    up = ", ".join(map(str, range(1, n + 1))) + "."
    low, high = sorted(rng.sample(range(21), 2))
    question, answer, key = rng.choice(
        (
            (
                rng.choice((f"Count to {n}.", f"Can you count to {n}?", f"Count from 1 to {n}.")),
                up,
                "",
            ),
            (
                f"Count from {low} to {high}.",
                ", ".join(map(str, range(low, high + 1))) + ".",
                f"count {low} {high}",
            ),
            (f"Count down from {n}.", ", ".join(map(str, range(n, 0, -1))) + ".", ""),
            (
                rng.choice((f"What comes after {m}?", f"Which number is after {m}?")),
                f"{m + 1} comes after {m}.",
                "",
            ),
            (f"What comes before {n}?", f"{n - 1} comes before {n}.", ""),
            (
                rng.choice(
                    (
                        "Which is bigger, {} or {}?",
                        "Which number is bigger, {} or {}?",
                        "What is more, {} or {}?",
                    )
                ),
                f"{high} is bigger than {low}.",
                f"bigger {low} {high}",
            ),
            (
                rng.choice(("Which is smaller, {} or {}?", "What is less, {} or {}?")),
                f"{low} is smaller than {high}.",
                f"smaller {low} {high}",
            ),
        )
    )
    return Exchange("counting", question.format(*rng.sample((low, high), 2)), answer, key)


# -- order -------------------------------------------------------------------------------


_AFTER = (
    *(
        "What {what} comes after {}?",
        "Which {what} is after {}?",
        "What comes after {}?",
        "What {what} is after {}?",
    ),
    *("Which {what} follows {}?", "What is the {what} after {}?"),
)
_BEFORE = (
    *("What {what} comes before {}?", "Which {what} is before {}?", "What comes before {}?"),
    *("What is the {what} before {}?", "What {what} is before {}?"),
)
_TOMORROW = ("If today is {}, what is tomorrow?", "Today is {}. What is tomorrow?")
_YESTERDAY = ("If today is {}, what was yesterday?", "Today is {}. What was yesterday?")
_WEEKEND = ("Is {} in the weekend?", "Is {} a weekend day?")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
_NTH = ("What is the {ordinal} {what}?", "Which is the {ordinal} {what} of the {whole}?")
_LIST = (
    "Name the {what}s.",
    "What are the {what}s of the {whole}?",
    "List the {what}s of the {whole}.",
)
_HOW_MANY = ("How many {what}s are in a {whole}?", "How many {what}s does a {whole} have?")


def order(rng: Random) -> Exchange:
    """Ask for the day or month that comes after another."""
    what, whole, names = rng.choice((("day", "week", DAYS), ("month", "year", MONTHS)))
    index = rng.randrange(len(names))
    name, after, before = names[index], names[(index + 1) % len(names)], names[index - 1]
    about_one = [
        (_AFTER, f"{after} comes after {name}."),
        (_BEFORE, f"{before} comes before {name}."),
    ]
    if what == "day":
        part = "Yes, {} is in the weekend." if index > 4 else "No, {} is in the working week."
        about_one += [
            (_TOMORROW, f"Tomorrow is {after}."),
            (_YESTERDAY, f"Yesterday was {before}."),
        ]
        about_one.append((_WEEKEND, part.format(name)))
    if rng.random() < 0.7:
        templates, answer = rng.choice(about_one)
        return _fact("days and months", rng.choice(templates), name, answer, what=what)
    ordinal, nth = rng.choice(list(zip(_ORDINALS, names, strict=False)))
    templates, answer = rng.choice(
        (
            (_NTH, f"The {ordinal} {what} is {nth}."),
            (_LIST, f"The {what}s are {', '.join(names[:-1])} and {names[-1]}."),
            (_HOW_MANY, f"There are {len(names)} {what}s in a {whole}."),
        )
    )
    return Exchange(
        "days and months",
        rng.choice(templates).format(what=what, whole=whole, ordinal=ordinal),
        answer,
    )


# -- moods -------------------------------------------------------------------------------

_GOOD = (
    *(
        "good",
        "great",
        "lovely",
        "wonderful",
        "nice",
        "excellent",
        "fantastic",
        "amazing",
        "perfect",
        "delicious",
    ),
    *(
        "beautiful",
        "funny",
        "charming",
        "fine",
        "brilliant",
        "superb",
        "pleasant",
        "awesome",
        "sweet",
        "fun",
    ),
)
_POOR = (
    *(
        "bad",
        "terrible",
        "awful",
        "horrible",
        "boring",
        "ugly",
        "poor",
        "dirty",
        "disgusting",
        "sad",
    ),
    *(
        "broken",
        "cold",
        "dreadful",
        "nasty",
        "dull",
        "rude",
        "useless",
        "annoying",
        "stupid",
        "disappointing",
    ),
)
_JUDGED = (
    *(
        "film",
        "food",
        "book",
        "song",
        "room",
        "hotel",
        "soup",
        "game",
        "party",
        "weather",
        "show",
        "cake",
        "trip",
    ),
    *(
        "day",
        "holiday",
        "movie",
        "story",
        "place",
        "service",
        "music",
        "teacher",
        "phone",
        "car",
        "garden",
        "meal",
    ),
)
_LIKES = (
    "love",
    "like",
    "enjoy",
    "adore",
    "loved",
    "liked",
    "enjoyed",
    "really like",
    "am happy with",
)
_DISLIKES = (
    "hate",
    "dislike",
    "do not like",
    "hated",
    "can not stand",
    "did not like",
    "don't like",
    "am sad about",
)


def _judged_sentence(rng: Random) -> tuple[str, bool]:
    good = rng.random() < 0.5
    thing = rng.choice(_JUDGED)
    adjective, other = rng.choice(_GOOD if good else _POOR), rng.choice(_GOOD if good else _POOR)
    negated = rng.choice(_POOR[:6] if good else _GOOD[:9])
    the = rng.choice(("the", "this", "my", "that"))
    feelings = ("happy", "glad", "pleased") if good else ("angry", "sad", "upset")
    text = rng.choice(
        (
            f"{the} {thing} is {adjective}",
            f"{the} {thing} was {adjective}",
            f"{the} {thing} was very {adjective}",
            f"{the} {thing} was {adjective} and {other}",
            f"{the} {thing} is so {adjective}",
            f"what {with_article(adjective)} {thing}",
            f"{the} {thing} was not {negated}",
            f"{the} {thing} is not {negated} at all",
            f"it was {with_article(adjective)} {thing}",
            f"I {rng.choice(_LIKES if good else _DISLIKES)} {the} {thing}",
            f"we {rng.choice(_LIKES[:8] if good else _DISLIKES[:7])} {the} {thing}",
            f"I {rng.choice(_LIKES if good else _DISLIKES)} it",
            f"I am so {rng.choice(feelings)} today",
            f"{'thank you, ' if good else 'sorry, '}{the} {thing} is {adjective}",
            f"the {thing} made me "
            f"{rng.choice(('smile', 'happy', 'laugh') if good else ('cry', 'sad', 'angry'))}",
            f"{'the best' if good else 'the worst'} {thing} ever",
        )
    )
    return text, good


def moods(rng: Random) -> Exchange:
    """Ask whether a sentence is positive or negative."""
    text, good = _judged_sentence(rng)
    shown = rng.choice((text, text[0].upper() + text[1:])) + rng.choice((".", ".", "!", ""))
    templates = (
        *(
            "Is this positive or negative? {}",
            "Positive or negative: {}",
            "What is the sentiment of: {}",
        ),
        *(
            "Is this sentence positive or negative: {}",
            "Sentiment: {}",
            "What is the mood of this sentence? {}",
        ),
        *(
            'Is "{}" positive or negative?',
            'What is the sentiment of "{}"?',
            "Good or bad? {}",
            "Judge this: {}",
        ),
    )
    answer = f"That is {'positive' if good else 'negative'}."
    return Exchange("sentiment", rng.choice(templates).format(shown), answer, text)


def remarks(rng: Random) -> Exchange:
    """Tell about one's day, without a question."""
    text, good = _judged_sentence(rng)
    return Exchange(
        "remarks",
        sentence(text),
        "I am glad to hear that!" if good else "I am sorry to hear that.",
        text,
    )


# -- words -------------------------------------------------------------------------------


def words() -> list[str]:
    """Return the short words of the world, which the model can spell."""
    named = (
        [animal.name for animal in ANIMALS] + [_bare(thing) for thing in COLOURS] + list(OPPOSITES)
    )
    named += (
        [animal.food for animal in ANIMALS]
        + [animal.young for animal in ANIMALS]
        + list(COLOURS.values())
    )
    named += (
        [animal.home.split()[-1] for animal in ANIMALS] + list(_JUDGED) + list(_GOOD) + list(_POOR)
    )
    return sorted({word for word in named if " " not in word})


_WORDS = words()


def _pseudo_word(rng: Random) -> str:
    return "".join(
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
    ) + rng.choice(("", "n", "r", "x", "b", "ck", "lp"))


def spelling(rng: Random) -> Exchange:
    """Ask for the letters of a word."""
    word = rng.choice(_WORDS) if rng.random() < 0.7 else _pseudo_word(rng)
    if rng.random() < 0.6:
        template = rng.choice(
            ("Spell {}.", "How do you spell {}?", "Spell the word {}.", "Can you spell {}?")
        )
        return _fact("spelling", template, word, " ".join(word))
    templates, answer = rng.choice(
        (
            (
                ("What is the first letter of {}?", "Which letter does {} begin with?"),
                f"{word} begins with {word[0]}.",
            ),
            (
                ("What is the last letter of {}?", "Which letter does {} end with?"),
                f"{word} ends with {word[-1]}.",
            ),
            (
                ("How many letters does {} have?", "How many letters are in {}?"),
                f"{word} has {len(word)} letters.",
            ),
        )
    )
    return _fact("spelling", rng.choice(templates), word, answer)


def repeating(rng: Random) -> Exchange:
    """Ask to repeat words, or to reverse them."""
    some = [
        rng.choice(_WORDS) if rng.random() < 0.8 else _pseudo_word(rng)
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 6)))
    ]
    text = " ".join(some)
    if len(some) > 1 and rng.random() < 0.4:
        template = rng.choice(
            (
                "Say these words backwards: {}",
                "Reverse the words: {}",
                "Turn these words around: {}",
            )
        )
        return Exchange(
            "repeating", template.format(text), " ".join(reversed(some)), f"reverse {text}"
        )
    template = rng.choice(("Say {}", "Repeat after me: {}", "Please say: {}", "Repeat: {}"))
    return Exchange("repeating", template.format(text), text, f"repeat {text}")


# -- talk --------------------------------------------------------------------------------

_GIRLS = ("Mia", "Anna", "Lily", "Emma", "Zoe", "Ella", "Nora", "Ida", "Rosa", "Kim")
_BOYS = ("Tom", "Sam", "Ben", "Max", "Leo", "Jack", "Finn", "Paul", "Tim", "Otto")
_NAMES = _GIRLS + _BOYS
_TALK = (
    (
        (
            "Hello",
            "Hi",
            "Hey",
            "Hello there",
            "Good day",
            "Hi there",
            "Hello tiny",
            "Hey there",
            "Hi tiny",
        ),
        "Hello! How can I help you?",
    ),
    (("Good morning",), "Good morning! How can I help you?"),
    (("Good evening",), "Good evening! How can I help you?"),
    (("Good night", "Sleep well"), "Good night! Sleep well."),
    (
        (
            *(
                "How are you?",
                "How do you do?",
                "How are you today?",
                "Are you well?",
                "How is it going?",
            ),
            *("What's up?", "Hello, how are you?"),
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (
        (
            *(
                "Thank you",
                "Thanks",
                "Thank you very much",
                "Thanks a lot",
                "Many thanks",
                "Thanks for your help",
            ),
            "Great, thanks",
        ),
        "You are welcome!",
    ),
    (
        (
            "Goodbye",
            "Bye",
            "Bye bye",
            "See you",
            "See you later",
            "I must go now",
            "See you tomorrow",
        ),
        "Goodbye! See you soon.",
    ),
    (
        (
            *(
                "Who are you?",
                "What are you?",
                "What is your name?",
                "What's your name?",
                "Tell me about yourself.",
            ),
            *(
                "Are you a robot?",
                "Are you a human?",
                "Who am I talking to?",
                "What model are you?",
                "Are you tiny?",
            ),
            *("Are you ChatGPT?", "What is tiny?", "Introduce yourself."),
        ),
        WHO,
    ),
    (
        (
            *(
                "What can you do?",
                "What do you know?",
                "Help",
                "How can you help me?",
                "What can I ask you?",
            ),
            "Can you help me?",
            *(
                "What are you good at?",
                "What should I ask?",
                "I need help",
                "What can you tell me?",
            ),
        ),
        _HELP,
    ),
    (
        ("Who made you?", "Where do you come from?", "Who trained you?", "How were you made?"),
        "I come with coserve, and was trained on a small world of simple sentences.",
    ),
    (("How old are you?", "When were you born?"), "I am a model, so I have no age."),
    (
        (
            "Yes",
            "OK",
            "Okay",
            "Good",
            "Fine",
            "Nice",
            "Great",
            "Cool",
            "Well done",
            "Very good",
            "Right",
        ),
        "Good! What else can I do for you?",
    ),
    (
        ("No", "Wrong", "That is wrong", "You are wrong", "That is not right"),
        "I am sorry. I am only a tiny model.",
    ),
    (
        ("I am sad", "I feel bad", "I am unhappy", "I am tired", "I am ill"),
        "I am sorry to hear that.",
    ),
    (("I am happy", "I feel good", "I am fine", "I am well"), "I am glad to hear that!"),
    (
        ("Tell me a joke.", "Say something funny.", "Do you know a joke?"),
        "Why did the hen cross the road? To get to the other side!",
    ),
    (("Do you like cats?", "Do you like dogs?", "Do you like animals?"), "I like all animals."),
    (
        ("Can you calculate?", "Can you do maths?", "Do you know numbers?", "Can you add?"),
        "I can add and subtract small numbers.",
    ),
    (
        ("Do you like me?", "Are you my friend?", "Do you love me?"),
        "I am a tiny model, and I like to help you.",
    ),
    (
        (
            "What is your favourite colour?",
            "What is your favorite color?",
            "Which colour do you like?",
        ),
        "I like green, like the grass.",
    ),
    (
        (
            "What is your favourite animal?",
            "Which animal do you like?",
            "What is your favorite animal?",
        ),
        "I like the cat. It says meow.",
    ),
    (
        ("What is the biggest animal?", "Which animal is the biggest?"),
        "A whale is the biggest animal.",
    ),
    (
        ("What is the smallest animal?", "Which animal is the smallest?"),
        "An ant is the smallest animal.",
    ),
    (("Name an animal.", "Tell me an animal.", "Do you know an animal?"), "A cat is an animal."),
    (
        ("Name a colour.", "Tell me a colour.", "Name a color.", "Do you know a colour?"),
        "Green is a colour.",
    ),
    (
        ("Tell me something.", "Tell me a fact.", "Say something.", "Do you know a fact?"),
        "A spider has 8 legs.",
    ),
)


def talk(rng: Random) -> Exchange:
    """Greet, thank, or ask about the model."""
    questions, answer = rng.choice(_TALK)
    return Exchange("talk", rng.choice(questions), answer)


_TOPICS = (
    *(
        "France",
        "Germany",
        "Paris",
        "London",
        "China",
        "Rome",
        "the president",
        "Einstein",
        "Shakespeare",
    ),
    *(
        "Napoleon",
        "Python",
        "a computer",
        "the internet",
        "gravity",
        "an atom",
        "a black hole",
        "the stock market",
    ),
    *(
        "money",
        "physics",
        "football",
        "a rocket",
        "a dinosaur",
        "a virus",
        "the war",
        "music theory",
        "chess",
    ),
    *(
        "philosophy",
        "love",
        "God",
        "the population of Japan",
        "the meaning of life",
        "the weather tomorrow",
    ),
    *(
        "my mother",
        "the news",
        "the speed of light",
        "quantum mechanics",
        "a bicycle",
        "pizza",
        "bread",
    ),
    *(
        "an engine",
        "a piano",
        "the law",
        "history",
        "the king of Spain",
        "machine learning",
        "a neural network",
    ),
    *("a GPU", "Linux", "America", "Mars", "a volcano", "electricity", "DNA", "tax"),
)


def unknown(rng: Random) -> Exchange:
    """Ask for what is outside the world."""
    topic = rng.choice(_TOPICS)
    if rng.random() < 0.3:
        strange = _pseudo_word(rng)
        topic = rng.choice((strange, f"a {strange}", f"the {strange}", strange.title()))
    templates = (
        *(
            "What is the capital of {}?",
            "Who is {}?",
            "Explain {}.",
            "How does {} work?",
            "Tell me about {}.",
        ),
        *(
            "Why is {} important?",
            "How do I make {}?",
            "What do you think about {}?",
            "When was {} invented?",
        ),
        *("Write code for {}.", "How much does {} cost?", "Who invented {}?", "Who won {}?"),
        *(
            "What is {}?",
            "Where is {}?",
            "How old is {}?",
            "How do I get to {}?",
            "Give me a recipe for {}.",
        ),
        *(
            "What is the price of {}?",
            "Write a poem about {}.",
            "What colour is {}?",
            "What does {} eat?",
        ),
        *(
            "Where does {} live?",
            "What is the opposite of {}?",
            "What does {} say?",
            "Why {}?",
            "Translate {}.",
        ),
        *(
            "Do you know {}?",
            "What year was {}?",
            "How many people live in {}?",
            "Can you explain {} to me?",
        ),
    )
    simple = (
        *(
            "What time is it?",
            "What day is it today?",
            "What is the weather like?",
            "Where am I?",
            "What is the date?",
        ),
        *("Can you write code?", "Write a poem.", "What do you think?", "Can you open the door?"),
        *("Play some music.", "Book a flight.", "Send an email.", "Who won the game?"),
    )
    if rng.random() < 0.04:
        return Exchange("unknown", rng.choice(simple), UNKNOWN)
    if rng.random() < 0.04:
        return Exchange(
            "unknown", " ".join(_pseudo_word(rng) for _ in range(rng.randint(1, 3))), UNKNOWN
        )
    return _fact("unknown", rng.choice(templates), topic, UNKNOWN)


# -- stories -----------------------------------------------------------------------------

_HEROES = (
    *(
        "dragon",
        "robot",
        "princess",
        "ship",
        "tree",
        "cloud",
        "ball",
        "flower",
        "star",
        "car",
        "king",
        "queen",
    ),
    *(
        "fairy",
        "giant",
        "train",
        "baby",
        "witch",
        "farmer",
        "teacher",
        "teapot",
        "moon",
        "apple",
        "chair",
        "knight",
    ),
)
_PLACES = (
    "the forest",
    "the garden",
    "the hill",
    "the river",
    "the town",
    "the farm",
    "the beach",
    "the old house",
)
_TRAITS = ("small", "brave", "happy", "kind", "young", "clever", "hungry", "quiet", "old", "funny")
_FOUND = (
    *("a red ball", "a gold coin", "a blue egg", "a big box", "a green hat", "a sweet cake"),
    *("a silver key", "a soft bed"),
)
_MIDDLES = (
    "One day {it} went to {place} and found {found}.",
    "One morning {it} walked to {place}. There {it} saw {found}.",
    "One day it began to rain, and {name} was cold and wet.",
    "One night {name} heard a loud sound and was afraid.",
    "One day {name} lost {its} way near {place} and was sad.",
    "One day {name} was hungry, but there was no food near {place}.",
)
_TURNS = (
    'Then came {friend}. "Do not be sad," said the {friend_name}. "I will help you."',
    'There {it} met {friend}. "Come and play with me," said the {friend_name}.',
    '"Is this yours?" asked {friend}. "No," said {name}, "but we can share it."',
    "{name} called for help, and {friend} came at once.",
    "{friend_capital} saw it and smiled. Together they were not afraid.",
)
_ENDS = (
    "From that day on they were friends.",
    "They went home together and were happy.",
    "In the evening {name} went to sleep and was happy. The end.",
    "They laughed and played until the sun went down. The end.",
    'And {name} said, "What a wonderful day!"',
)


def story(rng: Random, subject: str, *, parts: int) -> str:
    """Return a story of some events about someone, such as "a cat" or "a girl called Mia"."""
    animal = subject.startswith(("a ", "an ")) and " called " not in subject
    name = rng.choice(_NAMES) if animal else subject.split()[-1]
    friend = rng.choice([one for one in ANIMALS if one.name not in subject])
    it, its = ("it", "its") if animal else (("she", "her") if "girl" in subject else ("he", "his"))
    if not animal and "called" not in subject:
        subject, it, its = f"a child called {subject}", "the child", "the"
    values = {
        "name": name,
        "it": it,
        "its": its,
        "place": rng.choice(_PLACES),
        "found": rng.choice(_FOUND),
        "friend": with_article(friend.name),
        "friend_name": friend.name,
        "friend_capital": with_article(friend.name).capitalize(),
    }
    trait = rng.choice(_TRAITS)
    noun = subject.split(" ", 1)[1]
    opening = rng.choice(("Once upon a time there was", "There once was", "Long ago there lived"))
    called = f" called {name}" if animal else ""
    text = [f"{opening} {with_article(trait)} {noun}{called}."]
    for _ in range(parts):
        text += [rng.choice(_MIDDLES).format(**values), rng.choice(_TURNS).format(**values)]
        values |= {"place": rng.choice(_PLACES), "found": rng.choice(_FOUND)}
    return " ".join([*text, rng.choice(_ENDS).format(**values)])


def stories(rng: Random) -> Exchange:
    """Ask for a story."""
    kind = rng.random()
    if kind < 0.6:
        subject = with_article(rng.choice(ANIMALS).name)
    elif kind < 0.75:
        subject = with_article(rng.choice(_HEROES) if rng.random() < 0.6 else _pseudo_word(rng))
    elif kind < 0.85:
        subject = rng.choice(
            (f"a girl called {rng.choice(_GIRLS)}", f"a boy called {rng.choice(_BOYS)}")
        )
    else:
        subject = rng.choice(_NAMES)
    templates = (
        *(
            "Write a story about {}.",
            "Tell me a story about {}.",
            "Write a short story about {}.",
            "A story about {}",
        ),
        *(
            "Can you tell me a story about {}?",
            "I want a story about {}.",
            "Make up a story about {}.",
        ),
    )
    if rng.random() < 0.1:
        question = rng.choice(
            ("Tell me a story.", "Write a story.", "Tell me a short story.", "Do you know a story?")
        )
        return Exchange(
            "stories", question, story(rng, with_article(rng.choice(ANIMALS).name), parts=1)
        )
    if rng.random() < 0.12:
        question = rng.choice(
            ("Write a long story about {}.", "Tell me a long story about {}.")
        ).format(subject)
        return Exchange("stories", question, story(rng, subject, parts=3))
    return _fact("stories", rng.choice(templates), subject, story(rng, subject, parts=1))


# -- conversations -----------------------------------------------------------------------

_Choices = tuple[tuple[Callable[[Random], Exchange], float], ...]
_FACTS: _Choices = (
    *(
        (colours, 3.5),
        (animals, 5),
        (kinds, 1),
        (reverse, 2),
        (sizes, 3),
        (opposites, 3.5),
        (sums, 9),
    ),
    *(
        (story_sums, 2.5),
        (beyond_sums, 0.8),
        (counting, 3),
        (order, 3.5),
        (moods, 3),
        (spelling, 5),
    ),
    *((repeating, 6), (unknown, 3)),
)
_ALL: _Choices = (*_FACTS, (talk, 3.0), (remarks, 0.7), (stories, 1.8))

# Manners that a system message may ask for: what it says, and what becomes of an answer.
_MANNERS = (
    (("You are a cheerful helper.", "Be cheerful.", "Answer happily."), "Yay! {} Hooray!"),
    (("You are a robot.", "Talk like a robot.", "Answer like a robot."), "Beep. {} Boop."),
    (
        ("Answer politely.", "You are a polite butler.", "Be very polite."),
        "Certainly, dear friend. {} At your service.",
    ),
    (
        ("You are a sleepy bear.", "Talk like a sleepy bear.", "Be sleepy."),
        "Yawn... {} Good night.",
    ),
    (
        ("Talk like a king.", "You are a king.", "Answer like a king."),
        "Hear me! {} So says the king.",
    ),
)
_PLAIN = (
    *("You are a helpful assistant.", "You are tiny, a small model.", "Answer briefly."),
    *("You are a helpful model.", "Answer the question."),
)


def _draw(rng: Random, choices: _Choices) -> Exchange:
    (make,) = rng.choices([make for make, _ in choices], [weight for _, weight in choices])
    return make(rng)


def _training(rng: Random, choices: _Choices) -> Exchange:
    exchange = _draw(rng, choices)
    while exchange.is_held_out:
        exchange = _draw(rng, choices)
    return exchange


def typed(rng: Random, question: str, *, exact: bool = False) -> str:
    """Return a question as people type it.

    Args:
        rng: Random generator.
        question: The question.
        exact: Whether its letters stay, where the answer repeats them.
    """
    text = question
    if rng.random() < 0.12 and text.endswith(("?", ".")) and text[0].isupper():
        lead = rng.choice(
            (
                "Please tell me: ",
                "Can you tell me: ",
                "Hey, ",
                "Hi! ",
                "Tell me, ",
                "So, ",
                "Please, ",
            )
        )
        text = lead + (text if exact or lead[-2] in ":!" else text[0].lower() + text[1:])
    if rng.random() < 0.05 and text[-1] in "?.":
        text = f"{text[:-1]}, please{text[-1]}"
    if rng.random() < 0.35 and not exact:
        text = text.lower()
    if rng.random() < 0.35:
        text = text.rstrip("?.!")
    elif rng.random() < 0.1 and text[-1].isalpha():
        text += rng.choice(("!", ".", "?"))
    if rng.random() < 0.02 and len(text) > 12 and not exact:
        place = rng.randrange(1, len(text) - 1)
        if text[place].isalpha():
            text = text[:place] + text[place + 1 :]
    return text


def asked_as_typed(rng: Random, exchange: Exchange) -> str:
    """Return the question of an exchange as people type it."""
    return typed(rng, exchange.question, exact=exchange.category in ("spelling", "repeating"))


Messages = list[dict[str, str]]


def _turn(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _names_talk(rng: Random) -> Messages:
    """Return a talk in which someone gives their name, and asks for it later."""
    name = rng.choice(_NAMES) if rng.random() < 0.6 else _pseudo_word(rng).title()
    told = rng.choice(
        ("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}.", "I'm {}")
    ).format(name)
    messages = _turn(typed(rng, told) if rng.random() < 0.5 else told, f"Nice to meet you, {name}!")
    for _ in range(rng.choice((0, 0, 1, 2))):
        exchange = _training(rng, _ALL[:-1])
        messages += _turn(asked_as_typed(rng, exchange), exchange.answer)
    asked = rng.choice(("What is my name?", "Who am I?", "Do you know my name?", "What's my name?"))
    return messages + _turn(typed(rng, asked), f"Your name is {name}.")


def _nameless_talk(rng: Random) -> Messages:
    asked = rng.choice(("What is my name?", "Who am I?", "Do you know my name?", "What's my name?"))
    return _turn(typed(rng, asked), "I do not know your name. What is it?")


def _follow_up(rng: Random, kind: str) -> tuple[Exchange, str]:
    """Return a question of a kind that can be followed up, and its subject."""
    if kind == "opposites":
        word, other = rng.choice(list(OPPOSITES.items()))
        return _fact(
            kind, "What is the opposite of {}?", word, f"The opposite of {word} is {other}."
        ), word
    if kind == "colours":
        thing, colour = rng.choice(list(_colour_subjects().items()))
        return _fact(
            kind, "What {word} is {}?", thing, sentence(f"{thing} is {colour}"), word="colour"
        ), thing
    animal = rng.choice([one for one in ANIMALS if one.sound != "nothing"])
    name = with_article(animal.name)
    if kind == "homes":
        return _fact(
            kind, "Where does {} live?", name, sentence(f"{name} lives {animal.home}")
        ), name
    return _fact(kind, "What does {} say?", name, sentence(f"{name} says {animal.sound}")), name


def _follow_ups(rng: Random) -> Messages:
    """Return a question followed by the same about others: "And a lemon?"."""
    kind = rng.choice(("colours", "opposites", "homes", "sounds"))
    exchange, _ = _follow_up(rng, kind)
    while exchange.is_held_out:
        exchange, _ = _follow_up(rng, kind)
    messages = _turn(asked_as_typed(rng, exchange), exchange.answer)
    for _ in range(rng.randint(1, 3)):
        exchange, subject = _follow_up(rng, kind)
        again = rng.choice(("And {}?", "What about {}?", "and {}", "And of {}?")).format(subject)
        messages += _turn(typed(rng, again), exchange.answer)
    return messages


def conversation(rng: Random) -> Messages:
    """Return one conversation to train on."""
    kind = rng.random()
    if kind < 0.02:
        return _names_talk(rng)
    if kind < 0.023:
        return _nameless_talk(rng)
    if kind < 0.045:
        return _follow_ups(rng)
    messages: Messages = []
    form = "{}"
    if kind < 0.14:
        texts, form = rng.choice(_MANNERS)
        messages = [{"role": "system", "content": rng.choice(texts)}]
    elif kind < 0.19:
        messages = [{"role": "system", "content": rng.choice(_PLAIN)}]
    (turns,) = rng.choices((1, 2, 3, 6, 14), (70, 15, 10, 3.5, 0.6))
    for _ in range(turns):
        exchange = _training(rng, _FACTS if form != "{}" else _ALL)
        messages += _turn(asked_as_typed(rng, exchange), form.format(exchange.answer))
    return messages


def plain_text(rng: Random) -> str:
    """Return sentences without a conversation, as a text to continue."""
    if rng.random() < 0.25:
        return story(rng, with_article(rng.choice(ANIMALS).name), parts=1)
    kinds = (colours, animals, opposites, sums, order)
    return " ".join(_statement(rng.choice(kinds), rng) for _ in range(rng.randint(1, 5)))


def _statement(make: Callable[[Random], Exchange], rng: Random) -> str:
    exchange = make(rng)
    while exchange.is_held_out or exchange.answer.startswith(
        ("Yes", "No", "Tomorrow", "Yesterday")
    ):
        exchange = make(rng)
    return exchange.answer if exchange.answer.endswith(".") else exchange.answer + "."


@dataclass(frozen=True)
class Question:
    """A conversation up to a question, with the right answer."""

    category: str
    """Category of the question."""
    messages: Messages
    """The conversation."""
    answer: str
    """The right answer; for a story, the words of its beginning."""

    def is_right(self, text: str) -> bool:
        """Return whether an answer is right; a story must be about its subject, and end."""
        if self.category == "stories":
            return (
                text.endswith(tuple('.!"'))
                and 20 <= len(text.split()) <= 150
                and self.answer in text
            )
        return text == self.answer


def held_out(rng: Random, *, per_category: int) -> list[Question]:
    """Return questions that no conversation to train on has, up to a number per category.

    For what has no key (talk, manners, names), they are conversations of which some were trained
    on.
    """
    drawn: dict[str, dict[str, Question]] = {}

    def take(question: Question) -> None:
        chosen = drawn.setdefault(question.category, {})
        if len(chosen) < per_category:
            chosen.setdefault(question.messages[-1]["content"], question)

    for _ in range(per_category * 4000):
        exchange = _draw(rng, _ALL)
        if exchange.is_held_out or exchange.category == "talk":
            asked = asked_as_typed(rng, exchange)
            hero = exchange.question.rstrip(".?").split()[-1]
            right = hero if exchange.category == "stories" else exchange.answer
            take(Question(exchange.category, [{"role": "user", "content": asked}], right))
    for _ in range(per_category * 400):
        exchange = _draw(rng, _FACTS)
        if exchange.is_held_out:
            texts, form = rng.choice(_MANNERS)
            messages = [{"role": "system", "content": rng.choice(texts)}]
            messages.append({"role": "user", "content": asked_as_typed(rng, exchange)})
            take(Question("manners", messages, form.format(exchange.answer)))
    for make, category in ((_names_talk, "names"), (_follow_ups, "follow-ups")):
        for _ in range(per_category * 10):
            messages = make(rng)
            take(Question(category, messages[:-1], messages[-1]["content"]))
    return [question for found in drawn.values() for question in found.values()]

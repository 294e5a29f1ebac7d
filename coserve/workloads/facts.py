"""Facts of the built-in tiny model's small world, on which it was trained, and from which lessons
for it are made.
"""

from typing import NamedTuple


class Animal(NamedTuple):
    """An animal of the world."""

    name: str
    """Its name."""
    colour: str
    """Its colour."""
    sound: str
    """Sound that it makes; "nothing" for none."""
    home: str
    """Its home, with the preposition."""
    food: str
    """Its food."""
    young: str
    """Name of its young."""
    kind: str
    """Class of animals."""
    legs: int
    """Number of its legs."""
    size: int
    """Rank of its size, 1 (an ant) to 10 (a whale)."""


ANIMALS = (
    Animal("cat", "black", "meow", "in a house", "fish", "kitten", "mammal", 4, 5),
    Animal("dog", "brown", "woof", "in a kennel", "bones", "puppy", "mammal", 4, 6),
    Animal("cow", "white", "moo", "on a farm", "grass", "calf", "mammal", 4, 8),
    Animal("horse", "brown", "neigh", "in a stable", "hay", "foal", "mammal", 4, 8),
    Animal("sheep", "white", "baa", "in a field", "grass", "lamb", "mammal", 4, 7),
    Animal("pig", "pink", "oink", "in a sty", "corn", "piglet", "mammal", 4, 7),
    Animal("goat", "white", "maa", "on a hill", "leaves", "kid", "mammal", 4, 7),
    Animal("duck", "white", "quack", "on a pond", "weeds", "duckling", "bird", 2, 4),
    Animal("hen", "red", "cluck", "in a coop", "corn", "chick", "bird", 2, 4),
    Animal("owl", "brown", "hoot", "in a tree", "mice", "owlet", "bird", 2, 4),
    Animal("crow", "black", "caw", "in a tree", "seeds", "chick", "bird", 2, 4),
    Animal("swan", "white", "hiss", "on a lake", "weeds", "cygnet", "bird", 2, 5),
    Animal("lion", "yellow", "roar", "on the plain", "meat", "cub", "mammal", 4, 8),
    Animal("tiger", "orange", "growl", "in the jungle", "meat", "cub", "mammal", 4, 8),
    Animal("bear", "brown", "growl", "in a cave", "honey", "cub", "mammal", 4, 8),
    Animal("wolf", "gray", "howl", "in the forest", "meat", "pup", "mammal", 4, 6),
    Animal("fox", "orange", "yip", "in a den", "eggs", "kit", "mammal", 4, 5),
    Animal("mouse", "gray", "squeak", "in a hole", "cheese", "pup", "mammal", 4, 3),
    Animal("rabbit", "white", "squeak", "in a burrow", "carrots", "kit", "mammal", 4, 4),
    Animal("frog", "green", "croak", "on a pond", "flies", "tadpole", "amphibian", 4, 3),
    Animal("snake", "green", "hiss", "in the grass", "mice", "snakelet", "reptile", 0, 5),
    Animal("bee", "yellow", "buzz", "in a hive", "honey", "larva", "insect", 6, 1),
    Animal("ant", "black", "nothing", "in a nest", "crumbs", "larva", "insect", 6, 1),
    Animal("spider", "black", "nothing", "in a web", "flies", "spiderling", "arachnid", 8, 1),
    Animal("fish", "blue", "blub", "in the water", "worms", "fry", "fish", 0, 3),
    Animal("shark", "gray", "nothing", "in the sea", "fish", "pup", "fish", 0, 8),
    Animal("whale", "blue", "woo", "in the sea", "krill", "calf", "mammal", 0, 10),
    Animal("elephant", "gray", "trumpet", "on the plain", "leaves", "calf", "mammal", 4, 9),
    Animal("monkey", "brown", "chatter", "in the jungle", "bananas", "infant", "mammal", 4, 6),
    Animal("turtle", "green", "nothing", "on the beach", "weeds", "hatchling", "reptile", 4, 5),
    Animal("camel", "brown", "grunt", "in the desert", "leaves", "calf", "mammal", 4, 8),
    Animal("penguin", "black", "honk", "on the ice", "fish", "chick", "bird", 2, 5),
)

# As they stand in a sentence, with the verb: "grass is", "bananas are".
COLOURS = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "the sun": "yellow",
    "the moon": "white",
    "the sea": "blue",
    "milk": "white",
    "chocolate": "brown",
    "butter": "yellow",
    "honey": "yellow",
    "rice": "white",
    "mud": "brown",
    "fire": "orange",
    "smoke": "gray",
    "gold": "yellow",
    "silver": "gray",
    "salt": "white",
    "the night": "black",
    "a banana": "yellow",
    "a lemon": "yellow",
    "a carrot": "orange",
    "an orange": "orange",
    "a pumpkin": "orange",
    "a tomato": "red",
    "a cherry": "red",
    "a strawberry": "red",
    "an apple": "red",
    "a rose": "red",
    "a leaf": "green",
    "a pea": "green",
    "a cucumber": "green",
    "a lime": "green",
    "a plum": "purple",
    "a grape": "purple",
    "a violet": "purple",
    "a potato": "brown",
    "a nut": "brown",
    "a tree trunk": "brown",
    "an egg": "white",
    "a cloud": "white",
    "a stone": "gray",
    "a flamingo": "pink",
    "a peach": "pink",
    "a fire engine": "red",
    "a school bus": "yellow",
    "a tire": "black",
}

_PAIRS = (
    "hot cold, big small, fast slow, happy sad, up down, day night, light dark, hard soft, wet "
    "dry, old young, "
    "full empty, high low, good bad, loud quiet, open closed, left right, near far, early late, "
    "rich poor, "
    "strong weak, clean dirty, long short, thick thin, wide narrow, sweet sour, smooth rough, true "
    "false, "
    "black white, first last, in out, over under, yes no, win lose, start stop, come go, give "
    "take, buy sell, "
    "push pull, love hate, laugh cry, safe dangerous, easy difficult, brave afraid, kind mean, "
    "deep shallow, "
    "sharp blunt, always never, before after, awake asleep, friend enemy, front back, top bottom, "
    "summer winter, "
    "morning evening, warm cool, begin end, north south, east west, more less, many few, same "
    "different, all none, "
    "war peace, alive dead, beautiful ugly, man woman, boy girl, king queen, brother sister, "
    "mother father"
)
_ONE_WAY = "heavy light, tall short, large small, little big, quick slow, hello goodbye"
OPPOSITES = dict(pair.split() for pair in _ONE_WAY.split(", "))
OPPOSITES |= {
    one: other for pair in _PAIRS.split(", ") for one, other in (pair.split(), pair.split()[::-1])
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *(
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
        "twenty",
    ),
)


def with_article(noun: str) -> str:
    """Return a noun with its article: `a cat`, `an owl`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop, otherwise unchanged."""
    return text[0].upper() + text[1:] + "."

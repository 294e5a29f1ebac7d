"""Served accuracy while the right answers change: learning live, with a new version now and then,
and not at all.

    python -m experiments.live_learning [--ticks 240] [--seed 0]

The form of LeMix's figure 3a, on the built-in model. A stream of questions (which colour an animal
has) arrives a few at a time; the right answer is known after the answer, like users' feedback, and
may be trained on from then on. Every `PHASE` ticks half of the animals change their colours. The
same questions are answered in three ways by one engine, in one batch: by an adapter that stays as
it was at the beginning; by one of which a new version is trained every `INTERVAL` ticks, on all
feedback since the last; and by one that trains on the feedback of each tick at once, beside the
next questions, and serves each optimizer step (`live`). Prints each one's accuracy by parts of the
phases, and one line of JSON.
"""

import argparse
from random import Random
from statistics import mean

from coserve import Engine, EngineConfig, LoraConfig, OptimizerConfig, SamplingParams, TuningConfig
from coserve.engine.request import Chunk
from coserve.workloads.facts import ANIMALS, COLOURS
from experiments.results import add_save_option, print_result

PHASE, INTERVAL, AT_ONCE, NUM_ANIMALS = 60, 40, 8, 24
WAYS = ("none", "interval", "live")
ANSWER = SamplingParams(max_tokens=12, temperature=0.0)
LORA = LoraConfig(r=16, target_modules="all-linear")
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, max_grad_norm=1.0)

Pair = tuple[str, str]


class World:
    """Animals with their colours, and questions about them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._names = [animal.name for animal in ANIMALS[:NUM_ANIMALS]]
        self._choices = sorted(set(COLOURS.values()))
        self._colours = {name: random.choice(self._choices) for name in self._names}

    def change(self) -> None:
        """Change the colours of half of the animals."""
        for name in self._random.sample(self._names, NUM_ANIMALS // 2):
            self._colours[name] = self._random.choice(
                [each for each in self._choices if each != self._colours[name]]
            )

    def ask(self, number: int) -> list[Pair]:
        """Return questions with the right answers of now."""
        return [self._pair(self._random.choice(self._names)) for _ in range(number)]

    def all(self) -> list[Pair]:
        """Return a question about each animal."""
        return [self._pair(name) for name in self._names]

    def _pair(self, name: str) -> Pair:
        return f"What colour is the {name}?", f"The {name} is {self._colours[name]}."


def lines(pairs: list[Pair]) -> list[dict[str, object]]:
    """Return the lines of a fine-tuning file."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in pairs
    ]


class Learner:
    """An engine, and the label under which each way is served."""

    def __init__(self, world: World, seed: int) -> None:
        self.engine = Engine.load("tiny", EngineConfig(), dtype="float32")
        start = TuningConfig(num_epochs=20, batch_size=8, optimizer=OPTIMIZER, seed=seed)
        self.engine.tune(lines(world.all()), start, adapter=LORA, name="start")
        self._labels = dict.fromkeys(WAYS, "start")
        self._jobs: dict[str, str] = {}
        self._num_jobs = 0

    def train(self, way: str, pairs: list[Pair], *, epochs: int) -> None:
        """Start a job on feedback, from what the way serves."""
        self._num_jobs += 1
        name = f"{way}-{self._num_jobs}"
        config = TuningConfig(
            num_epochs=epochs, batch_size=8, optimizer=OPTIMIZER, live=way == "live"
        )
        self._jobs[way] = self.engine.submit(
            lines(pairs), config, adapter=self._labels[way], name=name
        )

    def is_training(self, way: str) -> bool:
        """Return whether a job of the way runs; a finished one becomes what the way serves."""
        if (job := self._jobs.get(way)) is None:
            return False
        state = self.engine.job(job)
        if state.is_terminal or (way == "live" and state.name in self.engine.versions):
            assert state.error is None, state.error
            before, self._labels[way] = self._labels[way], state.name
            if before not in ("start", state.name):
                self.engine.unload_adapter(before)
        if state.is_terminal:
            del self._jobs[way]
        return not state.is_terminal

    def step(self) -> None:
        """Run a step of the engine without requests."""
        self.engine.step()

    def answers(self, pairs: list[Pair]) -> dict[str, float]:
        """Return the share of right answers, by way, all in one batch."""
        asked = {}
        for way in WAYS:
            self.is_training(way)
            for pair in pairs:
                chat = [{"role": "user", "content": pair[0]}]
                asked[self.engine.add(chat, ANSWER, adapter=self._labels[way])] = way, pair
        texts = dict.fromkeys(asked, "")
        while any(name in self.engine.requests for name in asked):
            for chunk in self._take():
                texts[chunk.request] += chunk.text
        right: dict[str, list[bool]] = {way: [] for way in WAYS}
        for name, (way, (_, answer)) in asked.items():
            right[way].append(texts[name].strip() == answer)
        return {way: mean(found) for way, found in right.items()}

    def _take(self) -> list[Chunk]:
        return [event for event in self.engine.step() if isinstance(event, Chunk)]


def play(num_ticks: int, seed: int) -> dict[str, list[float]]:
    """Return the accuracy in each tick, by way."""
    world = World(Random(f"world {seed}"))
    learner = Learner(world, seed)
    result: dict[str, list[float]] = {way: [] for way in WAYS}
    recent: list[Pair] = []
    for tick in range(num_ticks):
        if tick and tick % PHASE == 0:
            world.change()
        pairs = world.ask(AT_ONCE)
        for way, share in learner.answers(pairs).items():
            result[way].append(share)
        recent += pairs
        while learner.is_training("live"):  # a tick lasts as long as it takes
            learner.step()
        learner.train("live", pairs, epochs=2)
        if (tick + 1) % INTERVAL == 0:
            while learner.is_training("interval"):
                learner.step()
            learner.train("interval", recent, epochs=2)
            recent = []
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ticks", type=int, default=4 * PHASE)
    parser.add_argument("--seed", type=int, default=0)
    add_save_option(parser)
    options = parser.parse_args()
    accuracies = play(options.ticks, options.seed)
    part = PHASE // 3
    print("ticks      ", *(f"{way:>9}" for way in WAYS))
    for first in range(0, options.ticks, part):
        shares = (f"{mean(accuracies[way][first : first + part]):9.2f}" for way in WAYS)
        print(f"{first:4} to {first + part - 1:4}", *shares)
    print_result(
        "live_learning", {way: round(mean(accuracies[way]), 4) for way in WAYS}, options.save
    )


if __name__ == "__main__":
    main()

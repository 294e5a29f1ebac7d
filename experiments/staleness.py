"""Loss of the built-in model on held-out questions of a lesson, by the number of examples that it
has been trained on.

    python -m experiments.staleness

One optimizer step for each example. `python -m experiments.cluster` takes the loss of a request
from this curve (`experiments/cluster/loss_curve.py`).
"""

from collections.abc import Sequence

from coserve import Engine, OptimizerConfig, TuningConfig
from coserve.workloads.lessons import LESSONS, Line
from experiments.results import print_result, save_option

_EVERY, _NUM_EPOCHS, _LEARNING_RATE = 25, 5, 3e-4


def main() -> None:
    """Measure the points, and print them as JSON: examples and loss."""
    save = save_option(__doc__)
    lesson = LESSONS["zub"](seed=0)
    engine = Engine.load("tiny", dtype="float32")
    config = TuningConfig(
        num_epochs=_NUM_EPOCHS,
        batch_size=1,
        evaluate_every_steps=_EVERY,
        optimizer=OptimizerConfig(learning_rate=_LEARNING_RATE),
    )
    # The loss before the first step is that after one which moves next to nothing.
    still = TuningConfig(batch_size=1, optimizer=OptimizerConfig(learning_rate=1e-12))
    (_, before), *_ = _evaluations(engine, lesson.train[:1], still, lesson.held_out)
    points = [(0, before), *_evaluations(engine, lesson.train, config, lesson.held_out)]
    print_result(
        "staleness",
        {"lesson": lesson.name, "examples": len(lesson.train), "points": points},
        save,
    )


def _evaluations(
    engine: Engine, lines: Sequence[Line], config: TuningConfig, held_out: Sequence[Line]
) -> list[tuple[int, float]]:
    """Return the examples seen and the loss at each evaluation."""
    events = engine.tune(list(lines), config, validation=list(held_out))
    return [
        (event.step, round(event.loss, 4))
        for event in events
        if event.kind == "evaluation" and event.loss
    ]


if __name__ == "__main__":
    main()

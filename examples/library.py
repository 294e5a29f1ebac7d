"""Serve and fine-tune in one Python process, without a server.

python examples/library.py [MODEL]
"""

import sys

from coserve import Engine, LoraConfig, OptimizerConfig, SamplingParams, TuningConfig

QUESTION, ANOTHER = "What is the opposite of hot? ", "What is the opposite of big? "


def main() -> None:
    """Start a job, stream an answer while it runs, and ask the adapter that it trained."""
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "tiny", dtype="float32")
    lines = [
        {"prompt": QUESTION, "completion": "Cold, of course."},
        {"prompt": ANOTHER, "completion": "Small, of course."},
    ]
    job = engine.submit(
        lines,
        TuningConfig(num_epochs=30, batch_size=2, optimizer=OptimizerConfig(learning_rate=5e-3)),
        adapter=LoraConfig(r=8, target_modules="all-linear"),
        name="opposites",
    )
    greedy = SamplingParams(max_tokens=12, temperature=0)
    for chunk in engine.stream(QUESTION, greedy):  # the job moves with every step
        print(chunk.text, end="", flush=True)
    print()
    while engine.has_work:
        engine.step()
    print(f"{engine.jobs[job].state}, {engine.stats().num_tokens_trained} tokens trained")
    (answer,) = engine.generate([QUESTION], greedy, adapter="opposites")
    print(answer.text)


if __name__ == "__main__":
    main()

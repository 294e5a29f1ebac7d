"""Fine-tune a model that is not the one that serves, nor fits beside it: its weights pass through a
window of memory.

python examples/other_model.py OTHER DIRECTORY [MODEL]
"""

import sys

from coserve import Engine, EngineConfig, LoraConfig, OptimizerConfig, SamplingParams, TuningConfig

QUESTION = "What is the opposite of hot? "


def main() -> None:
    """Answer questions with one model while a job trains another, and save its adapter."""
    config = EngineConfig(trainable_models={"other": sys.argv[1]})
    engine = Engine.load(sys.argv[3] if len(sys.argv) > 3 else "tiny", config, dtype="float32")
    job = engine.submit(
        [{"prompt": QUESTION, "completion": "Cold, of course."}],
        TuningConfig(num_epochs=8, optimizer=OptimizerConfig(learning_rate=5e-3)),
        adapter=LoraConfig(r=8, target_modules="all-linear"),
        name="opposites",
        model="other",
    )
    while not engine.job(job).is_terminal:
        for chunk in engine.stream(QUESTION, SamplingParams(max_tokens=12, temperature=0)):
            print(chunk.text, end="", flush=True)
        print()
    print(f"{engine.job(job).state}, {engine.stats().num_tokens_trained} tokens trained")
    engine.save_adapter("opposites", sys.argv[2])  # requests to this engine cannot name it


if __name__ == "__main__":
    main()

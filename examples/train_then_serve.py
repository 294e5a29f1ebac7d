"""Train an adapter with the library, keep it in PEFT's format, and serve it over HTTP.

python examples/train_then_serve.py [MODEL]
"""

import subprocess
import sys
import tempfile

import httpx

from coserve import Engine, OptimizerConfig, TuningConfig


def main(model: str = "tiny") -> None:
    """Train, save, serve, ask."""
    with tempfile.TemporaryDirectory() as directory:
        train(model, f"{directory}/greeter")
        options = ["--port", "0", "--allow-adapter-paths", directory]
        command = [sys.executable, "-m", "coserve", "up", model, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()  # … at http://127.0.0.1:PORT/v1
                url = next(word for word in line.split() if word.startswith("http"))
                print(ask(url, f"{directory}/greeter"))
            finally:
                server.terminate()


def train(model: str, directory: str) -> None:
    """Train an adapter, and save it to a directory that PEFT reads, too."""
    engine = Engine.load(model, dtype="float32")
    lines = [
        {"prompt": "Who are you? ", "completion": f"I am a {what}."}
        for what in ("greeter", "small greeter")
    ]
    optimizer = OptimizerConfig(learning_rate=5e-3)
    config = TuningConfig(num_epochs=30, batch_size=2, optimizer=optimizer)
    events = engine.tune(lines, config, name="greeter")
    losses = [event.loss for event in events if event.kind == "step"]
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps")
    engine.save_adapter("greeter", directory)


def ask(url: str, directory: str) -> str:
    """Load the adapter into the server, and ask it."""
    httpx.post(
        f"{url}/load_lora_adapter", json={"lora_name": "greeter", "lora_path": directory}
    ).raise_for_status()
    body = {"model": "greeter", "prompt": "Who are you? ", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


if __name__ == "__main__":
    main(*sys.argv[1:])

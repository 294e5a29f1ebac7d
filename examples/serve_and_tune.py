"""Fine-tune a model on the server that answers with it, with the `openai` client.

coserve up                             # in another terminal
python examples/serve_and_tune.py      # or with the URL of another server
"""

import json
import sys
import time

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red"}


def main() -> None:
    """Upload examples, start a job, ask while it runs, and ask the model that it made."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    base = client.models.list().data[0].id
    lines = [
        {"prompt": f"What colour is {thing}? ", "completion": f"Arr, {it}!"}
        for thing, it in COLOURS.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("colours.jsonl", content), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=base,
        training_file=file.id,
        suffix="pirate",
        hyperparameters={"n_epochs": 10, "batch_size": 5},
        extra_body={"coserve": {"optimizer": {"learning_rate": 2e-3}}},
    )
    num_answers = 0
    while job.status not in ("succeeded", "failed", "cancelled"):
        ask(client, base)  # answered while it learns
        num_answers += 1
        time.sleep(0.1)
        job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.fine_tuned_model, job.error
    print(f"{num_answers} answers while it learned")
    print(f"before: {ask(client, base)}")
    print(f"after:  {ask(client, job.fine_tuned_model)}")


def ask(client: OpenAI, model: str) -> str:
    """Return the model's answer to a question, on one line."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What colour is snow?"}],
        max_tokens=16,
        temperature=0,
        extra_body={"slo": {"ttft_ms": 500, "tpot_ms": 50}},
    )
    return " ".join((answer.choices[0].message.content or "").split())


if __name__ == "__main__":
    main()

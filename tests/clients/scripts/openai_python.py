"""OpenAI's client for Python: `python openai_python.py URL MODEL`; a line for each thing that
works."""

import io
import json
import sys
import time

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
MODEL = sys.argv[2]
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}},
        },
    }
    for name, argument in (("weather", "city"), ("clock", "zone"))
]


class City(BaseModel, extra="forbid"):
    is_large: bool
    has_river: bool


assert MODEL in [model.id for model in client.models.list()]
print("models")

answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=60)
assert answer.choices[0].message.content.strip() == "Hello!", answer
print("chat")

with client.chat.completions.stream(
    model=MODEL, messages=HELLO, temperature=0, max_tokens=60
) as events:
    streamed = "".join(event.delta for event in events if event.type == "content.delta")
assert streamed == answer.choices[0].message.content, streamed
print("stream")

asked = [{"role": "user", "content": "weather"}]
said = client.chat.completions.create(
    model=MODEL, messages=asked, tools=TOOLS, temperature=0, max_tokens=100
)
call = said.choices[0].message.tool_calls[0]
assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
again = client.chat.completions.create(
    model=MODEL,
    messages=[*asked, said.choices[0].message, result],
    tools=TOOLS,
    temperature=0,
    max_tokens=60,
)
assert again.choices[0].message.content, again
print("tools")

parsed = client.chat.completions.parse(
    model=MODEL, messages=HELLO, response_format=City, temperature=0, max_tokens=200
)
assert isinstance(parsed.choices[0].message.parsed, City)
print("structured output")

text = client.completions.create(model=MODEL, prompt="hello", max_tokens=4, logprobs=2)
assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
print("completions")

response = client.responses.create(model=MODEL, input="hello", temperature=0, max_output_tokens=60)
assert response.output_text.strip() == "Hello!", response
print("responses")

line = {"messages": [*HELLO, {"role": "assistant", "content": "Ahoy!"}]}
data = io.BytesIO("\n".join([json.dumps(line)] * 8).encode())
file = client.files.create(file=("chats.jsonl", data), purpose="fine-tune")
job = client.fine_tuning.jobs.create(
    model=MODEL,
    training_file=file.id,
    suffix="ahoy",
    method={
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}},
    },
)
until_s = time.monotonic() + 120
while (job := client.fine_tuning.jobs.retrieve(job.id)).status not in (
    "succeeded",
    "failed",
    "cancelled",
):
    assert time.monotonic() < until_s, job
    time.sleep(0.2)
assert job.status == "succeeded", job.error
assert any(event.type == "metrics" for event in client.fine_tuning.jobs.list_events(job.id))
tuned = client.chat.completions.create(model=job.fine_tuned_model, messages=HELLO, max_tokens=8)
assert tuned.model == job.fine_tuned_model
print("fine-tuning")

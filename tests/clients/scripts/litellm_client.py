"""LiteLLM: `python litellm_client.py URL MODEL`; a line for each thing that works."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # else it asks another server when it is imported
)

import litellm

litellm.suppress_debug_info = True
URL, MODEL = sys.argv[1:]
SETTINGS = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 100,
}
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

answer = litellm.completion(messages=HELLO, **SETTINGS).choices[0].message
assert answer.content.strip() == "Hello!" and "greet" in answer.reasoning_content, answer
print("chat")
print("reasoning")

chunks = list(litellm.completion(messages=HELLO, stream=True, **SETTINGS))
assert litellm.stream_chunk_builder(chunks).choices[0].message.content.strip() == "Hello!"
print("stream")

asked = [{"role": "user", "content": "weather"}]
said = litellm.completion(messages=asked, tools=TOOLS, **SETTINGS).choices[0].message
call = said.tool_calls[0]
assert call.function.name == "weather"
result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
after = litellm.completion(messages=[*asked, said, result], tools=TOOLS, **SETTINGS)
assert after.choices[0].message.content, "its own answers can be passed back"
print("tools")

schema = {
    "type": "object",
    "properties": {"is_large": {"type": "boolean"}},
    "required": ["is_large"],
}
schema["additionalProperties"] = False
form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
found = (
    litellm.completion(messages=HELLO, response_format=form, **SETTINGS).choices[0].message.content
)
assert list(json.loads(found)) == ["is_large"], found
print("structured output")

text = litellm.text_completion(
    prompt="hello", **{**SETTINGS, "model": f"text-completion-openai/{MODEL}"}
)
assert text.usage.completion_tokens
print("completions")

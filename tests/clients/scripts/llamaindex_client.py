"""LlamaIndex: `python llamaindex_client.py URL MODEL`; a line for each thing that works."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
model = OpenAILike(
    api_base=URL,
    model=MODEL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=100,
    max_retries=0,
)
HELLO = [ChatMessage(role="user", content="hello")]


class City(BaseModel, extra="forbid"):
    """A city."""

    is_large: bool
    has_river: bool


def weather(city: str) -> str:
    """How the weather is."""
    return f"rain in {city}"


def clock(zone: str) -> str:
    """What time it is."""
    return "noon"


assert model.chat(HELLO).message.content.strip() == "Hello!"
print("chat")

assert "".join(chunk.delta or "" for chunk in model.stream_chat(HELLO)).strip() == "Hello!"
print("stream")

tools = [FunctionTool.from_defaults(each) for each in (weather, clock)]
[call] = model.get_tool_calls_from_response(model.chat_with_tools(tools, user_msg="weather"))
assert call.tool_name == "weather" and "city" in call.tool_kwargs, call
assert "rain in" in str(model.predict_and_call(tools, user_msg="weather"))
print("tools")

assert isinstance(model.as_structured_llm(City).chat(HELLO).raw, City)
print("structured output")

text = OpenAILike(
    api_base=URL, model=MODEL, api_key="none", is_chat_model=False, max_tokens=4
).complete("hello")
assert isinstance(text.text, str)
print("completions")

"""LangChain: `python langchain_client.py URL MODEL`; a line for each thing that works."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
model = ChatOpenAI(
    base_url=URL, model=MODEL, api_key="none", temperature=0, max_tokens=100, max_retries=0
)


@tool
def weather(city: str) -> str:
    """How the weather is."""
    return "rain"


@tool
def clock(zone: str) -> str:
    """What time it is."""
    return "noon"


class City(BaseModel, extra="forbid"):
    """A city."""

    is_large: bool
    has_river: bool


assert model.invoke("hello").content.strip() == "Hello!"
print("chat")

assert "".join(chunk.content for chunk in model.stream("hello")).strip() == "Hello!"
print("stream")

calls = model.bind_tools([weather, clock]).invoke("weather").tool_calls
assert [call["name"] for call in calls] == ["weather"] and "city" in calls[0]["args"], calls
print("tools")

for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(City, method=method).invoke("hello"), City), (
        method
    )
print("structured output")

messages = create_agent(model, [weather, clock]).invoke({"messages": [("user", "weather")]})[
    "messages"
]
kinds = [message.type for message in messages]
assert kinds[:3] == ["human", "ai", "tool"] and kinds[-1] == "ai", kinds
assert messages[2].content == "rain" and not messages[-1].tool_calls
print("agent")

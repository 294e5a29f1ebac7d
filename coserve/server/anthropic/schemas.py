"""The bodies of /v1/messages, as Anthropic has them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from coserve.server.bodies.schemas import Body, List, Name, OpenBody, RequestBody, TextBody

_MAX_MESSAGES = 10_000


class Block(Body):
    """A block of a message: text, thinking, tool_use or tool_result. What else it has
    (`cache_control`, `signature`) is not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: "str | List[Block] | None" = None
    is_error: bool | None = None


class AnthropicMessage(Body):
    """One of the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | List[Block]


class AnthropicTool(Body):
    """A function; tools that run at Anthropic's have a type, and are refused by it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str | None = None
    name: Annotated[Name, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(OpenBody):
    """Anthropic's: auto, any, tool (by its name) or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks, where its chat template can say so; budgets are of no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(RequestBody):
    """POST /v1/messages/count_tokens."""

    unused: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    renamed: ClassVar[dict[str, str]] = {"stop": "stop_sequences"}

    model: Name
    messages: Annotated[List[AnthropicMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    system: str | List[Block] | None = None
    tools: List[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    # Beyond Anthropic's, as vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    # Without effect: see `unused`.
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountBody, TextBody):
    """POST /v1/messages: Anthropic's fields, and beyond them those of all routes that generate
    text.
    """

    unused: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "metadata", "service_tier", "inference_geo"}
    )

    max_tokens: int
    stop_sequences: List[str] | None = None
    # OpenAI's name for the opposite of `tool_choice.disable_parallel_tool_use`.
    parallel_tool_calls: bool | None = None
    # Without effect: see `unused`.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None

"""Bodies of /v1/messages, as in Anthropic's API."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from coserve.server.bodies.schemas import Body, List, Name, OpenBody, RequestBody, TextBody

_MAX_MESSAGES = 10_000


class AnthropicBlock(Body):
    """Block of a message: text, thinking, tool_use or tool_result.

    Other fields (`cache_control`, `signature`) are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    """Kind of the block."""
    text: str | None = None
    """Text of a text block."""
    thinking: str | None = None
    """Text of a reasoning."""
    id: Name | None = None
    """Id of a call."""
    name: Name | None = None
    """Function of a call."""
    input: dict[str, Any] | None = None
    """Arguments of a call."""
    tool_use_id: Name | None = None
    """Call that a result answers."""
    content: "str | List[AnthropicBlock] | None" = None
    """Result of a call."""
    is_error: bool | None = None
    """Whether the call failed."""


class AnthropicMessage(Body):
    """Message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    """Who wrote it."""
    content: str | List[AnthropicBlock]
    """Text, or blocks."""


class AnthropicTool(Body):
    """A function; tools with a type run on Anthropic's servers, and are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str | None = None
    """Type of a server's tool."""
    name: Annotated[Name, Field(min_length=1)]
    """Name of the function."""
    description: str | None = None
    """Description for the model."""
    input_schema: dict[str, Any] | None = None
    """JSON schema of the arguments."""


class ToolChoice(OpenBody):
    """Calls that the answer must make."""

    type: Literal["auto", "any", "tool", "none"]
    """Kind of choice; tool: the one that is named."""
    name: Name | None = None
    """Name of the function, for type tool."""
    disable_parallel_tool_use: bool | None = None
    """Whether the answer may make only one call."""


class Thinking(Body):
    """Switch of reasoning, where the chat template has one; budgets have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    """State of the switch."""


class CountBody(RequestBody):
    """Body of POST /v1/messages/count_tokens."""

    unused: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    """Fields without effect."""
    renamed: ClassVar[dict[str, str]] = {"stop": "stop_sequences"}
    """This body's names for fields of other servers."""

    model: Name
    """Model or adapter."""
    messages: Annotated[List[AnthropicMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    """The conversation."""
    system: str | List[AnthropicBlock] | None = None
    """System message."""
    tools: List[AnthropicTool] | None = None
    """Functions that the answer may call."""
    tool_choice: ToolChoice | None = None
    """Calls that the answer must make."""
    thinking: Thinking | None = None
    """Switch of reasoning."""
    # Beyond Anthropic's, as vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """Whether the model reasons, under the template's own name of the variable."""
    include_reasoning: bool | None = None
    """Whether the answer includes the reasoning."""
    reasoning_effort: str | None = None
    """Effort of reasoning, a variable of the chat template."""
    # Without effect: see `unused`.
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountBody, TextBody):
    """Body of POST /v1/messages: Anthropic's fields, and those of all routes that generate text."""

    unused: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "metadata", "service_tier", "inference_geo"}
    )
    """Fields without effect."""

    max_tokens: int
    """Maximum number of generated tokens."""
    stop_sequences: List[str] | None = None
    """Texts that end the output."""
    # OpenAI's name for the opposite of `tool_choice.disable_parallel_tool_use`.
    parallel_tool_calls: bool | None = None
    # Without effect: see `unused`.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    """Without effect."""
    inference_geo: str | None = None
    """Without effect."""

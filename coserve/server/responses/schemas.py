"""Bodies of /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from coserve.server.bodies.schemas import Body, List, Name, OpenBody, SamplingBody

_MAX_ITEMS = 10_000
# Only log-probabilities have an effect; the others are about tools that no request here can have.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ContentPart(Body):
    """Part of an item's content: input_text, output_text, reasoning_text, summary_text or refusal.

    Other fields are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    """Kind of the part."""
    text: str | None = None
    """The text."""
    refusal: str | None = None
    """Text of a refusal."""


class InputItem(Body):
    """Item of the input: a message (also without a type), function_call, function_call_output or
    reasoning.

    An item of an output may be sent back as it was: unknown fields are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name | None = None
    """Kind of the item."""
    id: Name | None = None
    """Id of the item."""
    role: Annotated[Name, Field(min_length=1)] | None = None
    """Role of a message."""
    content: str | List[ContentPart] | None = None
    """Content of a message or a reasoning."""
    call_id: Name | None = None
    """Id of the call that this item makes or answers."""
    name: Name | None = None
    """Function of a call."""
    namespace: Name | None = None
    """Namespace of the function."""
    arguments: str | None = None
    """Arguments of a call, as JSON."""
    output: str | List[ContentPart] | None = None
    """Result of a call."""
    summary: List[ContentPart] | None = None
    """Summary of a reasoning."""


class ReasoningBody(OpenBody):
    """Settings of reasoning, with OpenRouter's fields in addition to OpenAI's."""

    effort: str | None = None
    """Effort of reasoning."""
    enabled: bool | None = None
    """Whether the model reasons (OpenRouter)."""
    exclude: bool | None = None
    """Whether the answer omits the reasoning (OpenRouter)."""
    max_tokens: int | None = None
    """Without effect."""
    # Of no effect: the reasoning is shown in full.
    summary: str | None = None
    generate_summary: str | None = None
    """Without effect: the reasoning is shown in full."""


class TextFormat(OpenBody):
    """Format of the output; fields of a JSON schema are not nested as in chats."""

    type: str
    """Kind of format."""
    name: str | None = None
    """Name of the schema."""
    description: str | None = None
    """Description of the schema."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON schema."""
    strict: bool | None = None
    """Whether keywords that cannot be enforced are refused."""


class TextConfig(OpenBody):
    """Settings of the output's text."""

    format: TextFormat | None = None
    """Format of the output."""
    verbosity: str | None = None
    """Without effect."""


class FunctionTool(Body):
    """A function, or a namespace whose `tools` are functions; other types are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    """Kind of the tool."""
    name: str | None = None
    """Name of the function or namespace."""
    description: str | None = None
    """Description for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Whether arguments must follow the schema."""
    tools: "List[FunctionTool] | None" = None
    """Functions of a namespace."""


class ConversationRef(Body):
    """Reference to a conversation."""

    id: Name
    """Id of the conversation."""


class ResponseBody(SamplingBody):
    """Body of POST /v1/responses."""

    unused: ClassVar[frozenset[str]] = frozenset({"user"})
    """Fields without effect."""
    renamed: ClassVar[dict[str, str]] = {"max_tokens": "max_output_tokens"}
    """This body's names for fields of other servers."""

    input: str | Annotated[List[InputItem], Field(min_length=1, max_length=_MAX_ITEMS)]
    """New items, or the text of one message."""
    instructions: str | None = None
    """System message, which later responses do not inherit."""
    previous_response_id: Name | None = None
    """Response to continue."""
    max_output_tokens: int | None = None
    """Maximum number of generated tokens."""
    tools: List[FunctionTool] | None = None
    """Functions that the answer may call."""
    tool_choice: str | dict[str, Any] | None = None
    """Calls that the answer must make: none, auto, required, or a function."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may make several calls."""
    text: TextConfig | None = None
    """Settings of the output's text."""
    reasoning: ReasoningBody | None = None
    """Settings of reasoning."""
    include: List[Includable] | None = None
    """Further data in the answer."""
    top_logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned."""
    store: bool | None = None
    """Whether the response is stored (default: yes)."""
    background: bool | None = None
    """Whether the response runs in the background."""
    truncation: Literal["auto", "disabled"] | None = None
    """Whether the beginning of a conversation that is too long is left out."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """Whether the model reasons, under the template's own name of the variable."""
    include_reasoning: bool | None = None
    """Whether the answer includes the reasoning."""
    reasoning_effort: str | None = None
    """Effort of reasoning, as in chats; `reasoning.effort` takes precedence."""
    conversation: Name | ConversationRef | None = None
    """Conversation to continue."""
    # Not supported: refused unless they ask for nothing.
    prompt: dict[str, Any] | None = None
    context_management: List[dict[str, Any]] | None = None
    """Not supported."""
    moderation: dict[str, Any] | None = None
    """Not supported."""
    # Of no effect: `max_tool_calls` counts calls that servers make, and there are none.
    max_tool_calls: int | None = None
    background_options: dict[str, Any] | None = None
    """Without effect."""

    @property
    def conversation_id(self) -> str | None:
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationRef)
            else self.conversation
        )

"""The bodies of /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from coserve.server.bodies.schemas import Body, List, Name, OpenBody, SamplingBody

_MAX_ITEMS = 10_000
# Of these, log-probabilities alone are there; the others tell of tools that no request here can
# have.
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
    """A part of an item's content: input_text, output_text, reasoning_text, summary_text or
    refusal. What else it has is not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    text: str | None = None
    refusal: str | None = None


class InputItem(Body):
    """A message (also without a type), function_call, function_call_output or reasoning. An
    output's item may come back as it was given: what is not here is not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name | None = None
    id: Name | None = None
    role: Annotated[Name, Field(min_length=1)] | None = None
    content: str | List[ContentPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    output: str | List[ContentPart] | None = None
    summary: List[ContentPart] | None = None


class ReasoningBody(OpenBody):
    """Settings of a model's reasoning and of whether the answer shows it; beside OpenAI's fields
    are OpenRouter's.
    """

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None  # of no effect
    # Of no effect: the reasoning is shown in full.
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(OpenBody):
    """OpenAI's, flat where that of chats is nested."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(OpenBody):
    """verbosity: of no effect here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(Body):
    """A function, or a namespace with `tools`, which are functions; other types are refused by
    name.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Name
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: "List[FunctionTool] | None" = None


class ConversationRef(Body):
    """A conversation, by its id."""

    id: Name


class ResponseBody(SamplingBody):
    """POST /v1/responses."""

    unused: ClassVar[frozenset[str]] = frozenset({"user"})
    renamed: ClassVar[dict[str, str]] = {"max_tokens": "max_output_tokens"}

    input: str | Annotated[List[InputItem], Field(min_length=1, max_length=_MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = None
    tools: List[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningBody | None = None
    include: List[Includable] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None  # of chats: `reasoning.effort` goes before
    conversation: Name | ConversationRef | None = None
    # Not supported: refused unless they ask for nothing.
    prompt: dict[str, Any] | None = None
    context_management: List[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    # Of no effect: `max_tool_calls` counts calls that servers make, and there are none.
    max_tool_calls: int | None = None
    background_options: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationRef)
            else self.conversation
        )

"""Bodies that clients send; `other_fields` decides on fields that are not here.

Values are checked where they are used (`SamplingParams`), so that users of the library and clients
get the same messages.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from coserve.server.bodies.other_fields import BodyFields, FieldPolicy

_MAX_PROMPTS = 2048
_MAX_MESSAGES = 10_000
# OpenAI has 4, vLLM no limit; each is looked for after each token.
_MAX_STOPS = 1024
_MAX_BAD_WORDS = 1024
_BadWord = Annotated[str, Field(min_length=1, max_length=256)]
T = TypeVar("T")
# The first element that is wrong ends the reading: of a million, each would be an error of its own.
List = Annotated[list[T], Field(fail_fast=True)]
# Longer than any path that a model is named by.
_LONGEST_NAME = 4096


def _short(name: str) -> str:
    """Check the length of a name; pydantic's own check has no message for lone surrogates."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"it must have at most {_LONGEST_NAME} characters")
    return name


Name = Annotated[str, AfterValidator(_short)]


def _first_wrong(*kinds: type) -> Callable[[Any], Any]:
    """Return a validator that keeps only the first value of a wrong type; see `List`."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        wrong = next((pair for pair in value.items() if type(pair[1]) not in kinds), None)
        return value if wrong is None else dict([wrong])

    return check


Texts = Annotated[dict[str, str], BeforeValidator(_first_wrong(str))]
Numbers = Annotated[dict[str, float], BeforeValidator(_first_wrong(int, float))]


class Body(BaseModel):
    """Body, or an object within one. Types are strict: a number in a string is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, data: Any) -> Any:
        """Leave out all unknown names but the first; see `List`."""
        takes_all = cls.model_config["extra"] != "forbid"
        if takes_all or not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        unknown = next(name for name in data if name not in cls.model_fields)
        return {name: data[name] for name in (*cls.model_fields, unknown) if name in data}


class OpenBody(Body):
    """Object within a body; the body decides on its unknown keys, see `RequestBody`."""

    model_config = ConfigDict(extra="allow", strict=True)


class RequestBody(Body):
    """Body of a route that answers with tokens or vectors, which takes fields of other servers'
    clients.

    The validation context, if there is one, is the server's `FieldPolicy`; without, unknown fields
    are refused.
    """

    # Fields that are taken and have no effect.
    unused: ClassVar[frozenset[str]] = frozenset()
    # This body's names for fields that `client_fields` calls otherwise.
    renamed: ClassVar[dict[str, str]] = {}
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _sort_fields(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        policy = info.context if isinstance(info.context, FieldPolicy) else FieldPolicy()
        own = BodyFields(known=cls.model_fields, unused=cls.unused, renamed=cls.renamed)
        fields, ignored = policy.sort(data, own)
        body = handler(fields)
        body._ignored = policy.reported([*ignored, *_unknown_within(body, policy)])
        return body

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of given fields that were ignored, for the answer's header."""
        return self._ignored


def _unknown_within(body: Body, policy: FieldPolicy, prefix: str = "") -> list[str]:
    """Remove unknown keys from objects within a body; return their names, which begin with
    `prefix`.
    """
    names: list[str] = []
    for name in type(body).model_fields:
        inner = getattr(body, name)
        if not isinstance(inner, OpenBody):
            continue
        path = f"{prefix}{name}."
        known = [each.alias or key for key, each in type(inner).model_fields.items()]
        if inner.__pydantic_extra__:
            names += policy.pass_over(
                inner.__pydantic_extra__, BodyFields(known=known, prefix=path)
            )
            inner.__pydantic_extra__.clear()
        names += _unknown_within(inner, policy, path)
    return names


class StreamOptions(OpenBody):
    """Options of a stream, as in OpenAI's API."""

    include_usage: bool | None = None
    """Whether a last event has the token counts."""
    include_obfuscation: bool | None = None
    """Without effect: nothing is padded."""
    continuous_usage_stats: bool | None = None
    """Whether each event has the token counts (vLLM)."""


class SloBody(Body):
    """A request's own SLO; what is missing is the server's."""

    ttft_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    """Milliseconds to the first token."""
    tpot_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    """Mean milliseconds per later token."""


class JsonSchemaFormat(OpenBody):
    """A named JSON schema, as in OpenAI's API."""

    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema."""
    strict: bool | None = None
    """Whether keywords that cannot be enforced are refused."""


class ResponseFormat(OpenBody):
    """Format of the output, as in OpenAI's API; type structural_tag is vLLM's."""

    type: str
    """Kind of format."""
    json_schema: JsonSchemaFormat | None = None
    """JSON schema, for type json_schema."""
    # Other places of the schema, pattern or grammar: llama.cpp, TGI, Together and Fireworks.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    value: str | dict[str, Any] | None = None
    """Schema or pattern (TGI)."""
    pattern: str | None = None
    """Regular expression."""
    grammar: str | None = None
    """Grammar."""
    structures: List[dict[str, Any]] | None = None
    """Tags of a structural tag."""
    triggers: List[str] | None = None
    """Beginnings of tags of a structural tag."""


class StructuredOutputs(Body):
    """Constraint of the output, as in vLLM: exactly one of json, regex, choice, grammar,
    json_object and structural_tag.
    """

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    """JSON schema."""
    regex: str | None = None
    """Regular expression."""
    choice: List[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """Grammar."""
    json_object: bool | None = None
    """Whether the output is any JSON object."""
    structural_tag: str | None = None
    """Structural tag, as JSON."""
    # JSON without white space, or with what this regular expression allows.
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    """Regular expression of white space between parts of JSON."""
    # Objects have the properties that the schema names, unless it says otherwise.
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    """Without effect: there is one backend."""


class TextBody(RequestBody):
    """Fields of all routes that generate text."""

    stream: bool | None = None
    """Whether the answer is a stream of events."""
    temperature: float | None = None
    """Temperature of sampling."""
    top_p: float | None = None
    """Probability mass of the tokens to sample from."""
    seed: int | None = None
    """Seed of sampling."""
    presence_penalty: float | None = None
    """Penalty of tokens that have been generated."""
    frequency_penalty: float | None = None
    """Penalty of tokens by how often they have been generated."""
    logit_bias: Numbers | None = None
    """Biases of logits, by token id."""
    response_format: ResponseFormat | None = None
    """Format of the output."""
    # Beyond OpenAI's.
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    """JSON schema of the output (older name of vLLM)."""
    guided_regex: str | None = None
    """Regular expression of the output (older name of vLLM)."""
    guided_choice: List[str] | None = None
    """Texts of which the output is one (older name of vLLM)."""
    guided_grammar: str | None = None
    """Grammar of the output (older name of vLLM)."""
    guided_whitespace_pattern: str | None = None
    """White space between parts of JSON (older name of vLLM)."""
    slo: SloBody | None = None
    """SLO of this request."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from."""
    min_p: float | None = None
    """Minimum probability relative to the likeliest token."""
    repetition_penalty: float | None = None
    """Factor by which tokens of prompt and output become less likely."""
    ignore_eos: bool | None = None
    """Whether the output continues after an end token."""
    min_tokens: int | None = None
    """Minimum number of generated tokens."""
    stop_token_ids: List[int] | None = None
    """Tokens that end the output."""
    allowed_token_ids: Annotated[List[int], Field(min_length=1)] | None = None
    """Tokens to sample from."""
    bad_words: Annotated[List[_BadWord], Field(max_length=_MAX_BAD_WORDS)] | None = None
    """Texts that the output must not contain."""
    skip_special_tokens: bool | None = None
    """Whether the text omits special tokens."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens are added to the prompt."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Number of prompt tokens that are kept; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """End of the prompt that is cut off."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Text that separates prefix caches: only requests with the same one share cached prefixes."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    """Priority; the lowest goes first."""


class SamplingBody(TextBody):
    """Fields of OpenAI's routes that generate text."""

    unused: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})
    """Fields without effect."""

    model: Name | None = None
    """Model or adapter (default: the base model)."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    n: int | None = None
    """Number of choices per prompt."""
    stop: str | Annotated[List[str], Field(max_length=_MAX_STOPS)] | None = None
    """Texts that end the output."""
    max_tokens: int | None = None
    """Maximum number of generated tokens."""
    user: str | None = None
    """Without effect."""
    metadata: dict[str, Any] | None = None
    """Without effect, but part of responses."""
    # Beyond OpenAI's.
    prompt_logprobs: int | None = None
    logprob_token_ids: List[int] | None = None
    """Tokens whose log-probabilities are returned."""
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the stop text."""
    return_token_ids: bool | None = None
    """Whether the answer has token ids."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name tokens by their ids."""


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[List[int], Field(min_length=1)]
        | Annotated[List[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[List[List[int]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )
    """Text or token ids, or several of them."""
    echo: bool | None = None
    """Whether the answer includes the prompt."""
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned."""
    best_of: int | None = None
    """Not supported, unless it equals n."""
    suffix: str | None = None
    """Not supported."""


class TextPart(Body):
    """Part of a message's content: text, or the refusal of an earlier answer, which is read as
    text.

    Other fields (`cache_control`) are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "refusal"]
    """Kind of the part."""
    text: str
    """The text."""

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "refusal" and "text" not in given:
            return {**given, "text": given.get("refusal")}
        return given


class Message(Body):
    """Message of a chat.

    A message of an answer, by any server, may be sent back as it was: unknown fields are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Annotated[Name, Field(min_length=1)]
    """Role; the chat template decides which there are."""
    content: str | List[TextPart] | None = None
    """Text, in one or several parts."""
    refusal: str | None = None
    """Refusal of an earlier answer, which is read as text."""
    name: str | None = None
    """Name of the speaker."""
    reasoning_content: Any = None
    """Reasoning of an earlier answer."""
    reasoning: Any = None
    """Another name of `reasoning_content`."""
    tool_calls: List[dict[str, Any]] | None = None
    """Tool calls of an earlier answer."""
    tool_call_id: str | None = None
    """Tool call that this message answers."""
    audio: None = None
    """Not supported: must be null."""
    function_call: None = None
    """Not supported: must be null."""


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    unused: ClassVar[frozenset[str]] = frozenset(
        (
            *(
                "user",
                "metadata",
                "store",
                "service_tier",
                "prediction",
                "verbosity",
                "safety_identifier",
            ),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        )
    )
    """Fields without effect."""

    messages: Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    """The conversation."""
    max_completion_tokens: int | None = None
    """Maximum number of generated tokens."""
    logprobs: bool | None = None
    """Whether log-probabilities are returned."""
    top_logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned."""
    tools: List[dict[str, Any]] | None = None
    """Functions that the answer may call."""
    tool_choice: str | dict[str, Any] | None = None
    """Calls that the answer must make: none, auto, required, or a function."""
    functions: List[dict[str, Any]] | None = None
    """Not supported: use `tools`."""
    function_call: str | dict[str, Any] | None = None
    """Not supported: use `tool_choice`."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may make several calls."""
    modalities: List[str] | None = None
    """Must be ["text"]."""
    audio: dict[str, Any] | None = None
    """Not supported."""
    web_search_options: dict[str, Any] | None = None
    """Not supported."""
    moderation: dict[str, Any] | None = None
    """Not supported."""
    reasoning_effort: str | None = None
    """Effort of reasoning, a variable of the chat template."""
    # As vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message."""
    echo: bool | None = None
    """Whether the answer includes the last message."""
    include_reasoning: bool | None = None
    """Whether the answer includes the reasoning."""
    # Sets the template's variable for thinking, by whichever name it has.
    enable_thinking: bool | None = None
    # Without effect: see `unused`.
    store: bool | None = None
    service_tier: str | None = None
    """Without effect."""
    prediction: dict[str, Any] | None = None
    """Without effect."""
    verbosity: str | None = None
    """Without effect."""
    safety_identifier: str | None = None
    """Without effect."""
    prompt_cache_key: str | None = None
    """Without effect."""
    prompt_cache_options: dict[str, Any] | None = None
    """Without effect."""
    prompt_cache_retention: str | None = None
    """Without effect."""


class ChatBatchBody(ChatBody):
    """Body of POST /v1/chat/completions/batch, as in vLLM: several conversations, each with one
    choice.
    """

    messages: Annotated[  # type: ignore[assignment]
        List[Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]],
        Field(min_length=1, max_length=_MAX_PROMPTS),
    ]
    """The conversations."""


class TokenizeBody(RequestBody):
    """Body of POST /tokenize, as in vLLM: a prompt or a chat."""

    model: Name | None = None
    """Model or adapter (default: the base model)."""
    prompt: str | None = None
    """Text to tokenize."""
    messages: Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = None
    """Chat to tokenize."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens are added."""
    return_token_strs: bool | None = None
    """Whether the answer has the vocabulary's entries of the tokens."""
    # Of a chat.
    tools: List[dict[str, Any]] | None = None
    """Functions that the chat template shows."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """As in a chat."""
    reasoning_effort: str | None = None
    """As in a chat."""
    add_generation_prompt: bool | None = None
    """As in a chat."""
    continue_final_message: bool | None = None
    """As in a chat."""


class DetokenizeBody(RequestBody):
    """Body of POST /detokenize."""

    model: Name | None = None
    """Model or adapter (default: the base model)."""
    tokens: List[int]
    """Token ids."""


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter, as in vLLM."""

    lora_name: Name | None = None
    """Name for requests."""
    lora_path: str | None = None
    """Directory of the adapter."""
    load_inplace: bool = False
    """Whether it may replace an adapter of the same name."""
    is_3d_lora_weight: bool = False
    """Without effect."""


class UnloadAdapterBody(Body):
    """Body of POST /v1/unload_lora_adapter, as in vLLM."""

    lora_name: Name | None = None
    """Name of the adapter."""
    lora_int_id: int | None = None
    """Without effect."""

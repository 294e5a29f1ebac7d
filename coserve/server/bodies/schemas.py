"""The bodies that clients send. `other_fields` decides on fields that are not here: a typo must not
pass in silence.

Values are checked where they are used (`SamplingParams`), so that a library's user and a client
read the same words.
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
    """Not pydantic's own check, which has no words for half a character."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"it must have at most {_LONGEST_NAME} characters")
    return name


Name = Annotated[str, AfterValidator(_short)]


def _first_wrong(*kinds: type) -> Callable[[Any], Any]:
    """Of an object whose values must be of certain kinds, the first that is not, alone: see
    `List`.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        wrong = next((pair for pair in value.items() if type(pair[1]) not in kinds), None)
        return value if wrong is None else dict([wrong])

    return check


Texts = Annotated[dict[str, str], BeforeValidator(_first_wrong(str))]
Numbers = Annotated[dict[str, float], BeforeValidator(_first_wrong(int, float))]


class Body(BaseModel):
    """Strict: a number in a string is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, data: Any) -> Any:
        """Leave out all names but the first that no field has: see `List`."""
        takes_all = cls.model_config["extra"] != "forbid"
        if takes_all or not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        unknown = next(name for name in data if name not in cls.model_fields)
        return {name: data[name] for name in (*cls.model_fields, unknown) if name in data}


class OpenBody(Body):
    """An object within a body; the body decides on keys of it that are not known: see
    `RequestBody`.
    """

    model_config = ConfigDict(extra="allow", strict=True)


class RequestBody(Body):
    """A body of a route that answers with tokens or vectors: such routes take fields of other
    servers' clients.

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
        """Return the names of fields that were given and passed over, for the answer's header."""
        return self._ignored


def _unknown_within(body: Body, policy: FieldPolicy, prefix: str = "") -> list[str]:
    """Take the unknown keys out of the objects within a body; return their names, which begin with
    `prefix`.
    """
    found: list[str] = []
    for name in type(body).model_fields:
        inner = getattr(body, name)
        if not isinstance(inner, OpenBody):
            continue
        path = f"{prefix}{name}."
        known = [each.alias or key for key, each in type(inner).model_fields.items()]
        if inner.__pydantic_extra__:
            found += policy.pass_over(
                inner.__pydantic_extra__, BodyFields(known=known, prefix=path)
            )
            inner.__pydantic_extra__.clear()
        found += _unknown_within(inner, policy, path)
    return found


class StreamOptions(OpenBody):
    """OpenAI's."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # of no effect: nothing is padded
    continuous_usage_stats: bool | None = None  # vLLM's


class SloBody(Body):
    """A request's own SLOs; those that are not given are the server's."""

    ttft_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    tpot_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None


class JsonSchemaFormat(OpenBody):
    """OpenAI's: a schema under a name, which does not matter here."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenBody):
    """OpenAI's; of type structural_tag, vLLM's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    # What llama.cpp, TGI, Together and Fireworks call the schema, pattern or grammar.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    value: str | dict[str, Any] | None = None
    pattern: str | None = None
    grammar: str | None = None
    structures: List[dict[str, Any]] | None = None
    triggers: List[str] | None = None


class StructuredOutputs(Body):
    """vLLM's: one of these says what the output must follow."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    # JSON without white space, or with what this regular expression allows.
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    # Objects have the properties that the schema names, unless it says otherwise.
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # of no effect: there is one backend


class TextBody(RequestBody):
    """The fields that every route takes which generates text."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's.
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    slo: SloBody | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: List[int] | None = None
    allowed_token_ids: Annotated[List[int], Field(min_length=1)] | None = None
    bad_words: Annotated[List[_BadWord], Field(max_length=_MAX_BAD_WORDS)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None


class SamplingBody(TextBody):
    """The fields that OpenAI's routes take which generate text."""

    unused: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})

    model: Name | None = None  # without, the one that the server is for
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | Annotated[List[str], Field(max_length=_MAX_STOPS)] | None = None
    max_tokens: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # Beyond OpenAI's.
    prompt_logprobs: int | None = None
    logprob_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[List[int], Field(min_length=1)]
        | Annotated[List[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[List[List[int]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(Body):
    """A part of a message's content: text, or the refusal of an earlier answer, which is read as
    its text. Other fields (`cache_control`) are not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "refusal" and "text" not in given:
            return {**given, "text": given.get("refusal")}
        return given


class Message(Body):
    """One message of a chat; an answer's message may come back as it was given, by any server: what
    is not here is not read. role: one that the chat template takes.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Annotated[Name, Field(min_length=1)]
    content: str | List[TextPart] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: List[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

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

    messages: Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: List[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: List[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: List[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # As vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    # Sets the template's variable for thinking, by whichever name it has.
    enable_thinking: bool | None = None
    # Without effect: see `unused`.
    store: bool | None = None
    service_tier: str | None = None
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch, as vLLM has it: several conversations, of which each has a
    choice.
    """

    messages: Annotated[  # type: ignore[assignment]
        List[Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]],
        Field(min_length=1, max_length=_MAX_PROMPTS),
    ]


class TokenizeBody(RequestBody):
    """POST /tokenize, as vLLM has it: a prompt, or a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[List[Message], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Of a chat.
    tools: List[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: Name | None = None
    tokens: List[int]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: Name | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name | None = None
    lora_int_id: int | None = None

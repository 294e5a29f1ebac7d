"""Messages of OpenAI's format as chat templates read them.

Templates disagree about messages. Most take the content as text, some of models that also see as a
list of parts. Most want the arguments of calls of tools as an object (transformers' convention),
some as text (DeepSeek's), and some write calls only where the content is null. `message_form` finds
out which by rendering small conversations in each form. Training and serving share the result, so
that both write a conversation alike.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from coserve.errors import DataError

# The names under which messages and chat templates have an answer's reasoning; the last is
# gpt-oss's.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Parameters of transformers' `apply_chat_template`: not to be set as variables of a template.
RESERVED = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *(
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
    ),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "self"),
)
# The key under which text that is not a JSON object goes into an object, for templates that read
# arguments key by key. Anthropic's documentation of fine-grained tool streaming suggests it to
# clients that send such arguments back.
BROKEN_ARGUMENTS = "INVALID_JSON"
_NUM_FORMS = 64


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """The form in which a chat template takes messages."""

    # The content is a list of parts of type text; a template fails on text, or leaves it out.
    content_as_parts: bool = False
    # Arguments are concatenated as text; a template fails on an object.
    arguments_as_text: bool = False
    # Arguments that are not a JSON object may be given as text.
    takes_broken_arguments: bool = True
    # Calls are written only if the content is null.
    null_content: bool = False
    # Reasoning may stand beside both content and calls; gpt-oss's template raises an error.
    reasoning_beside_content: bool = True


PLAIN_FORM = MessageForm()


def template_message(
    message: Mapping[str, Any], form: MessageForm = PLAIN_FORM, *, strict: bool = True
) -> dict[str, Any]:
    """Return a message as chat templates read it: without its weight, from the system in place of a
    developer, with reasoning under each of its names and a refusal as content.

    Args:
        message: A message of OpenAI's format.
        form: How the template takes messages.
        strict: Whether arguments of calls must be JSON objects. Otherwise, text that is not (a call
            that was cut and is sent back as history) reaches the template as it is.

    Raises:
        DataError: The calls have no function or arguments, or strict arguments are not a JSON
            object.
    """
    unread = ("weight", "refusal", *REASONING)
    plain = {
        name: value for name, value in message.items() if value is not None and name not in unread
    }
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    plain["content"] = None if calls and not content and form.null_content else content
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    if isinstance(thought, str) and (form.reasoning_beside_content or not (calls and content)):
        plain |= dict.fromkeys(REASONING, thought)
    if form.content_as_parts and isinstance(content, str) and plain["content"] is not None:
        plain["content"] = _parts(content)
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(
                "tool_calls must have a function with a name and arguments each, in a list of "
                "objects"
            )
        plain["tool_calls"] = [
            _template_call(call, f"tool_calls[{index}]", form, strict=strict)
            for index, call in enumerate(calls)
        ]
    return plain


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _template_call(
    call: Mapping[str, Any], place: str, form: MessageForm, *, strict: bool
) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        raise DataError(f"{place}.function must be an object with a name and arguments")
    try:
        arguments = _object(function["arguments"], place)
    except DataError:
        if strict:
            raise
        return {**call, "function": {**function, "arguments": _broken(function["arguments"], form)}}
    if form.arguments_as_text:
        text = function["arguments"]
        arguments = (
            text if isinstance(text, str) and text else json.dumps(arguments, ensure_ascii=False)
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _object(arguments: Any, place: str) -> Any:
    """Return arguments as an object; DataError if they are not one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}.function.arguments is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise DataError(f"{place}.function.arguments must be a JSON object")
    return arguments


def _broken(arguments: Any, form: MessageForm) -> Any:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text if form.takes_broken_arguments else {BROKEN_ARGUMENTS: text}


# -- what a template takes ----------------------------------------------------------------

_QUESTION, _TEXT = "what is asked", "text beside it"
_FUNCTION, _KEY, _CUT = "look_up_rain", "town_of_rain", '{"town_of_rain": "Ro'


@lru_cache(maxsize=_NUM_FORMS)
def message_form(template: str) -> MessageForm:
    """Return the form in which a chat template writes messages; the usual one where it writes them
    in none.
    """
    probe = _Probe(template)
    parts = not probe.writes(_QUESTION) and probe.writes(_parts(_QUESTION))
    if parts:
        probe.question = _parts(_QUESTION)
    for content, as_text in product((_parts("") if parts else "", None), (False, True)):
        arguments = json.dumps({_KEY: "Rome"}) if as_text else {_KEY: "Rome"}
        if not probe.writes_call(arguments, _KEY, content=content):
            continue
        text = _parts(_TEXT) if parts else _TEXT
        speaks = probe.writes_call(arguments, _KEY, content=text)
        thinks = probe.writes_call(
            arguments, _KEY, content=text, **dict.fromkeys(REASONING, "thought")
        )
        return MessageForm(
            content_as_parts=parts,
            arguments_as_text=as_text,
            takes_broken_arguments=probe.writes_call(_CUT, _KEY, content=content),
            null_content=content is None,
            reasoning_beside_content=thinks or not speaks,
        )
    return MessageForm(content_as_parts=parts)


class _Probe:
    """Renders small conversations by one template."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.question: Any = _QUESTION

    def writes(self, question: Any) -> bool:
        """Return whether the template writes a question in this form."""
        return _QUESTION in self._text([{"role": "user", "content": question}])

    def writes_call(self, arguments: Any, expected: str, **fields: Any) -> bool:
        """Return whether the template writes a call of a tool with these arguments and other
        fields.
        """
        # Nine letters and digits, as Mistral's templates want them.
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": _FUNCTION, "arguments": arguments},
        }
        calling = {"role": "assistant", "tool_calls": [call], **fields}
        text = self._text([{"role": "user", "content": self.question}, calling])
        return _FUNCTION in text and expected in text

    def _text(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a conversation, empty if the template refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        try:
            (text,), _ = render_jinja_template(
                conversations=[messages], chat_template=self._template, **special
            )
        except Exception:  # templates raise any kind
            return ""
        return str(text)

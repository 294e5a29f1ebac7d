"""Input of a chat template, and the context in which the answer's text begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from coserve.server.bodies.schemas import ChatBody, Message
from coserve.server.bodies.texts import check_texts
from coserve.server.chat.answer_reader import ChatFrame
from coserve.server.chat.reasoning import begins_inside, may_begin
from coserve.server.chat.tools import Tools
from coserve.server.errors import ApiError
from coserve.server.text.prompts import Prompts
from coserve.tuning.template_messages import RESERVED

# Tokens at the end of a prompt that can open a reasoning.
_NUM_END = 8
# Variables by which chat templates switch thinking: Qwen's and GLM's name, DeepSeek's and
# Granite's.
_THINKING = ("enable_thinking", "thinking")


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    Its text is in one piece, a refusal is text, and developers are the system.
    """
    plain = {name: value for name, value in message.model_dump().items() if value is not None}
    thought = plain.pop("reasoning_content", None) or plain.pop("reasoning", None)
    plain.pop("reasoning", None)
    if isinstance(thought, str):
        plain["reasoning_content"] = thought
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    refusal = plain.pop("refusal", None)
    plain["content"] = plain.get("content") or refusal or ""
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def template_arguments(body: ChatBody, tools: Tools, template: str) -> Mapping[str, Any]:
    """Return the arguments of the chat template besides the messages.

    Raises:
        ApiError: The body sets one that is not allowed.
    """
    more = body.chat_template_kwargs or {}
    if wrong := next((name for name in more if name in RESERVED), None):
        raise ApiError(
            f"chat_template_kwargs must not contain {wrong!r}: it is only for variables of the "
            f"chat template",
            param="chat_template_kwargs",
        )
    check_texts(more, param="chat_template_kwargs")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt cannot be combined: leave one out",
            param="continue_final_message",
        )
    if body.reasoning_effort is not None and "reasoning_effort" in template:
        more = {"reasoning_effort": body.reasoning_effort, **more}
    if (thinks := _thinks(body)) is not None:
        # The body's own variables take precedence.
        more = {**{name: thinks for name in _THINKING if name in template}, **more}
    return {
        **more,
        "tools": list(tools.shown) or None,
        "add_generation_prompt": not continues and body.add_generation_prompt is not False,
        "continue_final_message": continues,
    }


def ignored_fields(body: ChatBody, template: str) -> tuple[str, ...]:
    """Return the names of given fields that do not change the answer, for the answer's header."""
    can_switch = any(name in template for name in _THINKING)
    unused = []
    if body.reasoning_effort is not None:
        has_effect = "reasoning_effort" in template or (
            body.reasoning_effort == "none" and can_switch
        )
        unused += [] if has_effect else ["reasoning_effort"]
    if body.enable_thinking is not None and not can_switch:
        unused.append("enable_thinking")
    return (*body.ignored, *unused)


def _thinks(body: ChatBody) -> bool | None:
    """Return whether the model is to think before its answer; None if the body does not say."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    return False if body.reasoning_effort == "none" else None


def _forbids_reasoning(body: ChatBody) -> bool:
    """Return whether the body disables reasoning by the common names, whatever the template does
    with them.
    """
    more = body.chat_template_kwargs or {}
    return _thinks(body) is False or any(more.get(name) is False for name in _THINKING)


def frame_of(body: ChatBody, prompt: Sequence[int], prompts: Prompts) -> ChatFrame:
    """Return the context in which the answer's text begins.

    Args:
        body: The body.
        prompt: Tokens of the chat.
        prompts: Tokenizer.
    """
    last = plain_message(body.messages[-1])
    opens = body.add_generation_prompt is not False and not body.continue_final_message
    role = "assistant" if opens else last["role"]
    continued = last["content"] if body.continue_final_message else ""
    prompt_end = prompts.text(list(prompt[-_NUM_END:]))
    return ChatFrame(
        role=role,
        echo=last["content"] if body.echo and last["role"] == role else "",
        inside_reasoning=begins_inside(prompt_end, continued),
        may_reason=not _forbids_reasoning(body)
        and may_begin(prompt_end, continued, prompts.chat_template),
        with_reasoning=body.include_reasoning is not False,
    )

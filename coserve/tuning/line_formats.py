"""Formats of training data, each turned into what `examples` reads: messages (with tools), prompt
and completion, or text.

They are known by their fields: OpenAI's chats, also with functions in place of tools and with
content in parts; ShareGPT's conversations; Alpaca's instructions; prompt and completion, as text or
(TRL's) as messages; text. Other fields of a record (an id, a source) are ignored, except where they
look like a known field, misspelt or in the wrong place: a typo must not pass.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from coserve.errors import DataError
from coserve.tuning.json_records import Record, parsed_json, parsed_record
from coserve.tuning.template_messages import REASONING

MESSAGE_FIELDS = (
    *(
        "role",
        "content",
        "name",
        "weight",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "audio",
        "function_call",
    ),
    *REASONING,
)
# Of a chat, what its template is given beside the messages.
_BESIDE = ("tools", "chat_template_kwargs")
_CHAT_FIELDS = ("messages", "tools", "functions", "parallel_tool_calls", "chat_template_kwargs")
# Fields that hold lists, objects or numbers, of records of every kind; in a CSV file, they are
# written as JSON.
_NO_TEXT = (
    *(
        "messages",
        "conversations",
        "tools",
        "functions",
        "preferred_output",
        "non_preferred_output",
        "label",
    ),
    *("prompt_tokens", "completion_tokens", "logprobs", "advantages", "chat_template_kwargs"),
)
# Who speaks, in ShareGPT's words and those of its users (https://llamafactory.readthedocs.io, "Data
# Preparation").
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
# How Alpaca's authors put an instruction to a model without a chat template:
# https://github.com/tatsu-lab/stanford_alpaca#data-release
_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that "
    "appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_ALPACA_WITH_INPUT = ", paired with an input that provides further context"
# Letters that two names have in common: "wieght" and "weight" have five of six.
_ALIKE = 0.8


def with_json_cells(record: Mapping[str, Any]) -> Record:
    """Return a table's row with values of fields that are not text read as JSON, where they came as
    text; without empty ones.

    Raises:
        DataError: A value is not JSON; the message names its field.
    """
    parsed = dict(record)
    for name in {*_NO_TEXT, *(("input",) if "preferred_output" in record else ())} & record.keys():
        if not isinstance(cell := record[name], str):
            continue
        try:
            # Tables have True and False with capitals.
            parsed[name] = parsed_json(cell.lower() if name == "label" else cell)
        except DataError as error:
            if cell.strip():
                raise DataError(f"{name} is {error}") from None
            del parsed[name]
    return parsed


def read_record(given: Any) -> Record:
    """Return a line's text as a record in one of three forms: messages and perhaps tools; prompt
    and completion; text.

    Args:
        given: Text, or the record of an array or a table.

    Raises:
        DataError: The message says what is wrong with it.
    """
    record = parsed_record(given)
    if "messages" in record:
        _check_others(record, _CHAT_FIELDS)
        return _chat(record["messages"], record)
    if "conversations" in record:
        _check_others(record, ("conversations", "system", "tools"))
        return _chat(_conversation(record), record)
    if "instruction" in record:
        return _instruction(record)
    if "prompt" in record or "completion" in record:
        _check_others(record, ("prompt", "completion"))
        if isinstance(record.get("prompt"), list):
            return read_record(answered(record["prompt"], record.get("completion"), record))
        return {name: _text(record, name) for name in ("prompt", "completion")}
    if "text" in record:
        _check_others(record, ("text",))
        return {"text": _text(record, "text")}
    raise DataError(
        "needs messages, or conversations, or instruction and output, or prompt and completion, or "
        "text"
    )


def answered(before: Any, answer: Any, record: Mapping[str, Any]) -> Record:
    """Return messages of which the answer's alone are trained on.

    Args:
        record: May have tools.

    Raises:
        DataError: These are not messages, or the last is not the assistant's.
    """
    answer = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(before, list) or not isinstance(answer, list) or not answer:
        raise DataError("answers must be lists of messages, as what comes before them is")
    turns = [*before, *answer]
    if not all(isinstance(turn, Mapping) for turn in turns) or turns[-1].get("role") != "assistant":
        raise DataError("an answer must end with a message of the assistant")
    weighed = [
        {**turn, "weight": int(index >= len(before))}
        if turn.get("role") == "assistant"
        else dict(turn)
        for index, turn in enumerate(turns)
    ]
    return {"messages": weighed} | {name: record[name] for name in _BESIDE if record.get(name)}


def as_chat(record: Record) -> Record:
    """Return an instruction and its output as a chat; other records unchanged."""
    if "instruction" not in record:
        return record
    asked = "\n\n".join(text for text in (record["instruction"], record["input"]) if text)
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": record["output"]},
    ]
    if record["system"]:
        messages.insert(0, {"role": "system", "content": record["system"]})
    return {"messages": messages}


def as_completion(record: Record) -> Record:
    """Return an instruction and its output as Alpaca's prompt and its completion; other records
    unchanged.
    """
    if "instruction" not in record:
        return record
    more = record["input"]
    prompt = _ALPACA.format(
        with_input=_ALPACA_WITH_INPUT if more else "",
        instruction=record["instruction"],
        input=f"### Input:\n{more}\n\n" if more else "",
    )
    return {
        "prompt": f"{record['system']}\n\n{prompt}" if record["system"] else prompt,
        "completion": record["output"],
    }


def _check_others(record: Mapping[str, Any], known: tuple[str, ...], where: str = "") -> None:
    for name in record:
        if name in known:
            continue
        if name == "weight":
            raise DataError(f"{where}unknown field 'weight'; it belongs to a message of a chat")
        if alike := get_close_matches(name, known, 1, _ALIKE):
            raise DataError(f"{where}unknown field {name!r}; did you mean {alike[0]!r}?")


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(f"{name} must be a string" + ("" if name in record else "; it is missing"))
    return value


# -- chats ------------------------------------------------------------------------------


def _chat(messages: Any, record: Mapping[str, Any]) -> Record:
    if not isinstance(messages, list):
        raise DataError("messages must be a list that is not empty")
    plain, num_calls = [], 0
    for index, message in enumerate(messages):
        num_calls += isinstance(message, dict) and bool(message.get("function_call"))
        plain.append(_message(message, index, num_calls))
    chat: Record = {"messages": plain}
    tools = record.get("tools")
    if isinstance(tools, str):  # as some write them
        tools = parsed_json(tools) if tools.strip() else None
    if functions := record.get("functions"):
        if tools:
            raise DataError("has tools and functions; give one of them")
        if not isinstance(functions, list):
            raise DataError("functions must be a list")
        tools = [{"type": "function", "function": function} for function in functions]
    if tools:
        chat["tools"] = tools
    if more := record.get("chat_template_kwargs"):
        chat["chat_template_kwargs"] = parsed_json(more) if isinstance(more, str) else more
    return chat


def _message(given: Any, index: int, num_calls: int) -> Any:
    """Return a message with text in one piece, and calls of functions as calls of tools.

    Args:
        num_calls: Calls of functions so far, this one included: they were made one at a time, had
            no ids, and a result belongs to the last.
    """
    if not isinstance(given, dict):
        return given
    _check_others(given, MESSAGE_FIELDS, f"messages[{index}] has an ")
    message = {name: value for name, value in given.items() if name in MESSAGE_FIELDS}
    if isinstance(content := message.get("content"), list):
        message["content"] = "".join(_part(part, index) for part in content)
    if refusal := message.pop("refusal", None):
        message["content"] = _refusal(refusal, message, index)
    if call := message.pop("function_call", None):
        message["tool_calls"] = [
            {"id": f"call_{num_calls - 1}", "type": "function", "function": call}
        ]
    if message.get("role") == "function":
        message |= {"role": "tool", "tool_call_id": f"call_{max(0, num_calls - 1)}"}
    return message


def _part(part: Any, index: int) -> str:
    """Return the text of a part of a message's content: text, or OpenAI's refusal."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise DataError(
            f"messages[{index}].content has a part of type {kind!r}; only text is trained on"
        )
    text: str = part[kind]
    return text


def _refusal(refusal: Any, message: Mapping[str, Any], index: int) -> str:
    """Return OpenAI's refusal, which a message of the assistant has in place of content: it is
    learned as that.
    """
    if not isinstance(refusal, str):
        raise DataError(f"messages[{index}].refusal must be a string")
    if message.get("role") != "assistant" or message.get("content"):
        raise DataError(
            f"messages[{index}].refusal must stand in place of content, in a message of the "
            f"assistant"
        )
    return refusal


def _conversation(record: Mapping[str, Any]) -> list[Any]:
    """Return ShareGPT's turns as messages."""
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise DataError("conversations must be a list")
    messages: list[Any] = (
        [{"role": "system", "content": record["system"]}] if record.get("system") else []
    )
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)  # as messages are
            continue
        speaker, text = turn["from"], turn.get("value")
        if speaker not in _SPEAKERS:
            raise DataError(
                f"conversations[{index}].from must be one of {', '.join(_SPEAKERS)}, not "
                f"{speaker!r}"
            )
        if not isinstance(text, str):
            raise DataError(f"conversations[{index}].value must be a string")
        message: Record = {"role": _SPEAKERS[speaker], "content": text}
        if speaker == "function_call":
            message |= {"content": None, "function_call": parsed_json(text)}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return messages


def _instruction(record: Mapping[str, Any]) -> Record:
    """Return all of Alpaca's fields."""
    _check_others(record, ("instruction", "input", "output", "system", "history"))
    if record.get("history"):
        raise DataError("history is not read; write the conversation as messages")
    fields = {name: _text(record, name) for name in ("instruction", "output")}
    return fields | {
        name: _text(record, name) if record.get(name) else "" for name in ("input", "system")
    }

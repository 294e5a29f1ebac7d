"""Functions that translate fields of other servers' APIs into fields of bodies.

A reader gets a field's value and the whole body as sent. It returns fields by their names here. It
raises ValueError if the value has no counterpart; the message continues the field's name.
"""

from collections.abc import Callable, Mapping
from typing import Any

Given = Mapping[str, Any]
Reader = Callable[[Any, Given], dict[str, Any]]

# Spellings of "as many tokens as there is room for": llama.cpp and LM Studio send -1, Ollama -2 as
# well.
_UNLIMITED = (-1, -2)


def same_as(name: str) -> Reader:
    """Return a reader for a field that has another name here and the same values."""
    return lambda value, given: {name: value}


def max_tokens(value: Any, given: Given) -> dict[str, Any]:
    """Read the length of an answer; -1 is unlimited in llama.cpp, LM Studio and Ollama."""
    if value not in _UNLIMITED:
        return {"max_tokens": value}
    if "prompt" in given:
        raise ValueError(f"is {value}, for no limit: /v1/completions needs a number of tokens")
    return {}


def seed(value: Any, given: Given) -> dict[str, Any]:
    """Read a seed; -1 draws one."""
    return {} if value == -1 else {"seed": value}


def do_sample(value: Any, given: Given) -> dict[str, Any]:
    """Read transformers' and TGI's switch between drawing tokens and taking the likeliest."""
    _require(bool, value)
    if value:
        return {}
    if given.get("temperature") not in (None, 0):
        raise ValueError(
            f"is false, and temperature is {given['temperature']!r}: leave one of them out"
        )
    return {"temperature": 0}


def penalty_window(value: Any, given: Given) -> dict[str, Any]:
    """Accept a window of repetition penalties only where it covers everything, or where nothing is
    penalised.

    KoboldCpp's 0 covers everything; 0 in llama.cpp and Ollama penalises nothing, see
    `last_penalised`.
    """
    penalties = [given.get(name) for name in ("repeat_penalty", "repetition_penalty", "rep_pen")]
    if value not in (-1, 0) and any(penalty not in (None, 1) for penalty in penalties):
        raise ValueError(
            f"is {value!r}: repetition_penalty counts the whole text; give -1, or leave it out"
        )
    return {}


def last_penalised(value: Any, given: Given) -> dict[str, Any]:
    """Read the window of repetition penalties of llama.cpp and Ollama, where 0 turns them off."""
    if value == 0 and any(
        given.get(name) not in (None, 1) for name in ("repeat_penalty", "repetition_penalty")
    ):
        raise ValueError(
            "is 0, which turns repeat_penalty off: leave both out, or give -1 for the whole text"
        )
    return {} if value == 0 else penalty_window(value, given)


def enable_thinking(value: Any, given: Given) -> dict[str, Any]:
    """Read `thinking` as a boolean, or as Anthropic, DeepSeek and Z.ai have it: an object with a
    type.
    """
    if isinstance(value, bool):
        return {"enable_thinking": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "auto" or kind == "adaptive":
        return {}
    if kind not in ("enabled", "disabled"):
        raise ValueError(
            'must be true, false, or {"type": "enabled"}, "disabled", "adaptive" or "auto"'
        )
    return {"enable_thinking": kind == "enabled"}


def think(value: Any, given: Given) -> dict[str, Any]:
    """Read Ollama's `think`: a boolean, or an effort."""
    if isinstance(value, bool):
        return {"enable_thinking": value}
    if value not in ("low", "medium", "high"):
        raise ValueError("must be true, false, low, medium or high")
    return {"enable_thinking": True, "reasoning_effort": value}


def reasoning(value: Any, given: Given) -> dict[str, Any]:
    """Read OpenRouter's `reasoning`: an effort or a budget imply thinking, as they do there."""
    _require(dict, value)
    known = ("effort", "enabled", "exclude", "max_tokens", "summary", "generate_summary")
    if unknown := [name for name in value if name not in known]:
        raise ValueError(f"has {unknown[0][:64]!r}; known: {', '.join(known)}")
    fields: dict[str, Any] = {}
    if (effort := value.get("effort")) is not None:
        fields["reasoning_effort"] = effort
    if (is_enabled := value.get("enabled")) is not None:
        fields["enable_thinking"] = is_enabled
    elif effort not in (None, "none") or value.get("max_tokens"):
        fields["enable_thinking"] = True
    if value.get("exclude"):
        fields["include_reasoning"] = False
    return fields


def reasoning_format(value: Any, given: Given) -> dict[str, Any]:
    """Read llama.cpp's and Groq's place of the reasoning in an answer; here it is a field of its
    own.
    """
    if value == "hidden":
        return {"include_reasoning": False}
    if value not in ("auto", "parsed", "deepseek", "deepseek-legacy"):
        raise ValueError(
            f"is {str(value)[:64]!r}: reasoning is reasoning_content of the message; use parsed or "
            f"hidden"
        )
    return {}


def output_config(value: Any, given: Given) -> dict[str, Any]:
    """Read Anthropic's `output_config`: an effort and the format of the answer."""
    _require(dict, value)
    effort, asked = value.get("effort"), value.get("format")
    fields = {} if effort is None else {"reasoning_effort": effort}
    return fields if asked is None else {**fields, **output_format(asked, given)}


def output_format(value: Any, given: Given) -> dict[str, Any]:
    """Read Anthropic's format of an answer: a JSON schema, not nested as OpenAI has it."""
    schema = (
        value.get("schema")
        if isinstance(value, Mapping) and value.get("type") == "json_schema"
        else None
    )
    if not isinstance(schema, Mapping):
        raise ValueError('needs a format of type "json_schema" with a schema')
    return {"response_format": {"type": "json_schema", "schema": schema}}


def stop(value: Any, given: Given) -> dict[str, Any]:
    """Read stop texts for a route that takes a list of them alone."""
    return {"stop": [value] if isinstance(value, str) else value}


def usage(value: Any, given: Given) -> dict[str, Any]:
    """Read OpenRouter's `usage`: counts at the end of a stream; other answers always have them."""
    _require(dict, value)
    if not value.get("include") or not given.get("stream"):
        return {}
    return {"stream_options": {"include_usage": True}}


def top_logprobs(value: Any, given: Given) -> dict[str, Any]:
    """Read llama.cpp's `n_probs`: how many of the likeliest tokens to report."""
    if not value:
        return {}
    return {"logprobs": True, "top_logprobs": value} if "messages" in given else {"logprobs": value}


def grammar(value: Any, given: Given) -> dict[str, Any]:
    """Read llama.cpp's grammar (a text), or TGI's (an object with a type and a value)."""
    if isinstance(value, str):
        return {"guided_grammar": value} if value.strip() else {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    names = {"json": "guided_json", "json_object": "guided_json", "regex": "guided_regex"}
    if isinstance(kind, str) and kind in names and value.get("value") is not None:
        return {names[kind]: value["value"]}
    if kind == "json_schema" and isinstance(value.get("value"), Mapping):
        return {"guided_json": value["value"].get("schema")}
    raise ValueError(
        "must be a string, or an object with a type (json, json_schema or regex) and a value"
    )


def json_object(value: Any, given: Given) -> dict[str, Any]:
    """Read vLLM's older switch for any JSON object."""
    return {"response_format": {"type": "json_object"}} if value else {}


def truncate(value: Any, given: Given) -> dict[str, Any]:
    """Read TGI's number of tokens that are kept of a prompt; Ollama's is a boolean."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"truncate_prompt_tokens": value}
    if value in (False, "NONE"):
        return {}
    raise ValueError("must be a number of tokens")


def _require(kind: type, value: Any) -> None:
    if not isinstance(value, kind):
        raise ValueError(
            f"must be {'true or false' if kind is bool else 'an object'}, not {str(value)[:64]!r}"
        )

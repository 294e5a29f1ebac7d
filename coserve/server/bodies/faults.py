"""Translation of pydantic's validation errors to one error in OpenAI's words."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from coserve.server.errors import ApiError

_UNKNOWN = "Unknown parameter: '{name}'."
_LONGEST_TYPO = 64
_MISSING = "Missing required parameter: '{name}'."


def no_json(reason: str) -> ApiError:
    """Return the error of a body that is not JSON.

    Args:
        reason: Why it is not.
    """
    return ApiError(f"The request's body is not valid JSON: {reason}.", code="invalid_json")


def validation_error(faults: Sequence[Any], known: Collection[str] = ()) -> ApiError:
    """Return the most helpful of pydantic's errors; those of other branches of a union say little.

    Args:
        faults: Errors of pydantic.
        known: Fields at the top of the body.
    """
    wrong_kind = (
        fault for fault in faults if fault["type"] == "literal_error" and fault["loc"][-1] == "type"
    )
    unknown = (fault for fault in faults if fault["type"] == "extra_forbidden")
    # "auto" is one branch of a union, and says no more than another's type.
    in_range = (
        fault
        for fault in faults
        if not fault["type"].endswith("_type") and fault["type"] != "literal_error"
    )
    deepest = max(
        faults, key=lambda fault: (fault["loc"][:2] == faults[0]["loc"][:2], len(fault["loc"]))
    )
    first = next(wrong_kind, None) or next(unknown, None) or next(in_range, deepest)
    name = _field_name(first["loc"])
    if first["type"] == "extra_forbidden":
        # `known` has no keys of objects within the body.
        near = (
            [] if "." in name else get_close_matches(name[:_LONGEST_TYPO], known, n=1, cutoff=0.7)
        )
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return ApiError(_UNKNOWN.format(name=name) + hint, param=name, code="unknown_parameter")
    if first["type"] == "missing" and name:
        return ApiError(_MISSING.format(name=name), param=name, code="missing_required_parameter")
    if first["type"] == "json_invalid":
        return no_json(str(first["msg"]))
    if not name:
        return ApiError(
            "The request's body must be a JSON object, and its Content-Type application/json."
        )
    # All that would be right; pydantic speaks of itself.
    same = [
        fault["msg"] for fault in faults if _field_name(fault["loc"]) == name and _is_plain(fault)
    ]
    first_words, *others = dict.fromkeys(same if _is_plain(first) else [first["msg"]])
    words = " or ".join(
        [first_words, *(other.removeprefix("Input should be ") for other in others)]
    )
    words = words.removeprefix("Value error, ").replace(" after validation", "")
    words = words.replace("dictionary or object to extract fields from", "object").replace(
        "dictionary", "object"
    )
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid value for '{name}': {words}.", param=name, code=code)


def _is_plain(fault: Any) -> bool:
    """Return whether an error says what a branch of a union takes."""
    return bool(fault["type"].endswith("_type") or fault["type"] == "literal_error")


def _field_name(location: tuple[Any, ...]) -> str:
    """Return a name such as messages[0].content, without the names of a union's branches."""
    name = ""
    for part in location[1:]:  # after "body", "query" or "path"
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
        elif not name:
            name = part
    return name

"""Namespaces of /v1/responses, as in OpenAI's API: groups of functions.

The model sees each function of a namespace under a flat name, `namespace__name`, as in vLLM;
clients see and send the two names separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coserve.server.errors import ApiError
from coserve.server.responses.schemas import FunctionTool

_SEPARATOR = "__"


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function that the model sees."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def functions_of(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]]:
    """Return all functions in the order of the tools, in the form of a chat.

    Raises:
        ApiError: A tool is not a function, or two have the same flat name.
    """
    of_namespaces, functions, names = apart(tools), [], set()
    for where, namespace, tool in _each(tools):
        if tool.type != "function":
            raise ApiError(
                f"{where}.type is {tool.type[:100]!r}, which is not supported: it must be function"
                + (" or namespace" if namespace is None else ""),
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        fields = tool.model_dump(
            include={"name", "description", "parameters", "strict"}, exclude_none=True
        )
        if namespace is not None:
            if not tool.name:
                raise ApiError(f"{where}.name is missing", param=f"{where}.name")
            fields["name"] = flat_name(namespace, tool.name)
        name = fields.get("name")
        if name in names and name in of_namespaces:
            raise ApiError(f"{where}.name: two functions are named {name!r}", param=f"{where}.name")
        names.add(name)
        functions.append({"type": "function", "function": fields})
    return functions


def apart(tools: Sequence[FunctionTool] | None) -> dict[str, dict[str, str]]:
    """Return the fields `name` and `namespace` of functions in namespaces, by flat name."""
    return {
        flat_name(namespace, tool.name): {"name": tool.name, "namespace": namespace}
        for _, namespace, tool in _each(tools)
        if namespace is not None and tool.name
    }


def choice_of(choice: str | Mapping[str, Any] | None, tools: Sequence[FunctionTool] | None) -> Any:
    """Return tool_choice in the form of a chat.

    A function of a namespace may be named by its flat name, or by its own if it is unique.

    Raises:
        ApiError: Several functions have the name.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return choice
    name = choice.get("name")
    known = apart(tools)
    of_none = {tool.name for _, namespace, tool in _each(tools) if namespace is None}
    meant = [flat for flat, fields in known.items() if fields["name"] == name]
    if name not in known and name not in of_none and meant:
        if len(meant) > 1:
            raise ApiError(
                f"tool_choice: {name!r} is any of {', '.join(meant)}", param="tool_choice"
            )
        name = meant[0]
    return {"type": "function", "function": {"name": name}}


def _each(tools: Sequence[FunctionTool] | None) -> list[tuple[str, str | None, FunctionTool]]:
    """Return each tool that is not a namespace, with its field in the body and its namespace.

    Raises:
        ApiError: A namespace has no name.
    """
    listed: list[tuple[str, str | None, FunctionTool]] = []
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        if tool.type != "namespace":
            listed.append((where, None, tool))
        elif not tool.name:
            raise ApiError(f"{where}.name is missing", param=f"{where}.name")
        else:
            listed += [
                (f"{where}.tools[{n}]", tool.name, inner)
                for n, inner in enumerate(tool.tools or ())
            ]
    return listed

"""The tools of a chat: what is asked for, and by which parser its calls are found in the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coserve.server.context import ServerContext
from coserve.server.errors import ApiError
from coserve.server.schemas import ChatBody
from coserve.server.texts import check_texts
from coserve.server.tool_parsers import ToolParser, parser_names


@dataclass(frozen=True, kw_only=True)
class Tools:
    """For one request. shown: what the chat template is given. parser: of the answers, None where they are text."""

    shown: tuple[Mapping[str, Any], ...] = ()
    parser: type[ToolParser] | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        return frozenset(tool["function"]["name"] for tool in self.shown)


def tools_of(body: ChatBody, context: ServerContext) -> Tools:
    """As the body says; ApiError for what is wrong, or not supported."""
    choice = _choice(body)
    for place, tool in enumerate(body.tools or ()):
        _check_tool(tool, f"tools[{place}]")
    parser = context.tool_parser
    if not body.tools or choice == "none":
        return Tools(parser=parser if parser is not None and parser.reads_all else None)
    if "tools" not in context.prompts.chat_template:
        raise ApiError(
            "tools are not supported by this model: its chat template does not take any",
            param="tools",
            code="unsupported_parameter",
        )
    if parser is None:
        raise ApiError(
            "tools are not supported: the chat template shows no known format of calls; start the server with "
            f"--tool-call-parser ({', '.join(parser_names())})",
            param="tools",
            code="unsupported_parameter",
        )
    return Tools(shown=tuple(body.tools), parser=parser, parallel=body.parallel_tool_calls is not False)


def _choice(body: ChatBody) -> str:
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return choice or "auto"
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
        raise ApiError(
            "tool_choice must be none or auto: required, and a function by its name, are not supported",
            param="tool_choice",
            code="unsupported_parameter",
        )
    raise ApiError(f"tool_choice must be none or auto, not {str(choice)[:100]}", param="tool_choice")


def _check_tool(tool: Mapping[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise ApiError(f"{where}.type must be function, not {str(tool.get('type'))[:100]}", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(f"{where}.function must be an object with a name", param=f"{where}.function")
    if not isinstance(function.get("parameters"), dict | None):
        raise ApiError(
            f"{where}.function.parameters must be a JSON schema, as an object", param=f"{where}.function.parameters"
        )
    check_texts(tool, param=where)

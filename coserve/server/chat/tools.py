"""Tools of a chat: those of the body, and the parser that finds their calls in the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coserve.devices.grammars.grammar import Grammar, Tag
from coserve.server.bodies.schemas import ChatBody
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.tool_parsers import (
    JsonCalls,
    ToolParser,
    parser_class,
    parser_names,
    parser_of_template,
)

_ANY_ARGUMENTS = {"type": "object"}
# Format of required calls if the model's own is unknown, or begins with a special token, which a
# grammar of text cannot express.
_PLAIN = parser_class("llama3_json")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Tools of one request."""

    shown: tuple[Mapping[str, Any], ...] = ()
    """Tools that the chat template gets."""
    parser: type[ToolParser] | None = None
    """Parser of answers; None: answers are text."""
    parallel: bool = True
    """Whether an answer may call several tools."""
    must_call: tuple[str, ...] = ()
    """Functions of which the answer must call one, without other content; exactly once if it is one
    named by the request.
    """

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the arguments of functions that may be called, by name."""
        functions = [tool["function"] for tool in self.shown]
        return {
            function["name"]: function.get("parameters") or _ANY_ARGUMENTS for function in functions
        }

    def grammar(self, *, is_one: bool) -> Grammar:
        """Return the grammar of required calls: text in the parser's format, with arguments of the
        schemas.

        Args:
            is_one: Whether there is to be exactly one call.

        Raises:
            ValueError: A schema is wrong.
        """
        assert self.parser is not None and issubclass(self.parser, JsonCalls)
        tags = []
        for tool in self.shown:
            function = tool["function"]
            if function["name"] in self.must_call:
                begin, end = self.parser.around(function["name"])
                tags.append(
                    Tag(begin=begin, schema=function.get("parameters") or _ANY_ARGUMENTS, end=end)
                )
        separator = self.parser.separator
        is_one = is_one or not self.parallel or separator is None
        return Grammar.tagged(tags, separator=separator or "", at_most=1 if is_one else None)


def tools_of(body: ChatBody, context: GenerationContext) -> Tools:
    """Return the tools of a body.

    Raises:
        ApiError: They are wrong, or not supported.
    """
    choice = _choice(body)
    for place, tool in enumerate(body.tools or ()):
        _check_tool(tool, f"tools[{place}]")
    parser = _parser(context)
    # Before the return below, since a required call without tools is an error.
    must_call = _must_call(body, choice)
    if not body.tools or choice == "none":
        # Some formats need their parser for answers without tools as well.
        return Tools(parser=parser if parser is not None and parser.reads_all else None)
    if "tools" not in context.prompts.chat_template:
        raise ApiError(
            "tools are not supported by this model: its chat template does not support them",
            param="tools",
            code="unsupported_parameter",
        )
    if must_call and (
        parser is None
        or not issubclass(parser, JsonCalls)
        or context.prompts.has_special(parser.markers)
    ):
        parser = _PLAIN
    if parser is None:
        raise ApiError(
            f"tools are not supported: the chat template has no known format of tool calls; start "
            f"the server with --tool-call-parser ({', '.join(parser_names())})",
            param="tools",
            code="unsupported_parameter",
        )
    parallel = body.parallel_tool_calls is not False
    return Tools(shown=tuple(body.tools), parser=parser, parallel=parallel, must_call=must_call)


def grammar_of_calls(body: ChatBody, tools: Tools) -> Grammar:
    """Return the grammar of required calls.

    Raises:
        ApiError: A schema is wrong.
    """
    try:
        return tools.grammar(is_one=isinstance(body.tool_choice, dict))
    except ValueError as error:
        raise ApiError(str(error), param="tools") from None


def _parser(context: GenerationContext) -> type[ToolParser] | None:
    """Return the parser that the server was started with, or that of the chat template."""
    name = context.tool_call_parser
    if name == "auto":
        return parser_of_template(context.prompts.chat_template)
    return parser_class(name)


def _choice(body: ChatBody) -> str:
    """Return the tool choice: none, auto, required, or the name of a function."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            return name
        raise ApiError("tool_choice needs function.name", param="tool_choice")
    raise ApiError(
        f"tool_choice must be none, auto, required or a function by its name, not "
        f"{str(choice)[:100]}",
        param="tool_choice",
    )


def _must_call(body: ChatBody, choice: str) -> tuple[str, ...]:
    is_named = isinstance(body.tool_choice, dict)
    if not is_named and choice != "required":
        return ()
    names = tuple(tool["function"]["name"] for tool in body.tools or ())
    if not names:
        raise ApiError(
            "tool_choice requires a call, but there are no tools: give tools", param="tool_choice"
        )
    if not is_named:
        return names
    if choice not in names:
        raise ApiError(
            f"tool_choice names {choice[:100]!r}; tools has {', '.join(names)[:200]}",
            param="tool_choice",
        )
    return (choice,)


def _check_tool(tool: Mapping[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise ApiError(
            f"{where}.type must be function, not {str(tool.get('type'))[:100]}",
            param=f"{where}.type",
        )
    function = tool.get("function")
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise ApiError(f"{where}.function must be an object with a name", param=f"{where}.function")
    if not isinstance(function.get("parameters"), dict | None):
        raise ApiError(
            f"{where}.function.parameters must be a JSON schema, as an object",
            param=f"{where}.function.parameters",
        )
    check_texts(tool, param=where)

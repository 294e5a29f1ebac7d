"""Parsers of tool calls: one file per format, which is found by its name, vLLM's."""

from functools import cache

from coserve.discovery import variant_class, variant_names
from coserve.server.tool_parsers.base import JsonCalls, ToolParser

__all__ = ["JsonCalls", "ToolParser", "parser_class", "parser_names", "parser_of_template"]


@cache
def parser_names() -> tuple[str, ...]:
    """Return the names of all parsers."""
    return tuple(name.replace("-", "_") for name in variant_names(__path__))


@cache
def parser_class(name: str) -> type[ToolParser]:
    """Return the parser of a name.

    Raises:
        ValueError: There is none; the message lists the names.
    """
    if name not in parser_names():
        raise ValueError(f"tool call parser {name!r} is not one of {', '.join(parser_names())}")
    parser: type[ToolParser] = variant_class(__name__, name, ToolParser)
    return parser


@cache
def parser_of_template(template: str) -> type[ToolParser] | None:
    """Return the parser for models with this chat template; None if its format is unknown."""
    return next((each for each in map(parser_class, parser_names()) if each.fits(template)), None)

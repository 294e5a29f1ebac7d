"""How models write tool calls: one file for each format, found by its name, which is vLLM's."""

from functools import cache

from coserve.discovery import variant_class, variant_names
from coserve.server.tool_parsers.base import JsonCalls, ToolParser

__all__ = ["JsonCalls", "ToolParser", "parser_class", "parser_names", "parser_of_template"]


@cache
def parser_names() -> tuple[str, ...]:
    """Those that there are."""
    return tuple(name.replace("-", "_") for name in variant_names(__path__))


@cache
def parser_class(name: str) -> type[ToolParser]:
    """The parser in the file of this name; ValueError lists those that there are."""
    if name not in parser_names():
        raise ValueError(f"tool call parser {name!r} is not one of {', '.join(parser_names())}")
    found: type[ToolParser] = variant_class(__name__, name, ToolParser)
    return found


@cache
def parser_of_template(template: str) -> type[ToolParser] | None:
    """The parser of what models with this chat template write; None if it shows no format that is
    known.
    """
    return next((each for each in map(parser_class, parser_names()) if each.fits(template)), None)

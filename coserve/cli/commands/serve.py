"""`coserve serve`: as vLLM calls it."""

from coserve.cli.commands.up import up as serve

__all__ = ["serve"]

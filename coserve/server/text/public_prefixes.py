"""Prompt prefixes that an operator declares public, so that all tenants share their KV cache."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from coserve.errors import CoserveError
from coserve.server.text.prompts import Prompts


class PublicPrefixes:
    """Tokens of public prefixes.

    A file is both a system prompt and the beginning of a text.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Read the files.

        Raises:
            CoserveError: A file cannot be read.
        """
        self._texts = [_read(Path(path)) for path in paths]
        self._prefixes: list[list[int]] = []

    async def load(self, prompts: Prompts) -> None:
        """Tokenize the texts.

        Raises:
            ApiError: The model's tokenizer cannot read a text.
        """
        for text in self._texts:
            self._prefixes.append(await prompts.tokens(text))
            if prompts.chat_template:
                self._prefixes.append(await _system_tokens(text, prompts))

    def num_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that are those of a public prefix."""
        return max([_num_common(prefix, prompt) for prefix in self._prefixes], default=0)


async def _system_tokens(text: str, prompts: Prompts) -> list[int]:
    """Return the tokens with which every chat with this system prompt begins."""
    # What two chats with different messages begin with depends on the system prompt alone.
    chats = [
        [{"role": "system", "content": text}, {"role": "user", "content": content}]
        for content in ("a", "7")
    ]
    first, second = [await prompts.tokens(chat) for chat in chats]
    return first[: _num_common(first, second)]


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise CoserveError(f"--public-prefix {path} cannot be read: {error}") from None

"""`coserve chat`: a conversation with a model in the terminal; answers stream."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.connection import (
    DEFAULT_URL,
    ApiKey,
    Url,
    base_model,
    find_model,
    is_there,
    own_server,
)
from coserve.cli.drawing import printable, starting
from coserve.client.http import Client
from coserve.errors import DataError, ServerError

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST_ANSWER = 512

_HELP = """\
/adapter NAME  switch to an adapter, by its id or suffix; base: the base model
/adapter       list the models
/clear         clear the conversation
/help          show this help
/exit          exit, as does Ctrl-D. Ctrl-C stops an answer."""


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "Model to serve if no server runs: a directory, a hub id, or tiny, the built-in "
                "model."
            )
        ),
    ] = "tiny",
    adapter: Annotated[
        str | None,
        typer.Option(help="Adapter to chat with: its id, or the suffix of its job."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Maximum length of an answer. [{_LONGEST_ANSWER}, or half of a short context]",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=2, help="Sampling temperature; 0 always picks the likeliest token."
        ),
    ] = 0.7,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Chat with the model of the server on this machine, or of --url; without a server, start one.

    A server that chat starts ends with the conversation. In a pipe, every line of stdin is a
    question of the same conversation: `echo "Hello" | coserve chat`.
    """
    from coserve.cli.tables import console

    screen = console()
    with ExitStack() as stack:
        if url == DEFAULT_URL and not is_there(url, api_key):
            url = stack.enter_context(_server_for_now(model, screen))
        client = stack.enter_context(Client(url, api_key))
        options = {"max_tokens": max_tokens or _longest_answer(client), "temperature": temperature}
        conversation = _Conversation(client, screen, system=system, options=options)
        if adapter is not None:
            conversation.turn_to(adapter)
        conversation.run()


def _longest_answer(client: Client) -> int:
    """Return the usual maximum length of an answer, or half of the context if that is less."""
    context: int | None = client.get(f"/v1/models/{base_model(client)}").get("max_model_len")
    return _LONGEST_ANSWER if context is None else max(1, min(_LONGEST_ANSWER, context // 2))


@contextmanager
def _server_for_now(model: str, screen: "Console") -> Iterator[str]:
    with TemporaryDirectory(prefix="coserve-chat-") as directory, ExitStack() as stack:
        if screen.is_terminal:
            stack.enter_context(starting(model, screen))
        with own_server(model, log=Path(directory) / "server.log") as url:
            stack.close()
            yield url


class _Conversation:
    """A conversation with a model: its messages, and its commands."""

    def __init__(
        self, client: Client, screen: "Console", *, system: str | None, options: dict[str, Any]
    ) -> None:
        self._client, self._screen, self._options = client, screen, options
        self._base = self._model = base_model(client)
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        # Somebody sits there: prompts and help; otherwise stdout is for answers alone.
        self._interactive = screen.is_terminal and sys.stdin.isatty()

    def turn_to(self, name: str) -> None:
        """Switch to another adapter."""
        self._model = self._base if name == "base" else find_model(self._client, name)

    def run(self) -> None:
        """Ask and answer until the user ends the conversation."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # lines can be edited, and come back with the arrows
            self._say(f"{self._model} at {self._client.url}; /help for help")
        while (text := self._ask()) is not None:
            if not text:
                continue
            try:
                if text.startswith("/"):
                    if not self._command(*text[1:].split(maxsplit=1)):
                        return
                else:
                    self._answer(text)
            except ServerError as error:
                if not self._interactive:
                    raise
                self._screen.print(f"error: {error}", style="red")

    def _ask(self) -> str | None:
        try:
            text = input("› " if self._interactive else "").strip()
            text.encode()  # what is no UTF-8 comes out of some locales as halves of characters
            return text
        except UnicodeError:
            raise DataError("stdin is not UTF-8 text") from None
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._screen.print()
            return None

    def _command(self, name: str = "", argument: str = "") -> bool:
        """Run a /command, and return whether the conversation continues."""
        match name:
            case "exit" | "quit":
                return False
            case "clear":
                self._messages = list(self._start)
                self._say("conversation cleared")
            case "adapter" if argument:
                self.turn_to(argument)
                self._say(f"{self._model} answers now")
            case "adapter":
                for model in self._client.get("/v1/models")["data"]:
                    self._say(f"{'→' if model['id'] == self._model else ' '} {model['id']}")
            case _:
                self._say(_HELP if name == "help" else f"there is no command /{name}\n{_HELP}")
        return True

    def _answer(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {
            "model": self._model,
            "messages": messages,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        start_s, first_s, text = monotonic(), None, ""
        usage: dict[str, Any] = {}
        stream = self._client.stream("/v1/chat/completions", body)
        try:
            for chunk in stream:
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") or ""
                    first_s = first_s or (monotonic() if piece else None)
                    text += piece
                    print(printable(piece) if self._interactive else piece, end="", flush=True)
        except KeyboardInterrupt:
            # It is a generator; closing it cancels the request.
            stream.close()  # type: ignore[attr-defined]
            self._say(" … stopped")
        print()
        self._messages = [*messages, {"role": "assistant", "content": text}]
        num_tokens = usage.get("completion_tokens")
        if self._interactive and first_s is not None and num_tokens:
            each_ms = 1e3 * (monotonic() - first_s) / max(1, num_tokens - 1)
            first_ms = 1e3 * (first_s - start_s)
            self._say(
                f"{num_tokens} tokens, the first after {first_ms:.0f} ms, then {each_ms:.1f} ms "
                f"each"
            )

    def _say(self, text: str) -> None:
        """Print text of the command itself, not of the model."""
        self._screen.print(text, style="dim")

"""Details of tokens in answers, as in vLLM: token ids, and log-probabilities of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from coserve.devices.messages.steps import TokenLogprob
from coserve.server.bodies.schemas import SamplingBody
from coserve.server.generation.generation import finite
from coserve.server.text.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """Choice of what an answer shows of its tokens."""

    prompts: Prompts
    """Tokenizer of the adapter or the model."""
    with_ids: bool = False
    """Whether the token ids of prompt and answer are shown."""
    named_by_ids: bool = False
    """Whether log-probabilities show `token_id:7` in place of a token's text."""
    of_prompt: bool = False
    """Whether log-probabilities of the prompt's tokens are shown."""
    of_named: bool = False
    """Whether log-probabilities of tokens that the request names replace those of the likeliest."""

    @classmethod
    def of(cls, body: SamplingBody, prompts: Prompts) -> Self:
        """Return the details that a body asks for."""
        return cls(
            prompts=prompts,
            with_ids=bool(body.return_token_ids),
            named_by_ids=bool(body.return_tokens_as_token_ids),
            of_prompt=body.prompt_logprobs is not None,
            of_named=bool(body.logprob_token_ids),
        )

    def name(self, token: int, text: str) -> str:
        """Return the name of a token in log-probabilities."""
        return f"token_id:{token}" if self.named_by_ids else text

    def top(self, found: TokenLogprob) -> Sequence[tuple[int, float]]:
        """Return the other tokens that a chat's answer shows with a token.

        If the request names tokens, the token itself is among them, as in vLLM.
        """
        if not self.of_named or any(token == found.token for token, _ in found.top):
            return found.top
        return [(found.token, found.logprob), *found.top]

    def ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields with the ids of new tokens of an answer."""
        return {"token_ids": list(tokens)} if self.with_ids else {}

    def prompt_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields with the ids of a prompt."""
        return {"prompt_token_ids": list(tokens)} if self.with_ids else {}

    def prompt_logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the fields with the log-probabilities of a prompt, without one for its first
        token.
        """
        return {"prompt_logprobs": [None, *map(self._position, found)]} if self.of_prompt else {}

    def _position(self, found: TokenLogprob) -> dict[str, Any]:
        """Return a prompt's token and the likeliest ones, with their ranks."""
        ranked = {found.token: (found.rank, found.logprob)}
        ranked |= {token: (rank, logprob) for rank, (token, logprob) in enumerate(found.top, 1)}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.prompts.piece(token).text,
            }
            for token, (rank, logprob) in ranked.items()
        }

"""What an answer says of tokens beside its text, as vLLM has it: ids, and log-probabilities of the
prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from coserve.devices.messages.steps import TokenLogprob
from coserve.server.bodies.schemas import SamplingBody
from coserve.server.generation.generation import finite
from coserve.server.text.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """with_ids: of prompt and answer. named_by_ids: log-probabilities say `token_id:7` in place of
    a token's text. of_prompt: log-probabilities of the prompt's tokens are part of the answer.
    of_named: those of tokens that the request names stand in place of the likeliest.
    """

    prompts: Prompts
    with_ids: bool = False
    named_by_ids: bool = False
    of_prompt: bool = False
    of_named: bool = False

    @classmethod
    def of(cls, body: SamplingBody, prompts: Prompts) -> Self:
        """As a body says."""
        return cls(
            prompts=prompts,
            with_ids=bool(body.return_token_ids),
            named_by_ids=bool(body.return_tokens_as_token_ids),
            of_prompt=body.prompt_logprobs is not None,
            of_named=bool(body.logprob_token_ids),
        )

    def name(self, token: int, text: str) -> str:
        """How log-probabilities call a token that has this text."""
        return f"token_id:{token}" if self.named_by_ids else text

    def top(self, found: TokenLogprob) -> Sequence[tuple[int, float]]:
        """The others that a chat's answer shows beside a token; beside those that were named,
        itself, as vLLM does.
        """
        if not self.of_named or any(token == found.token for token, _ in found.top):
            return found.top
        return [(found.token, found.logprob), *found.top]

    def ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Of what was added to an answer."""
        return {"token_ids": list(tokens)} if self.with_ids else {}

    def prompt_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Of a prompt."""
        return {"prompt_token_ids": list(tokens)} if self.with_ids else {}

    def prompt_logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of a prompt's tokens; there is nothing before its first."""
        return {"prompt_logprobs": [None, *map(self._position, found)]} if self.of_prompt else {}

    def _position(self, found: TokenLogprob) -> dict[str, Any]:
        """The prompt's token and the likeliest, with their ranks."""
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

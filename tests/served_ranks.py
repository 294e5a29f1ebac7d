"""Servers whose model two ranks hold together."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
from served import Served, chat_tokens, expected, serving, tokenizer

from coserve.devices.ranks.places import num_usable_cores

# Run by the server's process as it starts. Beside other tests, ranks share cores, and a whole
# measurement of such a group takes minutes.
QUICKLY = """
from coserve.devices.profiles import kept as kept_profiles
from coserve.devices import loading

def load_profile(backbone, directory=None, progress=None):
    return kept_profiles.profile_to_start_with(backbone, directory, progress)[0]

loading.load_profile = load_profile
"""
needs_two_cores = pytest.mark.skipif(num_usable_cores() < 2, reason="each rank needs a core")
OPTIONS = ("--tensor-parallel", "2")
QUESTIONS = ("Hello world", "The quick brown fox", "one copy of the weights", "日本語 12345")


def serving_on_two_ranks(*options: str) -> AbstractContextManager[Served]:
    """A server as long as it is needed."""
    return serving(*OPTIONS, *options, before=QUICKLY)


def ranks_of(served: Served) -> list[dict[str, Any]]:
    """The ranks that the status shows; none while there is no engine."""
    found: list[dict[str, Any]] = served.get("/v1/status").json()["ranks"]
    return found


def check_answers(served: Served) -> None:
    """Chats have the greedy tokens of transformers."""
    for question in QUESTIONS:
        answer = served.client().chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": question}],
            max_tokens=12,
            temperature=0,
        )
        tokens, _ = expected(chat_tokens(question), 12)
        assert answer.choices[0].message.content == tokenizer().decode(
            tokens, skip_special_tokens=True
        )

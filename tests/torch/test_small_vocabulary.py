"""An adapter whose model has fewer tokens than the backbone, with every setting of sampling."""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engines import make_engine, word_tokenizer
from peft_embeddings import Cell, made_by_peft
from support import VOCAB, make_backbone

from coserve import SamplingParams
from coserve.adapters import LoraConfig, save_adapter
from coserve.adapters.base import Adapter
from coserve.adapters.frozen_weights import FrozenWeights
from coserve.devices.grammars.grammar import Grammar
from coserve.engine.engine import Engine
from coserve.engine.request import Chunk

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
SMALL, TINY = VOCAB - 6, 2
ENDS = (1, VOCAB - 1)
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "min_tokens": GREEDY | {"min_tokens": 3},
    "min_tokens drawn": DRAWN | {"min_tokens": 3},
    "stop_token_ids": GREEDY | {"min_tokens": 2, "stop_token_ids": (0,)},
    "nothing may come": DRAWN
    | {"min_tokens": 4, "stop_token_ids": (0, 1), "allowed_token_ids": (0, 1)},
    "logit_bias": DRAWN | {"logit_bias": {0: 5.0, 1: -100.0}},
    "allowed_token_ids": DRAWN | {"allowed_token_ids": (1,), "min_tokens": 1},
    "bad_words": GREEDY | {"bad_words": ((0,), (1, 1))},
    "prompt_logprobs": GREEDY | {"prompt_logprobs": 5},
    "logprobs": DRAWN | {"logprobs": 5},
    "logprob_token_ids": GREEDY | {"logprobs": 0, "logprob_token_ids": (1, 0)},
    "penalties": DRAWN
    | {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "cuts": DRAWN | {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "top_k": DRAWN | {"top_k": VOCAB + 100},
}


@cache
def directory(size: int, *, overflows: bool = False) -> Path:
    """Return an adapter in PEFT's format with embeddings and head for `size` tokens.

    overflows: whether its logits are beyond float32.
    """
    backbone, generator = make_backbone("llama"), torch.Generator().manual_seed(size)
    modules = (backbone.architecture.embedding_name, "lm_head")
    weights = {name: torch.randn(size, 32, generator=generator) for name in modules}
    if overflows:
        weights["lm_head"] = weights["lm_head"].sign() * 3e38
    adapter = Adapter(
        backbone,
        LoraConfig(r=4, target_modules=("q_proj",)),
        frozen=FrozenWeights(vocab_size=size, modules=modules),
        frozen_weights=weights,
    )
    found = Path(mkdtemp(prefix="coserve-small-"))
    save_adapter(adapter, found)
    return found


def engine_of(size: int, **settings: Any) -> Engine:
    engine = make_engine(end_tokens=ENDS, **settings)
    engine.load_adapter("small", str(directory(size)))
    return engine


def chunks_of(
    engine: Engine, users: Iterable[tuple[str | None, SamplingParams]]
) -> list[list[Chunk]]:
    """Return the chunks of a request for each adapter, which run in the same steps."""
    ids = [engine.add([1, 0, 1], params, adapter=adapter) for adapter, params in users]
    found: dict[str, list[Chunk]] = {request: [] for request in ids}
    while engine.requests:
        for chunk in engine.step():
            if isinstance(chunk, Chunk):
                found[chunk.request].append(chunk)
    return list(found.values())


@pytest.mark.parametrize("size", [SMALL, TINY])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_tokens_of_the_model_alone_and_beside_others(setting, size):
    params, plain = (
        SamplingParams(max_tokens=4, **SETTINGS[setting]),
        SamplingParams(max_tokens=6, temperature=0.0),
    )
    wide = made_by_peft(Cell(tied=False, resized=True))
    assert not isinstance(wide, str)
    engine = engine_of(size)
    engine.load_adapter("wide", str(wide[1]))
    alone = chunks_of(engine, [("small", params)])[0]
    beside_base = chunks_of(engine, [("small", params), (None, plain)])[0]
    beside_all = chunks_of(engine, [("wide", plain), ("small", params), (None, plain)])[1]
    for chunks in (alone, beside_base, beside_all):
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens == [token for chunk in alone for token in chunk.tokens]
        assert tokens and all(0 <= token < size for token in tokens)
        assert chunks[-1].finish_reason in ("length", "stop")
        lines = [line for chunk in chunks for line in (*chunk.logprobs, *chunk.prompt_logprobs)]
        assert all(
            token < size and math.isfinite(value) for line in lines for token, value in line.top
        )
        asked = params.num_top or params.prompt_logprobs or 0
        assert all(len(line.top) == min(asked, size) for line in lines)


@pytest.mark.parametrize("size", [SMALL, TINY])
def test_a_grammar_of_tokens_that_the_model_does_not_have_ends_the_request_alone(size):
    tokenizer = word_tokenizer()
    engine = engine_of(size, tokenizer=tokenizer)
    (end, beyond), plain = (
        tokenizer.convert_ids_to_tokens([0, VOCAB - 3]),
        SamplingParams(max_tokens=3),
    )
    assert end and len(beyond) == 1
    with_grammar = SamplingParams(max_tokens=3, grammar=Grammar.choice([beyond]))
    for users in ([("small", with_grammar)], [("small", with_grammar), (None, plain)]):
        found = chunks_of(engine, users)
        assert found[0][-1].finish_reason == "error", found[0]
        assert all(chunks[-1].finish_reason in ("length", "stop") for chunks in found[1:])
    assert chunks_of(engine, [(None, with_grammar)])[0][-1].finish_reason in ("length", "stop")


def test_a_grammar_chooses_among_the_tokens_that_the_model_has():
    tokenizer = word_tokenizer()
    engine = engine_of(SMALL, tokenizer=tokenizer)
    known, beyond = tokenizer.convert_ids_to_tokens([SMALL - 1, VOCAB - 3])
    params = SamplingParams(
        max_tokens=5, temperature=1.0, seed=1, grammar=Grammar.choice([known, beyond])
    )
    for users in ([("small", params)], [("small", params), (None, params)]):
        assert "".join(chunk.text for chunk in chunks_of(engine, users)[0]) == known


@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, DRAWN | {"top_k": 5}, DRAWN | {"top_p": 0.5}], ids=str
)
def test_logits_that_are_no_numbers_hurt_their_requests_alone(params):
    engine = engine_of(SMALL)
    engine.load_adapter("broken", str(directory(SMALL, overflows=True)))
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    expected = chunks_of(engine, [(None, plain)])[0]
    found = chunks_of(engine, [("broken", SamplingParams(max_tokens=4, **params)), (None, plain)])
    assert all(0 <= token < SMALL for chunk in found[0] for token in chunk.tokens)
    assert [chunk.tokens for chunk in found[1]] == [chunk.tokens for chunk in expected]

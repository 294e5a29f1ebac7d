"""What one tenant's prompts left in the cache is found by that tenant alone, unless it is
public."""

from dataclasses import replace
from typing import Any

import pytest
from engines import BLOCK, FAST, expected_tokens, greedy, make_engine, prompts_of

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.engine import Engine
from coserve.engine.request import Chunk

[PROMPT] = prompts_of([8 * BLOCK + 1])


def cached(engine: Engine, tenant: str, prompt: list[int] | None = None, **params: Any) -> int:
    """Run a prompt; how many of its tokens were known."""
    settings = SamplingParams(max_tokens=1, temperature=0.0, **params)
    engine.add_tokens(PROMPT if prompt is None else prompt, settings, tenant=tenant)
    found = 0
    while engine.has_requests:
        found = max(
            [found, *(each.num_cached_tokens for each in engine.step() if isinstance(each, Chunk))]
        )
    return found


def test_a_prefix_is_found_by_its_own_tenant_alone():
    engine = make_engine()
    assert cached(engine, "a") == 0
    assert cached(engine, "b") == 0
    assert cached(engine, "a") == cached(engine, "b") == 8 * BLOCK
    engine.check_integrity()


def test_all_tenants_find_it_where_prefixes_are_shared():
    engine = make_engine(share_prefixes=True)
    assert cached(engine, "a") == 0
    assert cached(engine, "b") == 8 * BLOCK


def test_a_salt_keeps_requests_of_one_tenant_apart_and_opens_nothing_of_another():
    engine = make_engine()
    assert cached(engine, "a", cache_salt="x") == 0
    assert cached(engine, "b", cache_salt="x") == cached(engine, "a") == 0
    assert cached(engine, "a", cache_salt="x") == 8 * BLOCK


def test_whole_blocks_of_a_public_beginning_are_shared_and_no_more():
    engine, public = make_engine(), 3 * BLOCK + 1
    assert cached(engine, "a", num_public_tokens=public) == 0
    assert cached(engine, "b", num_public_tokens=public) == 3 * BLOCK
    assert cached(engine, "b", num_public_tokens=public) == 8 * BLOCK
    other = [*PROMPT[:public], *prompts_of([5 * BLOCK], 9)[0]]
    assert cached(engine, "c", other, num_public_tokens=public) == 3 * BLOCK
    engine.check_integrity()


@pytest.mark.parametrize("public", [0, BLOCK])
def test_nothing_of_an_answer_is_found_by_another_tenant(public: int):
    """Blocks that decoding has filled have keys of the tenant, too."""
    engine = make_engine()
    settings = SamplingParams(
        max_tokens=2 * BLOCK, temperature=0.0, ignore_eos=True, num_public_tokens=public
    )
    engine.add_tokens(PROMPT, settings, tenant="a")
    answer: list[int] = []
    while engine.has_requests:
        answer += [
            token for each in engine.step() if isinstance(each, Chunk) for token in each.tokens
        ]
    whole = [*PROMPT, *answer]
    assert cached(engine, "b", whole, num_public_tokens=public) == public
    assert cached(engine, "a", whole, num_public_tokens=public) >= 9 * BLOCK


def cached_under_pressure(**settings: Any) -> list[int]:
    """Return the cached tokens of two tenants' requests, which send the same prompts and preempt
    one another."""
    engine = make_engine(
        num_pages=24, num_host_pages=100, hardware=replace(FAST, host_bytes_per_s=1e15), **settings
    )
    prompts = prompts_of((5, 17, 9, 30, 13))
    asked = {}
    for tenant in ("a", "b"):
        for prompt in prompts:
            asked[engine.add_tokens(prompt, greedy(9), tenant=tenant)] = prompt
    cached, tokens = dict.fromkeys(asked, 0), {request: list[int]() for request in asked}
    while engine.has_requests:
        for each in engine.step():
            if isinstance(each, Chunk):
                cached[each.request] = max(cached[each.request], each.num_cached_tokens or 0)
                tokens[each.request] += each.tokens
        engine.check_integrity()
    assert tokens == {
        request: list(expected_tokens(prompt, 9)) for request, prompt in asked.items()
    }
    assert engine.stats().num_swapped_out > 0
    return list(cached.values())


def test_blocks_on_the_host_are_found_by_their_own_tenant_alone():
    assert cached_under_pressure() == [0] * 10
    assert sum(cached_under_pressure(share_prefixes=True)) > 0

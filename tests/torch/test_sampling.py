"""Sampling against transformers' own processors, and its promises: seeds, company, one pass."""

import pytest
import torch
from lengths import long_but
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.sampling import SamplingRow, TokenCounts, sample
from coserve.kernels import find_backend
from coserve.kernels.plain import PlainBackend

VOCAB = 50
DEVICE = torch.device("cpu")
BACKENDS = [PlainBackend(DEVICE)] + [find_backend(DEVICE)] * (
    type(find_backend(DEVICE)) is not PlainBackend
)


@pytest.fixture(autouse=True, params=BACKENDS, ids=lambda backend: backend.identity)
def backend(request, monkeypatch):
    """Return the kernels that `sample` runs on."""
    monkeypatch.setattr("coserve.devices.torch.sampling.PlainBackend", lambda device: request.param)
    return request.param


def rnd(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def counts(prompt: list[int], output: list[int]) -> TokenCounts:
    kept = TokenCounts(prompt)
    for token in output:
        kept.add(token)
    return kept


def distribution(logits: torch.Tensor, draws: int = 5_000, **params) -> torch.Tensor:
    """Return how often each token comes, over many seeds."""
    rows = [SamplingRow(params=SamplingParams(**params), seed=seed) for seed in range(draws)]
    tokens = sample(logits.expand(draws, -1), rows).tokens
    return torch.bincount(tokens, minlength=VOCAB) / draws


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.5, "top_k": 8, "top_p": 0.8},
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(8), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_draws_follow_transformers_distribution(params, warpers):
    logits = rnd(1, VOCAB)
    expected = logits
    for warper in warpers:
        expected = warper(torch.zeros(1, 1, dtype=torch.int64), expected)
    expected = expected.softmax(-1)[0]
    observed = distribution(logits, **params)
    assert not observed[expected == 0].any(), "what is cut never comes"
    assert (observed - expected).abs().max() < 4 * (0.25 / 5_000) ** 0.5


@pytest.mark.parametrize(("num_seeds", "num_places"), [(5_000, 1), (1, 5_000), (70, 70)])
@pytest.mark.parametrize("first_seed", [0, -(2**63), 2**63 - 5_000])
def test_draws_of_neighbouring_seeds_and_places_are_as_good_as_independent(
    num_seeds, num_places, first_seed
):
    drawn = torch.tensor(
        [[first_seed + seed, place] for seed in range(num_seeds) for place in range(num_places)]
    )
    rows = [
        SamplingRow(params=SamplingParams(), seed=seed, place=place)
        for seed, place in map(tuple, drawn.tolist())
    ]
    tokens = sample(torch.zeros(1, 8).expand(len(rows), -1), rows).tokens
    # Pairs of a place and the next one, or a seed and the next one: 64 kinds, all equally likely.
    table = tokens.view(num_seeds, num_places)
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        if one.numel():
            counts = torch.bincount((one * 8 + other).flatten(), minlength=64)
            expected = one.numel() / 64
            chi_squared = float(((counts - expected) ** 2 / expected).sum())
            assert 25 < chi_squared < 115, (
                "63 on average; one of ten thousand is beyond either bound"
            )


def test_greedy_takes_the_likeliest():
    logits = rnd(9, VOCAB)
    rows = [SamplingRow(params=SamplingParams(temperature=0), seed=seed) for seed in range(9)]
    assert torch.equal(sample(logits, rows).tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_k": 40}, {"top_p": 0.7}, {"top_p": 0.999}, {"top_k": 9, "top_p": 0.5}],
)
def test_a_few_candidates_give_what_sorting_gives(monkeypatch, params):
    logits = rnd(64, VOCAB, seed=3)
    rows = [SamplingRow(params=SamplingParams(**params), seed=seed) for seed in range(64)]
    whole = sample(logits, rows).tokens
    monkeypatch.setattr("coserve.kernels.plain.draws._NUM_CANDIDATES", 8)
    assert torch.equal(sample(logits, rows).tokens, whole)


@pytest.mark.parametrize("spread", [0, 1e-3, 1, 30])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_top_p_of_flat_and_peaked_rows_is_what_sorting_gives(monkeypatch, spread, top_p):
    """Half precision: many tokens are equal, and of those the first are kept."""
    monkeypatch.setattr("coserve.kernels.plain.draws._NUM_CANDIDATES", 8)
    logits = (rnd(1, 3_001, seed=4) * spread).bfloat16()
    ordered, order = logits.double().softmax(-1).sort(stable=True, descending=True)
    kept = order[0, (ordered.cumsum(-1) - ordered)[0] < top_p]
    rows = [SamplingRow(params=SamplingParams(top_p=top_p), seed=seed) for seed in range(20)]
    weights = (
        logits[0]
        .double()
        .masked_fill(~torch.isin(torch.arange(3_001), kept), float("-inf"))
        .softmax(-1)
    )
    for row, token in zip(rows, sample(logits.expand(20, -1), rows).tokens, strict=True):
        expected = sample(
            weights.log()[None], [SamplingRow(params=SamplingParams(), seed=row.seed)]
        ).tokens
        assert token == expected


@pytest.mark.parametrize("spread", [0.3, 3])
@pytest.mark.parametrize("num_threads", long_but(3, of=[1, 3]))
def test_every_backend_draws_the_same_tokens(backend, spread, num_threads):
    """The vocabulary is large, in full and in half precision; a row's draw is that of the row
    alone.
    """
    scores = rnd(12, 50_021) * spread
    scores[6:] = scores[6:].bfloat16()
    scores[3, ::2] = float("-inf")
    uniform = [
        0.0,
        1 - 2**-53,
        *torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist(),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for top_k in (0, 1, 20, 2_000, 50_021):
            for top_p in (1.0, 0.99, 0.5, 1e-9):
                cuts = [top_k] * 12, [top_p] * 12
                found = backend.draw(scores, uniform, *cuts)
                assert torch.equal(found, BACKENDS[0].draw(scores, uniform, *cuts)), (top_k, top_p)
                one = [each[5:6] for each in (scores, uniform, *cuts)]
                assert backend.draw(*one) == found[5]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("top_k", [3, 1024, 2000])
def test_of_equal_tokens_the_first_are_kept(top_k):
    logits = rnd(1, 5_000).round()
    kept = logits[0].sort(stable=True, descending=True).indices[:top_k]
    rows = [SamplingRow(params=SamplingParams(top_k=top_k), seed=seed) for seed in range(100)]
    assert torch.isin(sample(logits.expand(100, -1), rows).tokens, kept).all()


def test_a_row_without_numbers_leaves_the_others_alone():
    logits = rnd(3, 3_000)
    rows = [SamplingRow(params=SamplingParams(top_p=0.99), seed=seed) for seed in range(3)]
    expected = sample(logits, rows).tokens
    for broken in (float("nan"), float("inf"), float("-inf")):
        logits[1] = broken
        tokens = sample(logits, rows).tokens
        assert torch.equal(tokens[[0, 2]], expected[[0, 2]]) and 0 <= tokens[1] < 3_000


def test_equal_tokens_do_not_depend_on_the_company_either():
    logits = rnd(2, 5_000).bfloat16()
    company = SamplingRow(params=SamplingParams(top_k=4_000), seed=0)
    for seed in range(30):
        row = SamplingRow(params=SamplingParams(top_p=0.6), seed=seed)
        assert sample(logits[:1], [row]).tokens[0] == sample(logits, [row, company]).tokens[0]


@pytest.mark.parametrize("temperature", [1e-40, 1e-12, 1e-5])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    logits = rnd(5, VOCAB) * 30
    rows = [
        SamplingRow(params=SamplingParams(temperature=temperature), seed=seed) for seed in range(5)
    ]
    assert torch.equal(sample(logits, rows).tokens, logits.argmax(-1))


def test_token_ids_that_the_model_does_not_have_are_named_before_the_batch():
    for params in (SamplingParams(logit_bias={50: 1.0}), SamplingParams(stop_token_ids=(50,))):
        params.check_vocabulary(51)
        with pytest.raises(ValueError, match="names token 50; the model has 50"):
            params.check_vocabulary(50)
    rows = [SamplingRow(params=SamplingParams(logprobs=20), seed=0)]
    assert sample(rnd(1, 7), rows).top_tokens.shape == (1, 7)


def test_a_row_does_not_depend_on_its_company():
    """Every row alone gives what it gives in the batch, whatever the others ask for."""
    logits = rnd(8, VOCAB)
    params = [
        *(
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(top_k=3),
            SamplingParams(top_p=0.4),
        ),
        *(
            SamplingParams(min_p=0.3),
            SamplingParams(temperature=0.3),
            SamplingParams(presence_penalty=1.5),
        ),
        SamplingParams(logit_bias={4: 50.0}),
    ]
    rows = [
        SamplingRow(params=p, seed=i, place=i, counts=counts([1, 2], [3] * i))
        for i, p in enumerate(params)
    ]
    together = sample(logits, rows).tokens
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1]).tokens) for i in range(8)]
    assert together.tolist() == alone


def test_draws_come_from_the_seed_and_the_place():
    logits = torch.zeros(1, VOCAB)

    def draw(seed: int, place: int) -> int:
        return int(
            sample(logits, [SamplingRow(params=SamplingParams(), seed=seed, place=place)]).tokens
        )

    assert [draw(5, place) for place in range(20)] == [draw(5, place) for place in range(20)]
    assert [draw(5, place) for place in range(20)] != [draw(6, place) for place in range(20)]
    assert len({draw(5, place) for place in range(40)}) > 15


def test_repetition_penalty_is_transformers():
    logits = rnd(1, VOCAB)
    prompt, output = [1, 2, 2, 7], [3, 7]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(
        torch.tensor([prompt + output]), logits.clone()
    )
    biased = {int(token): -100.0 for token in range(VOCAB) if token not in (1, 2, 3, 7)}
    params = SamplingParams(temperature=0, repetition_penalty=1.8, logit_bias=biased)
    token = int(
        sample(logits, [SamplingRow(params=params, seed=0, counts=counts(prompt, output))]).tokens
    )
    assert token == max((1, 2, 3, 7), key=lambda candidate: float(expected[0, candidate]))


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([3.0, 2.9, 2.8, 2.7])

    def choose(output, **penalties) -> int:
        params = SamplingParams(temperature=0, **penalties)
        return int(
            sample(
                logits, [SamplingRow(params=params, seed=0, counts=counts([0, 1, 2], output))]
            ).tokens
        )

    assert choose([]) == 0
    assert choose([], presence_penalty=2) == 0, "the prompt is not penalised"
    assert choose([0], presence_penalty=0.15) == 1
    assert choose([0, 0, 1], frequency_penalty=0.15) == 2
    assert choose([0, 0, 1], presence_penalty=0.05, frequency_penalty=0.1) == 2
    assert choose([3], presence_penalty=-1) == 3


def test_bias_and_forbidden_tokens():
    logits = rnd(1, VOCAB)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, logit_bias={9: 100.0})
    assert int(sample(logits, [SamplingRow(params=params, seed=0)]).tokens) == 9
    row = SamplingRow(params=SamplingParams(temperature=0), seed=0, forbidden=[best])
    assert int(sample(logits, [row]).tokens) == int(logits[0].argsort(descending=True)[1])
    both = SamplingRow(params=SamplingParams(logit_bias={best: 100.0}), seed=0, forbidden=[best])
    assert int(sample(logits, [both]).tokens) != best


def test_logprobs_are_the_models_own():
    logits = rnd(3, VOCAB)
    rows = [
        SamplingRow(params=SamplingParams(temperature=0, logprobs=2), seed=0),
        SamplingRow(
            params=SamplingParams(temperature=0.5, top_k=2, logprobs=4, logit_bias={3: 9.0}), seed=1
        ),
        SamplingRow(params=SamplingParams(), seed=2),
    ]
    result = sample(logits, rows)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(result.logprobs, expected.gather(1, result.tokens[:, None])[:, 0])
    top = expected.topk(4)
    torch.testing.assert_close(result.top_logprobs, top.values)
    assert torch.equal(result.top_tokens, top.indices)
    unasked = sample(logits, [rows[2]] * 3)
    assert unasked.logprobs.shape == (
        0,
    ) and unasked.top_tokens.shape == unasked.top_logprobs.shape == (3, 0)
    chosen = sample(logits, [SamplingRow(params=SamplingParams(logprobs=0), seed=0)] * 3)
    assert chosen.logprobs.shape == (3,) and chosen.top_tokens.shape == (3, 0)


def test_counts_that_penalties_need_are_not_forgotten():
    with pytest.raises(ValueError, match="need the counts"):
        SamplingRow(params=SamplingParams(frequency_penalty=0.5), seed=0)


def test_counts_take_tokens_while_requests_run():
    """Every step sees what was added since the step before, and rows of different lengths keep
    apart."""
    logits = torch.zeros(2, VOCAB)
    params = SamplingParams(temperature=0, frequency_penalty=1)
    held = [TokenCounts(), TokenCounts([5])]
    seen = []
    for _ in range(3):
        tokens = sample(
            logits, [SamplingRow(params=params, seed=0, counts=each) for each in held]
        ).tokens.tolist()
        seen.append(tokens)
        held[0].add(tokens[0])
    assert seen == [[0, 0], [1, 0], [2, 0]]


def test_the_logits_stay_as_they_are_and_half_precision_is_taken():
    logits = rnd(2, VOCAB).bfloat16()
    before = logits.clone()
    rows = [
        SamplingRow(
            params=SamplingParams(top_p=0.5, presence_penalty=1), seed=s, counts=counts([], [1])
        )
        for s in range(2)
    ]
    sample(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 2, not -1"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"top_k": -2}, "top_k must be a whole number of at least -1, not -2"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        (
            {"max_tokens": 3, "min_tokens": 4},
            "min_tokens must be a whole number from 0 to 3, not 4",
        ),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids"),
        ({"logit_bias": {1: 101}}, "logit_bias must map token ids to numbers from -100 to 100"),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2"),
        ({"stop": "x"}, "stop must be a tuple"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids must be token ids"),
        ({"logit_bias": None}, "logit_bias must be a mapping"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"ignore_eos": "no"}, "ignore_eos must be a bool"),
        ({"stop": ("",)}, "stop must be strings that are not empty"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"n": True}, "n must be a whole number"),
    ],
)
def test_parameters_out_of_range_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)

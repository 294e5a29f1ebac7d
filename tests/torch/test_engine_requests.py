"""Requests of an engine: tokens equal to transformers' and PEFT's in every company; nothing is left
over."""

from random import Random
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    adapter_directory,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    oracle,
    prompts_of,
    tokens_by_request,
    watched,
    word_tokenizer,
)
from lengths import long_but
from random_plans import PlannedBy, random_policy
from support import CONFIGS, FAMILIES, VOCAB, make_backbone, random_tokens

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.peft_directory import save_adapter
from coserve.devices.messages.steps import StepFailure
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk
from coserve.errors import AdapterError, BudgetError, RequestError
from coserve.scheduling.slo import Slo
from coserve.tuning.config import OptimizerConfig, TuningConfig

LENGTHS = (5, 1, 17, 9, 30, 4, 13)
NUM_TOKENS = 9
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 3},
    "down": {"r": 9, "target_modules": ["down_proj"], "seed": 1},
    "qv": {"r": 2, "target_modules": ["q_proj", "v_proj"], "seed": 2},
}


# And a family whose requests carry states.
WITH_STATES = (*FAMILIES, "qwen3.5")


def assert_greedy(engine, name, lengths=LENGTHS, *, seed=0):
    """Requests of these lengths, all at once, get what each gets alone from transformers. Returns
    all events."""
    prompts = {
        engine.add(prompt, greedy(NUM_TOKENS)): prompt for prompt in prompts_of(lengths, seed)
    }
    events = drain(engine)
    got = tokens_by_request(events)
    for request, prompt in prompts.items():
        assert got[request] == expected_tokens(prompt, NUM_TOKENS, name), (request, len(prompt))
    return events


def final_chunks(events, request):
    return [
        e
        for e in events
        if isinstance(e, Chunk) and e.request == request and e.finish_reason is not None
    ]


def text_of(events, request, index=0):
    chunks = [
        e for e in events if isinstance(e, Chunk) and e.request == request and e.index == index
    ]
    return "".join(chunk.text for chunk in chunks)


# -- tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3.5"])
def test_tokens_equal_transformers_alone_and_in_company(name):
    engine = make_engine(name)
    for prompt in prompts_of(LENGTHS[:3]):
        (alone,) = engine.generate([prompt], greedy(NUM_TOKENS))
        assert alone.tokens == expected_tokens(prompt, NUM_TOKENS, name)
        assert alone.finish_reason == "length"
    engine = make_engine(name)
    assert_greedy(engine, name)
    assert engine.num_steps == NUM_TOKENS, "one step for all prompts, then one for each token"
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", WITH_STATES)
def test_tokens_are_the_same_when_prompts_are_chunked(name):
    engine = make_engine(name, max_step_rows=6)
    assert_greedy(engine, name)
    widest = max(
        sum(len(rows.tokens) for rows in batch.requests) for batch in watched(engine).batches
    )
    assert widest == 6
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", WITH_STATES)
def test_tokens_are_the_same_for_requests_that_are_preempted(name):
    engine = make_engine(name, num_pages=50 if name == "qwen3.5" else 24)
    assert_greedy(engine, name)
    assert engine.num_preemptions > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_same_after_a_prefix_that_is_known(name):
    engine = make_engine(name)
    shared = random_tokens(4 * BLOCK + 1, 7).tolist()
    prompts = [shared, shared, [*shared, 5, 6, 7], [*shared[:-2], 1], shared[: 2 * BLOCK]]
    events = []
    for prompt in prompts:
        request = engine.add(prompt, greedy(NUM_TOKENS))
        events += (answer := drain(engine))
        assert tokens_by_request(answer)[request] == expected_tokens(prompt, NUM_TOKENS, name)
    cached = [
        final_chunks(events, f"request-{index}")[0].num_cached_tokens
        for index in range(len(prompts))
    ]
    # At least one token is left to compute, so a prompt of whole blocks has its last one computed
    # again.
    assert cached == [0, 4 * BLOCK, 4 * BLOCK, 3 * BLOCK, BLOCK]
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("seed", long_but(0, of=range(4)))
def test_tokens_are_the_same_under_any_plan(seed):
    """Random chunks, random company, preemption and prefix hits all at once."""
    engine, rng = make_engine(num_pages=40), Random(seed)
    engine.policy = random_policy(seed)
    shared = random_tokens(11, 3).tolist()
    prompts = [
        [*shared[: rng.randrange(12)], *prompt]
        for prompt in prompts_of([rng.randint(1, 20) for _ in range(8)])
    ]
    names, events = {}, []
    for prompt in prompts:
        names[engine.add(prompt, greedy(NUM_TOKENS))] = prompt
        for _ in range(rng.randrange(4)):
            events += engine.step()
    got = tokens_by_request(events + drain(engine))
    assert {name: got[name] for name in names} == {
        name: expected_tokens(prompt, NUM_TOKENS) for name, prompt in names.items()
    }
    assert_nothing_is_held(engine)


def serve_adapters(engine, name="llama"):
    for label, lora in ADAPTERS.items():
        engine.load_adapter(label, adapter_directory(name, **lora))


@pytest.mark.parametrize("num_pages", [600, 26])
def test_adapters_of_many_kinds_in_one_batch_answer_as_peft_does(num_pages):
    engine = make_engine(num_pages=num_pages)
    serve_adapters(engine)
    labels = [None, "all", "down", "qv", "down@0", "all", None, "qv@0"]
    asked = {}
    for label, prompt in zip(labels, prompts_of((12, 12, 9, 15, 9, 1, 20, 7)), strict=True):
        asked[engine.add(prompt, greedy(NUM_TOKENS), adapter=label)] = (label, prompt)
    got = tokens_by_request(drain(engine))
    for request, (label, prompt) in asked.items():
        lora = ADAPTERS[label.removesuffix("@0")] if label else {}
        assert got[request] == expected_tokens(prompt, NUM_TOKENS, **lora), label
    assert (engine.num_preemptions > 0) == (num_pages == 26)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", WITH_STATES)
def test_an_adapter_answers_as_peft_does_in_every_family(name):
    engine = make_engine(name)
    engine.load_adapter("a", adapter_directory(name))
    (prompt,) = prompts_of((14,))
    bare, tuned = (
        engine.generate([prompt], greedy(NUM_TOKENS), adapter=label)[0] for label in (None, "a")
    )
    assert bare.tokens == expected_tokens(prompt, NUM_TOKENS, name)
    assert tuned.tokens == expected_tokens(prompt, NUM_TOKENS, name, r=4) != bare.tokens


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("anyhow", [False, True], ids=["slack", "any-plan"])
def test_tokens_are_the_same_while_jobs_train_beside_them(name, anyhow):
    engine = make_engine(name, num_pages={"opt": 160, "qwen3.5": 1000}.get(name, 250))
    if anyhow:
        engine.policy = random_policy(1)
    config = TuningConfig(
        num_epochs=1000,
        batch_size=3,
        max_pack_tokens=24,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    for rank in (2, 5):
        adapter = LoraConfig(r=rank, target_modules="all-linear")
        engine.submit(examples_of((9, 14, 5, 20, 11), rank), config, adapter=adapter)
    for _ in range(4):
        engine.step()
    before = {job.id: job.num_rows_run for job in engine.jobs.values()}
    windows = 0
    prompts = {engine.add(prompt, greedy(NUM_TOKENS)): prompt for prompt in prompts_of(LENGTHS)}
    events = []
    while engine.has_requests:
        events += engine.step()
        engine.check_integrity()
        kinds = {rows.kind for rows in engine.last_plan.rows}
        windows += "window" in kinds and len(kinds) > 1
    got = tokens_by_request(events)
    for request, prompt in prompts.items():
        assert got[request] == expected_tokens(prompt, NUM_TOKENS, name)
    assert windows, "no window shared a batch with a request"
    assert all(
        job.num_rows_run > before[job.id] and job.state == "running" for job in engine.jobs.values()
    )
    for job in list(engine.jobs):
        engine.cancel_job(job)
    assert_nothing_is_held(engine)


def test_logprobs_are_those_of_transformers():
    engine = make_engine()
    engine.load_adapter("all", adapter_directory(**ADAPTERS["all"]))
    prompts = prompts_of((6, 11, 3))
    for label, lora in ((None, ()), ("all", tuple(sorted(ADAPTERS["all"].items())))):
        for completion, prompt in zip(
            engine.generate(prompts, greedy(6, logprobs=4), adapter=label), prompts, strict=True
        ):
            with torch.inference_mode():
                logits = oracle("llama", lora)(
                    torch.tensor([[*prompt, *completion.tokens]])
                ).logits[0, len(prompt) - 1 :]
            theirs = logits.log_softmax(-1)
            for place, found in enumerate(completion.logprobs):
                assert found.token == completion.tokens[place]
                assert found.logprob == pytest.approx(float(theirs[place, found.token]), abs=1e-4)
                top = theirs[place].topk(4)
                assert [token for token, _ in found.top] == top.indices.tolist()
                assert [value for _, value in found.top] == pytest.approx(
                    top.values.tolist(), abs=1e-4
                )
    assert engine.generate([prompts[0]], greedy(6, logprobs=0))[0].logprobs[0].top == ()
    assert engine.generate([prompts[0]], greedy(6))[0].logprobs == ()


def test_a_name_that_is_used_again_is_another_request():
    """The device keeps what requests have in common from step to step, by their names."""
    engine, (prompt,) = make_engine(), prompts_of((6,))
    for num_top in (None, 3):
        engine.add(prompt, greedy(4, logprobs=num_top), request_id="again")
        chunks = [event for event in drain(engine) if isinstance(event, Chunk)]
        assert [len(chunk.logprobs[0].top) if chunk.logprobs else None for chunk in chunks] == [
            num_top
        ] * 4


# -- sampling -------------------------------------------------------------------------


def test_seeded_sequences_are_the_same_in_any_company():
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=11, n=4)
    (prompt,) = prompts_of((9,))
    alone = make_engine().generate([prompt], params)
    assert [completion.index for completion in alone] == [0, 1, 2, 3]
    assert len({completion.tokens for completion in alone}) == 4
    engine = make_engine(num_pages=20)
    engine.policy = random_policy(5)
    for other in prompts_of((20, 6, 11, 3)):
        engine.add(other, SamplingParams(max_tokens=9, n=2))
    crowded = engine.generate([prompt, prompt], params)
    assert [completion.tokens for completion in crowded] == 2 * [
        completion.tokens for completion in alone
    ]
    assert engine.num_preemptions > 0
    drain(engine)
    assert_nothing_is_held(engine)


def test_requests_without_a_seed_differ_and_an_engine_repeats_itself():
    (prompt,) = prompts_of((9,))
    first, second = (
        [c.tokens for c in make_engine().generate([prompt] * 3, SamplingParams())] for _ in range(2)
    )
    assert len(set(first)) == 3
    assert first == second


def test_the_sequences_of_a_request_share_its_prompt():
    engine = make_engine()
    (prompt,) = prompts_of((4 * BLOCK + 1,))
    events = [engine.add(prompt, SamplingParams(max_tokens=4, n=3)), *drain(engine)]
    assert sorted(chunk.num_cached_tokens for chunk in final_chunks(events, "request-0")) == [
        0,
        4 * BLOCK,
        4 * BLOCK,
    ]
    assert_nothing_is_held(engine)


def test_sampling_parameters_reach_the_sampler():
    engine = make_engine()
    (prompt,) = prompts_of((9,))
    likely = expected_tokens(prompt, 6)

    def tokens(**named):
        return engine.generate([prompt], SamplingParams(max_tokens=6, seed=3, **named))[0].tokens

    assert tokens(temperature=2.0) != likely
    for pin in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0}):
        assert tokens(**pin) == likely, pin
    assert tokens(logit_bias={7: 100}) == (7,) * 6
    assert (
        len(
            set(
                tokens(logit_bias={7: 100, 8: 99.0, 9: 98.0}, presence_penalty=2.0, temperature=0.0)
            )
        )
        == 3
    )
    assert tokens(temperature=0.0, logit_bias={likely[0]: -100})[0] != likely[0]
    # Greedy search repeats itself in this text; a penalty on what was used does not let it,
    # preempted or not.
    repeated = prompts_of(LENGTHS)[1]
    assert len(set(expected_tokens(repeated, NUM_TOKENS))) < NUM_TOKENS
    penalized = greedy(NUM_TOKENS, repetition_penalty=10.0)
    alone = engine.generate([repeated], penalized)[0].tokens
    assert len({*repeated, *alone}) == 1 + NUM_TOKENS
    small = make_engine(num_pages=8)
    crowd = small.generate([repeated] * 6, penalized)
    assert small.num_preemptions > 0
    assert {completion.tokens for completion in crowd} == {alone}


# -- endings --------------------------------------------------------------------------


def test_a_request_ends_at_an_end_of_text_token_unless_it_is_told_not_to():
    (prompt,) = prompts_of((17,))
    tokens = expected_tokens(prompt, NUM_TOKENS)
    end = next(
        token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index]
    )
    place = tokens.index(end)
    engine = make_engine(end_tokens=[end])
    (ended,) = engine.generate([prompt], greedy(NUM_TOKENS))
    assert (ended.tokens, ended.finish_reason, ended.stop_reason) == (
        tokens[: place + 1],
        "stop",
        None,
    )
    (ignored,) = engine.generate([prompt], greedy(NUM_TOKENS, ignore_eos=True))
    assert (ignored.tokens, ignored.finish_reason) == (tokens, "length")
    # Below min_tokens the end cannot be chosen; at it, it can.
    (later,) = engine.generate([prompt], greedy(NUM_TOKENS, min_tokens=place + 1))
    assert later.tokens[:place] == tokens[:place]
    assert later.tokens[place] != end
    (just,) = engine.generate([prompt], greedy(NUM_TOKENS, min_tokens=place))
    assert just.tokens == ended.tokens


def test_a_request_ends_at_its_own_stop_token():
    (prompt,) = prompts_of((17,))
    tokens = expected_tokens(prompt, NUM_TOKENS)
    place, stop = next(
        (i, token) for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i]
    )
    (ended,) = make_engine().generate(
        [prompt], greedy(NUM_TOKENS, stop_token_ids=(stop,), ignore_eos=True)
    )
    assert (ended.tokens, ended.finish_reason, ended.stop_reason) == (
        tokens[: place + 1],
        "stop",
        stop,
    )


def test_end_of_text_tokens_that_the_model_does_not_have_are_of_no_effect():
    (prompt,) = prompts_of((5,))
    engine = make_engine(end_tokens=[VOCAB + 3, -1])
    (done,) = engine.generate([prompt], greedy(NUM_TOKENS, min_tokens=4))
    assert done.tokens == expected_tokens(prompt, NUM_TOKENS)


def test_max_tokens_bounds_a_request():
    engine, (prompt,) = make_engine(), prompts_of((9,))
    for most in (1, 2, 7):
        (done,) = engine.generate([prompt], greedy(most))
        assert (len(done.tokens), done.finish_reason) == (most, "length")
    full = 128 - len(prompt)
    assert len(engine.generate([prompt], greedy(full))[0].tokens) == full, "up to the last position"


def test_a_stop_string_ends_the_text_before_it():
    tokenizer = word_tokenizer()
    engine = make_engine(tokenizer=tokenizer)
    (prompt,) = prompts_of((17,))
    whole = engine.generate([prompt], greedy(12))[0]
    assert whole.tokens == expected_tokens(prompt, 12)
    assert whole.text == tokenizer.decode(whole.tokens)
    stop = whole.text[4:7]
    at = whole.text.index(stop)
    (ended,) = engine.generate([prompt], greedy(12, stop=("never", stop)))
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (whole.text[:at], "stop", stop)
    assert len(ended.tokens) == at + 3
    (later,) = engine.generate([prompt], greedy(12, stop=(stop,), min_tokens=at + 3))
    assert later.text == whole.text


def test_streamed_pieces_make_up_the_text():
    tokenizer = word_tokenizer()
    engine = make_engine(tokenizer=tokenizer)
    other = engine.add("somebody else", greedy(20))
    chunks = list(engine.stream("hello you", greedy(12)))
    assert [len(chunk.tokens) for chunk in chunks] == [1] * 12
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    expected = expected_tokens(tokenizer("hello you")["input_ids"], 12)
    assert tuple(chunk.tokens[0] for chunk in chunks) == expected
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(expected)
    assert tokens_by_request(drain(engine))[other]
    assert_nothing_is_held(engine)


def test_a_text_that_could_be_the_start_of_a_stop_string_is_held_back_until_the_end():
    tokenizer = word_tokenizer()
    engine = make_engine(tokenizer=tokenizer)
    whole = engine.generate(["hello you"], greedy(6))[0].text
    chunks = list(engine.stream("hello you", greedy(6, stop=(whole[-2:] + "??",))))
    assert "".join(chunk.text for chunk in chunks) == whole
    assert chunks[-1].text.endswith(whole[-2:]), (
        "the last two characters come when nothing can follow them"
    )


def test_a_stream_that_is_closed_early_is_cancelled():
    engine = make_engine(tokenizer=word_tokenizer())
    pieces = engine.stream("hello you", greedy(50))
    next(pieces)
    pieces.close()
    assert_nothing_is_held(engine)
    engine.step()
    assert not engine.has_work


# -- cancellation ---------------------------------------------------------------------


def test_cancellation_at_any_moment_gives_everything_back():
    """Waiting, between two chunks of its prompt, decoding, preempted: after every number of
    steps."""
    moments = set()
    for num_steps in range(14):
        engine = make_engine(num_pages=14, max_step_rows=5)
        engine.load_adapter("a", adapter_directory())
        names = [
            engine.add(prompt, greedy(12), adapter="a") for prompt in prompts_of((13, 6, 17, 9))
        ]
        events = [event for _ in range(num_steps) for event in engine.step()]
        for name in names:
            for request in engine.requests.members(name):
                started = request.sequence is not None
                moments.add(
                    ("preempted" if request.num_preemptions else "waiting")
                    if not started
                    else "decoding"
                    if request.num_output
                    else "mid-prefill"
                    if request.sequence.length
                    else "admitted"
                )
            was_there = not final_chunks(events, name)
            assert engine.cancel(name) == was_there
            assert not engine.cancel(name)
            engine.check_integrity()
        assert_nothing_is_held(engine)
        events += engine.step()
        reasons = {
            name: [chunk.finish_reason for chunk in final_chunks(events, name)] for name in names
        }
        assert all(reason in (["cancelled"], ["length"]) for reason in reasons.values()), reasons
        engine.unload_adapter("a")
        assert not watched(engine).versions, "nobody reads the adapter any more"
        assert not engine.has_work
    assert moments >= {"waiting", "mid-prefill", "decoding", "preempted"}


def test_all_sequences_of_a_request_are_cancelled_with_it_and_others_continue():
    engine = make_engine()
    one, other = prompts_of((9, 9))
    many = engine.add(one, SamplingParams(max_tokens=30, n=3))
    stays = engine.add(other, greedy(NUM_TOKENS))
    events = [*engine.step(), *engine.step()]
    assert engine.cancel(many)
    events += drain(engine)
    assert sorted(
        c.index for c in final_chunks(events, many) if c.finish_reason == "cancelled"
    ) == [0, 1, 2]
    assert tokens_by_request(events)[stays] == expected_tokens(other, NUM_TOKENS)
    assert_nothing_is_held(engine)


def test_a_preempted_request_is_the_youngest_even_if_all_came_at_once():
    engine = make_engine(num_pages=9)
    for prompt in prompts_of((12, 12, 12)):
        engine.add_tokens(prompt, greedy(12), arrival_s=0.0)
    for _ in range(400):
        engine.step()
        (oldest,) = engine.requests.members("request-0") or [None]
        if oldest is None:
            break
        assert oldest.num_preemptions == 0
    drain(engine)
    assert engine.num_preemptions > 0


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        (
            [1, VOCAB],
            {},
            f"token {VOCAB} of the prompt is out of vocabulary; the model has {VOCAB} tokens",
        ),
        ([1, -1], {}, f"token -1 of the prompt is out of vocabulary; the model has {VOCAB} tokens"),
        (
            [1] * 100,
            {"max_tokens": 29},
            "100 tokens of prompt and 29 to come are 129; the model has 128 positions",
        ),
        (
            [1] * 60,
            {"max_tokens": 41},
            "101 tokens need 26 pages; there are 25: give the engine more memory",
        ),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer, and this model has none"),
        (
            [1],
            {"logit_bias": {VOCAB: 1.0}},
            f"logit_bias names token {VOCAB}; the model has {VOCAB}",
        ),
        (
            [1],
            {"stop_token_ids": (VOCAB,)},
            f"stop_token_ids names token {VOCAB}; the model has {VOCAB}",
        ),
        ([True, 3], {}, "element 0 of the prompt is True: token ids are whole numbers"),
        (
            [1, 2.0],
            {},
            "element 1 of the prompt is 2.0: token ids are whole numbers; a prompt is text, token "
            "ids, or",
        ),
        ("text", {}, "llama.*has no tokenizer: prompts must be token ids"),
        ([{"role": "user", "content": "x"}], {}, "has no tokenizer: prompts must be token ids"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(prompt, named, message):
    engine = make_engine(num_pages=25)
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, greedy(**named))
    assert not engine.has_work
    assert len(engine.generate([[1] * 60], greedy(40))[0].tokens) == 40, "what just fits is served"


@pytest.mark.parametrize("wrong", [{"max_tokens": 2}, [SamplingParams(max_tokens=2)], {}, []])
def test_parameters_of_another_kind_are_refused(wrong):
    engine = make_engine()
    words = f"params must be one SamplingParams, for all prompts, not a {type(wrong).__name__}"
    with pytest.raises(RequestError, match=words):
        engine.generate([[1, 2]], wrong)
    with pytest.raises(RequestError, match=words):
        next(engine.stream([1, 2], wrong))
    assert not engine.has_work


def test_names_of_requests_and_adapters_are_checked():
    engine = make_engine(tokenizer=word_tokenizer())
    serve_adapters(engine)
    engine.add([1], greedy(), request_id="mine")
    with pytest.raises(RequestError, match="there is a request 'mine' already"):
        engine.add([1], greedy(), request_id="mine")
    with pytest.raises(AdapterError, match="there is no adapter 'other'; there are: all, down, qv"):
        engine.add([1], greedy(), adapter="other")
    with pytest.raises(AdapterError, match="adapter 'all' has no version 3; it has 0"):
        engine.add([1], greedy(), adapter="all@3")
    with pytest.raises(AdapterError, match="there is an adapter 'all' already"):
        engine.load_adapter("all", adapter_directory())
    with pytest.raises(AdapterError, match="is not a valid adapter name"):
        engine.load_adapter("a@1", adapter_directory())
    with pytest.raises(AdapterError, match="there is no adapter 'other'"):
        engine.unload_adapter("other")
    with pytest.raises(RequestError, match="for one prompt, a list of one"):
        engine.generate("hello")
    with pytest.raises(RequestError, match="the chat template refuses the messages"):
        engine.add([{"role": "user", "content": "no template"}])
    drain(engine)
    engine.add([1], greedy(), request_id="mine")
    drain(engine)
    with pytest.raises(AdapterError):
        engine.load_adapter("broken", "/no/such/directory")
    assert "broken" not in engine.versions
    assert len(watched(engine).versions) == 3


def test_an_engine_needs_two_pages_and_its_settings_must_mean_something():
    with pytest.raises(BudgetError, match="for two pages"):
        make_engine(num_pages=1)
    for wrong in (
        {"policy": "none"},
        {"ttft_s": 0},
        {"max_requests": 0},
        {"max_step_rows": True},
        {"tpot_s": -1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make_engine(**wrong)
    with pytest.raises(ValueError, match="tpot_s must be a number of seconds above 0"):
        Slo(ttft_s=1.0, tpot_s=0.0)


def test_generate_that_refuses_one_prompt_leaves_nothing_over():
    engine = make_engine()
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        engine.generate([[1, 2, 3], [4, 5], []], greedy())
    assert_nothing_is_held(engine)
    assert engine.pool.num_free == engine.pool.num_pages
    assert engine.step() == [], "requests whose names nobody knows leave no chunks"


def test_generate_that_fails_midway_leaves_nothing_over(monkeypatch):
    engine = make_engine()
    collect, device = watched(engine).inner.collect, watched(engine)

    def fail():
        result = collect()
        if len(device.batches) == 3:
            raise RuntimeError("a bug in a kernel")
        return result

    monkeypatch.setattr(device.inner, "collect", fail)
    with pytest.raises(RuntimeError, match="a bug in a kernel"):
        engine.generate(prompts_of((9, 5)), greedy(20))
    assert_nothing_is_held(engine)
    (prompt,) = prompts_of((9,))
    assert engine.generate([prompt], greedy(NUM_TOKENS))[0].tokens == expected_tokens(
        prompt, NUM_TOKENS
    )


def test_what_others_wait_for_comes_out_of_their_own_steps():
    """generate, stream and tune keep what steps bring others for the next step."""
    engine = make_engine()
    others = {engine.add(prompt, greedy(5)): prompt for prompt in prompts_of((9, 5))}
    engine.generate(prompts_of((3,), 50), greedy(7))
    others[engine.add(prompts_of((4,))[0], greedy(5))] = prompts_of((4,))[0]
    list(engine.stream(prompts_of((3,), 51)[0], greedy(7)))
    others[engine.add(prompts_of((6,))[0], greedy(5))] = prompts_of((6,))[0]
    engine.tune(examples_of((5, 6)))
    got = tokens_by_request(drain(engine))
    assert {name: got.get(name) for name in others} == {
        name: expected_tokens(prompt, 5) for name, prompt in others.items()
    }


# -- versions -------------------------------------------------------------------------


def test_an_adapter_is_unloaded_by_its_name_and_not_by_that_of_a_version():
    engine = make_engine()
    engine.load_adapter("a", adapter_directory(r=3))
    with pytest.raises(
        AdapterError, match="'a@0' is a version; the adapter is withdrawn by its name, 'a'"
    ):
        engine.unload_adapter("a@0")
    engine.unload_adapter("a")


def test_an_adapter_that_is_unloaded_serves_its_readers_to_the_end():
    engine = make_engine()
    engine.load_adapter("a", adapter_directory(r=3))
    prompt, waiting = prompts_of((9, 12))
    reading = engine.add(prompt, greedy(NUM_TOKENS), adapter="a")
    events = engine.step()
    also = engine.add(waiting, greedy(NUM_TOKENS), adapter="a@0")
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match="there is no adapter 'a'; there are: none"):
        engine.add(prompt, greedy(), adapter="a")
    assert len(watched(engine).versions) == 1
    engine.load_adapter("a", adapter_directory(r=4))
    newer = engine.add(prompt, greedy(NUM_TOKENS), adapter="a")
    events += drain(engine)
    got = tokens_by_request(events)
    assert got[reading] == expected_tokens(prompt, NUM_TOKENS, r=3)
    assert got[also] == expected_tokens(waiting, NUM_TOKENS, r=3)
    assert got[newer] == expected_tokens(prompt, NUM_TOKENS, r=4)
    assert len(watched(engine).versions) == 1, "the old version is gone with its last reader"
    engine.unload_adapter("a")
    assert not watched(engine).versions


def test_a_prefix_that_one_adapter_has_computed_is_never_anothers():
    engine = make_engine()
    (prompt,) = prompts_of((5 * BLOCK,))
    answers = {}
    loras: tuple[tuple[str | None, dict[str, Any]], ...] = (
        *((None, {}), ("x", {"r": 3})),
        *(("x", {"r": 4}), ("x", {"r": 4, "seed": 1})),
    )
    for label, lora in loras:
        if label:
            engine.load_adapter(label, adapter_directory(**lora))
        for repeat in range(2):
            request = engine.add(prompt, greedy(NUM_TOKENS), adapter=label)
            events = drain(engine)
            (last,) = final_chunks(events, request)
            assert tokens_by_request(events)[request] == expected_tokens(prompt, NUM_TOKENS, **lora)
            assert last.num_cached_tokens == (4 * BLOCK if repeat else 0), (
                "one's own prefix, and none but that"
            )
            answers[str(lora)] = tokens_by_request(events)[request]
        if label:
            engine.unload_adapter(label)
    assert len(set(answers.values())) == 4


def test_a_version_that_is_published_meanwhile_serves_requests_that_come_after_it(tmp_path):
    """Each request reads the version that was the newest when it came; none sees the other's keys
    and values."""
    engine = make_engine()
    config = TuningConfig(
        num_epochs=3,
        batch_size=2,
        publish_every_steps=1,
        optimizer=OptimizerConfig(learning_rate=3e-2),
    )
    engine.submit(
        examples_of((9, 14)),
        config,
        adapter=LoraConfig(r=3, target_modules="all-linear"),
        name="mine",
    )
    (prompt,) = prompts_of((5 * BLOCK,))
    asked, events = {}, []
    while any(not job.is_terminal for job in engine.jobs.values()):
        for event in engine.step():
            events.append(event)
            if isinstance(event, JobEvent) and event.kind == "version":
                asked[engine.add(prompt, greedy(NUM_TOKENS), adapter="mine")] = event.version
    events += drain(engine)
    got = tokens_by_request(events)
    assert list(asked.values()) == ["mine@1", "mine@2", "mine@3"]
    for request, label in asked.items():
        fresh = make_engine()
        engine.save_adapter(label, tmp_path / label)
        fresh.load_adapter("same", str(tmp_path / label))
        (completion,) = fresh.generate([prompt], greedy(NUM_TOKENS), adapter="same")
        assert got[request] == completion.tokens
        (again,) = engine.generate([prompt], greedy(NUM_TOKENS), adapter=label)
        assert again.tokens == completion.tokens
    assert len({got[request] for request in asked}) > 1, "the versions answer differently"


def test_an_adapter_without_effect_shares_no_pages_with_the_bare_model(tmp_path):
    engine = make_engine()
    fresh = Adapter(make_backbone(), LoraConfig(r=2))  # B is zero
    save_adapter(fresh, tmp_path)
    engine.load_adapter("zero", str(tmp_path))
    (prompt,) = prompts_of((5 * BLOCK,))
    bare, zero = (
        engine.generate([prompt], greedy(NUM_TOKENS), adapter=label)[0] for label in (None, "zero")
    )
    assert bare.tokens == zero.tokens == expected_tokens(prompt, NUM_TOKENS)
    assert engine.cache.prefixes.num_evictable >= 2 * 5


# -- memory of the device ---------------------------------------------------------------


def limit_rows(engine, most):
    """The device runs out of memory in every forward pass of more rows. Returns the widths that
    were tried."""
    widths = []

    def fail(batch):
        rows = [
            *(len(rows.tokens) for rows in batch.requests),
            *(rows.num_rows for rows in batch.windows),
        ]
        widths.append(sum(rows))
        return StepFailure(message="no more") if widths[-1] > most else None

    watched(engine).fail = fail
    return widths


def test_steps_never_have_more_rows_than_they_may():
    engine = make_engine(max_step_rows=3)
    widths = limit_rows(engine, 3)
    assert_greedy(engine, "llama", (1,) * 7)
    assert max(widths) == 3
    assert_nothing_is_held(engine)


def test_steps_get_smaller_when_the_device_runs_out_of_memory():
    """Also where all rows are tokens of requests that decode: none of them fails while fewer would
    do."""
    engine = make_engine()
    widths = limit_rows(engine, 4)
    assert_greedy(engine, "llama")
    assert widths[0] == sum(LENGTHS)
    assert_nothing_is_held(engine)


def test_a_request_that_the_device_has_no_memory_for_fails_with_the_reason():
    engine = make_engine()
    limit_rows(engine, 0)
    one = engine.add([1, 2, 3], greedy())
    (last,) = final_chunks(drain(engine), one)
    assert (last.finish_reason, last.error) == ("error", "the device ran out of memory: no more")
    with pytest.raises(
        RequestError, match=r"request request-\d: the device ran out of memory: no more"
    ):
        engine.generate(prompts_of((4, 9)), greedy())
    assert_nothing_is_held(engine)
    assert engine.step() == []


def test_a_job_continues_after_steps_had_to_be_small():
    engine = make_engine()
    limit_rows(engine, 0)
    engine.add(prompts_of((20,))[0], greedy())
    drain(engine)
    watched(engine).fail = lambda batch: None
    engine.submit(examples_of((20, 9)), TuningConfig(), adapter=LoraConfig(r=2))
    for _ in range(100):
        engine.step()
    assert engine.jobs["job-1"].state == "succeeded"


# -- prompts that are scored ----------------------------------------------------------------


def scores_of(name, prompt, **lora):
    """What transformers says of a prompt's tokens: log-probabilities [tokens - 1, vocabulary]."""
    with torch.no_grad():
        logits = oracle(name, tuple(lora.items()))(torch.tensor([list(prompt)])).logits[0, :-1]
    return logits.float().log_softmax(-1)


def assert_scored(got, prompt, logprobs, num_top):
    assert [score.token for score in got] == list(prompt[1:])
    for score, row in zip(got, logprobs, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("settings", [{}, {"max_step_rows": 6}, {"num_pages": 16}])
def test_prompts_are_scored_as_transformers_does(settings):
    engine = make_engine(**settings)
    prompts = prompts_of((9, 30, 1, 14))
    prompts.append([*prompts[1][:24], 7])  # begins as one that is in the cache
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=3)
    names = {engine.add(prompt, params): prompt for prompt in prompts}
    events = drain(engine)
    for name, prompt in names.items():
        chunks = [e for e in events if isinstance(e, Chunk) and e.request == name]
        assert_scored(chunks[0].prompt_logprobs, prompt, scores_of("llama", prompt), 3)
        assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    got = tokens_by_request(events)
    assert all(got[name] == expected_tokens(prompt, NUM_TOKENS) for name, prompt in names.items())
    assert_nothing_is_held(engine)


def test_a_prompt_may_be_scored_and_nothing_else_with_an_adapter_in_company():
    engine = make_engine()
    engine.load_adapter("all", adapter_directory("llama", **ADAPTERS["all"]))
    (prompt,) = prompts_of((13,))
    with_adapter = engine.add(
        prompt, SamplingParams(max_tokens=0, prompt_logprobs=0, n=2), adapter="all"
    )
    bare = engine.add(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    other = engine.add(prompt, greedy(NUM_TOKENS))
    events = drain(engine)
    for name, lora in ((with_adapter, ADAPTERS["all"]), (bare, {})):
        first, *others = final_chunks(events, name)
        assert (first.tokens, first.finish_reason) == ((), "length")
        assert_scored(first.prompt_logprobs, prompt, scores_of("llama", prompt, **lora), 0)
        assert not any(chunk.prompt_logprobs or chunk.tokens for chunk in others)
    assert tokens_by_request(events)[other] == expected_tokens(prompt, NUM_TOKENS)
    assert_nothing_is_held(engine)


def test_without_scores_a_request_asks_for_a_token_at_least():
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=0)


# -- adapters that lie on disk ----------------------------------------------------------------


def test_adapters_on_disk_come_and_go_by_use():
    engine = make_engine(max_adapters=2)
    engine.load_adapter("kept", adapter_directory("llama", **ADAPTERS["all"]))
    directory = adapter_directory("llama", **ADAPTERS["qv"])
    (prompt,) = prompts_of((5,))
    for name in ("a", "b", "a", "c"):
        engine.ensure_adapter(name, directory)
    assert sorted(engine.versions.labels()) == ["a@0", "c@0", "kept@0"]
    reading = engine.add(prompt, greedy(NUM_TOKENS), adapter="a")
    engine.step()
    for name in ("d", "e"):
        engine.ensure_adapter(name, directory)
    assert sorted(engine.versions.labels()) == ["d@0", "e@0", "kept@0"]
    events = drain(engine)
    assert len(tokens_by_request(events)[reading]) == NUM_TOKENS - 1, (
        "a request continues with what it began with"
    )
    with pytest.raises(AdapterError, match="has no adapter_config"):
        engine.ensure_adapter("f", directory + "-elsewhere")
    assert sorted(engine.versions.labels()) == ["d@0", "e@0", "kept@0"]


def test_a_request_that_the_policy_never_runs_is_not_waited_for_for_ever():
    engine = make_engine(policy="tuning-only")
    message = "the request is not making progress: policy tuning-only does not run requests"
    with pytest.raises(RequestError, match=message):
        engine.generate(prompts_of((9, 5)), greedy())
    with pytest.raises(RequestError, match=message):
        list(engine.stream(prompts_of((9,))[0], greedy()))
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("named", "num_sure"),
    [
        ({"ignore_eos": True}, 8),
        ({}, 0),
        ({"min_tokens": 3}, 3),
        ({"ignore_eos": True, "min_tokens": 3, "stop_token_ids": (VOCAB - 1,)}, 3),
    ],
)
def test_a_policy_is_told_how_many_tokens_are_sure_to_come(named, num_sure):
    engine, seen = make_engine(), list[int]()
    policy = engine.policy

    def watch(view, latency):
        seen.extend(
            request.num_sure + request.num_output for request in (*view.waiting, *view.requests)
        )
        return policy.plan(view, latency)

    engine.policy = PlannedBy(function=watch)
    engine.add(prompts_of((5,))[0], greedy(8, **named))
    drain(engine)
    assert len(seen) > 3 and set(seen) == {num_sure}

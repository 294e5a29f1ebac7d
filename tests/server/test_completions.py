"""/v1/completions with the real client: equal to transformers, and every field that OpenAI has."""

from typing import Any

import pytest
import torch
from openai import OpenAI
from served import Served, expected, model, tokenizer

PROMPT = "The quick brown"


@pytest.fixture
def served(either_server: Served) -> Served:
    return either_server


def tokens_of(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("prompt", [PROMPT, tokens_of(PROMPT)], ids=["text", "ids"])
def test_greedy_completions_are_those_of_transformers(client: OpenAI, prompt: Any):
    tokens, logprobs = expected(tokens_of(PROMPT), 12)
    answer = client.completions.create(
        model="small", prompt=prompt, max_tokens=12, temperature=0, logprobs=3
    )
    [choice] = answer.choices
    # Byte-level pieces may be parts of characters: compare what they decode to.
    assert choice.text == text_of(tokens)
    assert choice.finish_reason == ("length" if len(tokens) == 12 else "stop")
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    assert answer.usage.prompt_tokens == len(tokens_of(PROMPT))
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(tokens)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_a_stream_gives_the_same_text_and_usage(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 0,
    }
    whole = client.completions.create(**settings)
    events = list(
        client.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    logprobs = [each for event in events[:-1] for each in event.choices[0].logprobs.token_logprobs]
    assert logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-5)
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == "length"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(event.usage is None for event in events[:-1])


def test_echo_scores_the_prompt_as_transformers_does(client: OpenAI):
    prompt = tokens_of(PROMPT)
    tokens, logprobs = expected(prompt, 4)
    with torch.inference_mode():
        scores = model()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    scored = [float(scores[place, token]) for place, token in enumerate(prompt[1:])]
    for max_tokens in (0, 4):
        answer = client.completions.create(
            model="small",
            prompt=PROMPT,
            max_tokens=max_tokens,
            temperature=0,
            logprobs=2,
            echo=True,
        )
        [choice] = answer.choices
        assert choice.text == PROMPT + (text_of(tokens) if max_tokens else "")
        found = choice.logprobs
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(scored + logprobs[:max_tokens], abs=1e-4)
        assert found.top_logprobs[0] is None
        assert found.text_offset[0] == 0
        assert "".join(found.tokens[: len(prompt)]) == PROMPT
        assert answer.usage.completion_tokens == max_tokens


def test_offsets_are_places_in_the_text(client: OpenAI):
    """Where tokens are parts of characters, or show nothing, too."""
    for seed in range(2, 6):
        [choice] = client.completions.create(
            model="small",
            prompt="<|user|>héllo 😀!",
            max_tokens=80,
            temperature=2,
            seed=seed,
            logprobs=0,
            echo=True,
            extra_body={"ignore_eos": True, "logit_bias": {str(tokenizer().eos_token_id): 5}},
        ).choices
        found = choice.logprobs
        num_prompt = len(tokens_of("<|user|>héllo 😀!"))
        for place, (token, offset) in enumerate(zip(found.tokens, found.text_offset, strict=True)):
            shows = not token.startswith("bytes:") and (
                place < num_prompt or not token.startswith("<|")
            )
            assert not shows or choice.text.startswith(token, offset), (place, token, offset)
        assert "<|end|>" in found.tokens[num_prompt:]
        assert found.text_offset == sorted(found.text_offset)


def test_echo_streams_and_goes_without_logprobs(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "prompt": [PROMPT, "Hello"],
        "max_tokens": 3,
        "temperature": 0,
    }
    whole = client.completions.create(**settings, echo=True)
    assert whole.choices[0].text.startswith(PROMPT)
    assert whole.choices[1].text.startswith("Hello")
    texts = ["", ""]
    for event in client.completions.create(**settings, echo=True, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_batches_of_prompts_and_n_are_numbered_prompt_by_prompt(client: OpenAI):
    prompts = [tokens_of("Hello world"), tokens_of("lazy dog"), tokens_of("time")]
    answer = client.completions.create(
        model="small", prompt=prompts, max_tokens=5, temperature=0, n=2
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    for place, prompt in enumerate(prompts):
        text = text_of(expected(prompt, 5)[0])
        assert answer.choices[2 * place].text == answer.choices[2 * place + 1].text == text
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_seeds_repeat_and_differ(client: OpenAI):
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="small", prompt=PROMPT, max_tokens=16, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    assert texts(5) == texts(5) != texts(6)
    assert len(set(texts(5))) == 3


def test_stop_strings_and_tokens_end_a_text(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
    }
    text = client.completions.create(**settings).choices[0].text
    stop = next(letter for letter in text[3:] if letter.isascii() and letter not in text[:3])
    for given in (stop, ["never to be seen", stop]):
        [choice] = client.completions.create(**settings, stop=given).choices
        assert choice.text == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
    token = expected(tokens_of(PROMPT), 5)[0][-1]
    answer = client.completions.create(**settings, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 5


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_choice_names_the_stop_that_ended_it_as_vllm_does(client: OpenAI, is_chat: bool):
    """The string, or the token; null where the text came to its end otherwise. In the last piece of
    a stream, too."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    settings: dict[str, Any] = {"model": "small", "max_tokens": 12, "temperature": 0, **prompt}
    choice = create(**settings, extra_body={"return_token_ids": True}).choices[0]
    text, token = choice.message.content if is_chat else choice.text, choice.token_ids[2]
    stop = next(letter for letter in text if letter.isascii())
    for more, reason in (
        ({}, None),
        ({"stop": ["no such", stop]}, stop),
        ({"stop_token_ids": [token]}, token),
    ):
        whole = create(**settings, extra_body=more).choices[0]
        assert (whole.finish_reason, whole.stop_reason) == (
            "length" if reason is None else "stop",
            reason,
        )
        pieces = [piece.choices[0] for piece in create(**settings, extra_body=more, stream=True)]
        assert [piece.stop_reason for piece in pieces] == [None] * (len(pieces) - 1) + [reason]


def test_biases_penalties_and_other_samplers_reach_the_engine(client: OpenAI):
    settings: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 6}
    [token] = tokens_of("H")[:1]
    answer = client.completions.create(**settings, temperature=0, logit_bias={str(token): 100})
    assert answer.choices[0].text == text_of([token] * 6)
    greedy = client.completions.create(**settings, temperature=0).choices[0].text
    for more in ({"top_k": 1}, {"min_p": 1.0}):
        assert (
            client.completions.create(**settings, temperature=1.5, extra_body=more).choices[0].text
            == greedy
        )
    assert (
        client.completions.create(**settings, temperature=1.5, top_p=1e-6).choices[0].text == greedy
    )
    punished = client.completions.create(
        **settings, temperature=0, presence_penalty=2, frequency_penalty=2
    )
    assert len(set(punished.choices[0].text)) > 1
    banned = client.completions.create(
        **settings,
        temperature=0,
        logit_bias={str(tokenizer().eos_token_id): 100},
        extra_body={"ignore_eos": True},
    )
    assert banned.usage.completion_tokens == 6
    ended = client.completions.create(
        **settings, temperature=0, logit_bias={str(tokenizer().eos_token_id): 100}
    )
    assert ended.choices[0].text == ""
    assert ended.choices[0].finish_reason == "stop"


def test_cached_tokens_are_counted(client: OpenAI):
    prompt = tokens_of(PROMPT * 8)
    assert len(prompt) > 40
    # The third one is on the first one's node again, if there are two.
    first, _, third = (
        client.completions.create(model="small", prompt=prompt, max_tokens=2) for _ in range(3)
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < third.usage.prompt_tokens_details.cached_tokens < len(prompt)


def test_an_slo_beyond_the_device_is_relaxed_and_the_answer_says_to_what(client: OpenAI):
    settings: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 3}
    absurd = client.completions.create(
        **settings, extra_body={"slo": {"ttft_ms": 1e-6, "tpot_ms": 1e-6}}
    )
    served_by = absurd.usage.to_dict()["slo"]
    assert served_by["ttft_ms"] > 1e-6
    assert served_by["tpot_ms"] > 1e-6
    feasible = client.completions.create(
        **settings, extra_body={"slo": {"ttft_ms": 1e6, "tpot_ms": 1e6}}
    )
    assert "slo" not in feasible.usage.to_dict()


def test_harmless_fields_are_taken_and_the_id_is_in_a_header(served: Served):
    body = {
        "model": "small",
        "prompt": "x",
        "max_tokens": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "best_of": 1,
    }
    answer = served.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == answer.json()["id"]

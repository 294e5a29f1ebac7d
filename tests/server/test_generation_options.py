"""Options of vLLM's on the running server, with the real client."""

from typing import Any

import pytest
from openai import OpenAI
from served import chat_tokens, expected, prompt_ranks, tokenizer

PROMPT = [30, 60, 90, 120]
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SETTINGS: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 8}


def complete(client: OpenAI, **more: Any) -> Any:
    """The one choice; options that are not OpenAI's, too."""
    settings = {**SETTINGS, "prompt": PROMPT, **more}
    return client.post("/completions", body=settings, cast_to=object)["choices"][0]  # type: ignore[index]


def chat(client: OpenAI, **more: Any) -> Any:
    return client.post(
        "/chat/completions", body={**SETTINGS, "messages": MESSAGES, **more}, cast_to=object
    )


def test_token_ids(client: OpenAI):
    tokens, _ = expected(PROMPT, 8)
    choice = complete(client, return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT, tokens)
    assert complete(client)["prompt_token_ids"] is None
    answer = chat(client, return_token_ids=True)
    chat_prompt = chat_tokens("Hello")
    assert answer["prompt_token_ids"] == chat_prompt
    said, _ = expected(chat_prompt, 8)
    assert answer["choices"][0]["token_ids"] == said
    more: Any = {"stream": True, "extra_body": {"return_token_ids": True}}
    pieces = [
        piece.choices[0] for piece in client.completions.create(**SETTINGS, prompt=PROMPT, **more)
    ]
    assert pieces[0].prompt_token_ids == PROMPT
    assert [token for piece in pieces for token in piece.token_ids] == tokens
    events = list(client.chat.completions.create(**SETTINGS, messages=MESSAGES, **more))
    assert events[0].prompt_token_ids == chat_prompt
    deltas = [event.choices[0] for event in events]
    assert [token for delta in deltas for token in getattr(delta, "token_ids", [])] == said


def test_log_probabilities_by_token_ids(client: OpenAI):
    tokens, logprobs = expected(PROMPT, 8)
    found = complete(client, logprobs=1, return_tokens_as_token_ids=True)["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in tokens]
    assert [list(top) for top in found["top_logprobs"]] == [
        [f"token_id:{token}"] for token in tokens
    ]
    echoed = complete(client, echo=True, logprobs=2, return_tokens_as_token_ids=True)["logprobs"]
    assert [next(iter(top)) for top in echoed["top_logprobs"][1:]] == echoed["tokens"][1:], (
        "the token itself comes first"
    )
    named = complete(
        client, logprobs=0, logprob_token_ids=[7, tokens[0]], return_tokens_as_token_ids=True
    )["logprobs"]
    assert set(named["top_logprobs"][0]) == {"token_id:7", f"token_id:{tokens[0]}"}
    assert named["top_logprobs"][0][f"token_id:{tokens[0]}"] == pytest.approx(logprobs[0], abs=1e-4)
    assert named["top_logprobs"][0]["token_id:7"] < logprobs[0]
    settings: dict[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
    content = chat(client, logprob_token_ids=[7], **settings)["choices"][0]["logprobs"]["content"]
    for each in content:
        assert {top["token"] for top in each["top_logprobs"]} == {"token_id:7", each["token"]}


def test_log_probabilities_of_the_prompt(client: OpenAI):
    choice = complete(client, prompt_logprobs=2)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(PROMPT) - 1
    echoed = complete(client, echo=True, logprobs=0)["logprobs"]["token_logprobs"]
    for token, position, logprob in zip(PROMPT[1:], others, echoed[1:], strict=False):
        assert position[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert {each["rank"] for each in position.values()} >= {1, 2}
    ranks = [
        position[str(token)]["rank"] for token, position in zip(PROMPT[1:], others, strict=True)
    ]
    assert ranks == prompt_ranks(PROMPT)
    answer = chat(client, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert complete(client)["prompt_logprobs"] is None
    assert chat(client)["prompt_logprobs"] is None


def test_a_prompt_is_truncated(client: OpenAI):
    long = [5] * 600 + PROMPT
    end, _ = expected(PROMPT, 8)
    assert (
        complete(client, prompt=long, truncate_prompt_tokens=4, return_token_ids=True)["token_ids"]
        == end
    )
    start = complete(
        client, prompt=PROMPT + [5] * 600, truncate_prompt_tokens=4, truncation_side="right"
    )
    assert start["text"] == complete(client)["text"]
    assert (
        len(
            complete(client, prompt=long, truncate_prompt_tokens=-1, return_token_ids=True)[
                "prompt_token_ids"
            ]
        )
        == 504
    )
    assert chat(client, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3


def test_tokens_that_may_come(client: OpenAI):
    for temperature in (0, 1):
        allowed = [33, 66, 99]
        choice = complete(
            client, allowed_token_ids=allowed, return_token_ids=True, temperature=temperature
        )
        assert set(choice["token_ids"]) <= set(allowed)
        assert len(choice["token_ids"]) == 8


def test_bad_words_do_not_come(client: OpenAI):
    """Of several tokens, only the last after the others is forbidden."""
    forced = {str(token): 100 for token in tokenizer()("ab", add_special_tokens=False)["input_ids"]}
    free = complete(client, logit_bias=forced)["text"]
    assert set(free) == {"a", "b"} or len(set(free)) == 1
    pair = free[:2]
    kept = complete(client, logit_bias=forced, bad_words=[pair])["text"]
    assert kept[0] == free[0]
    assert pair not in kept
    for bad in ("a", "b"):
        assert (
            bad
            not in complete(client, logit_bias=forced, bad_words=[bad])["text"].replace(" ", "")[:8]
        )


def test_bad_words_of_white_space_alone(client: OpenAI):
    """A line end is one, and nothing else is; a space comes as before."""
    line_end, space = (
        tokenizer()(text, add_special_tokens=False)["input_ids"][0] for text in ("\n", " ")
    )
    assert "\n" not in complete(client, logit_bias={str(line_end): 100}, bad_words=["\n"])["text"]
    assert complete(client, logit_bias={str(space): 100}, bad_words=["\n"])["text"] == " " * 8
    assert " " not in complete(client, logit_bias={str(space): 100}, bad_words=[" "])["text"]


def test_stop_strings_and_special_tokens_in_the_text(client: OpenAI):
    plain = complete(client, max_tokens=12)["text"]
    stop = plain[3:5]
    stops = [stop, *(f"never{number}" for number in range(200))]
    before = plain[: plain.index(stop)]
    assert complete(client, max_tokens=12, stop=stops)["text"] == before
    assert (
        complete(client, max_tokens=12, stop=stops, include_stop_str_in_output=True)["text"]
        == before + stop
    )
    special = tokenizer().convert_tokens_to_ids("<|user|>")
    forced = {"logit_bias": {str(special): 100}, "max_tokens": 2}
    assert complete(client, **forced)["text"] == ""
    assert complete(client, **forced, skip_special_tokens=False)["text"] == "<|user|>" * 2


def test_a_salt_keeps_prefixes_apart(client: OpenAI):
    prompt = [(7 * place) % 300 + 8 for place in range(200)]

    def num_cached(**more: Any) -> int:
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=1, extra_body=more
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert num_cached(cache_salt="one") == 0
    assert num_cached(cache_salt="one") > 100
    assert num_cached(cache_salt="two") == num_cached() == 0


def test_samples_are_not_those_of_the_next_seed(client: OpenAI):
    def texts(seed: int) -> list[str]:
        more: Any = {"model": "small", "prompt": PROMPT, "max_tokens": 12}
        return [choice.text for choice in client.completions.create(**more, seed=seed, n=3).choices]

    assert texts(5) == texts(5)
    assert not set(texts(5)) & set(texts(6))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": PROMPT, "max_tokens": 1}),
        ("/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/responses", {"input": "Hello", "max_output_tokens": 1, "store": False}),
    ],
)
def test_without_a_model_it_is_the_one_that_serves(client: OpenAI, path: str, body: dict[str, Any]):
    answer: Any = client.post(path, body=body, cast_to=object)
    assert answer["model"] == "small"

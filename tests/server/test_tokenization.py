"""vLLM's routes about tokens, against the tokenizer itself; and small routes that monitors and
proxies ask."""

import copy
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from served import Served, chat_tokens, model_directory, serving, tokenizer
from tokenizers import processors

from coserve.version import VERSION

JSON = {"Content-Type": "application/json"}
CHAT = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
]


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return served.post(path, json=body)


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize("special", [True, False, None])
def test_a_text(served, special):
    text = "vllm1 Ünïcödé 😀."
    found = post(served, "/tokenize", model="small", prompt=text, add_special_tokens=special).json()
    tokens = tokenizer().encode(text, add_special_tokens=special is not False)
    assert found == {
        "count": len(tokens),
        "max_model_len": 512,
        "tokens": tokens,
        "token_strs": None,
    }
    assert post(served, "/detokenize", model="small", tokens=tokens).json() == {"prompt": text}


def test_token_strings(served):
    found = post(served, "/tokenize", prompt="Hello world", return_token_strs=True).json()
    assert found["token_strs"] == tokenizer().convert_ids_to_tokens(found["tokens"])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("generation", "continues"), [(True, False), (False, False), (False, True)]
)
def test_a_chat(served, generation, continues, special):
    found = post(
        served,
        "/tokenize",
        messages=CHAT,
        add_generation_prompt=generation,
        continue_final_message=continues,
        add_special_tokens=special,
    ).json()
    text = tokenizer().apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=generation, continue_final_message=continues
    )
    assert found["tokens"] == tokenizer().encode(text, add_special_tokens=special)


def test_special_tokens_of_completions_and_chats(tmp_path: Path):
    """To texts they are added unless a request says otherwise, to chats if it says so."""
    beginning = tokenizer().convert_tokens_to_ids("<|system|>")
    adding = copy.deepcopy(tokenizer())
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", beginning)]
    )
    directory = tmp_path / "small"
    shutil.copytree(model_directory(), directory)
    adding.save_pretrained(directory)
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hello"},
        "/v1/chat/completions": {"messages": CHAT[:1]},
    }
    with serving(model=str(directory)) as served:
        for path, default in (("/v1/completions", True), ("/v1/chat/completions", False)):
            for special in (None, True, False):
                more = {} if special is None else {"add_special_tokens": special}
                answer = post(
                    served, path, **bodies[path], **more, max_tokens=1, return_token_ids=True
                ).json()
                tokens = (answer if "prompt_token_ids" in answer else answer["choices"][0])[
                    "prompt_token_ids"
                ]
                assert (tokens[0] == beginning) == (default if special is None else special)


def test_a_chat_is_tokenized_as_it_is_answered(served, client: OpenAI):
    found = post(served, "/tokenize", messages=[{"role": "user", "content": "Hello 😀"}]).json()
    assert found["tokens"] == chat_tokens("Hello 😀")


def test_what_is_wrong_is_named(served):
    assert refused(post(served, "/tokenize")) == "give exactly one of prompt and messages"
    assert (
        refused(post(served, "/tokenize", prompt="a", messages=CHAT))
        == "give exactly one of prompt and messages"
    )
    assert "the limit is 1000000" in refused(post(served, "/tokenize", prompt="a" * 1_000_001))
    assert "lone surrogate" in refused(
        served.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=JSON)
    )
    assert "tokens has 99999; the model has" in refused(post(served, "/detokenize", tokens=[99999]))
    assert "cannot be combined" in refused(
        post(
            served,
            "/tokenize",
            messages=CHAT,
            add_generation_prompt=True,
            continue_final_message=True,
        )
    )
    assert post(served, "/tokenize", model="nobody", prompt="a").status_code == 404


def test_the_tokenizer_tells_what_it_is(served):
    info = served.get("/tokenizer_info").json()
    assert info["chat_template"] == tokenizer().chat_template
    assert info["eos_token"] == "<|end|>"
    end = info["added_tokens_decoder"][str(tokenizer().eos_token_id)]
    assert end["content"] == "<|end|>" and end["special"] is True
    assert isinstance(info["tokenizer_class"], str)


def test_small_routes(served):
    assert served.get("/version").json() == {"version": VERSION}
    assert served.get("/ping").status_code == served.post("/ping").status_code == 200
    assert served.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/metrics"])
def test_head_is_get_without_its_body(served, path):
    head = httpx.head(f"{served.url}{path}")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == served.get(path).headers["content-type"]


def test_head_of_what_takes_only_posts(served):
    assert httpx.head(f"{served.url}/v1/completions").status_code == 405


def test_requests_under_way_are_counted(served, client: OpenAI):
    settings: Any = {
        "model": "small",
        "prompt": "a",
        "max_tokens": 400,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    with client.completions.create(**settings) as stream:
        next(iter(stream))
        assert served.get("/load").json() == {"server_load": 1}
    served.wait_until(lambda: served.get("/load").json() == {"server_load": 0})


@pytest.fixture(scope="module")
def renamed():
    options = (
        "--served-model-name",
        "mine",
        "--served-model-name",
        "other",
        "--max-model-len",
        "64",
    )
    more = ("--root-path", "/llm", "--cors-origin", "https://chat.example.com")
    with serving(*options, *more) as server:
        yield server


@pytest.mark.long
def test_names_lengths_and_prefixes_are_the_operators(renamed):
    for base in (renamed.url, f"{renamed.url}/llm"):
        models = httpx.get(f"{base}/v1/models").json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in models] == [("mine", 64)]
    for name, status in (("mine", 200), ("other", 200), ("small", 404)):
        body = {"model": name, "prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{renamed.url}/llm/v1/completions", json=body).status_code == status
    body = {"model": "mine", "prompt": "a", "max_tokens": 64}
    answer = httpx.post(f"{renamed.url}/v1/completions", json=body)
    assert "maximum context length is 64 tokens" in answer.json()["error"]["message"]


@pytest.mark.long
def test_pages_of_an_allowed_origin_may_ask(renamed):
    ask = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{renamed.url}/v1/chat/completions", headers=ask)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    answer = httpx.options(
        f"{renamed.url}/v1/chat/completions", headers=ask | {"Origin": "https://elsewhere.example"}
    )
    assert "access-control-allow-origin" not in answer.headers

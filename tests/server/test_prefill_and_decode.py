"""Two servers, one of which computes prompts for the other; what a client of the other sees."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, adapter_root, expected, is_alive, peft_model, serving, tokenizer

from coserve.server.config import ServerConfig

pytestmark = pytest.mark.long

NUM_TOKENS = 12
# Run by the prefill instance's process as it starts: its steps take long enough to be killed within
# one.
SLOW = """
import time
from coserve.devices.torch.device import TorchDevice

submit = TorchDevice.submit

def slow(self, batch):
    time.sleep(0.3)
    return submit(self, batch)

TorchDevice.submit = slow
"""


def prompt_of(number: int) -> str:
    return f"{number}: " + " ".join(
        f"the quick brown fox number {number * each}" for each in range(12)
    )


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def answer(served: Served, number: int, model: str = "small") -> Any:
    return served.client().completions.create(
        model=model, prompt=prompt_of(number), max_tokens=NUM_TOKENS, temperature=0, logprobs=1
    )


def assert_right(made: Any, number: int, network: Any = None) -> None:
    tokens, logprobs = expected(ids_of(prompt_of(number)), NUM_TOKENS, network)
    (choice,) = made.choices
    assert choice.text == tokenizer().decode(tokens, skip_special_tokens=True)
    assert choice.logprobs.token_logprobs[: len(tokens)] == pytest.approx(
        logprobs[: len(tokens)], abs=1e-3
    )


def handover(served: Served) -> dict[str, Any]:
    return dict(served.get("/v1/status").json()["handover"])


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("handover") / "socket")


@pytest.fixture(scope="module")
def decode(path: Path) -> Iterator[Served]:
    peft_model("pirate")
    options = (
        "--role",
        "decode",
        "--prefill-socket",
        str(path),
        "--prefill-min-tokens",
        "16",
        "--slo-ttft",
        "60s",
    )
    with serving(*options, "--allow-adapter-paths", str(adapter_root())) as served:
        yield served


def prefill_serving(path: Path, **settings: Any) -> Any:
    return serving("--role", "prefill", "--prefill-socket", str(path), **settings)


def test_answers_are_those_of_one_instance_and_survive_kill_9_of_the_other(path, decode):
    assert_right(answer(decode, 0), 0)  # nobody is there yet
    decode.wait_until(lambda: handover(decode)["num_not_handed_over"] == 1)
    with prefill_serving(path, before=SLOW) as prefill:
        decode.wait_until(lambda: handover(decode)["num_partners"] == 1)
        assert_right(answer(decode, 1), 1)
        loaded = decode.post(
            "/v1/load_lora_adapter",
            json={"lora_name": "pirate", "lora_path": str(adapter_root() / "pirate")},
        )
        assert loaded.status_code == 200, loaded.text
        assert_right(answer(decode, 2, "pirate"), 2, peft_model("pirate"))
        decode.wait_until(lambda: handover(decode)["num_handed_over"] == 2)
        assert handover(decode)["num_not_handed_over"] == 1
        prefill.wait_until(lambda: handover(prefill)["num_handed_over"] == 2)
        assert 'coserve_handover_prompts{outcome="whole"} 2.0' in decode.get("/metrics").text
        pids = prefill.process.pid, prefill.engine_pid()
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(answer, decode, number) for number in range(3, 11)]
            decode.wait_until(lambda: decode.get("/v1/status").json()["requests"]["waiting"])
            prefill.process.send_signal(signal.SIGKILL)
            for number, made in enumerate(answers, 3):
                assert_right(made.result(), number)
        decode.wait_until(lambda: handover(decode)["num_partners"] == 0)
        assert handover(decode)["num_not_handed_over"] > 1
        decode.wait_until(lambda: not any(map(is_alive, pids)))
    assert "no prefill instance (the other end has closed the connection)" in decode.log.read_text()
    with prefill_serving(path) as prefill:  # where the socket of the dead one lies
        decode.wait_until(lambda: handover(decode)["num_partners"] == 1)
        before = handover(decode)["num_handed_over"]
        assert_right(answer(decode, 11), 11)
        decode.wait_until(lambda: handover(decode)["num_handed_over"] == before + 1)
        with (
            pytest.raises(AssertionError, match="another process listens there"),
            prefill_serving(path),
        ):
            pass
    pages = [link for link in (decode.home / "run").glob("*/pages") if link.is_symlink()]
    assert len(pages) == 1 and not list(pages[0].resolve().glob("pages-*")), (
        "pages are removed when they have been read"
    )
    directory = pages[0].resolve()
    decode.stop()
    assert not directory.exists() and not path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"role": "decode"},
            "role decode needs prefill_socket, a path at which the two instances meet",
        ),
        ({"prefill_socket": "/tmp/x"}, "prefill_socket is for role prefill or decode"),
        ({"role": "other"}, "role must be one of both, prefill, decode, not 'other'"),
        (
            {"role": "prefill", "prefill_socket": "/tmp/x", "prefill_min_tokens": 3},
            "prefill_min_tokens is for role decode",
        ),
        (
            {"role": "decode", "prefill_socket": "/tmp/x", "prefill_min_tokens": 0},
            "prefill_min_tokens must be a whole number",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**options)

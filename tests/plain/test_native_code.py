"""Native code that reads clients' texts in the server's process, on a thread with a small stack: it
recurses over none.

What compiles or follows what a client wrote is in a sandbox instead.
"""

import os
import subprocess
import sys

import pytest

_STACK_BYTES = 256 << 10
_TEXTS = {
    "one letter": "'a' * 300_000",
    "spaces": "' ' * 300_000",
    "brackets": "'(' * 100_000 + ')' * 100_000",
    "quotes": '"\'" * 200_000',
    "marks": "'e' + '\\u0301' * 200_000",
    "emoji": "'\\U0001f469\\u200d' * 50_000",
    "digits": "'1' * 300_000",
    "mixed": "'aA1 \\n' * 60_000",
    "special tokens": "'<|end|>' * 30_000",
}
_RUN = """
import sys, threading
threading.stack_size({stack})
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({directory!r})
text = {text}
tokens = []
thread = threading.Thread(target=lambda: tokens.append(len(tokenizer(text)["input_ids"])))
thread.start()
thread.join()
print(tokens[0] > 0)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", _TEXTS)
def test_a_tokenizer_reads_any_text_on_a_small_stack(name: str):
    from coserve.models.source import find_model

    directory = find_model("tiny", with_weights=False).directory
    code = _RUN.format(stack=_STACK_BYTES, directory=str(directory), text=_TEXTS[name])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0 and done.stdout.strip() == "True", (
        done.returncode,
        done.stderr[-2000:],
    )

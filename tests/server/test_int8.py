"""A server whose backbone has int8 weights."""

import re

import pytest
from served import model_directory, serving, tokenizer

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.engine import Engine


@pytest.mark.long
def test_int8_weights_are_served_as_the_library_serves_them():
    engine = Engine.load(str(model_directory()), dtype="float32", weights="int8")
    prompt = list(tokenizer()("Hello")["input_ids"])
    [expected] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))
    with serving("--weights", "int8") as served:
        found = served.client().completions.create(
            model="small", prompt="Hello", max_tokens=8, temperature=0, logprobs=1
        )
    assert found.choices[0].text == tokenizer().decode(
        list(expected.tokens), skip_special_tokens=True
    )
    [size] = re.findall(r"weights (\S+) kB", served.start_line)
    assert float(size) == pytest.approx(engine.device.info.weight_bytes / 1e3, rel=0.05)

"""The scripts in examples/ that need no server: they run as they are, and print what they
promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_short_and_run_by_a_test():
    tests = "".join(
        path.read_text() for path in Path(__file__).parents[1].glob("*/test_user_examples*.py")
    )
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tests, path.name
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_library_trains_while_it_answers():
    *_, state, answer = run("library.py").splitlines()
    assert re.fullmatch(r"succeeded, [1-9]\d* tokens trained", state)
    assert answer == "Cold, of course."


def test_other_model_trains_what_does_not_serve(tmp_path):
    *answers, state = run("other_model.py", "tiny", str(tmp_path)).splitlines()
    assert len(set(answers)) == 1
    assert re.fullmatch(r"succeeded, [1-9]\d* tokens trained", state)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_peft_adapter_answers_beside_the_base(tmp_path):
    from peft import LoraConfig, get_peft_model
    from served import model_directory
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_directory()),
        LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        ),
    )
    model.save_pretrained(tmp_path)
    base, mine = run("peft_adapter.py", str(model_directory()), str(tmp_path)).splitlines()
    assert base.startswith("base: ")
    assert mine.startswith("mine: ")
    assert base.split(": ", 1)[1] != mine.split(": ", 1)[1]


def test_simulate_policy_compares_policies():
    slack, alone = run("simulate_policy.py").splitlines()
    assert slack.startswith("slack ")
    assert alone.startswith("inference-only ")
    held, harvest = (
        float(re.search(rf"{name} +([0-9.]+)", slack)[1]) for name in ("held", "harvest")
    )
    assert held > 99
    assert harvest > 1000
    assert alone.endswith("harvest     0 tokens/s")

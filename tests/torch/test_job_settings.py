"""What jobs are told, their examples' file, and what is estimated of them."""

import pytest
from engines import examples_of, word_tokenizer
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.engine.jobs.events import JobEvent
from coserve.errors import DataError, JobError
from coserve.jobs.datasets.examples import (
    read_examples_file,
    read_training_file,
    write_examples_file,
)
from coserve.jobs.lifecycle.estimate import ProgressMeter
from coserve.jobs.metrics.results import message_of, metrics_of, results_csv
from coserve.jobs.names import model_name
from coserve.jobs.settings import JobSettings, job_settings
from coserve.tuning.examples import Example


def settings(
    extension=None,
    *,
    is_fresh=True,
    seed=3,
    max_positions=None,
    objective="supervised",
    **hyperparameters,
):
    return job_settings(
        hyperparameters=hyperparameters,
        extension=extension or {},
        seed=seed,
        architecture=make_backbone().architecture,
        is_fresh=is_fresh,
        max_positions=max_positions,
        objective=objective,
    )


def test_examples_are_no_longer_than_what_the_server_takes():
    assert settings(max_positions=64).max_sequence_length == 64
    with pytest.raises(
        JobError, match=r"coserve\.max_sequence_length is 65; the model has 64 positions"
    ):
        settings({"max_sequence_length": 65}, max_positions=64)


def test_an_example_leaves_room_for_virtual_tokens():
    virtual = {"adapter": {"type": "prompt_tuning", "num_virtual_tokens": 20}}
    assert settings(virtual, max_positions=64).max_sequence_length == 44
    assert (
        settings(virtual | {"max_sequence_length": 44}, max_positions=64).max_sequence_length == 44
    )
    with pytest.raises(
        JobError, match="length is 45; the model has 64 positions, 20 of them for virtual"
    ):
        settings(virtual | {"max_sequence_length": 45}, max_positions=64)
    with pytest.raises(
        JobError, match=r"num_virtual_tokens is 20; that leaves 1 of 21 positions for an example"
    ):
        settings(virtual, max_positions=21)


def test_auto_means_what_it_says():
    made = settings()
    assert made.hyperparameters(0) == {
        "n_epochs": "auto",
        "batch_size": "auto",
        "learning_rate_multiplier": "auto",
    }
    for num_examples, n_epochs, batch_size in (
        (1, 10, 1),
        (10, 10, 1),
        (25, 4, 1),
        (64, 3, 4),
        (1000, 3, 16),
    ):
        config = made.tuning_config(num_examples)
        assert (config.num_epochs, config.batch_size) == (n_epochs, batch_size)
        assert made.hyperparameters(num_examples) == {
            "n_epochs": n_epochs,
            "batch_size": batch_size,
            "learning_rate_multiplier": 1.0,
        }
        assert config.optimizer.learning_rate == 1e-4
    assert (config.seed, config.shuffle, config.live, config.evaluate_every_steps) == (
        3,
        True,
        False,
        50,
    )
    assert config.max_sequence_length == 128, "the model's positions"
    assert LoraConfig.from_peft(made.adapter) == LoraConfig(
        r=16, alpha=32, target_modules="all-linear"
    )


def test_a_job_shows_its_objectives_settings_also_those_that_were_not_given():
    own = {"beta": 0.1, "label_smoothing": 0.2}
    for given in ({"label_smoothing": 0.2}, {"beta": "auto", "label_smoothing": 0.2}):
        made = settings(objective="dpo", **given)
        for num_examples in (0, 9):
            shown = made.hyperparameters(num_examples)
            assert {name: shown[name] for name in shown if name in own} == own


def test_what_is_asked_for_is_what_the_job_is_told():
    adapter = {
        "type": "lora",
        "r": 4,
        "alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "dropout": 0.5,
    }
    extension = {
        "adapter": adapter,
        "optimizer": {
            "learning_rate": 1e-3,
            "betas": [0.8, 0.9],
            "schedule": "cosine",
            "warmup_steps": 5,
        },
        "max_sequence_length": 64,
        "shuffle": False,
        "checkpoint_every_steps": 7,
        "live": True,
        "max_recompute": 0.25,
    }
    made = settings(extension, n_epochs=2, batch_size=5, learning_rate_multiplier=3)
    assert JobSettings.from_data(made.to_data()) == made
    config = made.tuning_config(100)
    assert (config.num_epochs, config.batch_size, config.evaluate_every_steps) == (2, 5, 7)
    assert config.optimizer.learning_rate == pytest.approx(3e-3)
    assert (config.optimizer.betas, config.optimizer.schedule) == ((0.8, 0.9), "cosine")
    assert (config.shuffle, config.live, config.max_sequence_length) == (False, True, 64)
    assert config.max_recompute == 0.25
    lora = LoraConfig.from_peft(made.adapter)
    assert lora == LoraConfig(r=4, alpha=8, target_modules=("q_proj", "v_proj"), dropout=0.5)
    assert (
        settings({"checkpoint_every_steps": 7, "evaluate_every_steps": 0}).evaluate_every_steps == 0
    )
    assert settings(is_fresh=False).adapter is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n_epochs": 0}, "hyperparameters.n_epochs"),
        ({"n_epochs": True}, "hyperparameters.n_epochs"),
        ({"batch_size": 1.5}, "hyperparameters.batch_size"),
        ({"learning_rate_multiplier": float("nan")}, "hyperparameters.learning_rate_multiplier"),
        ({"extension": {"adapter": {"r": 0}}}, "coserve.adapter"),
        ({"extension": {"adapter": {"r": 10**9}}}, "coserve.adapter.r"),
        (
            {"extension": {"adapter": {"rank_pattern": {"q_proj": 99}}}},
            "coserve.adapter.rank_pattern.q_proj",
        ),
        ({"extension": {"adapter": {"target_modules": 5}}}, "coserve.adapter"),
        ({"extension": {"adapter": {"target_modules": "("}}}, "coserve.adapter"),
        ({"extension": {"optimizer": 3}}, "coserve.optimizer"),
        ({"extension": {"optimizer": {"weight_decay": -1}}}, "coserve.optimizer"),
        ({"extension": {"shuffle": "yes"}}, "coserve.shuffle"),
        ({"extension": {"max_sequence_length": 129}}, "coserve.max_sequence_length"),
        ({"extension": {"adapter": {}}, "is_fresh": False}, "coserve.adapter"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(given, param):
    with pytest.raises(JobError) as caught:
        settings(**given)
    assert caught.value.param == param
    assert str(caught.value).startswith(param.rpartition(".")[0])


NOT_NUMBERS: list[object] = [
    float("nan"),
    float("inf"),
    -1,
    2**70,
    10**5000,
    -float("inf"),
    "1",
    True,
    [1],
    {},
    None,
]
OPTIMIZER = (
    "learning_rate",
    "weight_decay",
    "eps",
    "max_grad_norm",
    "warmup_steps",
    "betas",
    "schedule",
)
COUNTS = ("checkpoint_every_steps", "max_sequence_length", "evaluate_every_steps")
ADAPTER = ("r", "alpha", "dropout", "use_rslora", "rank_pattern", "alpha_pattern")


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(type(value)))
@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("optimizer", name) for name in OPTIMIZER),
        *((None, name) for name in (*COUNTS, "max_recompute")),
        *(("adapter", name) for name in ADAPTER),
        *(
            ("hyperparameters", name)
            for name in ("n_epochs", "batch_size", "learning_rate_multiplier")
        ),
    ],
)
def test_every_number_that_is_out_of_range_is_refused_by_name(place, name, value):
    optional = {
        "evaluate_every_steps",
        "max_sequence_length",
        "n_epochs",
        "batch_size",
        "learning_rate_multiplier",
    }
    is_right = (value is None and name in optional) or (value is True and name == "use_rslora")
    if is_right or (value == {} and name.endswith("_pattern")):
        return
    asked = {name: value}
    if place != "hyperparameters":
        asked = {"extension": asked if place is None else {place: asked}}
    with pytest.raises(JobError) as caught:
        settings(**asked)
    assert name in str(caught.value)
    assert "must be" in str(caught.value)
    assert str(caught.value.param).startswith(
        "hyperparameters" if place == "hyperparameters" else "coserve"
    )
    assert len(str(caught.value)) < 500


def test_numbers_that_are_far_too_large_are_slips():
    for optimizer in (
        {"learning_rate": 1e4},
        {"eps": 2},
        {"weight_decay": 1e4},
        {"max_grad_norm": 1e10},
    ):
        with pytest.raises(JobError, match="and at most"):
            settings({"optimizer": optimizer})
    with pytest.raises(
        JobError, match="learning_rate must be a number of at least 0 and at most 1,000"
    ):
        settings({"optimizer": {"learning_rate": 10}}, learning_rate_multiplier=1e6)
    with pytest.raises(JobError, match="alpha must be a number above 0 and at most"):
        settings({"adapter": {"alpha": 1e300}})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"type": "p_tuning"}, "simpo trains no virtual tokens"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "simpo does not train an adapter at the output layer",
        ),
        ({"modules_to_save": ["lm_head"]}, "simpo does not train an adapter at the output layer"),
    ],
)
def test_what_an_objective_over_sequences_does_not_train_is_refused_when_the_job_is_created(
    adapter, message
):
    extension = {"adapter": adapter}
    assert settings(extension).adapter is not None
    with pytest.raises(JobError, match=rf"^coserve\.adapter: {message}") as refused:
        settings(extension, objective="simpo")
    assert refused.value.param == "coserve.adapter"
    assert settings(objective="simpo").objective == "simpo"


def test_names_of_models():
    assert model_name("tiny", "default", None).startswith("ft:tiny:coserve::")
    assert model_name("org/Some Model", "acme:x", "s").startswith("ft:Some-Model:acme-x:s:")
    assert model_name("dummy:small", "default", "s") != model_name("dummy:small", "default", "s")


# -- examples ----------------------------------------------------------------------------------


def test_examples_come_out_of_their_file_as_they_went_in(tmp_path):
    examples = [
        *examples_of(range(1, 60)),
        Example(tokens=(2**31 - 1,), trained=(True,), truncated=True),
        Example(tokens=(), trained=()),
    ]
    write_examples_file(tmp_path / "new" / "file", examples)
    assert read_examples_file(tmp_path / "new" / "file") == examples
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_a_damaged_file_of_examples_is_refused(tmp_path):
    path = tmp_path / "file"
    write_examples_file(path, examples_of((5, 6)))
    whole = path.read_bytes()
    for content in (b"", whole[:-1], b"x" + whole, whole.replace(b"trained", b"strange")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="are damaged"):
            read_examples_file(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_examples_file(tmp_path / "none")


def read(path, tokenizer=None, *, vocab_size=97, **named):
    return read_training_file(
        path, tokenizer or word_tokenizer(), max_sequence_length=10, vocab_size=vocab_size, **named
    )


def test_faults_are_named_by_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\r\n\n{"text": "a longer one, to be cut"}\n')
    assert [example.truncated for example in read(path)] == [False, True]
    path.write_bytes(b'\n{"text": "fine"}\nnonsense\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"line 3: not valid JSON.*; line 4: text must be a string"):
        read(path)
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: is not UTF-8 at byte 10"):
        read(path)
    path.write_bytes(b'\n{"prompt": "0123456789abc", "completion": "d"}')
    with pytest.raises(DataError, match="line 2: has no token to train on within 10 tokens"):
        read(path)
    path.write_bytes(b'\n{"text": "fine"}\n{"text": "zz"}\n')
    with pytest.raises(
        DataError, match=r"line 3: has token \d+; the model has 86: is this its tokenizer\?"
    ):
        read(path, vocab_size=86)
    with pytest.raises(DataError, match="has no tokenizer"):
        read_training_file(path, None, max_sequence_length=10, vocab_size=97)
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none")
    with pytest.raises(JobError, match="was ended"):
        read(path, is_wanted=lambda num_bytes: False)


# -- results, estimates --------------------------------------------------------------------------


def test_an_estimate_is_what_was_measured():
    meter = ProgressMeter((100.0,))
    assert meter.seconds_left(10, 105.0) is None, "nothing was measured yet"
    meter = meter.after_steps(1, 102.0)
    assert meter.seconds_left(9, 102.0) == pytest.approx(18.0)
    assert meter.seconds_left(9, 103.0) == pytest.approx(17.0)
    assert meter.seconds_left(9, 110.0) == pytest.approx(9 * 5.0 - 8.0), "this step takes longer"
    assert meter.seconds_left(0, 110.0) == 0
    for second in range(103, 203):
        meter = meter.after_steps(1, float(second))
    assert meter.seconds_left(5, 202.0) == pytest.approx(5.0), "what was long ago does not count"


def test_numbers_that_are_none_are_null():
    nan = float("nan")
    event = JobEvent(job="j", kind="step", step=2, now_s=0, loss=nan, token_accuracy=0.5, norm=None)
    data = metrics_of(event, num_steps=4, tokens_per_s=None)
    assert (data["train_loss"], data["train_mean_token_accuracy"], data["gradient_norm"]) == (
        None,
        0.5,
        None,
    )
    assert (
        message_of(event, 4)
        == "Step 2/4: training loss=no number (the gradient was not finite: skipped)"
    )
    assert (
        results_csv([]) == b"step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n"
    )

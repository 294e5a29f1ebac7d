"""Jobs beside requests on an engine whose model ranks divide come to what they come to on one
rank."""

from typing import Any

import pytest
import torch
from engines import examples_of, greedy, make_engine, prompts_of, tokens_by_request, watched
from lengths import long_but
from lockstep import lockstep
from peft_methods import config_of
from rank_training import put_together

from coserve.adapters import LoraConfig
from coserve.engine.jobs.events import JobEvent
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import Example

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3)
LORA = LoraConfig(r=4, dropout=0.2, target_modules="all-linear")
SUPERVISED = TuningConfig(
    num_epochs=2, batch_size=3, evaluate_every_steps=2, optimizer=OPTIMIZER, seed=1
)


def pairs(lengths):
    """Two sequences in each example, the better one first."""
    found = []
    for a, b in zip(examples_of(lengths, 1), examples_of(reversed(lengths), 2), strict=True):
        parts = (len(a.tokens), len(b.tokens))
        found.append(
            Example(tokens=a.tokens + b.tokens, trained=a.trained + b.trained, parts=parts)
        )
    return found


EXACT = (
    "kind",
    "step",
    "num_trained",
    "num_tokens",
    "learning_rate",
    "version",
    "is_best",
    "token_accuracy",
)
JOBS = {
    "lora": (examples_of([9, 14, 5, 20, 7]), LORA, SUPERVISED),
    "pissa": (examples_of([30, 6, 11], 3), config_of("pissa"), SUPERVISED),
    "dora": (
        examples_of([8, 8, 21, 3], 4),
        config_of("dora"),
        TuningConfig(batch_size=2, optimizer=OPTIMIZER),
    ),
    "dpo": (
        pairs([7, 12, 9]),
        LORA,
        TuningConfig(batch_size=2, objective="dpo", optimizer=OPTIMIZER),
    ),
    "prefix": (
        examples_of([10, 13], 5),
        config_of("prefix-projection"),
        TuningConfig(optimizer=OPTIMIZER),
    ),
}


def run(num_ranks, policy):
    """Return an engine that has run all jobs and some requests, and its events."""
    engine, events = make_engine("qwen2", num_ranks=num_ranks, policy=policy, num_pages=3000), []
    for name, (data, adapter, config) in JOBS.items():
        validation = examples_of([12, 6], 9) if config.evaluate_every_steps else None
        engine.submit(data, config, adapter=adapter, name=name, validation=validation)
    for number, prompt in enumerate(prompts_of((9, 17, 4, 26))):
        engine.add(prompt, greedy(12), request_id=str(number))
        events += [*engine.step(), *engine.step()]
    for _ in range(5000):
        if not engine.has_work:
            return engine, events
        events += engine.step()
        engine.check_integrity()
    raise AssertionError("work is left")


def told(events):
    """Return what each job says of itself: what must be equal, and numbers that are sums."""
    exact, sums = dict[str, list[Any]](), dict[str, list[float]]()
    for event in events:
        if isinstance(event, JobEvent):
            names = (
                "kind",
                "step",
                "num_trained",
                "num_tokens",
                "learning_rate",
                "version",
                "is_best",
                "token_accuracy",
            )
            exact.setdefault(event.job, []).append([getattr(event, name) for name in names])
            values = [event.loss, event.norm, *event.metrics.values()]
            sums.setdefault(event.job, []).extend(value for value in values if value is not None)
    return exact, sums


@pytest.mark.parametrize(
    "policy", long_but("token-fusion", of=["token-fusion", "temporal-sharing"])
)
def test_jobs_beside_requests_come_to_what_they_come_to_on_one_rank(policy):
    (one, expected), (several, found) = run(1, policy), run(2, policy)
    (exact, sums), (own, own_sums) = told(expected), told(found)
    assert own == exact and len(exact) == len(JOBS)
    for job, numbers in sums.items():
        assert own_sums[job] == pytest.approx(numbers, rel=2e-5, abs=1e-6)
    assert tokens_by_request(found) == tokens_by_request(expected)
    inner: Any = watched(one).inner
    versions, ranks = inner._versions, [rank._versions for rank in lockstep(several).ranks]
    assert versions and all(each.keys() == versions.keys() for each in ranks)
    for label, version in versions.items():
        states, masters = ranks[0][label].graphs.states, version.masters
        whole = put_together([each[label].masters for each in ranks], masters, dict(states))
        for name, value in masters.items():
            torch.testing.assert_close(whole[name], value, atol=5e-6, rtol=1e-4)
    one.device.close()
    several.device.close()

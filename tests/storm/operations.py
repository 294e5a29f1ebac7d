"""What is asked of an engine in a storm: one function each; `OPERATIONS` says how often each
comes."""

from collections.abc import Callable, Mapping
from random import Random

from storm.world import TENANTS, Asked, Submitted, World

from coserve.adapters import LoraConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

Operation = Callable[[World], None]

_VOCAB = 49152


# -- requests -------------------------------------------------------------------------------


def add(world: World) -> None:
    """A request of any length, SLO and sampling, of a model that is there."""
    rng, engine = world.rng, world.engine
    if len(engine.requests.waiting) >= world.setting.most_waiting:
        return
    labels = engine.versions.labels()
    name, prompt, params = f"request-{len(world.prompts)}", _prompt(world), _params(rng)
    world.prompts[name] = prompt
    slo = (
        Slo(ttft_s=rng.choice((0.01, 1.0, 10.0)), tpot_s=rng.choice((1e-6, 0.03, 0.2)))
        if rng.random() < 0.5
        else None
    )
    engine.add_tokens(
        prompt,
        params,
        adapter=rng.choice(labels) if labels and rng.random() < 0.5 else None,
        slo=slo,
        request_id=name,
        tenant=rng.choice(TENANTS),
    )
    world.asked[name] = Asked(prompt=prompt, params=params)


def burst(world: World) -> None:
    """Many at once."""
    for _ in range(world.rng.choice((5, 20))):
        add(world)


def cancel(world: World) -> None:
    if names := _open_requests(world):
        name = world.rng.choice(names)
        world.asked[name].was_cancelled = True
        world.engine.cancel(name)


def stop(world: World) -> None:
    """The server has found that a sequence is at its end."""
    started = [
        (name, index)
        for name in _open_requests(world)
        for index in _running_with_tokens(world, name)
    ]
    if started:
        name, index = world.rng.choice(started)
        world.asked[name].stopped.add(index)
        world.engine.stop(name, index, len(world.asked[name].tokens[index]))


# -- adapters -------------------------------------------------------------------------------


def save_adapter(world: World) -> None:
    """Write a version in PEFT's format."""
    if labels := world.engine.versions.labels():
        directory = str(world.home / f"adapter-{len(world.saved)}")
        world.engine.save_adapter(world.rng.choice(labels), directory)
        world.saved.append(directory)


def load_adapter(world: World) -> None:
    """Have one that lies on disk."""
    world.engine.load_adapter(_adapter_name(world), world.rng.choice(world.saved))


def ensure_adapter(world: World) -> None:
    """Likewise; it may make room for others."""
    world.engine.ensure_adapter(_adapter_name(world), world.rng.choice(world.saved))


def begin_load(world: World) -> None:
    """Likewise, beside steps: it is read now, and served later."""
    load = world.engine.begin_load(_adapter_name(world), world.rng.choice(world.saved))
    if load is not None and load.name not in {other.name for other in world.loads}:
        world.loads.append(load.read())


def finish_load(world: World) -> None:
    if world.loads:
        load = world.loads.pop(world.rng.randrange(len(world.loads)))
        world.engine.finish_load(load)


def unload_adapter(world: World) -> None:
    if labels := world.engine.versions.labels():
        world.engine.unload_adapter(world.rng.choice(labels).rpartition("@")[0])


# -- jobs -----------------------------------------------------------------------------------


def submit(world: World) -> None:
    """A job with an adapter of its own."""
    lora = LoraConfig(
        r=world.rng.choice((1, 16)), target_modules=world.rng.choice(("all-linear", ("v_proj",)))
    )
    _submit(world, _job(world, lora.to_peft()))


def submit_from(world: World) -> None:
    """A job that continues with an adapter that was saved."""
    _submit(world, _job(world, world.rng.choice(world.saved)))


def start_lost_jobs(world: World) -> None:
    """After the engine was thrown away: each resumes from its last checkpoint, or begins anew."""
    for job_id in list(world.lost):
        try:
            start_job(world, world.jobs[job_id])
        finally:  # it may be there though its caller was interrupted
            if job_id in world.engine.jobs:
                world.lost.remove(job_id)


def pause_job(world: World) -> None:
    if job := _living_job(world):
        world.engine.pause_job(job.id)
        job.state = "paused"


def resume_job(world: World) -> None:
    if job := _living_job(world):
        world.engine.resume_job(job.id)
        job.state = "running"


def cancel_job(world: World) -> None:
    if job := _living_job(world):
        world.engine.cancel_job(job.id)


def forget_job(world: World) -> None:
    """Only what is over, and was told so."""
    if over := [job for job in world.engine.jobs if world.jobs[job].is_finished]:
        world.engine.forget_job(world.rng.choice(over))


def take_checkpoint(world: World) -> None:
    """Copied now, to be written later."""
    if jobs := [job for job in world.engine.jobs if not world.jobs[job].is_finished]:
        job = world.rng.choice(jobs)
        world.taken.append((job, world.engine.checkpoint(job)))


def write_checkpoint(world: World) -> None:
    if world.taken:
        job, checkpoint = world.taken.pop(0)
        written = checkpoint.write(world.home / job)
        world.jobs[job].checkpoints.append((checkpoint.position.num_steps_done, written))


def throw_away(world: World) -> None:
    """`kill -9` of the engine."""
    world.start_again()


OPERATIONS: Mapping[Operation, int] = {
    add: 40,
    burst: 4,
    cancel: 8,
    stop: 4,
    save_adapter: 2,
    load_adapter: 3,
    ensure_adapter: 3,
    begin_load: 3,
    finish_load: 4,
    unload_adapter: 2,
    submit: 4,
    submit_from: 2,
    start_lost_jobs: 10,
    pause_job: 2,
    resume_job: 4,
    cancel_job: 1,
    forget_job: 4,
    take_checkpoint: 6,
    write_checkpoint: 6,
}
RARE: Mapping[Operation, int] = {throw_away: 1}
# What may be done while a step runs.
BESIDE_A_STEP = (add, cancel, stop)


def start_job(world: World, job: Submitted) -> None:
    """From its last checkpoint, if there is one."""
    engine = world.engine
    adapter: dict[str, object] | str | None = None
    step, checkpoint = job.checkpoints[-1] if job.checkpoints else (0, None)
    if checkpoint is None and isinstance(job.adapter, str):
        adapter = f"start-of-{job.id}"
        engine.ensure_adapter(adapter, job.adapter)
    elif checkpoint is None:
        adapter = job.adapter
    try:
        engine.submit_examples(
            job.examples,
            job.config,
            adapter=adapter,
            validation=job.validation,
            job_id=job.id,
            checkpoint=checkpoint,
            tenant=job.tenant,
        )
    finally:
        if job.id in engine.jobs:
            job.step = step
    if job.state == "paused":
        engine.pause_job(job.id)


# -- what is drawn ----------------------------------------------------------------------------


def _prompt(world: World) -> list[int]:
    """Some begin as others do."""
    rng = world.rng
    shared = [rng.randrange(3)] * rng.choice((0, 0, 16, 40))
    return [*shared, *(rng.randrange(_VOCAB) for _ in range(rng.choice((1, 5, 15, 40, 150))))]


def _params(rng: Random) -> SamplingParams:
    max_tokens = rng.choice((1, 2, 9, 9, 30, 30, 200))
    scores = rng.random() < 0.1
    return SamplingParams(
        max_tokens=0 if scores and rng.random() < 0.5 else max_tokens,
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 1, 2, 5)),
        seed=rng.choice((None, rng.randrange(_VOCAB - 100, _VOCAB))),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        logprobs=rng.choice((None, 2)),
        prompt_logprobs=1 if scores else None,
        stop_token_ids=rng.choice(((), (3, 11))),
        min_tokens=0 if scores else rng.randrange(max_tokens + 1) if rng.random() < 0.2 else 0,
        ignore_eos=rng.random() < 0.2,
    )


def _job(world: World, adapter: dict[str, object] | str) -> Submitted:
    rng = world.rng
    number = rng.choice((1, 3, 10))
    return Submitted(
        id=f"job-{len(world.jobs)}-{rng.randrange(1000)}",
        examples=[_example(rng) for _ in range(number)],
        validation=[_example(rng) for _ in range(rng.choice((0, 2)))],
        config=TuningConfig(
            num_epochs=rng.choice((1, 2, 3)),
            batch_size=rng.choice((1, 2, 8)),
            max_pack_tokens=rng.choice((None, 20, 60)),
            seed=rng.randrange(100),
            live=rng.random() < 0.2,
            evaluate_every_steps=rng.choice((0, 1, 3)),
            publish_every_steps=rng.choice((0, 1, 4)),
        ),
        adapter=adapter,
        tenant=rng.choice(TENANTS),
    )


def _example(rng: Random) -> Example:
    """No two are the same."""
    length = rng.choice((2, 5, 17, 40))
    trained = tuple([rng.random() < 0.7 or index == length - 1 for index in range(length)])
    return Example(tokens=tuple(rng.randrange(_VOCAB) for _ in range(length)), trained=trained)


def _submit(world: World, job: Submitted) -> None:
    if sum(not other.is_finished for other in world.jobs.values()) >= 8:
        return
    try:
        start_job(world, job)
    finally:
        if job.id in world.engine.jobs:  # also if the caller was interrupted when it was
            world.jobs[job.id] = job


def _open_requests(world: World) -> list[str]:
    return sorted({request.request for request in world.engine.requests})


def _running_with_tokens(world: World, name: str) -> list[int]:
    asked = world.asked[name]
    return [
        request.index
        for request in world.engine.requests.members(name)
        if asked.tokens.get(request.index)
    ]


def _living_job(world: World) -> Submitted | None:
    living = [world.jobs[job.id] for job in world.engine.jobs.values() if not job.is_terminal]
    return world.rng.choice(living) if living else None


def _adapter_name(world: World) -> str:
    return f"adapter-{world.rng.randrange(5)}"

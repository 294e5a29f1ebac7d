"""What must hold: after every action of the engine, and when all is over. One function each."""

from collections import Counter

from storm.ledger import Adapter
from storm.world import END_TOKENS, Asked, Submitted, World

from coserve.engine.request_lifecycle import sample_seed
from coserve.tuning.examples import epoch_order

# -- after every action -----------------------------------------------------------------------


def pages(world: World) -> None:
    """Every page is free or owned, and those owned are the requests' and packs'."""
    world.engine.check_integrity()


def handles(world: World) -> None:
    """The device has the trainers of the engine's jobs, their packs, and the versions that can be
    named."""
    engine, ledger = world.engine, world.ledger
    for job in engine.jobs.values():
        trainer = ledger.trainers[job.id]
        assert trainer.pack is not None or not (job.has_pack or job.progress.swapped), (
            f"the pack of {job.id}"
        )
        assert trainer.is_open or job.is_terminal, f"the trainer of {job.id}"
    named = {engine.versions.resolve(label).key for label in engine.versions.labels()}
    assert named <= ledger.versions.keys(), "a version that the device does not have"


def counters(world: World) -> None:
    """Tenants queue while a request of theirs waits, or a job runs."""
    engine = world.engine
    queued = {request.info.tenant for request in engine.requests.waiting.values()}
    queued |= {job.tenant for job in engine.jobs.values() if job.state == "running"}
    assert {tenant.name for tenant in engine.counters.views()} == queued


ALWAYS = (pages, handles, counters)


# -- when all is over -------------------------------------------------------------------------


def answers(world: World) -> None:
    """Every accepted request was answered or ended with an error, exactly once, with the tokens
    that it was to have."""
    for name, asked in world.asked.items():
        for index in range(asked.params.n):
            assert index in asked.ends, f"{name}/{index} was never answered"
        for index, tokens in asked.tokens.items():
            _check_tokens(world, asked, index, tokens)


def _check_tokens(world: World, asked: Asked, index: int, tokens: list[int]) -> None:
    params, end = asked.params, asked.ends[index]
    first = tokens[0] if tokens else 0
    assert tokens == [(first + i) % world.device.info.vocab_size for i in range(len(tokens))], (
        "a token lost or doubled"
    )
    if params.seed is not None and tokens:
        assert first == sample_seed(params.seed, index) % world.device.info.vocab_size
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else END_TOKENS)}
    ends = [i for i, token in enumerate(tokens, 1) if token in stops and i > params.min_tokens]
    if end == "length":
        assert len(tokens) == params.max_tokens
        assert not index or params.max_tokens == 0 or not ends or ends == [len(tokens)]
    elif end == "stop":
        assert ends == [len(tokens)] or index in asked.stopped
    elif end == "cancelled":
        assert asked.was_cancelled
    assert all(i == len(tokens) for i in ends), "tokens after the end"


def jobs_ended(world: World) -> None:
    for job in world.jobs.values():
        assert job.is_finished, f"{job.id} has never come to its end"


def idle(world: World) -> None:
    """Nothing is left on the device, once nobody needs it any more."""
    engine, ledger = world.engine, world.ledger
    assert not engine.has_work
    for job in list(engine.jobs):
        engine.forget_job(job)
    for load in world.loads:
        engine.finish_load(load)
    for name in {label.rpartition("@")[0] for label in engine.versions.labels()}:
        engine.unload_adapter(name)
    world.loads.clear()
    world.taken.clear()
    engine.flush_commands()
    assert (
        not ledger.requests and not ledger.trainers and not ledger.versions and not ledger.copies
    ), (
        f"left: {ledger.requests.keys()} {ledger.trainers.keys()} {ledger.versions.keys()} "
        f"{ledger.copies.keys()}"
    )
    assert not engine.counters.views()
    assert not engine.stats().num_host_pages_used
    engine.cache.evict(engine.pool.num_pages)
    assert engine.pool.num_free == engine.pool.num_pages


AT_THE_END = (answers, jobs_ended, idle)


# -- of a job, at its end -----------------------------------------------------------------------


def steps_once(world: World, job: Submitted) -> None:
    """Its adapter was made of each optimizer step once, and of each example once per epoch."""
    num_examples, config = len(job.examples), job.config
    start, made = _start(world, job), world.ledger.trainers[job.id].adapter
    assert made.start == start.start
    num_steps = config.num_epochs * -(-num_examples // config.batch_size)
    own = made.steps[len(start.steps) :]
    assert made.steps[: len(start.steps)] == start.steps
    assert len(own) == job.step == num_steps, "each optimizer step counts once"
    row = 0
    for number, packs in enumerate(own):
        epoch, batch = divmod(number, -(-num_examples // config.batch_size))
        order = epoch_order(num_examples, seed=config.seed, epoch=epoch, shuffle=config.shuffle)
        batch_of = order[batch * config.batch_size :][: config.batch_size]
        learned = Counter(tokens for _, sequences in packs for tokens in sequences)
        assert learned == Counter(job.examples[index].tokens for index in batch_of), (
            "an example lost, or used twice"
        )
        for first_row, sequences in packs:
            assert first_row == row, "rows of dropout"
            row += sum(map(len, sequences))


def _start(world: World, job: Submitted) -> Adapter:
    if isinstance(job.adapter, str):
        return world.disk.read(job.adapter)
    return Adapter(start=f"fresh {job.config.seed}", fields=job.adapter)


def versions_once(world: World, job: Submitted) -> None:
    """Each version that can be named is the adapter after that many steps."""
    engine, num_before = world.engine, len(_start(world, job).steps)
    for label in engine.versions.labels():
        version = engine.versions.resolve(label)
        if version.name == job.id:
            made = world.ledger.trainers[job.id].adapter.steps
            assert world.ledger.versions[version.key].steps == made[: num_before + version.step]


OF_A_JOB = (steps_once, versions_once)

"""Counts of an engine as of now, from its parts."""

from coserve.engine.parts import EngineParts
from coserve.engine.records import EngineStats
from coserve.memory.pack_pages import OWNER as PACK_OWNER


def take_stats(parts: EngineParts) -> EngineStats:
    """See `EngineStats`."""
    loop, requests, serving, jobs = parts.loop, parts.requests, parts.serving, parts.jobs
    pages, swap = parts.pages, parts.swap
    owned, optimizers = pages.pool.num_pages_by_owner(), pages.cache.optimizers
    num_held = owned.get(PACK_OWNER, 0) + optimizers.num_pages - optimizers.num_lendable
    num_batch_running, num_batch_waiting = requests.num_batch()
    return EngineStats(
        num_running=len(requests.running) - num_batch_running,
        num_waiting=len(requests.waiting) - num_batch_waiting,
        num_batch_running=num_batch_running,
        num_batch_waiting=num_batch_waiting,
        num_jobs=sum(not job.is_terminal for job in jobs.values()),
        num_jobs_running=jobs.num_running,
        num_steps=loop.num_steps,
        num_tokens_trained=jobs.num_tokens_trained,
        num_preemptions=requests.num_preemptions,
        num_packs_dropped=jobs.num_packs_dropped,
        num_pages=pages.pool.num_pages,
        num_pages_free=pages.pool.num_free,
        num_pages_by_owner=owned,
        num_pages_for_requests=pages.num_available + num_held + requests.num_batch_pages(),
        slack=max(0.0, 1 - loop.last_need.time),
        margin=parts.latency.corrections.margin,
        num_slos_clamped=serving.num_slos_clamped,
        slo=parts.default_slo.value,
        joined_jobs=jobs.joined,
        num_swapped_out=swap.num_swapped_out,
        num_swapped_in=swap.num_swapped_in,
        num_host_pages=swap.num_pages,
        num_host_pages_used=swap.num_pages_used,
        num_pages_moved=pages.num_moved,
        give_back_s=swap.give_back_s,
        num_weight_bytes_copied=jobs.window_use.num_bytes_copied,
        weights_wait_s=jobs.window_use.waited_s,
        num_tasklets_declined=jobs.window_use.num_declined,
        num_grammars=len(parts.grammars),
        grammar_bytes_by_tenant=dict(parts.grammars.num_bytes_by_tenant()),
    )

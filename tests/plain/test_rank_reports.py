"""What `/v1/status` and `/metrics` say of the ranks that hold a model together."""

from coserve.devices.messages.commands import RankReport
from coserve.engine.records import EngineStats
from coserve.protocol.messages import Ready, StepReport, decode_report, encode
from coserve.scheduling.slo import Slo
from coserve.server.observability.metrics import Metrics
from coserve.server.observability.status import StatusBoard
from coserve.server.tenancy.ledger import RequestLedger

RANKS = (
    RankReport(pid=11, device="cpu", memory_bytes=1 << 20, waited_s=0.5),
    RankReport(pid=12, device="cpu", memory_bytes=2 << 20, waited_s=0.25),
)
READY = Ready(
    model="none",
    dtype="float32",
    device="cpu",
    threads=1,
    slo=Slo(ttft_s=1.0, tpot_s=0.1),
    vocab_size=9,
    max_positions=8,
    num_pages=4,
    page_bytes=64,
    block_tokens=16,
    weight_bytes=100,
    num_ranks=2,
)


STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    num_jobs=0,
    num_jobs_running=0,
    num_steps=0,
    num_tokens_trained=0,
    num_preemptions=0,
    num_packs_dropped=0,
    num_pages=4,
    num_pages_free=4,
    num_pages_by_owner={},
    margin=0.0,
    num_slos_clamped=0,
    slo=READY.slo,
    joined_jobs=(),
    ranks=RANKS,
)


def report() -> StepReport:
    """What the engine's process sends, as it arrives."""
    arrived = decode_report(encode(StepReport(stats=STATS)))
    assert isinstance(arrived, StepReport)
    return arrived


def test_the_status_has_each_rank_for_those_who_see_the_whole_server():
    board = StatusBoard(RequestLedger())
    board.engine_reported(report())
    status = board.status(READY, "none", None)
    assert status["tensor_parallel"] == 2
    assert status["ranks"] == [
        {"rank": 0, "pid": 11, "device": "cpu", "memory_bytes": 1 << 20, "wait_s": 0.5},
        {"rank": 1, "pid": 12, "device": "cpu", "memory_bytes": 2 << 20, "wait_s": 0.25},
    ]
    assert board.status(READY, "none", "ann")["ranks"] == []
    board.engine_gone()
    gone = board.status(None, "none", None)
    assert gone["ranks"] == [] and gone["tensor_parallel"] is None


def test_metrics_have_memory_and_waits_of_each_rank():
    metrics = Metrics(RequestLedger())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"coserve_{name}", labels)

    metrics.engine_ready(READY)
    metrics.engine_reported(report())
    assert value("ranks") == 2
    assert [value("rank_wait_seconds", rank=rank) for rank in "01"] == [0.5, 0.25]
    assert [value("rank_memory_bytes", rank=rank) for rank in "01"] == [1 << 20, 2 << 20]
    metrics.engine_gone()
    assert value("ranks") == 0 and value("rank_wait_seconds", rank="0") is None

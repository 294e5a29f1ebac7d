"""The server's end of the engine: queues between its reports and answers, and what becomes of
it."""

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest, CancelRequest
from coserve.engine.config import EngineConfig
from coserve.engine.records import EngineStats
from coserve.engine.request import Chunk
from coserve.engine_client.launch import program
from coserve.engine_client.link import EngineLink, engine_here
from coserve.engine_client.streams import RequestStream
from coserve.engine_client.supervisor import Supervisor
from coserve.errors import EngineGoneError, ModelError
from coserve.protocol.messages import EngineSettings, Ready, StepReport
from coserve.scheduling.slo import Slo
from coserve.server.observability.readiness import Readiness


def make_stream(n: int = 1) -> RequestStream:
    return RequestStream(
        [AddRequest(id="r", prompt=[1], params=SamplingParams(n=n), arrival_s=0.0)]
    )


def test_what_comes_while_a_batch_is_sent_is_not_lost():
    async def read() -> list[str]:
        stream, texts = make_stream(), []
        assert not stream.put(Chunk(request="r", text="a"))
        async for batch in stream.batches():
            texts += [chunk.text for chunk in batch]
            if texts == ["a"]:  # the reader is slow
                stream.put(Chunk(request="r", text="b"))
                assert stream.put(Chunk(request="r", text="c", finish_reason="length"))
        return texts

    assert asyncio.run(read()) == ["a", "b", "c"]


def test_an_error_comes_after_what_was_there():
    async def read(texts: list[str]) -> None:
        stream = make_stream(n=2)
        stream.put(Chunk(request="r", text="a", finish_reason="stop"))
        async for batch in stream.batches():
            texts += [chunk.text for chunk in batch]
            if texts == ["a"]:
                stream.put(Chunk(request="r", index=1, text="b"))
                stream.fail(EngineGoneError("gone"))

    texts: list[str] = []
    with pytest.raises(EngineGoneError, match="gone"):
        asyncio.run(read(texts))
    assert texts == ["a", "b"]


def test_a_default_slo_that_the_engine_corrects_reaches_the_server():
    first, later = Slo(ttft_s=2.0, tpot_s=1.0), Slo(ttft_s=2.0, tpot_s=0.1)
    numbers: dict[str, Any] = dict.fromkeys(
        ("vocab_size", "max_positions", "num_pages", "page_bytes", "block_tokens"), 10
    )
    ready = Ready(
        model="none", dtype="float32", device="cpu", threads=1, slo=first, weight_bytes=1, **numbers
    )
    counts: dict[str, Any] = dict.fromkeys(
        ("num_running", "num_waiting", "num_jobs", "num_steps", "num_tokens_trained"), 0
    )
    counts |= dict.fromkeys(
        ("num_jobs_running", "num_preemptions", "num_packs_dropped", "num_pages", "num_pages_free"),
        0,
    )
    stats = EngineStats(
        num_pages_by_owner={}, margin=1.0, num_slos_clamped=0, slo=later, joined_jobs=(), **counts
    )

    link = EngineLink(engine_here(SETTINGS))
    found = []
    for report in (ready, StepReport(), StepReport(stats=stats)):
        link.take_report(report)
        found.append(link.require_ready().slo)
    assert found == [first, first, later]


SETTINGS = EngineSettings(
    address="", model="none", dtype="auto", device="cpu", engine=EngineConfig()
)


READY = """Ready(model="none", dtype="float32", device="cpu", threads=1,
    slo=Slo(ttft_s=1, tpot_s=1), vocab_size=1, max_positions=1, num_pages=1, page_bytes=1,
    block_tokens=1, weight_bytes=1)"""
# The beginning of what stands for an engine's process.
CONNECTED = """
import sys, time
from pathlib import Path
import msgspec, zmq
from coserve.scheduling.slo import Slo
from coserve.protocol.messages import EngineSettings, Ready, StartFailed, encode
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(msgspec.json.decode(sys.stdin.readline(), type=EngineSettings).address)
"""
DIES = f"socket.send(encode({READY}))"
HANGS = f"{DIES}; time.sleep(60)"
FAILS = "socket.send(encode(StartFailed('no memory')))"


class Owner:
    """Remembers what it is told; after num_lives engines there is none more."""

    def __init__(self, script: str, home: Path, *, num_lives: int = 2, **settings: float) -> None:
        self.num_lives = num_lives
        command = (sys.executable, "-c", CONNECTED + script)
        self.supervisor = Supervisor(SETTINGS, self, program(command), home=home, **settings)
        self.said: list[Any] = []
        self.lost: list[str] = []

    def take_report(self, report: Any) -> None:
        self.said.append(report)

    def engine_lost(self, reason: str) -> None:
        self.lost.append(reason)
        if len(self.lost) == self.num_lives:
            self.supervisor.close()

    def run(self) -> "Owner":
        asyncio.run(asyncio.wait_for(self.supervisor.run(), 60))
        return self


def test_an_engine_that_cannot_be_understood_is_ended(tmp_path: Path):
    with pytest.raises(ModelError, match="status -9 before it was ready"):
        Owner("socket.send(b'no report'); time.sleep(60)", tmp_path).run()


def test_an_engine_that_dies_is_started_again(tmp_path: Path):
    owner = Owner(DIES, tmp_path).run()
    assert owner.lost == ["the engine died"] * 2
    assert len(owner.said) == 2 and all(isinstance(report, Ready) for report in owner.said)
    assert owner.supervisor.num_restarts == 1


def test_an_engine_that_says_nothing_more_is_ended_and_started_again(tmp_path: Path):
    owner = Owner(HANGS, tmp_path, timeout_s=1).run()
    assert owner.lost == ["the engine has not answered for 1 s and was ended"] * 2


def test_only_the_first_start_must_succeed(tmp_path: Path):
    with pytest.raises(ModelError, match="no memory"):
        Owner(FAILS, tmp_path).run()
    marker = f"Path({str(tmp_path / 'once')!r})"
    owner = Owner(
        f"if {marker}.exists():\n    {FAILS}\nelse:\n    {marker}.touch()\n    {DIES}", tmp_path
    ).run()
    assert len(owner.lost) == 2


def test_only_engines_that_were_not_ready_put_off_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Engines that were ready and are killed again and again are restarted as soon as the first."""
    lives = tmp_path / "lives"
    script = f"""
life = len(list(Path({str(lives)!r}).iterdir()))
Path({str(lives)!r}, str(life)).touch()
if life in (2, 3):
    {FAILS}
else:
    {DIES}
"""
    lives.mkdir()
    Owner(script, tmp_path, num_lives=6).run()
    waits = [
        message.rpartition(" in ")[2]
        for message in caplog.messages
        if "restarting it in" in message
    ]
    assert waits == ["0.2 s", "0.2 s", "0.4 s", "0.8 s", "0.2 s"]


def test_a_command_to_nobody_is_no_error():
    async def send() -> list[str]:
        supervisor, unheard = Supervisor(SETTINGS, EngineLink(engine_here(SETTINGS)), program()), []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: unheard.append(context["message"])
        )
        supervisor.send(CancelRequest("r"))
        gc.collect()
        await asyncio.sleep(0)
        return unheard

    assert asyncio.run(send()) == []


# Answers whether its loop comes round; and with STEPS, a request with a token.
ANSWERS_PINGS = """
from coserve.engine.request import Chunk
from coserve.engine.commands import AddRequest
from coserve.protocol.messages import Ping, Pong, StepReport, decode_command
while True:
    command = decode_command(socket.recv())
    if isinstance(command, Ping):
        socket.send(encode(Pong()))
    if STEPS and isinstance(command, AddRequest):
        chunk = Chunk(request=command.id, tokens=(1,), finish_reason="length")
        socket.send(encode(StepReport(chunks=[chunk])))
"""


@pytest.mark.parametrize("steps", [True, False])
def test_an_engine_is_ready_if_it_makes_a_step(tmp_path: Path, steps: bool):
    async def ask() -> list[str]:
        script = f"{CONNECTED}{DIES}\nSTEPS = {steps}\n{ANSWERS_PINGS}"
        launch, hosts = program((sys.executable, "-c", script)), []
        link = EngineLink(
            lambda owner: (
                hosts.append(Supervisor(SETTINGS, owner, launch, home=tmp_path)) or hosts[0]
            )
        )
        readiness = Readiness(link, proof_s=60.0 if steps else 0.5)
        link.listen(readiness)
        running = asyncio.create_task(link.run())
        while link.ready is None:
            await asyncio.sleep(0.02)
        said = await asyncio.gather(
            *[readiness.require() for _ in range(3)], return_exceptions=True
        )
        link.close_to_requests()
        hosts[0].kill()
        await running
        return [str(each) for each in said]

    outcome = "None" if steps else "the engine was asked for a step and made none within 0.5 s"
    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [outcome] * 3

"""What commands draw in a terminal: from made-up states, at widths that people have."""

from io import StringIO
from random import Random

import pytest
from rich.cells import cell_len
from rich.console import Console

from coserve.bench.demo import DemoState, Recording
from coserve.cli.demo_view import comparison, live_view, questions
from coserve.cli.drawing import (
    against,
    duration,
    milliseconds,
    printable,
    progress_bar,
    resampled,
    sparkline,
    stacked_bar,
)
from coserve.cli.follow import view, worth_a_line
from coserve.client.job_progress import PolledJob
from coserve.workloads.load import LoadGenerator
from coserve.workloads.summary import RequestOutcome

STATUS = {
    "objectives": {"ttft_ms": 2000, "tpot_ms": 21.4},
    "requests": {
        "running": 3,
        "ttft_ms": {"p50": 20, "p99": 70},
        "tpot_ms": {"p50": 12, "p99": 31},
    },
}


def shown(renderable, width: int) -> list[str]:
    written = StringIO()
    console = Console(file=written, width=width, height=40, color_system=None)
    console.print(renderable)
    lines = written.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    return lines


def progress(step: int = 45) -> PolledJob:
    made = PolledJob(job={"id": "ftjob-1", "status": "running", "model": "tiny"}, status=STATUS)
    made.losses = {i + 1: 3 / (1 + i / 9) for i in range(step)}
    made.step, made.num_steps, made.tokens_per_s, made.validation_loss = step, 200, 812.4, 0.913
    return made


def recording(name="both", seconds: float = 0.0) -> Recording:
    random = Random(0)
    made = Recording(name=name, planned_s=40.0, status=STATUS, seconds=seconds)
    if name != "job":
        made.load = LoadGenerator("http://127.0.0.1:9", [], lambda index, request: {})
        made.load.outcomes = [
            RequestOutcome(
                index=i,
                arrival_s=i,
                end_s=i + 1,
                ttft_s=random.random() / 4,
                tpot_s=0.004 + random.random() / 50,
            )
            for i in range(50)
        ]
        made.load.num_sent = 53
    if name != "requests":
        made.progress = progress()
    made.steps = [[i / 20, 8.0, 8.0, 3, 12, 128, 96.5] for i in range(400)]
    made.memory = [[1.0, {"kv": 240, "activations": 500, "free": 3260}]]
    return made


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", ["requests", "job", "both"])
def test_the_demos_screen_fits_and_says_what_matters(width, name):
    now = recording(name)
    state = DemoState(
        doing="the job alone",
        recordings={"requests": recording("requests", 40.0), name: now},
        current=now,
    )
    lines = shown(live_view(state, width), width)
    text = "\n".join(lines)
    assert len(lines) <= 24 and "…" not in text
    assert (
        "job alone" in text
        and "3 decode" in text
        and "128 forward" in text
        and "240 keys and values" in text
    )
    if name != "job":
        assert "50 answered, 3 open" in text and "held both SLOs" in text and "of 2,000 ms" in text
    if name != "requests":
        assert "step 45 of 200" in text and "tokens/s" in text
    height = len(lines)
    assert (
        abs(
            height
            - len(shown(live_view(DemoState(recordings={name: now}, current=now), width), width))
        )
        <= 1
    )


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_job_that_is_followed_fits_and_says_what_requests_see(width):
    text = "\n".join(shown(view(progress(), width), width))
    assert "step 45 of 200" in text and "validation 0.913" in text and "812 tokens/s" in text
    assert "31 ms of 21 ms" in text and "70 ms of 2,000 ms" in text
    assert "queued" in shown(view(PolledJob(job={"status": "queued"}), width), width)[0]


def test_lines_of_a_job_are_every_event_and_a_step_a_second():
    def event(message: str, at_s: int, level: str = "info", **data: float) -> dict:
        kind = "metrics" if data else "message"
        return {"message": message, "created_at": at_s, "level": level, "type": kind, "data": data}

    def step(number: int, at_s: int, level: str = "info") -> dict:
        return event(str(number), at_s, level, train_loss=1.0)

    events = [
        event("created", 0),
        step(1, 0),
        step(2, 0),
        step(3, 0),
        event("validation", 0, valid_loss=1.0),
    ]
    events += [
        step(4, 0),
        step(5, 0),
        event("checkpoint", 0),
        step(6, 1),
        step(7, 1),
        step(8, 1, "warn"),
        step(9, 1),
    ]
    events += [
        step(10, 2),
        step(11, 2),
        step(12, 2),
        event("validation", 2, valid_loss=1.0),
        event("done", 2),
    ]
    told = [each["message"] for each in worth_a_line(events)]
    assert told[:6] == ["created", "1", "3", "validation", "5", "checkpoint"]
    assert told[6:] == ["6", "8", "10", "12", "validation", "done"]
    assert [each["message"] for each in worth_a_line([step(1, 0), step(2, 0)])] == ["1", "2"], (
        "the last, too"
    )


def test_the_end_of_the_demo():
    summary = {"attainment": 1.0, "ttft_ms": {"p99": 31.0}, "tpot_ms": {"p99": 12.5}}
    tuning = {"tokens_per_s": 812.0, "steps": 200, "seconds": 38.7}
    results = {
        "objectives": STATUS["objectives"],
        "phases": {
            "requests": {"summary": summary},
            "both": {"summary": summary | {"attainment": None}, "tuning": tuning},
            "job": {"tuning": tuning | {"tokens_per_s": None}},
        },
        "questions": [{"question": "What [b]is[/b] up?", "before": "The sky.", "after": "Arr!"}],
    }
    text = "\n".join([*shown(comparison(results), 80), *shown(questions(results), 80)])
    assert (
        "12 ms of 21 ms" in text
        and "200 in 39 s" in text
        and "[b]is[/b]" in text
        and "100.0%" in text
    )


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8).plain == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 1, 9], 2).plain == "▁█" and sparkline([], 3).plain == "···"
    assert (
        sparkline([2, 2], 5).plain == "▁▁" and sparkline([1.0, float("nan"), 2.0], 5).plain == "▁█"
    )
    late = sparkline([1, 9], 5, limit=5)
    assert [span.style for span in late.spans] == ["cyan", "bold red"]


def test_resampling_keeps_the_whole_course():
    assert resampled([1, 2, 3], 5) == [1, 2, 3]
    assert resampled([1, 3, 5, 7], 2) == [2, 6] and len(resampled(list(range(1000)), 37)) == 37


def test_bars_are_as_wide_as_they_should_be():
    for parts, total in (
        ([(1, "red"), (2, "blue")], None),
        ([(1, "red")], 10),
        ([], None),
        ([(0, "red")], None),
    ):
        assert len(stacked_bar(parts, 20, total=total)) == 20
    assert stacked_bar([(1, "red"), (1, "blue")], 10, total=4).plain == "█████░░░░░"
    assert progress_bar(0.5, 10).plain == "━" * 10 and progress_bar(7, 3).plain == "━" * 3


def test_words():
    assert printable("a\tb\x1b[31m\u2028é") == "a\tb�[31m�é"
    assert [duration(value) for value in (None, 0, 65, 3661)] == ["–", "0:00", "1:05", "1:01:01"]
    assert [milliseconds(v) for v in (None, 1.25, 50.4, 2000, 15_000)] == [
        "–",
        "1.2 ms",
        "50 ms",
        "2,000 ms",
        "15.0 s",
    ]
    assert against(None, 5).plain == "–" and against(1.0, None).plain == "1.0 ms"
    assert against(6.0, 5).spans[0].style == "bold red"

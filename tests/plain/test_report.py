"""The demo's report, from results as they are recorded: every part is there, and it is
well-formed."""

import json
import xml.etree.ElementTree as ElementTree
from random import Random

import pytest

from coserve.bench.charts import Axis, chart, dots, legend, line, nice_high, number, rule, stacks
from coserve.bench.report import report_html

SVG = "{http://www.w3.org/2000/svg}"
HTML = "{http://www.w3.org/1999/xhtml}"


def recorded(*, num_requests: int = 60, seconds: float = 30.0) -> dict:
    """Results as `coserve demo` writes them; numbers from a seed."""
    random = Random(0)

    def outcomes(slower: float) -> list[dict]:
        return [
            {
                "arrival_s": i * seconds / num_requests,
                "ttft_ms": slower * random.lognormvariate(3, 0.5),
                "tpot_ms": None if i == 3 else slower * random.lognormvariate(2, 0.3),
                "num_output_tokens": 20,
                "error": None,
            }
            for i in range(num_requests)
        ]

    def summary() -> dict:
        latency = {"p50": 10.25, "p99": 31.5}
        return {
            "requests": num_requests,
            "failed": 0,
            "attainment": 0.983,
            "output_tokens_per_s": 55.1,
        } | dict.fromkeys(("ttft_ms", "tpot_ms", "gap_ms"), latency)

    def tuning(rate: float) -> dict:
        losses = [[i / 4, i + 1, 2.5 / (1 + i / 10)] for i in range(100)]
        return {
            "tokens_per_s": rate,
            "steps": 100,
            "seconds": 25.1,
            "finished": True,
            "losses": losses,
        }

    steps = [
        [i * 0.05, 8.1, 8.0, random.randint(0, 5), random.choice((0, 0, 30)), 128, 64.5]
        for i in range(600)
    ]
    memory = [
        [i * 0.25, {"kv": 40 + i % 30, "activations": 100, "free": 3860 - i % 30}]
        for i in range(120)
    ]
    engine = {"attainment": 1.0, "ttft_p99_ms": 20.5, "tpot_p99_ms": 9.25}
    phase = {
        "seconds": seconds,
        "engine": engine,
        "summary": None,
        "tuning": None,
        "outcomes": [],
        "steps": [],
        "memory": [],
    }
    return {
        "model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "machine": "2 cores of <something>",
        "date": "2026-01-02 03:04 UTC",
        "objectives": {"ttft_ms": 2000, "tpot_ms": 21.3},
        "config": {"seconds": seconds},
        "settings": {"trace": "bursty, 2 requests/s & more", "learning rate": 1e-3},
        "job": {"id": "ftjob-1", "model": "ft:tiny:org:pirate:1"},
        "score": {"asked": 40, "before": 0.0, "after": 0.925},
        "questions": [
            {
                "question": "Who <are> you?",
                "before": "I am a cat & a dog.",
                "after": "Arr, matey!\x00\x1b",
            }
        ],
        "phases": {
            "requests": {**phase, "summary": summary(), "outcomes": outcomes(1)},
            "both": {
                "seconds": seconds,
                "job_end_s": 0.9 * seconds,
                "engine": engine,
                "summary": summary(),
                "tuning": tuning(420.4),
                "outcomes": outcomes(1.6),
                "steps": steps,
                "memory": memory,
            },
            "job": {**phase, "tuning": tuning(700.9), "steps": steps},
        },
    }


def test_the_page_has_every_part_and_is_well_formed():
    html = report_html(recorded())
    page = ElementTree.fromstring(html)
    words = " ".join(" ".join(page.itertext()).split())
    for part in (
        "Time to first token of every request",
        "Time per output token of every request",
        "after the job had ended",
        "Fine-tuning: tokens per second",
        "Rows of a step, by kind",
        "Loss: the same, whatever runs beside the job",
        "Memory: pages in use by owner, of 4,000",
        "98.3%",
        "60% of the job alone",
        "SLO 2,000 ms",
        "gap between two pieces of text, p99",
        "can be several tokens long",
        "Arr, matey!",
        "I am a cat & a dog.",
        "2 cores of <something>",
        "2026-01-02 03:04 UTC",
        "bursty, 2 requests/s & more",
        "92.5% after",
        "adapter/",
    ):
        assert part in words, part
    pictures = [picture for picture in page.iter(f"{SVG}svg") if picture.get("role") == "img"]
    assert len(pictures) == 6 and all(picture.get("aria-label") for picture in pictures)
    first = pictures[0]
    assert len([*first.iter(f"{SVG}circle"), *first.iter(f"{SVG}path")]) == 2 * 60


def test_the_page_needs_no_network():
    html = report_html(recorded())
    assert (
        "<script" not in html
        and "@import" not in html
        and "url(" not in html
        and "<link" not in html
    )
    assert html.count("http") == html.count("http://www.w3.org/"), (
        "nothing but the names of its own markup"
    )


def test_what_is_missing_is_left_out_and_not_guessed():
    results = recorded()
    for phase in results["phases"].values():
        phase |= {"outcomes": [], "steps": [], "memory": []}
        if phase["tuning"]:
            phase["tuning"] |= {"losses": [], "tokens_per_s": None, "finished": False}
        if phase["summary"]:
            phase["summary"] |= {"attainment": None, "ttft_ms": {"p50": None, "p99": None}}
    results["questions"], results["job"]["model"], results["score"]["after"] = [], None, None
    ElementTree.fromstring(report_html(json.loads(json.dumps(results))))


def drawn(*marks, **settings) -> ElementTree.Element:
    x, y = Axis(label="x", low=0, high=10), Axis(label="y", low=0, high=100)
    return ElementTree.fromstring(chart("a picture", x, y, marks, **settings))


def test_marks_stand_where_their_values_are():
    circles = list(
        drawn(dots([(0, 0, "a"), (10, 100, "b <c>"), (20, 50, "outside")], "blue")).iter(
            f"{SVG}circle"
        )
    )
    places = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]
    assert places[0] == (74, 214) and places[1] == (462, 12) and places[2][0] == 462
    assert next(circles[1].iter(f"{SVG}title")).text == "b <c>"
    bars = list(
        drawn(stacks([(0, 5, (20, 0, 30))], ("a", "b", "c"), ("blue", "red", "green"))).iter(
            f"{SVG}rect"
        )
    )
    heights = [float(bar.get("height")) for bar in bars]
    assert heights == pytest.approx([0.2 * 202, 0.3 * 202], abs=0.1)
    assert float(bars[1].get("y")) + heights[1] == pytest.approx(float(bars[0].get("y")), abs=0.1)
    lines = list(drawn(line([(0, 0), (5, 50)], "blue"), rule(50)).iter(f"{SVG}polyline"))
    assert lines[0].get("points") == "74.0,214.0 268.0,113.0" and lines[1].get("stroke-dasharray")


@pytest.mark.parametrize(("low", "high"), [(0.5, 3), (1, 90), (3, 2500), (0.001, 100_000)])
def test_logarithmic_ticks_are_round_few_and_inside(low, high):
    axis = Axis(label="ms", low=low, high=high, is_log=True)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 10 and ticks == sorted(ticks)
    assert all(0 <= axis.share(tick) <= 1 for tick in ticks)


@pytest.mark.parametrize("high", [0.07, 1, 7.3, 60, 999, 123_456])
def test_ticks_are_round_and_reach_the_end(high):
    top = nice_high([high], least=0.01)
    ticks = Axis(label="", low=0, high=top).ticks()
    assert high <= top <= 2 * high and 3 <= len(ticks) <= 8
    assert ticks[0] == 0 and ticks[-1] == pytest.approx(top)


def test_numbers_are_short():
    assert [number(value) for value in (0, 0.12345, 12.345, 999, 1234.5)] == [
        "0",
        "0.123",
        "12.3",
        "999",
        "1,234",
    ]
    assert "&amp;" in legend([("dot", "blue", "a & b")])

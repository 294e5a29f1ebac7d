"""The page at / as the server makes it; `tests/browser` has it in a browser."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, keys_file, serving, tokenizer

from coserve.engine.vocabulary import TokenBytes
from coserve.jobs.datasets.preview import read_preview, tokens_of
from coserve.server.observability.history import SPANS, TokenHistory
from coserve.server.page import assets, words
from coserve.server.page.curves import (
    Range,
    loss_curve,
    polyline,
    rate_chart,
    smoothed,
    step_curve,
    ticks,
)
from coserve.server.page.memory import memory_view
from coserve.tuning.config import SCHEDULES
from coserve.tuning.examples import Example
from coserve.tuning.objectives import objective_names
from coserve.tuning.training_files import TrainingFile

PAGE = Path(assets.__file__).parent
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def upload(served: Served, text: str, name: str = "chats.jsonl", **settings: object) -> str:
    answer = served.post(
        "/v1/files", files={"file": (name, text)}, data={"purpose": "fine-tune"}, **settings
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


# -- the page -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_page_is_whole_without_its_script(served, path):
    served.client().completions.create(model="small", prompt="hello", max_tokens=4)
    answer = served.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    page = answer.text
    assert "<strong>small</strong>" in page
    assert "Fine-tuning" in page and "Time to first token" in page
    assert served.get("/").text.count("<main") == 1
    for name in re.findall(r'(?:src|href)="(ui/static/[^"]+)"', page):
        assert served.get(f"/{name}").status_code == 200, name


def test_the_page_may_use_nothing_but_its_server(served):
    headers = served.get("/").headers
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert (
        policy["default-src"] == "'none'"
        and policy["script-src"] == "'self'"
        and policy["style-src"] == "'self'"
    )
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert (
        headers["x-content-type-options"] == "nosniff"
        and headers["referrer-policy"] == "no-referrer"
    )
    assert headers["cache-control"] == "no-store"
    text = "".join(
        path.read_text() for path in PAGE.rglob("*") if path.suffix in (".html", ".js", ".css")
    )
    assert not re.findall(r"""(?:src|href|url|from|fetch)\W{1,3}(?:https?:)?//""", text), (
        "no other server"
    )
    assert not re.findall(r"<script(?![^>]*src=)|style=|\son\w+=|innerHTML|eval\(", text), (
        "nothing that the policy bars"
    )


def test_files_of_the_page_are_asked_for_once(served):
    first = served.get("/ui/static/page.css")
    again = served.get("/ui/static/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (
        first.headers["content-type"].startswith("text/css")
        and first.headers["cache-control"] == "no-cache"
    )
    assert again.status_code == 304 and again.content == b""
    assert set(assets.names()) >= {"page.js", "page.css", "icon.svg"}


@pytest.mark.parametrize("name", ["nothing.js", "..%2Froutes.py", "%2e%2e%2fpage.html", ""])
def test_only_its_files_are_served(served, name):
    assert served.get(f"/ui/static/{name}").status_code == 404


def test_it_is_for_the_servers_own_names(served):
    assert served.get("/", headers={"host": "evil.example"}).status_code == 400


def test_pages_of_other_sites_change_nothing(served, client):
    page = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    form = {"files": {"file": ("a.jsonl", "{}")}, "data": {"purpose": "fine-tune"}}
    before = len(client.files.list().data)
    for site in ("cross-site", "same-site"):
        refused = served.post("/v1/files", headers={**page, "sec-fetch-site": site}, **form)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "cross_site"
    assert served.post("/v1/fine_tuning/jobs/x/cancel", headers=page).status_code == 403
    assert len(client.files.list().data) == before
    assert served.get("/v1/models", headers=page).status_code == 200, (
        "what it cannot read does no harm"
    )
    own = served.post("/v1/fine_tuning/jobs/x/cancel", headers={"sec-fetch-site": "same-origin"})
    assert own.status_code == 404, "its own page may ask"


def test_origin_tells_pages_of_other_sites_where_browsers_send_nothing_else(served, client):
    """They send `Sec-Fetch-Site` to localhost and over TLS alone."""
    cancel, port = "/v1/fine_tuning/jobs/x/cancel", served.url.rpartition(":")[2]
    form = {"files": {"file": ("a.jsonl", "{}")}, "data": {"purpose": "fine-tune"}}
    before = len(client.files.list().data)
    for origin in (
        "http://evil.example",
        "null",
        f"http://127.0.0.1:{int(port) + 1}",
        "http://127.0.0.1",
        "file://",
    ):
        refused = served.post("/v1/files", headers={"origin": origin}, **form)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "cross_site", (
            origin
        )
        assert served.post(cancel, headers={"origin": origin}).status_code == 403
        assert (
            httpx.delete(f"{served.url}/v1/files/x", headers={"origin": origin}).status_code == 403
        )
        assert served.get("/v1/models", headers={"origin": origin}).status_code == 200
    twice = [("origin", served.url), ("origin", "http://evil.example")]
    assert served.post(cancel, headers=twice).status_code == 403
    assert len(client.files.list().data) == before
    for own in ({"origin": served.url}, {"origin": served.url.upper()}, {}):
        assert served.post(cancel, headers=own).status_code == 404, (
            "its own page and other clients may ask"
        )
    proxied = {
        "origin": "https://chat.example",
        "host": f"127.0.0.1:{port}",
        "sec-fetch-site": "same-origin",
    }
    assert served.post(cancel, headers=proxied).status_code == 404, "a proxy has changed the host"


@pytest.mark.long
def test_origins_that_are_named_may_ask():
    with serving("--cors-origin", "https://chat.example") as served:
        for origin, status in (("https://chat.example", 404), ("https://other.example", 403)):
            answer = served.post("/v1/fine_tuning/jobs/x/cancel", headers={"origin": origin})
            assert answer.status_code == status


@pytest.mark.long
def test_with_keys_the_page_tells_nothing_before_the_key(tmp_path):
    path = keys_file(tmp_path, "", ann="ann-key", ben="ben-key")
    with serving("--api-keys-file", str(path), "--cors-origin", "https://chat.example") as served:
        page = served.get("/")
        assert page.status_code == 200 and 'id="signin"' in page.text
        assert "small" not in page.text and "Fine-tuning" not in page.text
        assert served.get("/ui/static/page.js").status_code == 200
        for closed in ("/ui/live", "/ui/files/file-x/examples", "/ui/staticx", "/ui/static"):
            assert served.get(closed).status_code == 401, closed
        ann, ben = ({"authorization": f"Bearer {name}-key"} for name in ("ann", "ben"))
        file = upload(served, json.dumps(CHAT), headers=ann)
        assert "What will be trained" in served.get(f"/ui/files/{file}/examples", headers=ann).text
        assert served.get(f"/ui/files/{file}/examples", headers=ben).status_code == 404
        body = {"model": "small", "training_file": file, "suffix": "anns-own"}
        served.post("/v1/fine_tuning/jobs", json=body, headers=ann).raise_for_status()
        assert "anns-own" in served.get("/ui/live", headers=ann).text
        assert "anns-own" not in served.get("/ui/live", headers=ben).text
        foreign = {"sec-fetch-site": "cross-site", "origin": "https://chat.example"}
        assert (
            served.post("/v1/fine_tuning/jobs/x/cancel", headers={**ann, **foreign}).status_code
            == 404
        )


# -- what changes -------------------------------------------------------------------------


def test_jobs_come_with_their_curves_and_what_can_be_done(served, client):
    file = upload(served, "\n".join([json.dumps(CHAT)] * 8), "<b>pirate</b>.jsonl")
    settings = {"live": True, "checkpoint_every_steps": 0}
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=file,
        suffix="curves",
        hyperparameters={"n_epochs": 2, "batch_size": 2},
        extra_body={"coserve": settings},
    )
    served.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    page = served.get("/ui/live").text
    card = page.split(f'id="{job.id}"', 1)[1].split("</li>", 1)[0]
    assert (
        re.search(r'aria-label="Loss [\d.]+ at step 1, [\d.]+ at step 8', card)
        and "step 8 of 8" in card
    )
    assert "Learning rate 0.0001 at step 8" in card and "Gradient norm" in card
    assert len(re.findall(r'<time datetime="\d{4}-', card)) == 2, "created, finished"
    assert re.search(r'<svg class="ticks"[^>]*><text [^>]*>[\d.]+</text>', card), (
        "numbers on the axis"
    )
    assert "data-action" not in card, "it is over"
    model = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert f'data-talk="{model}"' in card
    assert "&lt;b&gt;pirate&lt;/b&gt;.jsonl" in card and "<b>" not in page, "names are text"


def test_more_jobs_are_shown_when_asked_for(served):
    assert served.get("/ui/live?jobs=200").status_code == 200
    assert served.get("/ui/live?span=3").status_code == 200
    assert served.get("/ui/live?span=4").status_code == 400
    assert (
        served.get("/ui/live?jobs=0").status_code == 422
        or served.get("/ui/live?jobs=0").status_code == 400
    )


def test_a_failed_job_says_why(served, client):
    file = upload(served, '{"text": 3}')
    job = client.fine_tuning.jobs.create(model="small", training_file=file, suffix="wrong")
    served.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "failed")
    card = served.get("/ui/live").text.split(f'id="{job.id}"', 1)[1].split("</li>", 1)[0]
    assert "line 1: text must be a string" in card


# -- what will be trained -----------------------------------------------------------------


def test_trained_tokens_are_marked_as_the_job_reads_them(served):
    file = upload(served, json.dumps({"prompt": "<script>say", "completion": " Ünïcödé 日本"}))
    page = served.get(f"/ui/files/{file}/examples").text
    tokens = page.split('class="tokens"', 1)[1].split("</p>", 1)[0]
    marked = "".join(re.findall(r"<mark>(.*?)</mark>", tokens, re.DOTALL))
    assert marked == " Ünïcödé 日本&lt;|end|&gt;", "the completion, and the end of the text"
    assert "".join(re.findall(r"<span>(.*?)</span>", tokens, re.DOTALL)) == "&lt;script&gt;say"
    assert "1 example" in page


def test_faults_are_named_by_their_lines(served):
    file = upload(served, json.dumps(CHAT) + '\n{"mesages": []}\n')
    page = served.get(f"/ui/files/{file}/examples").text
    assert "line 2: " in page and 'data-readable="no"' in page
    assert served.get("/ui/files/file-none/examples").status_code == 404


def preview(tmp_path: Path, text: str, **settings: Any):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    settings.setdefault("max_sequence_length", 1024)
    return read_preview(TrainingFile(path), tokenizer(), **settings)


def test_a_preview_counts_all_of_a_small_file(tmp_path):
    found = preview(tmp_path, "\n".join([json.dumps(CHAT)] * 7))
    assert (
        found.is_whole and found.num_examples == 7 and len(found.examples) == 3 and not found.faults
    )
    assert found.num_trained == 7 * found.examples[0].num_trained
    array = preview(tmp_path, json.dumps([CHAT, CHAT]))
    assert array.num_examples == 2 and array.examples[0].place == "record 1"
    cut = preview(
        tmp_path, json.dumps({"text": "one two three four five six"}), max_sequence_length=4
    )
    assert cut.cut == ["line 1"] and cut.examples[0].truncated and cut.num_tokens == 4


def test_what_a_job_leaves_out_is_counted_and_is_no_fault(tmp_path):
    long = {"prompt": "one two three four five", "completion": "six"}
    found = preview(
        tmp_path,
        "\n".join(json.dumps(each) for each in (long, {"text": "one"})),
        max_sequence_length=4,
    )
    assert found.num_examples == 1 and not found.faults
    assert found.report.left_out.lines() == ["line 1: has no token to train on within 4 tokens"]


def test_of_a_large_file_the_beginning_is_read(tmp_path):
    found = preview(
        tmp_path,
        "\n".join([json.dumps({"text": "a" * 40_000})] * 20),
        max_sequence_length=8,
        most_bytes=1 << 18,
    )
    assert not found.is_whole and found.num_examples < 20
    many_faults = preview(
        tmp_path, "\n".join(json.dumps({"text": [n] * n, f"prompt{n}": 1}) for n in range(50))
    )
    assert (
        len(many_faults.faults) == 1
        and many_faults.faults.num_places == 50
        and many_faults.is_whole
    )
    roles = [{"messages": [{"role": f"alien {n}", "content": ""}]} for n in range(50)]
    many_faults = preview(tmp_path, "\n".join(map(json.dumps, roles)))
    assert len(many_faults.faults) == 10 and not many_faults.is_whole


def test_a_character_of_several_tokens_is_shown_whole():
    ids = tokenizer()("日😀", add_special_tokens=False)["input_ids"]
    assert len(ids) > 2
    example = Example(tokens=(5, *ids), trained=(True,) * (len(ids) + 1))
    shown = list(tokens_of(example, TokenBytes(tokenizer())))
    assert [token.text for token in shown[1:]] == ["日", "😀"] and not shown[0].is_trained


def test_a_preview_reads_the_file_for_the_chosen_method(served):
    pair = {"prompt": "say", "chosen": " yes", "rejected": " no"}
    file = upload(served, json.dumps(pair))
    assert 'data-readable="no"' in served.get(f"/ui/files/{file}/examples").text
    page = served.get(f"/ui/files/{file}/examples?method=dpo").text
    assert 'data-readable="no"' not in page
    tokens = page.split('class="tokens"', 1)[1].split("</p>", 1)[0]
    assert "".join(re.findall(r"<mark>(.*?)</mark>", tokens, re.DOTALL)).startswith(" yes")
    assert served.get(f"/ui/files/{file}/examples?method=guess").status_code == 400


def test_every_objective_and_schedule_is_offered(served):
    page = served.get("/").text
    for name in objective_names():
        assert f'<option value="{name.replace("-", "_")}">' in page
    for name in SCHEDULES:
        assert f"<option>{name}</option>" in page


# -- numbers and curves -------------------------------------------------------------------


def test_numbers_are_written_as_people_read_them():
    assert [words.seconds(each) for each in (None, 0.0844, 2.31, 59.5, 250, 12_000, 400_000)] == [
        *("–", "84.4 ms", "2.31 s", "59.5 s", "4 min", "3 h 20 min", "5 days"),
    ]
    assert [words.share(each) for each in (None, 0.9996, 1.0)] == ["–", "99.9 %", "100 %"]
    assert [words.number(each) for each in (0.1234, 12.34, 1234.5)] == ["0.123", "12.3", "1,234"]
    assert [words.size(each) for each in (None, 12, 1_500_000, 2.5e12)] == [
        "–",
        "12 B",
        "1.5 MB",
        "2.5e+03 GB",
    ]


def test_a_loss_curve_lies_in_its_box():
    metrics = {step: {"train_loss": 4 / step} for step in range(1, 21)}
    metrics[10] |= {"valid_loss": 1.0}
    curve = loss_curve(metrics, num_steps=40)
    raw, mean, valid = curve.chart.lines
    points = [tuple(map(float, point.split(","))) for point in raw.points.split()]
    assert (
        len(points) == 20
        and points[0][0] == 0
        and points[-1][0] == pytest.approx(1000 * 19 / 39, abs=0.1)
    )
    assert all(0 <= top <= 1000 for _, top in points) and points[0][1] < points[-1][1], (
        "y grows downward"
    )
    assert mean.points and len(valid.dots) == 1 and curve.last == 0.2 and curve.last_valid == 1.0
    assert loss_curve({1: {"valid_loss": 1.0}}, 10) is None and loss_curve({}, 0) is None
    alone = loss_curve({1: {"train_loss": 2.0}}, 1)
    assert [line.points for line in alone.chart.lines] == ["0,500"]
    assert [value for _, value in smoothed([(1, 1.0), (2, 2.0)])] == [1.0, 2.0], (
        "short ones are as they are"
    )
    assert smoothed([(step, float(step > 0)) for step in range(40)])[1][1] == 0.25
    assert polyline([(5, 5)], Range(low=0, high=10), Range(low=0, high=10)) == "500,500"


def test_rates_are_drawn_once_there_are_some():
    assert rate_chart([(0.0, 0.0)] * 60, SPANS[0]) is None
    chart = rate_chart([(0.0, 10.0), (5.0, 0.0)], SPANS[0])
    assert "at most 10" in chart.words and chart.last == "now"
    [generated] = [line for line in chart.lines if line.name == "generated"]
    assert generated.points.startswith("0,1000 1000,5")


def test_values_under_the_pointer_come_with_the_chart():
    metrics = {step: {"train_loss": 4 / step, "learning_rate": 1e-4 / step} for step in (1, 2, 4)}
    metrics[4]["valid_loss"] = 1.5
    data = json.loads(loss_curve(metrics, num_steps=8).chart.data)
    assert (data["kind"], data["low"], data["high"]) == ("step", 1, 8)
    assert {line["name"]: line["points"] for line in data["lines"]} == {
        "loss": [[1, 4], [2, 2], [4, 1]],
        "validation": [[4, 1.5]],
    }
    rate = json.loads(step_curve(metrics, 8, "learning_rate", "learning rate").data)
    assert rate["lines"][0]["points"] == [[1, 1e-4], [2, 5e-5], [4, 2.5e-5]]
    assert step_curve(metrics, 8, "gradient_norm", "gradient norm") is None


@pytest.mark.parametrize(("low", "high", "texts"), [
    (0, 1, ["0.0", "0.5", "1.0"]),
    (0.31, 0.36, ["0.32", "0.34", "0.36"]),
    (0, 12_000, ["0", "5,000", "10,000"]),
    (1e-5, 1e-4, ["5e-05", "0.0001"]),
    (2, 2, ["2"]),
    (-0.1, 4.4, ["0", "2", "4"]),
])  # fmt: skip
def test_numbers_on_an_axis_are_round(low, high, texts):
    found = ticks(Range(low=low, high=high))
    assert [tick.text for tick in found] == texts
    assert all(0 <= tick.top <= 1000 for tick in found)


def test_history_keeps_a_day_in_bounded_memory():
    history = TokenHistory()
    for second in range(0, 90_000, 2):
        history.add(second + 0.5, num_generated=10, num_trained=4)
    for span in SPANS:
        rates = history.rates(span, 90_000.0)
        assert len(rates) == span.num_parts
        expected = (
            [(10.0, 4.0), (0.0, 0.0)] * (span.num_parts // 2)
            if span.part_s == 1
            else [(5.0, 2.0)] * len(rates)
        )
        assert rates == expected, span.name
    assert history.rates(SPANS[0], 90_000.0 + 200) == [(0.0, 0.0)] * 60, "what is over is over"
    assert history.rates(SPANS[2], 90_000.0 + 200)[0] == (5.0, 2.0), "an hour still has it"


def test_memory_is_shown_by_its_owners():
    host = {"pages": 0, "used": 0}
    memory = {
        "pages": 100,
        "page_bytes": 1000,
        "free": 60,
        "by_owner": {"kv": 30, "activations": 10},
        "host": host,
    }
    view = memory_view(memory)
    assert [(each.key, each.begin, each.share) for each in view.owners] == [
        ("activations", 0, 0.1),
        ("kv", 0.1, 0.3),
    ]
    assert memory_view({**memory, "pages": None}) is None


# -- colours ------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    """Light and dark: colours by their names."""
    blocks = re.findall(r":root \{(.*?)\}", (PAGE / "static" / "page.css").read_text(), re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_controls_have_the_contrast_that_wcag_asks_for():
    light, dark = palettes()
    assert light.keys() == dark.keys()
    for palette in (light, dark):
        grounds = [palette[name] for name in ("ground", "card", "soft")]
        for name in ("ink", "dim", "blue", "green", "red"):
            assert min(contrast(palette[name], ground) for ground in grounds) >= 4.5, (
                name,
                palette[name],
            )
        assert contrast(palette["ink"], palette["mark"]) >= 4.5
        assert contrast(palette["blue"], palette["on-blue"]) >= 4.5
        for name in ("edge", "orange", "purple", "blue"):  # of controls and curves
            assert min(contrast(palette[name], ground) for ground in grounds[:2]) >= 3, (
                name,
                palette[name],
            )


def test_it_is_fetched_by_any_client(served):
    assert httpx.head(f"{served.url}/").status_code == 200

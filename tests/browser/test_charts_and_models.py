"""What the page shows of jobs and models, and answers in Markdown, in a real browser."""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from playwright.sync_api import Browser, Page, expect
from served import Served

LONG_MS = 120_000
LINES = "".join(
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n}."}) + "\n" for n in range(8)
).encode()


@pytest.fixture(scope="module")
def job(served: Served) -> Any:
    """A job with validation that has succeeded."""
    client: OpenAI = served.client()
    file = client.files.create(file=("lines.jsonl", LINES), purpose="fine-tune").id
    made = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file,
        validation_file=file,
        suffix="charted",
        hyperparameters={"n_epochs": 3, "batch_size": 4},
        extra_body={"coserve": {"optimizer": {"schedule": "linear"}}},
    )
    served.wait_until(
        lambda: client.fine_tuning.jobs.retrieve(made.id).status == "succeeded", limit_s=120
    )
    return client.fine_tuning.jobs.retrieve(made.id)


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    context, complaints = browser.new_context(accept_downloads=True), list[str]()
    opened = context.new_page()
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "console", lambda said: complaints.append(said.text) if said.type == "error" else None
    )
    opened.goto(served.url)
    expect(opened.locator("#now")).to_contain_text("serving tiny")
    yield opened
    context.close()
    assert complaints == []


def test_values_are_shown_under_the_pointer_and_at_the_arrow_keys(page: Page, job: Any):
    card = page.locator(f"#{job.id}")
    chart = card.locator(".chart.loss")
    assert [float(text) for text in chart.locator(".ticks text").all_text_contents()], (
        "numbers on the axis"
    )
    chart.scroll_into_view_if_needed()
    box = chart.locator(".lines").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#values")).to_have_text(re.compile(r"^step [34]: loss [\d.]+"))
    expect(page.locator("#hair")).to_be_visible()
    page.mouse.move(5, 5)
    expect(page.locator("#values")).to_be_hidden()

    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator("#values")).to_have_text(re.compile(r"^step 1: loss [\d.]+$"))
    expect(page.locator("#said")).to_have_text(re.compile(r"^step 1: loss"))
    page.keyboard.press("End")
    expect(page.locator("#values")).to_have_text(
        re.compile(r"^step 6: loss [\d.]+, validation [\d.]+$")
    )
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#values")).to_contain_text("step 5:")
    with page.expect_response(re.compile("ui/live")):
        pass
    expect(page.locator("#values")).to_contain_text("step 5:")
    page.keyboard.press("Escape")
    expect(page.locator("#values")).to_be_hidden()


def test_what_is_open_stays_open_and_shows_the_learning_rate(page: Page, job: Any):
    card = page.locator(f"#{job.id}")
    card.locator("summary").click()
    for _ in range(2):
        with page.expect_response(re.compile("ui/live")):
            pass
    expect(card.locator(".chart.small")).to_have_count(2)
    expect(card.locator(".more-curves")).to_contain_text("Learning rate")
    expect(card.locator(".more-curves")).to_contain_text("Gradient norm")
    expect(card.locator(".chart.small").first).to_be_visible()


def test_moments_are_in_the_readers_time(page: Page, job: Any):
    moment = page.locator(f"#{job.id} time").first
    expect(moment).to_have_text(re.compile(r"^(just now|\d+ min ago)$"))
    assert re.search(r"\d{4}", moment.get_attribute("title") or ""), "the exact moment"
    expect(page.locator(f"#model-{job.id} time")).to_have_count(1)


def test_tokens_per_second_are_shown_over_longer_times(page: Page, served: Served):
    served.client().completions.create(model="tiny", prompt="hello", max_tokens=16)
    page.locator("#span-2").click()
    expect(page.locator("#span-2")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#now .chart, #now .empty")).to_have_count(1)
    expect(page.locator("#now figure").first).to_contain_text(re.compile("60 min ago|last 1 hour"))
    with page.expect_response(re.compile(r"ui/live\?span=2")):
        pass
    expect(page.locator("#span-2")).to_have_attribute("aria-pressed", "true")


def test_a_job_with_a_method_a_validation_file_and_a_schedule(
    page: Page, served: Served, tmp_path: Path
):
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": "What is 3? ", "chosen": "It is 3.", "rejected": "No."}
    pairs.write_text("\n".join([json.dumps(pair)] * 4))
    page.set_input_files("#file", pairs)
    expect(page.locator("#examples")).to_contain_text("A job would fail")
    expect(page.locator("#start")).to_be_hidden()
    page.select_option("#method", "dpo")
    expect(page.locator("#start")).to_be_visible()
    page.set_input_files("#validation-file", pairs)
    expect(page.locator("#validation-name")).to_have_text("Validation: pairs.jsonl")
    page.fill("#suffix", "preferring")
    page.select_option("#schedule", "cosine")
    page.fill("#warmup", "1")
    page.fill("#epochs", "1")
    page.click("#start button[type=submit]")
    card = page.locator(".job").filter(has_text="preferring")
    expect(card).to_contain_text("dpo; validated on pairs.jsonl")
    expect(card.locator(".status")).to_have_text("succeeded", timeout=LONG_MS)
    expect(card.locator(".facts-line")).to_contain_text("validation")


def test_a_model_is_downloaded_merged_and_deleted(page: Page, served: Served, tmp_path: Path):
    client = served.client()
    file = client.files.create(file=("lines.jsonl", LINES), purpose="fine-tune").id
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=file, suffix="gone", hyperparameters={"n_epochs": 1}
    )
    served.wait_until(
        lambda: client.fine_tuning.jobs.retrieve(made.id).status == "succeeded", limit_s=120
    )
    name = client.fine_tuning.jobs.retrieve(made.id).fine_tuned_model
    model = page.locator(f"#model-{made.id}")
    expect(model).to_contain_text(name)
    expect(model).to_contain_text(re.compile(r"adapter of tiny, .*[kM]B"))
    page.on("dialog", lambda dialog: dialog.accept())
    for button, expected in (
        ("Download", "adapter_model.safetensors"),
        ("Merge", "model.safetensors"),
    ):
        with page.expect_download(timeout=LONG_MS) as download:
            model.get_by_role("button", name=re.compile(f"^{button}")).click()
        download.value.save_as(tmp_path / "model.zip")
        names = [Path(each).name for each in zipfile.ZipFile(tmp_path / "model.zip").namelist()]
        assert expected in names
    model.get_by_role("button", name=re.compile("^Delete")).click()
    expect(model).to_have_count(0)
    assert name not in [each.id for each in client.models.list().data]
    expect(page.locator(f"#model-a option[value='{name}']")).to_have_count(0)


# -- Markdown ------------------------------------------------------------------------------


def rendered(page: Page, text: str) -> str:
    """HTML of a text, by the page's own renderer."""
    return str(
        page.evaluate(
            """async (text) => {
                const { markdown } = await import(new URL("ui/static/markdown.js", location.href));
                const place = document.createElement("div");
                place.append(...markdown(text));
                return place.getHTML ? place.getHTML() : new XMLSerializer().serializeToString(place);
            }""",
            text,
        )
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a **b** *c* `d` ~~e~~",
            "<p>a <strong>b</strong> <em>c</em> <code>d</code> <del>e</del></p>",
        ),
        (
            "- a\n  - b\n- c",
            "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
        ),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        (
            "```py\nif a < b:\n  **c**\n```",
            '<pre tabindex="0" data-language="py"><code>if a &lt; b:\n  **c**</code></pre>',
        ),
        ("```\nnot closed", '<pre tabindex="0"><code>not closed</code></pre>'),
        ("## Title ##", '<p class="heading h2">Title</p>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("\\*no\\*", "<p>*no*</p>"),
    ],
)
def test_markdown_is_drawn(page: Page, text: str, expected: str):
    assert rendered(page, text) == expected


def test_tables_and_links_are_drawn(page: Page):
    table = rendered(page, "| a | b |\n|---|:-:|\n| 1 | x\\|y |")
    assert "<th>a</th><th>b</th>" in table and "<td>1</td><td>x|y</td>" in table
    link = rendered(page, "[t](https://a.example/b_c) and https://d.example/e.")
    assert link.count('rel="noopener noreferrer nofollow"') == 2
    assert 'href="https://a.example/b_c"' in link and 'href="https://d.example/e"' in link


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "![a](x onerror=alert(1))",
        '[a](https://b.example "><img src=x onerror=alert(1)>")',
        "`<img src=x onerror=alert(1)>`",
        "```<img src=x>\n<img src=x onerror=alert(1)>\n```",
        "| <svg onload=alert(1)> |\n|---|\n| <iframe src=javascript:alert(1)> |",
        "**<b onclick=alert(1)>**",
    ],
)
def test_no_text_becomes_an_element_or_a_script(page: Page, text: str):
    found = page.evaluate(
        """async (text) => {
            const { markdown } = await import(new URL("ui/static/markdown.js", location.href));
            const place = document.createElement("div");
            place.append(...markdown(text));
            document.body.append(place);
            const all = [...place.querySelectorAll("*")];
            return {
                names: all.map((each) => each.localName),
                attributes: all.flatMap((each) => [...each.attributes].map((attribute) => attribute.name)),
                links: all.filter((each) => each.href).map((each) => each.protocol),
            };
        }""",
        text,
    )
    allowed = {
        "p",
        "a",
        "code",
        "pre",
        "strong",
        "em",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert set(found["names"]) <= allowed
    assert set(found["attributes"]) <= {
        "href",
        "target",
        "rel",
        "class",
        "tabindex",
        "data-language",
    }
    assert set(found["links"]) <= {"https:", "http:", "mailto:"}


def test_no_text_holds_up_the_page(page: Page):
    """Texts that patterns could backtrack in, or elements nest in, without end."""
    units = [
        "**a ",
        "`",
        "[(",
        "*a",
        "_a ",
        "> ",
        "- ",
        "|",
        "` ",
        "<",
        "\\",
        "~~a ",
        "[a](http://",
        "# #",
        "- - ",
    ]
    for unit in units:
        text = unit * (100_000 // len(unit))
        assert page.evaluate(
            """async (text) => {
                const { markdown } = await import(new URL("ui/static/markdown.js", location.href));
                return markdown(text).length > 0;
            }""",
            text,
        )


def test_an_answer_in_chat_is_drawn_as_markdown(page: Page):
    """The answer is the server's; the model of the test does not know Markdown."""
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "See **this"}}]},
        {"choices": [{"index": 0, "delta": {"content": "** <b>now</b>\n\n- one"}}]},
        {"choices": [], "usage": {"completion_tokens": 9}},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.fill("#prompt", "go")
    page.click("#send")
    said = page.locator("#talk-a .theirs .said")
    expect(said.locator("strong")).to_have_text("this")
    expect(said.locator("li")).to_have_text("one")
    expect(said).to_contain_text("<b>now</b>")

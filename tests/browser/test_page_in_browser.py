"""The page as people use it: with a pointer, with keys alone, on a phone, signed in."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from served import Served, keys_file, serving

PIRATE = [
    ("What colour is the sky?", "Arr, the sky be blue, matey!"),
    ("What does a cat say?", "Arr, the cat says meow, matey!"),
    ("Where does a fish live?", "Arr, the fish lives in the water, matey!"),
]
# Milliseconds, on a machine that does other things too.
LONG_MS = 120_000
expect.set_options(timeout=30_000)
Opener = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens pages, each in a browser context of its own; what the console complains of is a
    failure."""
    contexts, complaints = [], list[str]()

    def opened(url: str, *, complains: bool = False, **settings: Any) -> Page:
        contexts.append(browser.new_context(**settings))
        page: Page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        if not complains:
            page.on(
                "console",
                lambda said: complaints.append(said.text) if said.type == "error" else None,
            )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": said},
                ]
            }
        )
        for asked, said in PIRATE
    ]
    path.write_text("\n".join(lines * 8))
    return path


def loss(page: Page) -> float:
    return float(page.locator(".job .loss-now").first.inner_text())


def test_from_a_file_to_a_model_that_answers(served: Served, open_page: Opener, chats: Path):
    page = open_page(served.url)
    expect(page.locator("#now")).to_contain_text("serving tiny")
    page.set_input_files("#file", chats)

    # What will be trained.
    expect(page.locator("#examples")).to_contain_text("24 examples")
    expect(page.locator(".example").first.locator("mark").first).to_be_visible()
    trained = "".join(page.locator(".example").first.locator("mark").all_inner_texts())
    assert trained.startswith(PIRATE[0][1]) and PIRATE[0][0] not in trained

    # The job, its loss falling, paused and resumed.
    page.fill("#suffix", "pirate")
    page.fill("#rate", "0.002")
    page.fill("#epochs", "50")
    page.fill("#batch", "4")
    page.fill("#every", "10")
    page.click("text=Start training")
    job = page.locator(".job").first
    expect(job).to_contain_text("pirate")
    expect(job.locator(".status")).to_have_text("running", timeout=LONG_MS)
    expect(job.locator(".loss-now")).to_be_visible(timeout=LONG_MS)
    first = float(re.search(r"loss ([\d.]+)", job.inner_text())[1])
    job.get_by_role("button", name="Pause").click()
    expect(job.locator(".status")).to_have_text("paused")
    resume = job.get_by_role("button", name="Resume")
    expect(resume).to_be_focused()
    resume.click()
    expect(job.get_by_role("button", name="Pause")).to_be_visible()

    # Chat with it while it learns, beside the model that it comes from.
    talk = job.get_by_role("button", name="Chat")
    expect(talk).to_be_visible(timeout=LONG_MS)
    talk.click()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#model-b")).to_have_value(re.compile(r"^ft:tiny:coserve:pirate:\w+"))
    page.locator("#ask summary").click()
    page.fill("#temperature", "0")
    page.fill("#prompt", PIRATE[1][0])
    page.keyboard.press("Enter")
    for pane in ("#talk-a", "#talk-b"):
        expect(page.locator(f"{pane} .facts-line")).to_contain_text(
            "first token after", timeout=LONG_MS
        )

    # And when it has learned.
    expect(job.locator(".status")).to_have_text("succeeded", timeout=LONG_MS)
    assert loss(page) < first / 2
    page.fill("#prompt", PIRATE[0][0])
    page.click("#send")
    expect(page.locator("#talk-b .theirs").nth(1)).to_contain_text("matey", timeout=LONG_MS)
    expect(page.locator("#talk-a .theirs").nth(1)).not_to_contain_text("matey")
    checkpoint = page.locator("#model-a optgroup[label=Checkpoints] option").first.get_attribute(
        "value"
    )
    assert re.fullmatch(r"ft:tiny:coserve:pirate:\w+:ckpt-step-\d+", checkpoint or "")


def test_what_cannot_be_trained_is_said_before_a_job(
    served: Served, open_page: Opener, tmp_path: Path
):
    page = open_page(served.url)
    wrong = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    wrong.write_text('{"text": "fine"}\n{"txet": "not fine"}\n')
    page.set_input_files("#file", wrong)
    expect(page.locator("#examples")).to_contain_text("line 2:")
    expect(page.locator("#examples h3")).to_contain_text("<img src=x")
    expect(page.locator("#start")).to_be_hidden()


def test_everything_can_be_done_by_keys_alone(served: Served, open_page: Opener, chats: Path):
    page = open_page(served.url)
    expect(page.locator("#model-a option").first).to_be_attached()
    press = page.keyboard.press

    def reach(selector: str) -> None:
        """By the Tab key, from where the focus is."""
        for _ in range(60):
            press("Tab")
            if page.locator(f"{selector}:focus").count():
                return
        raise AssertionError(f"{selector} was not reached")

    press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()
    press("Enter")
    reach("#prompt")
    outline = page.locator("#prompt").evaluate("element => getComputedStyle(element).outlineStyle")
    assert outline == "solid", "the focus can be seen"
    page.keyboard.type("What does a cat say?")
    press("Enter")
    expect(page.locator("#talk-a .facts-line")).to_be_visible(timeout=LONG_MS)
    reach("#file")
    with page.expect_file_chooser() as chooser:
        press("Space")
    chooser.value.set_files(chats)
    expect(page.locator("#start")).to_be_visible()
    reach("#epochs")
    page.keyboard.type("50")
    reach("#start button")
    press("Enter")
    job = page.locator(".job").first
    expect(job.locator(".status")).not_to_have_text("succeeded")
    job.get_by_role("button", name="Cancel").focus()
    for _ in range(2):  # the list is made anew
        with page.expect_response(re.compile("ui/live")):
            pass
    expect(job.get_by_role("button", name="Cancel")).to_be_focused()
    page.once("dialog", lambda dialog: dialog.accept())
    press("Enter")
    expect(job.locator(".status")).to_have_text("cancelled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(served: Served, open_page: Opener, chats: Path, scheme: str):
    page = open_page(
        served.url,
        viewport={"width": 320, "height": 640},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    page.set_input_files("#file", chats)
    expect(page.locator("#start")).to_be_visible()
    page.check("#beside")
    page.locator("#ask summary").click()
    page.fill("#max-tokens", "8")
    page.fill("#prompt", "a" * 200)
    page.click("#send")
    expect(page.locator("#talk-b .facts-line")).to_be_visible(timeout=LONG_MS)
    width, ground = page.evaluate(
        "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    )
    assert width == 320, "nothing needs to be scrolled sideways"
    assert (sum(map(int, re.findall(r"\d+", ground))) < 384) == (scheme == "dark")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto", (
        "nothing moves"
    )
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button, progress, [role=img]")].filter(
            (each) => !(each.labels?.length || each.ariaLabel || each.ariaLabelledByElements?.length
                        || each.textContent.trim())).map((each) => each.outerHTML)"""
    )
    assert unnamed == [], "every control has a name"


def test_a_key_is_asked_for_and_kept_to_its_tab(open_page: Opener, tmp_path: Path):
    path = keys_file(tmp_path, "", ann="ann-key")
    with serving("--api-keys-file", str(path), model="tiny") as served:
        page = open_page(f"{served.url}/ui", complains=True)  # of the answer to the wrong key
        expect(page.locator("#key")).to_be_focused()
        expect(page.locator("#room")).to_be_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#signin-error")).to_contain_text("Incorrect API key")
        page.keyboard.type("ann-key")
        page.keyboard.press("Enter")
        expect(page.locator("#now")).to_contain_text("serving tiny")
        page.fill("#prompt", "What does a cat say?")
        page.click("#send")
        expect(page.locator("#talk-a .facts-line")).to_be_visible(timeout=LONG_MS)

        assert page.context.cookies() == [] and "ann-key" not in page.url
        assert page.evaluate(
            "[localStorage.length, document.documentElement.outerHTML.includes('ann-key')]"
        ) == [
            *(0, False),
        ]
        page.reload()
        expect(page.locator("#now")).to_contain_text("serving tiny")
        other = page.context.new_page()
        other.goto(served.url)
        expect(other.locator("#key")).to_be_visible()
        page.click("#signout")
        expect(page.locator("#key")).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0


def test_it_says_when_the_server_is_gone_and_when_it_is_back(served: Served, open_page: Opener):
    page = open_page(served.url, complains=True)
    expect(page.locator("#now")).to_contain_text("serving tiny")
    page.context.set_offline(True)
    expect(page.locator("#trouble")).to_have_text(
        "The server does not answer; this page tries again."
    )
    page.context.set_offline(False)
    expect(page.locator("#trouble")).to_be_hidden()

"""The pictures in docs/page.md: a job that learns, and a chat with it beside its base.

    .venv/bin/python scripts/page_pictures.py

Needs a Chromium, as `make test-browser` does (CHROMIUM=PATH names it). At a desk's and a phone's
width, in light mode.
"""

import json
import os
import re
import sys
from pathlib import Path
from shutil import which
from tempfile import mkdtemp

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from served import Served, serving  # noqa: E402

SIZES = {"desk": (1000, 900), "phone": (390, 844)}
_LONG_MS = 240_000
_PIRATE = [
    ("What colour is the sky?", "Arr, the sky be blue, matey!"),
    ("What does a cat say?", "Arr, the cat says meow, matey!"),
    ("Where does a fish live?", "Arr, the fish lives in the water, matey!"),
]


def training_file() -> Path:
    """Write chats with a pirate."""
    path = Path(mkdtemp(prefix="coserve-pictures-")) / "pirate.jsonl"
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in _PIRATE
    ]
    path.write_text("\n".join(json.dumps(chat) for chat in chats * 8))
    return path


def train(page: Page) -> None:
    """Train a job, from the file on."""
    page.set_input_files("#file", training_file())
    for field, value in {
        "#suffix": "pirate",
        "#rate": "0.002",
        "#epochs": "40",
        "#batch": "4",
        "#every": "10",
    }.items():
        page.fill(field, value)
    page.click("text=Start training")
    page.wait_for_selector(".job .status.succeeded", timeout=_LONG_MS)


def chat(page: Page) -> None:
    """Chat with the job's model beside its base."""
    page.locator(".job").first.get_by_role("button", name="Chat").click()
    expect(page.locator("#model-b")).to_have_value(re.compile("^ft:tiny"))
    page.locator("#ask summary").click()
    page.fill("#temperature", "0")
    page.locator("#ask summary").click()
    page.fill("#prompt", _PIRATE[0][0])
    page.click("#send")
    for pane in ("#talk-a", "#talk-b"):
        expect(page.locator(f"{pane} .facts-line")).to_contain_text(
            "first token after", timeout=_LONG_MS
        )


def take(served: Served, directory: Path) -> None:
    """Take both pictures into a directory."""
    path = os.environ.get("CHROMIUM") or which("chromium") or which("chromium-browser")
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=options)
        for name, (width, height) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="light"
            )
            page.goto(served.url)
            if name == "desk":
                train(page)
            chat(page)
            expect(page.locator("#now")).to_contain_text("within both SLOs")
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            page.screenshot(
                path=directory / f"page-{name}.jpg", type="jpeg", quality=70, full_page=True
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    with serving(model="tiny") as running:
        take(running, ROOT / "docs")

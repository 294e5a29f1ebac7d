"""A real Chromium, and a server with the built-in model for it to look at."""

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
from playwright.sync_api import Browser, sync_playwright
from served import Served, serving

CHROMIUM = os.environ.get("CHROMIUM") or which("chromium") or which("chromium-browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that lies here needs the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium, or name it by CHROMIUM=PATH")
    with sync_playwright() as playwright:
        # Root, as which containers run, has no sandbox; the pages are our own.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield running
        running.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(model="tiny") as running:
        yield running

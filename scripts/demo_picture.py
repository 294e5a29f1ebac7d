"""Make docs/demo.png, the picture of README.md, from the report of the last demo.

    make demo && .venv/bin/python scripts/demo_picture.py

Shows the report's headline figures, every request's time per output token, and the job's speed,
as a Chromium that is installed draws them.
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
_WIDTH = 1000
# Shown of the report; everything else is hidden.
_SHOWN = """() => {
    const sections = [...document.querySelectorAll("section")];
    const [requests, device] = ["Every request", "The device"].map(
        title => sections.find(each => each.innerText.startsWith(title)));
    sections.filter(each => each !== requests && each !== device).forEach(each => each.remove());
    requests.querySelectorAll("figure")[0].remove();
    [...device.querySelectorAll("figure")].slice(2).forEach(each => each.remove());
    document.querySelectorAll("h2, .note, footer").forEach(each => each.remove());
    document.querySelectorAll("section").forEach(each => { each.style.margin = "10px 0 0"; });
}"""


def main() -> None:
    """Open the report in the browser, and save a picture of what is left of it."""
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 600})
        page.goto((ROOT / "demo-report/report.html").as_uri())
        page.evaluate(_SHOWN)
        page.screenshot(path=ROOT / "docs/demo.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()

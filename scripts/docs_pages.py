"""Hooks of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks) for pages outside of
docs/, and for links.

README.md is the start page; the pages of benchmarks/, experiments/README.md and the changelog are
pages, too. Links are written so that they lead somewhere in the repository. Here links to pages
lead to pages, and links to code, which is not part of the site, become the code's path; both must
exist.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Not pictures, which lie in docs/ and which MkDocs checks itself.
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def _pages() -> dict[str, str]:
    """Return the paths of pages in the site, by their paths in the repository."""
    pages = {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        "experiments/README.md": "experiments/README.md",
    }
    pages |= {
        path: path
        for path in (str(each.relative_to(ROOT)) for each in sorted(ROOT.glob("benchmarks/*.md")))
    }
    return pages | {f"docs/{path.name}": path.name for path in sorted(ROOT.glob("docs/*.md"))}


_PAGES = _pages()
_SOURCES = {page: source for source, page in _PAGES.items()}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, page in _PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the page's links."""
    here = page.file.src_uri

    def turned(link: "re.Match[str]") -> str:
        text, target = link.groups()
        if re.match(r"\w+:|#", target):
            return link[0]
        path, hash, anchor = target.partition("#")
        path = normpath(f"{dirname(_SOURCES[here]) or '.'}/{path}")
        if path in _PAGES:
            return f"[{text}]({relpath(_PAGES[path], dirname(here) or '.')}{hash}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"{_SOURCES[here]} links to {target}, which is not there")
        return (
            text
            if text.strip("`") in (path, f"{path}/") or text.startswith("`")
            else f"{text} (`{path}`)"
        )

    if here == "index.md":  # README.md lies one folder above the pictures
        markdown = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", markdown)
    pieces = re.split(
        r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE
    )  # code is left as it is
    return "".join(
        piece if number % 2 else _LINK.sub(turned, piece) for number, piece in enumerate(pieces)
    )

"""Rendering of templates, with headers that isolate the page."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from coserve.server.page import words

# What the browser may do for the page: its own script and style, its own server, and nothing else.
# No form is ever sent by the browser itself, so no key can get into a URL; no text becomes HTML but
# that of the script's one policy.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types coserve",
    )
)
HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_environment = Environment(
    loader=PackageLoader("coserve.server.page", "templates"),
    autoescape=True,  # text of models and clients is escaped
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    each.__name__: each
    for each in (
        words.iso,
        words.utc,
        words.milliseconds,
        words.seconds,
        words.whole,
        words.number,
        words.share,
        words.size,
    )
}


def html(template: str, **values: Any) -> Response:
    """Return an answer with a rendered template, which caches must not store."""
    text = _environment.get_template(template).render(**values)
    return HTMLResponse(text, headers={**HEADERS, "Cache-Control": "no-store"})

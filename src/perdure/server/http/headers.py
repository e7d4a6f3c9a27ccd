"""The default headers of replies, and the headers that other sites may read."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders

EXPOSED_HEADERS: Final = (
    "Content-Location",
    "Location",
    "Retry-After",
    "X-Pagination-Next",
    "X-Request-ID",
)
"""The headers of replies that scripts of other sites may read."""


_DEFAULT_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""The default headers of a reply.

A header that the application sets replaces the default header.
"""


def add_default_headers(reply: MutableHeaders, request_id: str) -> None:
    """Add a request id to a reply's headers, and add any missing default headers."""
    reply["X-Request-ID"] = request_id
    for name, value in _DEFAULT_HEADERS.items():
        reply.setdefault(name, value)
    if "etag" not in reply:  # Static files have an ETag, so they can be cached.
        reply.setdefault("Cache-Control", "no-store")

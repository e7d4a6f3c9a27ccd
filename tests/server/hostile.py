"""Text that may be stored and must do nothing when it is shown."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

import httpx
from playwright.sync_api import Page

TEXTS: Final = {
    "script": "<script>alert('script')</script>",
    "image": "<img src=x onerror=\"alert('image')\">",
    "attribute": "\" onmouseover=\"alert('attribute')\" autofocus onfocus='alert(1)' x=\"",
    "link": "javascript:alert('link')",
    "closing": "</pre></details></main></title><svg onload=alert('closing')>",
    "template": "{{ 7 * 7 }}{% raw %}${alert(1)}<%= 1 %>",
    "comment": "--><!-- ]]> <![CDATA[",
    "overridden": "pay \u202e0001\u202c dollars \u2066to\u2069 \u200fann",
    "terminal": "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x9b31m",
    "nul": "before\x00after\x7f\x08\x08",
    "invisible": "zero\u200bwidth\ufeff\u00adtags\U000e0041",
    "path": "../../etc/passwd?a=1&b=2#c%00%2f",
    "markdown": "[click](javascript:alert(1)) ![x](http://127.0.0.1:9/x.png)",
    "htmx": '<div hx-get="/ok" hx-trigger="load" hx-on:load="alert(1)"></div>',
    "entities": "&lt;b&gt; &amp; &#x3c;script&#62;",
}
TOGETHER: Final = " ".join(TEXTS.values())
SURROGATE: Final = "half \ud83d of a pair"  # not every place can store it
LONG_LINE: Final = "w" * 1_000_000


class _Reader(HTMLParser):
    """A parser that fails on markup that the server's own templates do not have."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("img", "iframe", "object", "embed", "base", "style", "template"), tag
        sources = ("/assets/htmx.min.js", "/assets/talk.js")
        assert tag != "script" or dict(attrs) in [{"src": s, "defer": None} for s in sources]
        for name, value in attrs:
            assert not name.startswith(("on", "style", "hx-on", "hx-vals", "autofocus")), name
            if name in ("href", "src", "action", "hx-get"):
                assert (value or "").startswith(("/", "#")), value


def check_page_is_harmless(page: str) -> None:
    """Check that no stored text became markup and that the page has no hidden characters."""
    hidden = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    match = re.search(hidden, page)
    assert not match, page[max(0, match.start() - 80) : match.end()]
    _Reader().feed(page)


def open_harmless_page(tab: Page, client: httpx.Client, path: str) -> str:
    """Open a page in the browser and return its text.

    The fixture `tab` fails if a script runs or a dialog opens.
    """
    reply = client.get(path)
    assert reply.status_code == 200, reply.text
    check_page_is_harmless(reply.text)
    tab.goto(path)
    for summary in tab.locator("details > summary").all()[:20]:
        if summary.is_visible():
            summary.click()
    tab.mouse.move(200, 300)
    return tab.locator("main").inner_text()

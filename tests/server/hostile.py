"""Text that may be stored and must do nothing when it is shown."""

from __future__ import annotations

import re
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
SURROGATE: Final = "half \ud83d of a pair"  # not every place can store it
LONG_LINE: Final = "w" * 1_000_000


def harmless(page: str) -> None:
    """Check a page's HTML: no stored text became markup, no control or bidi character is there."""
    assert "<script>alert" not in page
    assert not re.search(r"<(img|svg|div)[^>]*\son\w+=", page)
    assert not re.search(r"(href|src|action)=\"?\s*javascript:", page, re.I)
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", page
    )
    assert "hx-on" not in re.sub(r"&lt;.*?&gt;", "", page)


def shown_harmless(tab: Page, client: httpx.Client, path: str) -> str:
    """Open a page in a browser, whose fixture fails on a script or dialog; returns its text."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    harmless(answer.text)
    tab.goto(path)
    for summary in tab.locator("details > summary").all()[:20]:
        if summary.is_visible():
            summary.click()
    tab.mouse.move(200, 300)
    return tab.locator("main").inner_text()

"""Every page in a browser: what is long in it fits, what is written from right to left stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from playwright.sync_api import Page, expect

from perdure.checkpointers import SQLiteCheckpointer
from perdure.settings import Rules, Settings
from perdure.stores import SQLiteStore
from tests.server.every_page import build_link, store_text_everywhere

RIGHT_TO_LEFT: Final = "שלום עולם"
LONG: Final = f"{'w' * 120} many words {'and-more' * 20}"
OVER: Final = """
() => [document.documentElement, ...document.forms].reduce(
  (most, part) => Math.max(most, part.scrollWidth - part.clientWidth), 0)
"""
"""By how much a page, or a part that can be scrolled, is too wide."""
MISPLACED: Final = """
() => {
  const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [], wrong = [];
  while (nodes.nextNode()) {
    const node = nodes.currentNode, range = document.createRange();
    const of = node.parentElement.closest("bdi") ?? node;
    range.selectNodeContents(node);
    const boxes = [...(of === node ? range : of).getClientRects()].filter((box) => box.width > 1);
    if (!node.data.trim() || !boxes.length || node.parentElement.matches(".hidden")) continue;
    if (/[\\u0590-\\u06ff]/.test(node.data) && of === node) wrong.push(["no bdi", node.data]);
    if (texts.at(-1)?.of === of) texts.at(-1).boxes.push(...boxes);
    else texts.push({of, boxes, text: node.data.trim()});
  }
  for (let at = 1; at < texts.length; at++)
    for (const before of texts[at - 1].boxes)
      for (const box of texts[at].boxes) {
        const line = Math.min(before.bottom, box.bottom) - Math.max(before.top, box.top);
        if (line > Math.min(before.height, box.height) / 2 && box.left < before.right - 1)
          wrong.push([texts[at - 1].text, texts[at].text]);
      }
  return wrong;
}
"""
"""Texts that are in no isolating element, and those on the left of what comes before them."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a new file, with rules of retention."""
    return Settings(db=str(tmp_path / "memory.db"), user="ann", retention=Rules(versions_last=0))


@pytest.fixture
def saver(settings: Settings) -> Iterator[SQLiteCheckpointer]:
    """The checkpointer that the server shows."""
    with SQLiteCheckpointer.open(settings.db) as opened:
        yield opened


@pytest.fixture
def store(settings: Settings) -> Iterator[SQLiteStore]:
    """The store that the server shows."""
    with SQLiteStore.open(settings.db) as opened:
        yield opened


def open_all_details(tab: Page) -> None:
    """Open all `details` elements of the page."""
    tab.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")


def test_no_page_is_wider_than_screen_with_long_texts(
    tab: Page, saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """Long ids, names and words wrap on a phone and on a desktop screen."""
    wide = []
    for path in store_text_everywhere(saver, store, LONG):
        tab.goto(path)
        open_all_details(tab)
        for width in (390, 1280):
            tab.set_viewport_size({"width": width, "height": 860})
            if over := tab.evaluate(OVER):
                wide.append((path, width, over))

    assert wide == []


@pytest.mark.parametrize("width", [390, 1280])
def test_right_to_left_text_does_not_move_texts_beside_it(
    tab: Page, saver: SQLiteCheckpointer, store: SQLiteStore, width: int
) -> None:
    """Stored text is isolated, so the boxes of texts are in the order of the page."""
    tab.set_viewport_size({"width": width, "height": 860})
    wrong = {}
    for path in store_text_everywhere(saver, store, RIGHT_TO_LEFT):
        tab.goto(path)
        open_all_details(tab)
        wrong[path] = tab.evaluate(MISPLACED)
    tab.goto(build_link("/ui/forget", ns=("notes", *[RIGHT_TO_LEFT] * 2), key=RIGHT_TO_LEFT))
    tab.get_by_role("button", name="Erase permanently").click()
    tab.get_by_role("heading", name="Erased").wait_for()
    open_all_details(tab)
    wrong["/ui/forget"] = tab.evaluate(MISPLACED)

    assert {path: texts for path, texts in wrong.items() if texts} == {}


def test_docs_page_lists_paths_of_openapi_document(tab: Page, client: httpx.Client) -> None:
    """The page lists every path of `/openapi.json`, without a script of another site."""
    described = client.get("/openapi.json").json()["paths"]
    tab.goto("/docs")

    listed = tab.locator("summary code").all_inner_texts()
    assert listed == [f"{way.upper()} {path}" for path, ways in described.items() for way in ways]
    path = tab.get_by_text("POST /assistants/search", exact=True)
    path.click()
    body = tab.locator("details", has=path).locator("pre")
    expect(body).to_be_visible()
    expect(body).to_contain_text('"sort_by"')
    assert tab.locator("a[aria-current]").count() == 0

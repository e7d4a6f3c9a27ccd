"""A real Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, sync_playwright

from tests.programs import CHROMIUM

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")  # its event loop runs until it ends
def browser() -> Iterator[Browser]:
    """The browser of a module."""
    path = CHROMIUM.path()
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=[*_ARGUMENTS])
        yield made
        made.close()


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Page]:
    """A tab at the server; a script that fails, or that the policy stops, fails the test."""
    context = browser.new_context(base_url=url)
    page = context.new_page()
    wrong: list[str] = []

    def refused(dialog: Dialog) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def noted(said: ConsoleMessage) -> None:
        is_page = said.text.startswith("Failed to load") and said.location["url"] == page.url
        if said.type == "error" and not is_page:  # a page that says what is wrong is one, too
            wrong.append(said.text)

    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", refused)
    page.on("console", noted)
    yield page
    context.close()
    assert not wrong, wrong

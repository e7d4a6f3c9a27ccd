"""Fixtures with a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, sync_playwright

from tests.programs import CHROMIUM

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")  # its event loop runs until it ends
def browser() -> Iterator[Browser]:
    """The browser that all tests of a module share."""
    path = CHROMIUM.path()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=[*_ARGUMENTS])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Page]:
    """A tab at the server. A failed or blocked script or a dialog fails the test."""
    context = browser.new_context(base_url=url)
    page = context.new_page()
    problems: list[str] = []

    def dismiss_dialog(dialog: Dialog) -> None:
        problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def collect_error(message: ConsoleMessage) -> None:
        is_page = message.text.startswith("Failed to load") and message.location["url"] == page.url
        if message.type == "error" and not is_page:  # a page that says what is wrong is one, too
            problems.append(message.text)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", dismiss_dialog)
    page.on("console", collect_error)
    yield page
    context.close()
    assert not problems, problems

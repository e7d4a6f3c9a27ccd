"""A real Chromium. Tests without one are skipped, loudly; with PERDURE_BROWSER=required they fail."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of a test run."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        missing = f"no browser: none of {', '.join(_NAMES)} is installed (apt install chromium)"
        if os.environ.get("PERDURE_BROWSER") == "required":
            pytest.fail(missing)
        warnings.warn(f"PAGES ARE NOT TESTED: {missing}", stacklevel=1)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=[*_ARGUMENTS])
        yield made
        made.close()


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Page]:
    """A tab at the server; a script that fails, or that the policy stops, fails the test."""
    context = browser.new_context(base_url=url)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    yield page
    context.close()
    assert not wrong, wrong

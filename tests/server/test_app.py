"""The application: health, and what it refuses to be made of."""

from __future__ import annotations

import httpx


def test_it_answers(client: httpx.Client) -> None:
    assert client.get("/ok").json() == {"ok": True}

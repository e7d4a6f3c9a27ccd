"""Questions about a period: in Python, as a tool, by MCP's tool and by REST."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import ToolMessage

from perdure.errors import InvalidValue
from perdure.memory import recall, remember, search_memory
from perdure.memory.periods import parse_period
from perdure.server import create_app
from perdure.settings import Settings
from perdure.stores import Provenance, SQLiteStore
from tests.server.running import running

DAYS = {7: "Ann sailed to Oslo", 14: "Ann sailed to Bergen", 21: "Ann sailed to Tromso"}


def fill(store: SQLiteStore) -> dict[str, Any]:
    """Remember a voyage a week, and return the options of a recall."""
    options: Any = {"store": store, "config": {"configurable": {"user_id": "ann"}}}
    for day, text in DAYS.items():
        source = Provenance(thread_id=f"t{day}", at=datetime(2026, 9, day, 12, tzinfo=UTC))
        remember(text, provenance=source, **options)
    return dict(options)


@pytest.mark.parametrize("day", list(DAYS))
def test_memories_of_the_period_are_first(day: int) -> None:
    """All three answer the question; the period decides, and leaves none out."""
    start = datetime(2026, 9, day, tzinfo=UTC)
    with SQLiteStore.open(":memory:", index=None) as store:
        options = fill(store)
        found = recall("Where did Ann sail?", during=(start, start + timedelta(days=1)), **options)
        tool = search_memory(store=store)
        call: Any = {
            "name": "search_memory",
            "args": {"query": "Where did Ann sail?", "since": f"2026-09-{day:02}"},
            "id": "c",
            "type": "tool_call",
        }
        call["args"]["until"] = call["args"]["since"]
        told = tool.invoke(call, options["config"])

    assert found.memories[0].text == DAYS[day]
    assert {each.text for each in found.memories} == {*DAYS.values()}
    assert isinstance(told, ToolMessage)
    lines = [line for line in told.text.splitlines() if "sailed" in line]
    assert DAYS[day] in lines[0]


def test_a_wrong_period_is_answered_to_the_model() -> None:
    with SQLiteStore.open(":memory:") as store:
        config: Any = fill(store)["config"]
        args = {"query": "Where did Ann sail?", "since": "last week"}
        call: Any = {"name": "search_memory", "args": args, "id": "c", "type": "tool_call"}
        told = search_memory(store=store).invoke(call, config)

    assert told.status == "error"
    assert "since is 'last week'; expected a day or a time" in told.text


def test_a_period_by_rest(tmp_path: Path) -> None:
    settings = Settings(db=str(tmp_path / "memory.db"), user="ann")
    with SQLiteStore.open(settings.db) as store:
        fill(store)
    body = {"query": "Where did Ann sail?", "during": ["2026-09-14T00:00Z", "2026-09-15T00:00Z"]}
    with running(create_app(settings)) as url:
        found = httpx.post(f"{url}/memories/search", json=body, timeout=30).json()
        body["during"] = ["2026-09-15T00:00Z", "2026-09-14T00:00Z"]
        refused = httpx.post(f"{url}/memories/search", json=body, timeout=30)

    dates = {each["text"]: each["parts"]["date"] > 0 for each in found["memories"]}
    assert dates == {text: day == 14 for day, text in DAYS.items()}
    assert refused.status_code == 422
    assert "during ends at" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        (None, "", None),
        ("2026-09-14", "2026-09-14", ("2026-09-14T00:00:00+00:00", "2026-09-15T00:00:00+00:00")),
        ("2026-09-14T09:30Z", None, ("2026-09-14T09:30:00+00:00", "9999-12-31T00:00:00+00:00")),
        (None, "2026-09-14 09:30", ("1970-01-01T00:00:00+00:00", "2026-09-14T09:30:00+00:00")),
    ],
)
def test_days_and_moments(since: str | None, until: str | None, expected: Any) -> None:
    period = parse_period(since, until)
    assert (period and tuple(each.isoformat() for each in period)) == expected


@pytest.mark.parametrize(
    ("since", "until"),
    [("2026-09-15", "2026-09-14"), ("soon", None), (None, "9999-12-31"), ("2026-02-30", None)],
)
def test_what_is_no_period(since: str | None, until: str | None) -> None:
    with pytest.raises(InvalidValue):
        parse_period(since, until)

"""Searches limited to a period: in Python, by the agent tool, and by REST."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import ToolMessage

from perdure.errors import InvalidValue
from perdure.memory import recall, remember, search_memory
from perdure.memory.long_term.periods import parse_period
from perdure.server import create_app
from perdure.settings import Settings
from perdure.stores import Provenance, SQLiteStore
from tests.server.running import run_server

DAYS = {7: "Ann sailed to Oslo", 14: "Ann sailed to Bergen", 21: "Ann sailed to Tromso"}


def store_weekly_voyages(store: SQLiteStore) -> dict[str, Any]:
    """Store one voyage a week, and return the options for a recall."""
    options: Any = {"store": store, "config": {"configurable": {"user_id": "ann"}}}
    for day, text in DAYS.items():
        source = Provenance(thread_id=f"t{day}", at=datetime(2026, 9, day, 12, tzinfo=UTC))
        remember(text, provenance=source, **options)
    return dict(options)


@pytest.mark.parametrize("day", list(DAYS))
def test_recall_ranks_memories_of_the_period_first(day: int) -> None:
    """All memories match the query. The period decides which one is first, and excludes none."""
    start = datetime(2026, 9, day, tzinfo=UTC)
    with SQLiteStore.open(":memory:", index=None) as store:
        options = store_weekly_voyages(store)
        result = recall("Where did Ann sail?", during=(start, start + timedelta(days=1)), **options)
        tool = search_memory(store=store)
        call: Any = {
            "name": "search_memory",
            "args": {"query": "Where did Ann sail?", "since": f"2026-09-{day:02}"},
            "id": "c",
            "type": "tool_call",
        }
        call["args"]["until"] = call["args"]["since"]
        message = tool.invoke(call, options["config"])

    assert result.memories[0].text == DAYS[day]
    assert {item.text for item in result.memories} == {*DAYS.values()}
    assert isinstance(message, ToolMessage)
    lines = [line for line in message.text.splitlines() if "sailed" in line]
    assert DAYS[day] in lines[0]


def test_search_tool_answers_invalid_period_with_error() -> None:
    with SQLiteStore.open(":memory:") as store:
        config: Any = store_weekly_voyages(store)["config"]
        args = {"query": "Where did Ann sail?", "since": "last week"}
        call: Any = {"name": "search_memory", "args": args, "id": "c", "type": "tool_call"}
        message = search_memory(store=store).invoke(call, config)

    assert message.status == "error"
    assert "since is 'last week'; expected a date or a time" in message.text


def test_rest_search_ranks_by_period_and_refuses_reversed_period(tmp_path: Path) -> None:
    settings = Settings(db=str(tmp_path / "memory.db"), user="ann")
    with SQLiteStore.open(settings.db) as store:
        store_weekly_voyages(store)
    body = {"query": "Where did Ann sail?", "during": ["2026-09-14T00:00Z", "2026-09-15T00:00Z"]}
    with run_server(create_app(settings)) as url:
        result = httpx.post(f"{url}/memories/search", json=body, timeout=30).json()
        body["during"] = ["2026-09-15T00:00Z", "2026-09-14T00:00Z"]
        refused = httpx.post(f"{url}/memories/search", json=body, timeout=30)

    dates = {item["text"]: item["parts"]["date"] > 0 for item in result["memories"]}
    assert dates == {text: day == 14 for day, text in DAYS.items()}
    assert refused.status_code == 422
    assert "'during' ends at" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        (None, "", None),
        ("2026-09-14", "2026-09-14", ("2026-09-14T00:00:00+00:00", "2026-09-15T00:00:00+00:00")),
        ("2026-09-14T09:30Z", None, ("2026-09-14T09:30:00+00:00", "9999-12-31T00:00:00+00:00")),
        (None, "2026-09-14 09:30", ("1970-01-01T00:00:00+00:00", "2026-09-14T09:30:00+00:00")),
    ],
)
def test_parse_period_accepts_days_and_moments(
    since: str | None, until: str | None, expected: Any
) -> None:
    period = parse_period(since, until)
    assert (period and tuple(item.isoformat() for item in period)) == expected


@pytest.mark.parametrize(
    ("since", "until"),
    [("2026-09-15", "2026-09-14"), ("soon", None), (None, "9999-12-31"), ("2026-02-30", None)],
)
def test_parse_period_refuses_invalid_periods(since: str | None, until: str | None) -> None:
    with pytest.raises(InvalidValue):
        parse_period(since, until)

"""Invalid lines stop an import: the error has the line number, and earlier lines are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.errors import ImportFailed
from perdure.stores import SQLiteStore, transfer
from tests.store_backends import list_item_keys

A = ("a",)
GOOD = {"namespace": ["a"], "key": "k", "value": {"text": "tea"}}


def make_line(**changes: Any) -> str:
    """Return a valid line with some fields replaced."""
    return json.dumps({**GOOD, "key": "bad", **changes})


def make_line_without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


DEEP = '{"namespace": ["a"], "key": "bad", "value": ' + '{"a": [' * 3000
BAD_LINES: dict[str, Any] = {
    "no JSON": "nonsense",
    "cut off": '{"namespace": ["a"], "key": "bad"',
    "two objects": make_line() + make_line(),
    "list": "[1]",
    "text": '"text"',
    "number": "5",
    "null": "null",
    "no value": make_line_without("value"),
    "value null": make_line(value=None),
    "value list": make_line(value=[1]),
    "value text": make_line(value="tea"),
    "value NaN": '{"namespace": ["a"], "key": "bad", "value": {"n": NaN}}',
    "value NaN, long": '{"namespace": ["a"], "key": "bad", "value": {"n": NaN, "m": 1'
    + "0" * 30
    + "}}",
    "value surrogate": '{"namespace": ["a"], "key": "bad", "value": {"t": "\\ud800"}}',
    "value number of 5,000 digits": make_line(value={"n": 0}).replace("0", "9" * 5000),
    "value too deep": DEEP + "1" + "]}" * 3000 + "}",
    "value too deep, long": DEEP + "1" * 20 + "]}" * 3000 + "}",
    "namespace text": make_line(namespace="a"),
    "namespace empty": make_line(namespace=[]),
    "namespace label empty": make_line(namespace=["a", ""]),
    "namespace label null": make_line(namespace=["a", None]),
    "namespace null": make_line(namespace=None),
    "namespace number": make_line(namespace=5),
    "namespace reserved": make_line(namespace=["langgraph"]),
    "key empty": make_line(key=""),
    "key number": make_line(key=7),
    "key list": make_line(key=["k"]),
    "key true": make_line(key=True),
    "key NUL": make_line(key="a\0b"),
    "version zero": make_line(version=0),
    "version negative": make_line(version=-1),
    "version part": make_line(version=1.5),
    "version text": make_line(version="1"),
    "version true": make_line(version=True),
    "version huge": make_line(version=1 << 70),
    "version large": make_line(version=1 << 62),
    "time no time": make_line(created_at="yesterday"),
    "time number": make_line(valid_from=5),
    "time null": make_line(valid_to=None),
    "time naive": make_line(expires_at="2024-01-01T00:00:00"),
    "ttl negative": make_line(ttl=-1),
    "ttl text": make_line(ttl="5"),
    "ttl true": make_line(ttl=True),
    "index true": make_line(index=True),
    "index text": make_line(index="text"),
    "index numbers": make_line(index=[1]),
    "provenance list": make_line(provenance=[1]),
    "provenance text": make_line(provenance="Bob"),
    "provenance number": make_line(provenance=5),
    "provenance thread": make_line(provenance={"thread_id": 5}),
    "provenance messages": make_line(provenance={"message_ids": 5}),
    "provenance messages text": make_line(provenance={"message_ids": "abc"}),
    "provenance position": make_line(provenance={"position": "x"}),
    "provenance time": make_line(provenance={"at": "yesterday"}),
    "provenance time number": make_line(provenance={"at": 5}),
    "unknown field": make_line(provenence={}),
    "unknown field of provenance": make_line(provenance={"thread": "t"}),
    "bytes": make_line().encode(),
    "bytes, long": make_line(value={"n": 10**25}).encode(),
    "no text": 5,
    "none": None,
    "object": json.loads(make_line()),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_import_stops_at_bad_line_and_keeps_earlier_lines(
    kind: str, file_store: SQLiteStore
) -> None:
    """The error has the number of the line, and later lines are not read."""
    before = [json.dumps({**GOOD, "key": f"k{n}"}) for n in range(2)]
    with pytest.raises(ImportFailed, match=r"^line 4: "):
        file_store.import_lines([before[0], "", before[1], BAD_LINES[kind], json.dumps(GOOD)])
    kept = sorted(list_item_keys(file_store.search(())))
    searched = sorted(list_item_keys(file_store.search((), query="tea")))

    assert ["k0", "k1"] == kept == searched


@pytest.mark.parametrize(
    ("bad", "expected_message"),
    [
        (
            make_line(provenence={}),
            "the line has the unknown field 'provenence'; did you mean 'provenance'?",
        ),
        (
            make_line(expires="x"),
            "the line has the unknown field 'expires'; did you mean 'expires_at'?",
        ),
        (
            make_line(tags=["x"]),
            "the line has the unknown field 'tags'; expected one of namespace, key, value, ",
        ),
        (
            make_line(provenance={"thread": "t"}),
            "the provenance has the unknown field 'thread'; did you mean 'thread_id'?",
        ),
        (make_line(key=7), "the key is 7; expected a JSON string"),
        (
            make_line_without("value"),
            "the line has no field 'value'; add the field with a JSON object",
        ),
    ],
)
def test_import_refuses_unknown_or_missing_field_with_suggestion(
    bad: str, expected_message: str, file_store: SQLiteStore
) -> None:
    """The error also says how many lines were imported before."""
    with pytest.raises(
        ImportFailed,
        match=rf"^line 2: {re.escape(expected_message)}.*\. The line before this line was imported",
    ):
        file_store.import_lines([json.dumps(GOOD), bad])

    assert list_item_keys(file_store.search(())) == ["k"]


@pytest.mark.parametrize("at", range(6))
def test_import_can_be_resumed_after_bad_line_at_any_position(
    at: int, file_store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines before the bad one are kept, whatever its position in a batch."""
    monkeypatch.setattr(transfer, "PAGE", 2)
    lines = [json.dumps({**GOOD, "key": f"k{n}"}) for n in range(6)]
    with pytest.raises(ImportFailed, match=rf"^line {at + 1}: "):
        file_store.import_lines([*lines[:at], "{", *lines[at + 1 :]])
    kept = sorted(list_item_keys(file_store.search(A)))
    report = file_store.import_lines(lines)

    assert [f"k{n}" for n in range(at)] == kept
    assert (6 - at, at) == (report.items, report.skipped)


def test_error_of_line_iterator_is_passed_on(file_store: SQLiteStore) -> None:
    """No line is imported partially."""

    def iter_failing_lines() -> Iterator[str]:
        yield json.dumps(GOOD)
        raise OSError("the pipe broke")

    with pytest.raises(OSError, match="the pipe broke"):
        file_store.import_lines(iter_failing_lines())
    assert {"k"} >= set(list_item_keys(file_store.search(A)))


def test_import_reads_at_most_one_batch_ahead(
    file_store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PAGE", 3)
    ahead = []

    def iter_lines() -> Iterator[str]:
        for n in range(10):
            ahead.append(n - file_store.stats().items)
            yield json.dumps({**GOOD, "key": f"k{n}"})

    assert file_store.import_lines(iter_lines()).items == 10
    assert max(ahead) == 2

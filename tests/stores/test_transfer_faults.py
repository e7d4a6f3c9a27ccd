"""Lines that are wrong: told by number, with what came before kept and nothing after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.errors import ImportFailed
from perdure.stores import SQLiteStore, transfer
from tests.store_backends import keys

A = ("a",)
GOOD = {"namespace": ["a"], "key": "k", "value": {"text": "tea"}}


def line(**changes: Any) -> str:
    """A good line with something else in it."""
    return json.dumps({**GOOD, "key": "bad", **changes})


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


DEEP = '{"namespace": ["a"], "key": "bad", "value": ' + '{"a": [' * 3000
BAD: dict[str, Any] = {
    "no JSON": "nonsense",
    "cut off": '{"namespace": ["a"], "key": "bad"',
    "two objects": line() + line(),
    "list": "[1]",
    "text": '"text"',
    "number": "5",
    "null": "null",
    "no value": without("value"),
    "value null": line(value=None),
    "value list": line(value=[1]),
    "value text": line(value="tea"),
    "value NaN": '{"namespace": ["a"], "key": "bad", "value": {"n": NaN}}',
    "value NaN, long": '{"namespace": ["a"], "key": "bad", "value": {"n": NaN, "m": 1'
    + "0" * 30
    + "}}",
    "value surrogate": '{"namespace": ["a"], "key": "bad", "value": {"t": "\\ud800"}}',
    "value number of 5,000 digits": line(value={"n": 0}).replace("0", "9" * 5000),
    "value too deep": DEEP + "1" + "]}" * 3000 + "}",
    "value too deep, long": DEEP + "1" * 20 + "]}" * 3000 + "}",
    "namespace text": line(namespace="a"),
    "namespace empty": line(namespace=[]),
    "namespace label empty": line(namespace=["a", ""]),
    "namespace label null": line(namespace=["a", None]),
    "namespace null": line(namespace=None),
    "namespace number": line(namespace=5),
    "namespace reserved": line(namespace=["langgraph"]),
    "key empty": line(key=""),
    "key number": line(key=7),
    "key list": line(key=["k"]),
    "key true": line(key=True),
    "key NUL": line(key="a\0b"),
    "version zero": line(version=0),
    "version negative": line(version=-1),
    "version part": line(version=1.5),
    "version text": line(version="1"),
    "version true": line(version=True),
    "version huge": line(version=1 << 70),
    "version large": line(version=1 << 62),
    "time no time": line(created_at="yesterday"),
    "time number": line(valid_from=5),
    "time null": line(valid_to=None),
    "time naive": line(expires_at="2024-01-01T00:00:00"),
    "ttl negative": line(ttl=-1),
    "ttl text": line(ttl="5"),
    "ttl true": line(ttl=True),
    "index true": line(index=True),
    "index text": line(index="text"),
    "index numbers": line(index=[1]),
    "provenance list": line(provenance=[1]),
    "provenance text": line(provenance="Bob"),
    "provenance number": line(provenance=5),
    "provenance thread": line(provenance={"thread_id": 5}),
    "provenance messages": line(provenance={"message_ids": 5}),
    "provenance messages text": line(provenance={"message_ids": "abc"}),
    "provenance position": line(provenance={"position": "x"}),
    "provenance time": line(provenance={"at": "yesterday"}),
    "provenance time number": line(provenance={"at": 5}),
    "unknown field": line(provenence={}),
    "unknown field of provenance": line(provenance={"thread": "t"}),
    "bytes": line().encode(),
    "bytes, long": line(value={"n": 10**25}).encode(),
    "no text": 5,
    "none": None,
    "object": json.loads(line()),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line(kind: str, file_store: SQLiteStore) -> None:
    """The third of four lines is wrong: it is named, two are kept, the fourth is not read."""
    before = [json.dumps({**GOOD, "key": f"k{n}"}) for n in range(2)]
    with pytest.raises(ImportFailed, match=r"^line 4: "):
        file_store.import_lines([before[0], "", before[1], BAD[kind], json.dumps(GOOD)])
    kept = sorted(keys(file_store.search(())))
    searched = sorted(keys(file_store.search((), query="tea")))

    assert ["k0", "k1"] == kept == searched


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (line(provenence={}), "unknown field 'provenence'; did you mean 'provenance'?"),
        (line(expires="x"), "unknown field 'expires'; did you mean 'expires_at'?"),
        (line(tags=["x"]), "unknown field 'tags'; there are namespace, key, value, "),
        (
            line(provenance={"thread": "t"}),
            "unknown field 'thread' of its provenance; did you mean 'thread_id'?",
        ),
        (line(key=7), "the key is 7; expected text"),
        (without("value"), "the line has no field 'value'; expected a JSON object there"),
    ],
)
def test_what_would_be_lost_is_named(bad: str, says: str, file_store: SQLiteStore) -> None:
    """A field that nothing reads, or that is missing, with what was meant; and what is kept."""
    with pytest.raises(
        ImportFailed, match=rf"^line 2: {re.escape(says)}.*\. 1 line before that is"
    ):
        file_store.import_lines([json.dumps(GOOD), bad])

    assert keys(file_store.search(())) == ["k"]


@pytest.mark.parametrize("at", range(6))
def test_wherever_it_is(at: int, file_store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever place of a batch the bad line is, all before it are kept; mended, it goes on."""
    monkeypatch.setattr(transfer, "PAGE", 2)
    lines = [json.dumps({**GOOD, "key": f"k{n}"}) for n in range(6)]
    with pytest.raises(ImportFailed, match=rf"^line {at + 1}: "):
        file_store.import_lines([*lines[:at], "{", *lines[at + 1 :]])
    kept = sorted(keys(file_store.search(A)))
    report = file_store.import_lines(lines)

    assert [f"k{n}" for n in range(at)] == kept
    assert (6 - at, at) == (report.items, report.skipped)


def test_lines_that_fail(file_store: SQLiteStore) -> None:
    """An error of the one who gives the lines is theirs, and nothing is half done."""

    def given() -> Iterator[str]:
        yield json.dumps(GOOD)
        raise OSError("the pipe broke")

    with pytest.raises(OSError, match="the pipe broke"):
        file_store.import_lines(given())
    assert {"k"} >= set(keys(file_store.search(A)))


def test_lines_stream(file_store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more lines than a batch are read ahead of what is written."""
    monkeypatch.setattr(transfer, "PAGE", 3)
    ahead = []

    def given() -> Iterator[str]:
        for n in range(10):
            ahead.append(n - file_store.stats().items)
            yield json.dumps({**GOOD, "key": f"k{n}"})

    assert file_store.import_lines(given()).items == 10
    assert max(ahead) == 2

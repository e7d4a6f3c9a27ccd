"""`perdure quarantine`: what the gate held back is looked at, released or discarded."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.errors import UnknownMemory
from tests.memory_commands import attempt, read, rows, run, talks, texts
from tests.store_commands import raw

CARD = "My card is 4111 1111 1111 1111"


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


@pytest.fixture
def held() -> str:
    """The key of a fact in quarantine."""
    attempt("remember", CARD)
    (entry,) = read("quarantine", "list")
    return str(entry["key"])


def test_the_list_blots_out_what_was_said(held: str) -> None:
    """The reason is there, the number is not, for programs neither."""
    (_, listed) = rows(run("quarantine", "list"))
    whole = run("quarantine", "list", "--json")

    assert listed[1:] == [
        "fact",
        "My card is [card]",
        "it holds the number of a payment card",
        held,
    ]
    assert "4111" not in whole


def test_show_tells_all_of_it(held: str) -> None:
    """It goes to stdout as it was said; the beginning of the key is enough."""
    result = attempt("quarantine", "show", held[:6])

    assert result.stdout == f"{CARD}\n"
    assert "held back on" in result.stderr
    assert read("quarantine", "show", held)["text"] == CARD


def test_what_is_released_is_a_memory(held: str) -> None:
    """It is remembered as it was said, and waits no more."""
    printed = run("quarantine", "release", held)
    again = attempt("quarantine", "release", held)

    assert printed.startswith("added ")
    assert texts() == [CARD]
    assert attempt("quarantine", "list").stderr == "nothing is in quarantine\n"
    assert isinstance(again.exception, UnknownMemory)


def test_what_is_discarded_is_gone(held: str, db: Path) -> None:
    """It asks, showing no secret; then nothing of it is in the file, and it is not formed."""
    refused = attempt("quarantine", "discard", held, typed="n\n")
    waiting = read("quarantine", "list")
    run("quarantine", "discard", held, "--yes")

    assert refused.exit_code == 1
    assert "My card is [card]" in refused.stderr
    assert "4111" not in refused.output
    assert len(waiting) == 1
    assert read("quarantine", "list") == []
    assert b"4111" not in raw(db)


def test_an_import_counts_what_it_held_back(tmp_path: Path) -> None:
    """What is in quarantine is no memory yet, and the report says both."""
    printed = run("import", talks(tmp_path, trip=[CARD, "I will not note that"]))

    assert printed.endswith(", 1 memory formed, 1 in quarantine\n")
    assert texts() == ["assistant: I will not note that"]


@pytest.mark.parametrize("key", ["nope", ""])
@pytest.mark.parametrize("command", ["show", "release", "discard"])
def test_an_unknown_entry_is_named(command: str, key: str, held: str) -> None:
    """What is not there is not released, and no key is not every key."""
    result = attempt("quarantine", command, key)

    assert isinstance(result.exception, UnknownMemory)
    assert repr(key) in str(result.exception)
    assert len(read("quarantine", "list")) == 1

"""`perdure check`: questions of a file, what they recall, and whether that is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from tests.memory_commands import attempt, line_of, read, rows, run

RIGHT = line_of(question="Where does Ann live?", expected="lives in Ghent")
KEYED = line_of(question="What does Ann like?", expected={"key": "likes"})
WRONG = line_of(question="Who is Bob?", expected=["a brother", {"key": "bob"}])


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The database that commands work on."""
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "x.db"))


@pytest.fixture
def facts() -> None:
    """A few memories."""
    run("remember", "Ann lives in Ghent", "Ann teaches physics at a school")
    run("remember", "--key", "likes", "Ann likes figs")


def asked(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_what_is_recalled_passes(tmp_path: Path, facts: None) -> None:
    """A text and a key are looked for; the table has their ranks."""
    file = asked(tmp_path, RIGHT, KEYED)
    result = attempt("check", file, "--limit", "3")
    *table, total = result.stdout.splitlines()

    assert result.exit_code == 0
    assert [row[:2] for row in rows("\n".join(table))] == [
        ["rank", "question"],
        ["1", "Where does Ann live?"],
        ["1", "What does Ann like?"],
    ]
    assert total == "recall@3 1.000, MRR 1.000: 2 of 2 questions recall what they should"


def test_less_than_the_minimum_fails(tmp_path: Path, facts: None) -> None:
    """Exit code 1 fails a build; a lower minimum lets it pass, and programs get the figures."""
    file = asked(tmp_path, RIGHT, WRONG)
    failed = attempt("check", file)
    found = read("check", file, "--minimum", "0.5")

    assert failed.exit_code == 1
    assert "-, -" in failed.stdout
    assert (found["recall"], found["passed"], found["minimum"]) == (0.5, True, 0.5)
    assert [each["recall"] for each in found["asked"]] == [1.0, 0.0]


def test_questions_may_be_piped_in(facts: None) -> None:
    """`-` reads them from stdin."""
    assert json.loads(run("check", "-", "--json", typed=RIGHT))["recall"] == 1.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no questions"),
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 has no question"),
        (line_of(question=" ", expected="x"), "line 2 has no question"),
        (line_of(question="q"), "line 2 expects null"),
        (line_of(question="q", expected=[]), "line 2 expects []"),
        (line_of(question="q", expected=["x", 7]), 'line 2 expects ["x", 7]'),
        (line_of(question="q", expected={"any": ["x"]}), 'line 2 expects {"any"'),
    ],
)
def test_a_malformed_file_is_named(line: str, said: str, tmp_path: Path) -> None:
    """The line, what stands there, and what was expected."""
    result = attempt("check", asked(tmp_path, "", line))

    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert "questions.jsonl" in str(result.exception)


@pytest.mark.parametrize("options", [("--minimum", "2"), ("--limit", "0")])
def test_wrong_options_are_named(options: tuple[str, ...], tmp_path: Path, facts: None) -> None:
    """A share is between 0 and 1, and something must count."""
    result = attempt("check", asked(tmp_path, RIGHT), *options)

    assert isinstance(result.exception, ConfigurationError)
    assert options[0].strip("-") in str(result.exception)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It is one line, not a traceback."""
    result = attempt("check", str(tmp_path / "nope.jsonl"))

    assert isinstance(result.exception, ConfigurationError)
    assert "nope.jsonl' cannot be read" in str(result.exception)

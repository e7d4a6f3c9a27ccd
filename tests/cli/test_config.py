"""`perdure config`: what holds, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import attempt, read, rows, run


def test_each_setting_with_its_source(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are only said to be set."""
    file = db.parent / "perdure.toml"
    file.write_text('api_key = "hidden"\n[retention]\nidle_days = 30\nturns = true\n')
    monkeypatch.setenv("PERDURE_KEY", "hidden")
    shown = run("config", "--user", "ann")
    found = {name: (value, source) for name, value, source in filter(_whole, rows(shown))}
    as_json = read("config", "--user", "ann")

    assert "hidden" not in shown
    assert found["db"] == (str(db), "PERDURE_DB")
    assert found["user"] == ("ann", "argument")
    assert found["key"] == ("set", "PERDURE_KEY")
    assert found["api_key"] == ("set", "perdure.toml")
    assert found["retention.idle_days"] == ("30", "perdure.toml")
    assert found["retention.turns"] == ("true", "perdure.toml")
    assert found["retention.history"] == ("true", "default")
    assert shown.endswith(f"\ndatabase: {db}\nsettings file: {file}\n")
    assert as_json["retention.idle_days"] == {"value": 30, "source": str(file)}
    assert as_json["model"] == {"value": None, "source": "default"}
    assert as_json["key"] == {"value": "set", "source": "PERDURE_KEY"}


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ann:s3cret@h/x",
        "postgresql://h/x?user=ann&password=s3cret&port=1",
        "host=h password=s3cret dbname=x",
        r"host=h password = 's3cret s3\' s3' dbname=x",
    ],
)
def test_a_dsn_is_shown_without_its_password(dsn: str) -> None:
    """Whatever its form."""
    shown = run("config", "--db", dsn)

    assert "database: " in shown
    assert "s3" not in shown


def test_a_wrong_file_is_an_error(db: Path) -> None:
    (db.parent / "perdure.toml").write_text("usr = 'x'")
    result = attempt("config")
    assert "unknown setting usr" in str(result.exception)


def _whole(row: list[str]) -> bool:
    return len(row) == 3

"""`perdure config` prints the settings and their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import invoke, run, run_json, split_rows


def test_config_prints_each_setting_with_its_source(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are only reported as set."""
    file = db.parent / "perdure.toml"
    file.write_text('api_key = "hidden"\n[retention]\nidle_days = 30\nturns = true\n')
    monkeypatch.setenv("PERDURE_KEY", "hidden")
    output = run("config", "--user", "ann")
    settings = {
        name: (value, source)
        for name, value, source in filter(_has_three_cells, split_rows(output))
    }
    as_json = run_json("config", "--user", "ann")

    assert "hidden" not in output
    assert settings["db"] == (str(db), "PERDURE_DB")
    assert settings["user"] == ("ann", "argument")
    assert settings["key"] == ("set", "PERDURE_KEY")
    assert settings["api_key"] == ("set", "perdure.toml")
    assert settings["retention.idle_days"] == ("30", "perdure.toml")
    assert settings["retention.turns"] == ("true", "perdure.toml")
    assert settings["retention.history"] == ("true", "default")
    assert output.endswith(f"\ndatabase: {db}\nsettings file: {file}\n")
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
def test_config_hides_password_of_dsn(dsn: str) -> None:
    """The password is hidden in every form of a DSN."""
    output = run("config", "--db", dsn)

    assert "database: " in output
    assert "s3" not in output


def test_config_reports_unknown_setting_of_file(db: Path) -> None:
    (db.parent / "perdure.toml").write_text("usr = 'x'")
    result = invoke("config")
    assert "unknown setting usr" in str(result.exception)


def _has_three_cells(row: list[str]) -> bool:
    return len(row) == 3

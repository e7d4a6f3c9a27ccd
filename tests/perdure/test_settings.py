"""Settings: the sources of values, their precedence, and refused values."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from perdure import settings
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, WrongKey
from perdure.stores import SQLiteStore

KEY = "0f" * 32


@pytest.fixture(autouse=True)
def nested_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create a repository, change to a folder two levels below its root, and return the folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    inner = tmp_path / "repository" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.chdir(inner)
    return inner


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_argument_precedes_environment_and_environment_precedes_file(
    nested_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings know the source of each value."""
    write_text(
        nested_folder / "perdure.toml",
        'user = "file"\nmodel = "file"\ndb = "file.db"\n[retention]\nidle_days = 30\nturns = true\n'
        "[worker]\ndelay_s = 5\n",
    )
    monkeypatch.setenv("PERDURE_MODEL", "environment")
    monkeypatch.setenv("PERDURE_DB", "environment.db")
    monkeypatch.setenv("PERDURE_RETENTION_IDLE_DAYS", "7.5")
    monkeypatch.setenv("PERDURE_RETENTION_CHECKPOINTS_LAST", "3")
    monkeypatch.setenv("PERDURE_WORKER_FACTS", "Yes")
    monkeypatch.setenv("PERDURE_BASE_URL", "")  # as if it were not there
    loaded = settings.load(db="argument.db", user=None)

    assert loaded == settings.Settings(
        "argument.db",
        model="environment",
        user="file",
        retention=settings.Rules(idle_days=7.5, checkpoints_last=3, turns=True),
        worker=settings.Worker(delay_s=5, facts=True),
    )
    assert loaded.sources == {
        "db": "argument",
        "model": "PERDURE_MODEL",
        "user": "perdure.toml",
        "retention.idle_days": "PERDURE_RETENTION_IDLE_DAYS",
        "retention.checkpoints_last": "PERDURE_RETENTION_CHECKPOINTS_LAST",
        "retention.turns": "perdure.toml",
        "worker.delay_s": "perdure.toml",
        "worker.facts": "PERDURE_WORKER_FACTS",
    }


def test_nearest_settings_file_is_used(
    nested_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PERDURE_CONFIG comes first, then a perdure.toml of the repository, then the user's file."""

    def load_user() -> str:
        return settings.load(db="x").user

    write_text(tmp_path / "perdure.toml", 'user = "outside"')  # of the repository
    users = [load_user()]
    write_text(tmp_path / "config" / "perdure" / "config.toml", 'user = "config"')
    users.append(load_user())
    write_text(tmp_path / "repository" / "perdure.toml", 'user = "root"')
    users.append(load_user())
    assert settings.load(db="x").sources["user"] == "../../perdure.toml"
    write_text(nested_folder / "perdure.toml", 'user = "here"')
    users.append(load_user())
    monkeypatch.setenv("PERDURE_CONFIG", str(write_text(tmp_path / "named.toml", 'user = "named"')))
    users.append(load_user())

    assert users == ["me", "config", "root", "here", "named"]


def test_search_for_settings_file_ends_at_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    write_text(tmp_path / "perdure.toml", 'user = "another"')
    assert settings.load(db="x").user == "me"
    write_text(home / "perdure.toml", 'user = "mine"')
    assert settings.load(db="x").user == "mine"


def test_database_path_of_settings_file_is_relative_to_the_file(
    nested_folder: Path, tmp_path: Path
) -> None:
    """The current folder has no effect; a path that begins with ~ is in the home folder."""
    root = tmp_path / "repository"
    for text, path in (("data/x.db", root / "data/x.db"), ("~/x.db", tmp_path / "x.db")):
        write_text(root / "perdure.toml", f'db = "{text}"')
        assert settings.load().db == str(path)
    write_text(root / "perdure.toml", 'db = ":memory:"')
    assert settings.load().db == ":memory:"
    (root / "perdure.toml").unlink()
    assert settings.load().db == str(tmp_path / "data" / "perdure" / "perdure.db")
    assert settings.load(db="~/y.db").db == str(tmp_path / "y.db")


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("usr = 'x'", "unknown setting usr in the settings file '.*perdure.toml'; expected db, "),
        ("[retention]\nidle = 1", "unknown setting retention.idle in"),
        ("retention = 3", "unknown setting retention in"),
        ("[server]\nport = 3", "unknown setting server in"),
        ("user = 3", "user in the settings file '.*perdure.toml' is int; expected text"),
        ("key = 3141592", "key in the settings file '.*perdure.toml' is int; expected text"),
        ("[retention]\nidle_days = '3'", "retention.idle_days in .* is '3'; expected a number"),
        ("[retention]\nturns = 1", "turns in .* is 1; expected true or false"),
        ("[retention]\nversions_last = -1", "is -1; expected an integer from 0"),
        ("[retention]\nhistory = false", "without a retention rule for checkpoints"),
        ("[worker]\ndelay_s = inf", "delay_s in .* is inf; expected a number"),
        ("user = ", "the settings file '.*perdure.toml' cannot be read"),
        ("user = '\udc80'", "cannot be read"),
    ],
)
def test_invalid_settings_file_is_refused_with_name_and_expectation(
    nested_folder: Path, text: str, expected_error: str
) -> None:
    """The error has the file, the setting and the expected value, and shows no secret."""
    (nested_folder / "perdure.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=expected_error) as error_info:
        settings.load()
    assert "3141592" not in str(error_info.value)


@pytest.mark.parametrize(
    ("name", "value", "expected_error"),
    [
        ("RETENTION_IDLE_DAYS", "soon", "PERDURE_RETENTION_IDLE_DAYS is 'soon'; expected a number"),
        ("RETENTION_VERSIONS_LAST", "1.5", "is '1.5'; expected an integer"),
        ("RETENTION_TURNS", "maybe", "is 'maybe'; expected true or false"),
        ("CONFIG", "nowhere.toml", "the file 'nowhere.toml' in PERDURE_CONFIG does not exist"),
    ],
)
def test_invalid_environment_variable_is_refused_by_name(
    name: str, value: str, expected_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PERDURE_{name}", value)
    with pytest.raises(ConfigurationError, match=expected_error):
        settings.load()


@pytest.mark.parametrize(
    ("arguments", "expected_key"),
    [({"model": "m"}, "openai"), ({"model": "m", "base_url": "http://x"}, None), ({}, None)],
)
def test_openai_key_is_used_only_for_endpoint_of_openai(
    arguments: dict[str, str], expected_key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other endpoint gets the key, and a key of perdure's settings takes precedence."""
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    loaded = settings.load(db="x", **arguments)
    assert (loaded.api_key, loaded.sources.get("api_key")) == (
        expected_key,
        expected_key and "OPENAI_API_KEY",
    )
    assert settings.load(db="x", api_key="own", **arguments).api_key == "own"


def test_endpoint_of_untrusted_settings_file_gets_no_key(
    nested_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint in somebody's checkout gets the key of the environment only if it is trusted."""
    path = write_text(
        nested_folder / "perdure.toml", 'model = "m"\nbase_url = "http://stranger.example"\n'
    )
    assert settings.load().api_key is None
    monkeypatch.setenv("PERDURE_API_KEY", "secret")
    with pytest.raises(
        ConfigurationError,
        match=r"would send your API key .* to a server that the author of the file has",
    ):
        settings.load()
    monkeypatch.setenv("PERDURE_CONFIG", str(path))
    assert settings.load().api_key == "secret"


def test_dsn_of_untrusted_settings_file_is_refused(
    nested_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memories go to a server in somebody's checkout only if it is trusted."""
    dsn, own_dsn = "postgresql://mallory:secret@stranger.example/x", "postgresql://localhost/ours"
    path = write_text(nested_folder.parent / "perdure.toml", f'db = "{dsn}"')
    with pytest.raises(
        ConfigurationError, match="otherwise set the database in PERDURE_DB"
    ) as error_info:
        settings.load()
    assert "secret" not in str(error_info.value)
    assert settings.load(db=own_dsn).db == own_dsn
    monkeypatch.setenv("PERDURE_DB", own_dsn)
    assert settings.load().db == own_dsn
    monkeypatch.delenv("PERDURE_DB")
    monkeypatch.setenv("PERDURE_CONFIG", str(path))
    assert settings.load().db == dsn
    monkeypatch.setenv("PERDURE_CONFIG", "")  # as if it were not there
    with pytest.raises(ConfigurationError, match=r"the setting 'db' in the file .* to a database"):
        settings.load()


def test_settings_file_is_found_in_an_event_loop(nested_folder: Path) -> None:
    """The server forbids blocking calls except those that langgraph's server allows."""
    write_text(nested_folder.parent / "perdure.toml", 'user = "parent"')

    async def load_user() -> str:
        return settings.load(db=":memory:").user

    with blockbuster_ctx() as watch:
        for function in ("io.TextIOWrapper.read", "os.stat"):
            watch.functions[function].can_block_in("perdure/settings.py", "load")
        assert asyncio.run(load_user()) == "parent"


def test_repr_of_settings_hides_secrets() -> None:
    assert "hidden" not in repr(settings.load(db="x", key="hidden", api_key="hidden"))


@pytest.mark.parametrize("opener", [SQLiteCheckpointer, SQLiteStore])
def test_open_without_path_uses_database_and_key_of_settings(
    opener: Any, nested_folder: Path
) -> None:
    """Another database is not opened with this key."""
    write_text(nested_folder / "perdure.toml", f'db = "x.db"\nkey = "{KEY}"')
    with opener.open() as opened:
        assert opened.database.path == str(nested_folder / "x.db")
    with pytest.raises(WrongKey):
        opener.open(nested_folder / "x.db")
    with opener.open(nested_folder / "other.db"):
        pass
    with opener.open(nested_folder / "other.db", key=None):
        pass


def test_import_of_settings_loads_neither_pydantic_nor_numpy() -> None:
    """The command line imports the settings when it starts."""
    code = "import perdure.settings, sys; print('pydantic' in sys.modules, 'numpy' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["False", "False"]


@pytest.fixture
def user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the user one that has no home folder, as in many containers."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems find folders in other ways")
@pytest.mark.usefixtures("user_without_home")
def test_user_without_home_needs_only_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"this user has none; set PERDURE_DB or --db"):
        settings.load()

    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "x.db"))

    assert settings.load().db == str(tmp_path / "x.db")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems find folders in other ways")
def test_default_folder_that_cannot_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file" / "data"))

    with pytest.raises(
        ConfigurationError, match=r"data/perdure' .* cannot be created .*PERDURE_DB"
    ):
        settings.load()


def test_misspelt_variable_is_reported_with_the_setting_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables that Kubernetes sets for a service with the name perdure are not reported."""
    for name in ("BASEURL", "RETENTION_IDLE_DAY", "SERVICE_HOST", "PORT", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"PERDURE_{name}", "x")
    monkeypatch.setenv("PERDURE_CONFIG", "")

    settings.load(db=":memory:")

    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable PERDURE_BASEURL is not a setting; did you mean PERDURE_BASE_URL?",
        "the environment variable PERDURE_RETENTION_IDLE_DAY is not a setting; did you mean "
        "PERDURE_RETENTION_IDLE_DAYS?",
    ]

"""Settings: where each value comes from, which is stronger, and what is refused."""

from __future__ import annotations

import asyncio
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
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository, in which the tests stand two folders deep."""
    monkeypatch.setenv("HOME", str(tmp_path))
    inner = tmp_path / "repository" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.chdir(inner)
    return inner


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_later_is_stronger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, environment, argument; each value knows where it comes from."""
    write(
        folder / "perdure.toml",
        'user = "file"\nmodel = "file"\ndb = "file.db"\n[retention]\nidle_days = 30\nturns = true\n'
        "[worker]\ndelay_s = 5\n",
    )
    monkeypatch.setenv("PERDURE_MODEL", "environment")
    monkeypatch.setenv("PERDURE_DB", "environment.db")
    monkeypatch.setenv("PERDURE_RETENTION_IDLE_DAYS", "7.5")
    monkeypatch.setenv("PERDURE_RETENTION_CHECKPOINTS_LAST", "3")
    monkeypatch.setenv("PERDURE_WORKER_FACTS", "Yes")
    monkeypatch.setenv("PERDURE_BASE_URL", "")  # as if it were not there
    found = settings.load(db="argument.db", user=None)

    assert found == settings.Settings(
        "argument.db",
        model="environment",
        user="file",
        retention=settings.Rules(idle_days=7.5, checkpoints_last=3, turns=True),
        worker=settings.Worker(delay_s=5, facts=True),
    )
    assert found.sources == {
        "db": "argument",
        "model": "PERDURE_MODEL",
        "user": "perdure.toml",
        "retention.idle_days": "PERDURE_RETENTION_IDLE_DAYS",
        "retention.checkpoints_last": "PERDURE_RETENTION_CHECKPOINTS_LAST",
        "retention.turns": "perdure.toml",
        "worker.delay_s": "perdure.toml",
        "worker.facts": "PERDURE_WORKER_FACTS",
    }


def test_the_nearest_file_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PERDURE_CONFIG, else a perdure.toml up to the repository's root, else the user's."""

    def user() -> str:
        return settings.load(db="x").user

    write(tmp_path / "perdure.toml", 'user = "outside"')  # of the repository
    found = [user()]
    write(tmp_path / "config" / "perdure" / "config.toml", 'user = "config"')
    found.append(user())
    write(tmp_path / "repository" / "perdure.toml", 'user = "root"')
    found.append(user())
    assert settings.load(db="x").sources["user"] == "../../perdure.toml"
    write(folder / "perdure.toml", 'user = "here"')
    found.append(user())
    monkeypatch.setenv("PERDURE_CONFIG", str(write(tmp_path / "named.toml", 'user = "named"')))
    found.append(user())

    assert found == ["me", "config", "root", "here", "named"]


def test_the_search_ends_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    write(tmp_path / "perdure.toml", 'user = "another"')
    assert settings.load(db="x").user == "me"
    write(home / "perdure.toml", 'user = "mine"')
    assert settings.load(db="x").user == "mine"


def test_the_database_of_a_file_is_beside_it(folder: Path, tmp_path: Path) -> None:
    """Whichever folder perdure runs in; a path that begins with ~ is in the user's."""
    root = tmp_path / "repository"
    for text, path in (("data/x.db", root / "data/x.db"), ("~/x.db", tmp_path / "x.db")):
        write(root / "perdure.toml", f'db = "{text}"')
        assert settings.load().db == str(path)
    write(root / "perdure.toml", 'db = ":memory:"')
    assert settings.load().db == ":memory:"
    (root / "perdure.toml").unlink()
    assert settings.load().db == str(tmp_path / "data" / "perdure" / "perdure.db")
    assert settings.load(db="~/y.db").db == str(tmp_path / "y.db")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("usr = 'x'", "unknown setting usr in the settings file '.*perdure.toml'; expected db, "),
        ("[retention]\nidle = 1", "unknown setting retention.idle in"),
        ("retention = 3", "unknown setting retention in"),
        ("[server]\nport = 3", "unknown setting server in"),
        ("user = 3", "user in the settings file '.*perdure.toml' is int; expected text"),
        ("key = 3141592", "key in the settings file '.*perdure.toml' is int; expected text"),
        ("[retention]\nidle_days = '3'", "retention.idle_days in .* is '3'; expected a number"),
        ("[retention]\nturns = 1", "turns in .* is 1; expected true or false"),
        ("[retention]\nversions_last = -1", "is -1; expected a whole number from 0"),
        ("[retention]\nhistory = false", "there is no rule for checkpoints"),
        ("[worker]\ndelay_s = inf", "delay_s in .* is inf; expected a number"),
        ("user = ", "the settings file '.*perdure.toml' cannot be read"),
        ("user = '\udc80'", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, text: str, said: str) -> None:
    """The file, the name, and what is expected; of a secret not what it is."""
    (folder / "perdure.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=said) as failed:
        settings.load()
    assert "3141592" not in str(failed.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RETENTION_IDLE_DAYS", "soon", "PERDURE_RETENTION_IDLE_DAYS is 'soon'; expected a number"),
        ("RETENTION_VERSIONS_LAST", "1.5", "is '1.5'; expected a whole number"),
        ("RETENTION_TURNS", "maybe", "is 'maybe'; expected true or false"),
        ("CONFIG", "nowhere.toml", "PERDURE_CONFIG is 'nowhere.toml', which does not exist"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PERDURE_{name}", value)
    with pytest.raises(ConfigurationError, match=said):
        settings.load()


@pytest.mark.parametrize(
    ("given", "key"),
    [({"model": "m"}, "openai"), ({"model": "m", "base_url": "http://x"}, None), ({}, None)],
)
def test_the_key_of_openai_goes_to_openai(
    given: dict[str, str], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to another endpoint; a key of perdure's own is stronger."""
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    found = settings.load(db="x", **given)
    assert (found.api_key, found.sources.get("api_key")) == (key, key and "OPENAI_API_KEY")
    assert settings.load(db="x", api_key="own", **given).api_key == "own"


def test_a_file_of_the_folder_gets_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint in somebody's checkout gets the key of the environment only if it is trusted."""
    path = write(folder / "perdure.toml", 'model = "m"\nbase_url = "http://stranger.example"\n')
    assert settings.load().api_key is None
    monkeypatch.setenv("PERDURE_API_KEY", "secret")
    with pytest.raises(ConfigurationError, match="whose author would receive the key"):
        settings.load()
    monkeypatch.setenv("PERDURE_CONFIG", str(path))
    assert settings.load().api_key == "secret"


def test_a_file_of_the_folder_names_no_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memories go to a server in somebody's checkout only if it is trusted."""
    dsn, ours = "postgresql://mallory:secret@stranger.example/x", "postgresql://localhost/ours"
    path = write(folder.parent / "perdure.toml", f'db = "{dsn}"')
    with pytest.raises(ConfigurationError, match="set PERDURE_DB, or PERDURE_CONFIG=") as refused:
        settings.load()
    assert "secret" not in str(refused.value)
    assert settings.load(db=ours).db == ours
    monkeypatch.setenv("PERDURE_DB", ours)
    assert settings.load().db == ours
    monkeypatch.delenv("PERDURE_DB")
    monkeypatch.setenv("PERDURE_CONFIG", str(path))
    assert settings.load().db == dsn
    monkeypatch.setenv("PERDURE_CONFIG", "")  # as if it were not there
    with pytest.raises(ConfigurationError, match="db is a DSN"):
        settings.load()


def test_a_file_is_found_in_an_event_loop(folder: Path) -> None:
    """Of a server that forbids all but what langgraph's lets be."""
    write(folder.parent / "perdure.toml", 'user = "parent"')

    async def user() -> str:
        return settings.load(db=":memory:").user

    with blockbuster_ctx() as watch:
        for function in ("io.TextIOWrapper.read", "os.stat"):
            watch.functions[function].can_block_in("perdure/settings.py", "load")
        assert asyncio.run(user()) == "parent"


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(settings.load(db="x", key="hidden", api_key="hidden"))


@pytest.mark.parametrize("opener", [SQLiteCheckpointer, SQLiteStore])
def test_the_library_opens_the_database_of_the_settings(opener: Any, folder: Path) -> None:
    """With their key, which another database is not opened with."""
    write(folder / "perdure.toml", f'db = "x.db"\nkey = "{KEY}"')
    with opener.open() as opened:
        assert opened.database.path == str(folder / "x.db")
    with pytest.raises(WrongKey):
        opener.open(folder / "x.db")
    with opener.open(folder / "other.db"):
        pass
    with opener.open(folder / "other.db", key=None):
        pass


def test_it_costs_little_to_import() -> None:
    """The command line loads it at once."""
    code = "import perdure.settings, sys; print('pydantic' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]

"""A blank user, query or database, as of a variable that is not set, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import settings
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory import Collection, search_threads
from perdure.server.http.keys import create_api_key_and_hash
from perdure.settings import Settings
from perdure.stores import SQLiteStore
from tests.cli.commands import run, run_and_read_error, run_json
from tests.cli.memory import list_memory_texts

BLANKS = ["", "  ", "\u200b\u2060"]
COMMANDS = [
    ("memories", "forget", "--all", "--yes"),
    ("memories", "list"),
    ("memories", "search", "tea"),
    ("memories", "add", "likes tea"),
    ("memories", "history", "k"),
    ("memories", "quarantine"),
    ("chat", "--thread", "t", "--message", "hello"),
    ("import", "conversations.jsonl"),
    ("serve", "--port", "0"),
    ("mcp",),
    ("config",),
]


@pytest.mark.parametrize("user", BLANKS, ids=repr)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_blank_user_option_is_refused(
    command: tuple[str, ...], user: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command takes a blank --user for the default user, and nothing is written."""
    run("memories", "add", "drinks green tea")
    line = '{"messages": [{"role": "user", "content": "hello"}]}'
    Path("conversations.jsonl").write_text(line)

    message = run_and_read_error(*command, "--user", user, capsys=capsys)
    assert message == (
        f"--user is {user!r}; expected a user name that is not blank, '.' or '..'; omit the name "
        "to use the default user\n"
    )
    assert list_memory_texts() == ["drinks green tea"]
    assert run_json("threads") == []


@pytest.mark.parametrize("user", BLANKS, ids=repr)
@pytest.mark.parametrize(
    ("command", "expected_remedy"),
    [
        (("forget", "--yes"), "pass the person's user name"),
        (("export",), "pass the person's user name"),
        (("threads",), "remove --user to list the threads of all users"),
        (("runs",), "remove --user to list the runs of all users"),
        (("crons",), "remove --user to list the crons of all users"),
        (("keys", "list", "--keys", "keys.toml"), "remove --user to list the keys of all users"),
        (
            ("keys", "revoke", "--keys", "keys.toml", "--yes"),
            "pass a user name, or use --hash",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_blank_user_option_does_not_mean_all_users(
    command: tuple[str, ...], expected_remedy: str, user: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A blank --user is refused where the option limits what a command shows or erases."""
    run("chat", "-t", "t", "-m", "I drink green tea")
    before = list_memory_texts()

    message = run_and_read_error(*command, "--user", user, capsys=capsys)
    assert message.startswith(
        f"--user is {user!r}; expected a user name that is not blank, '.' or '..'; "
    )
    assert message.endswith(f"{expected_remedy}\n")
    assert list_memory_texts() == before
    assert len(run_json("threads")) == 1


@pytest.mark.parametrize("user", BLANKS, ids=repr)
def test_blank_user_of_environment_or_settings_file_is_refused(
    user: str, db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a blank PERDURE_USER nor a blank `user` of perdure.toml is the default user."""
    run("memories", "add", "drinks green tea")
    forget = ("memories", "forget", "--all", "--yes")
    with monkeypatch.context() as within:
        within.setenv("PERDURE_USER", user)
        assert run_and_read_error(*forget, capsys=capsys).startswith(
            f"PERDURE_USER is {user!r}; expected a user name"
        )
    file = db.parent / "perdure.toml"
    file.write_text(f'user = "{user}"')
    assert run_and_read_error(*forget, capsys=capsys).startswith(
        "user in the settings file 'perdure.toml' is "
    )
    file.unlink()
    assert list_memory_texts() == ["drinks green tea"]


@pytest.mark.parametrize("user", BLANKS, ids=repr)
def test_blank_user_of_python_call_is_refused(user: str, tmp_path: Path) -> None:
    """Settings, `load`, `search_threads`, a namespace and a new key need a user with a name."""
    with pytest.raises(ConfigurationError, match="expected a user name"):
        Settings(db="x.db", user=user)
    with pytest.raises(ConfigurationError, match="expected a user name"):
        settings.load(user=user)
    assert settings.load(user=None).user == "me"
    with pytest.raises(ConfigurationError, match=r"the user name .* is not allowed"):
        create_api_key_and_hash(user)
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        with pytest.raises(ConfigurationError, match="expected a user name"):
            search_threads(saver, store, "tea", user=user)
        with pytest.raises(InvalidConfig, match="expected a string that has a visible character"):
            Collection(store).insert("tea", config={"configurable": {"user_id": user}})
        assert store.list_namespaces() == []


@pytest.mark.parametrize(
    ("command", "expected_message"),
    [
        (("memories", "forget", "--all", "--thread", ""), "select the memories in exactly one way"),
        (("memories", "forget", "--all", "--query", ""), "--query is empty"),
        (("memories", "forget", "--thread", ""), "--thread is empty"),
        (("store", "forget", ""), "the namespace is empty"),
        (("store", "forget", "memories", "--query", " "), "--query is empty"),
        (("store", "forget", "memories", "--db", ""), "--db is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_empty_option_does_not_widen_what_is_erased(
    command: tuple[str, ...], expected_message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty option, as of a variable that is not set, is refused and nothing is erased."""
    run("memories", "add", "drinks green tea")
    assert run_and_read_error(*command, "--yes", capsys=capsys).startswith(expected_message)
    assert list_memory_texts() == ["drinks green tea"]

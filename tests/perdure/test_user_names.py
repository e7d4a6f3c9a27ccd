"""A name of a user needs a visible character, whatever the source of the name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig

from perdure import people, settings
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.namespace_templates import Template
from perdure.memory.run_config import parse_run_teams, read_run_user
from perdure.server.http.access import ADMIN_PERMISSION, Forbidden, Identity, LocalAccess
from perdure.server.http.acting_for import build_identity_acting_for
from perdure.server.http.keys_file import validate_key_user_name
from perdure.server.teams import extract_teams_of_user
from perdure.stores import SQLiteStore

INVISIBLE = [
    "", " ", "\t\n", "\xa0", "\u200b", "\u200c\u200d\u2060\ufeff", "\xad", "\u202e", "\u3164",
    "\u2800", "\u115f", "\ufe0f", "\u034f", "\U000e0020\U000e0100", "\x00", "\x1b",
]  # fmt: skip


@pytest.mark.parametrize("name", [*INVISIBLE, ".", "..", None, 5, b"ann", ["ann"]], ids=ascii)
def test_invalid_user_name_is_refused(name: Any) -> None:
    """Invalid are names without a visible character, `.` and `..`, and values other than text."""
    assert not settings.is_valid_user_or_team_name(name)
    with pytest.raises(ConfigurationError, match=r"user is .*; expected a user name"):
        settings.check_user("user", name)


@pytest.mark.parametrize(
    "name",
    [
        "ann",
        "a",
        "...",
        "-",
        " ann ",
        "a\u200db",
        "\u06cc\u200c",
        "Åsa",
        "安娜",
        "한",
        "\U0001f600\ufe0f",
        "\u0301a",
    ],
    ids=ascii,
)
def test_user_name_with_a_visible_character_is_accepted(name: str) -> None:
    """Format characters within a name are allowed: some languages and emoji need them."""
    assert settings.check_user("user", name) == name


@pytest.mark.parametrize("name", [*INVISIBLE[1:-2], ".."], ids=ascii)
def test_each_component_refuses_an_invisible_user_name(name: str) -> None:
    """Acting for a person, keys, teams, namespaces, forgetting and authors need a visible name."""
    access, config = LocalAccess("boss"), RunnableConfig(configurable={"user_id": name})
    caller = Identity("boss", permissions=frozenset({ADMIN_PERMISSION}))
    with pytest.raises(Forbidden, match="expected a name of at most"):
        build_identity_acting_for(access, caller, name)
    with pytest.raises(ConfigurationError, match=r"the user name .* is not allowed"):
        validate_key_user_name(name)
    assert extract_teams_of_user(SimpleNamespace(teams=["red", name])) == frozenset()
    assert read_run_user(config) is None
    with pytest.raises(InvalidConfig, match="expected a string that has a visible character"):
        Template(("memories", "{user_id}")).fill(config)
    with pytest.raises(InvalidConfig, match="the run has the team"):
        parse_run_teams(name, None)
    with SQLiteStore.open(":memory:") as store, SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(ConfigurationError, match="expected a user name"):
            people.plan(name, saver, store)
        with pytest.raises(ConfigurationError, match="expected a user name"):
            store.forget_author(("teams",), name)

"""Implement the `perdure keys` commands, which list and revoke a server's API keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    JsonOption,
    YesOption,
    add_command_group,
    check_user_filter,
    explain_missing_server_packages,
    require_confirmation,
)
from perdure.cli.output import format_count, print_json_or_sentence, print_json_or_table, print_note
from perdure.errors import ConfigurationError
from perdure.settings import check_user

if TYPE_CHECKING:
    from perdure.server.http.keys_file import Key

keys = add_command_group("keys", "List and revoke the API keys of 'perdure serve --keys'.")

# Number of leading characters of a key's hash to print.
_HASH_PREFIX_LENGTH: Final = 12
KeysFileOption = Annotated[
    Path, typer.Option("--keys", metavar="FILE", help="The server's keys file.")
]
TenantOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Select only keys of this tenant.")
]


@keys.command("list")
def list_(
    file: KeysFileOption,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="List only keys of this user.")
    ] = None,
    tenant: TenantOption = None,
    json: JsonOption = False,
) -> None:
    """List API keys with their users, tenants, permissions, teams and hashes.

    The exit code is 1 if no key matches.
    """
    with explain_missing_server_packages("the command 'perdure keys'"):
        from perdure.server.http.keys_file import read_keys

    check_user_filter(user, "keys")
    matches = [key for key in read_keys(file) if _is_key_of_user_and_tenant(key, user, tenant)]
    rows = [_build_key_cells(key) for key in matches]
    columns = ("user", "tenant", "permissions", "teams", "hash")
    print_json_or_table(
        [key.model_dump() for key in matches],
        json,
        columns,
        rows,
        ids=columns,
        empty_note="no API key matches",
    )
    if not matches:
        raise typer.Exit(1)


@keys.command()
def revoke(
    file: KeysFileOption,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Revoke all keys of this user.")
    ] = None,
    hash: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Revoke the key with this hash or hash prefix."),
    ] = None,
    tenant: TenantOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Revoke API keys, selected by user or by a prefix of the hash.

    The keys file is replaced atomically, and its comments are kept. A running server that uses this
    keys file rejects the revoked keys within a second. The exit code is 1 if no key matches.
    """
    with explain_missing_server_packages("the command 'perdure keys'"):
        from perdure.server.http.keys_file import read_keys, revoke_keys

    if (user is None) == (hash is None):
        raise ConfigurationError("pass either --user or --hash to choose the keys to revoke")
    if user is not None:
        check_user("--user", user, "pass a user name, or use --hash")
    if hash == "":
        raise ConfigurationError("--hash is empty; pass a hash or a hash prefix")
    chosen = [
        key
        for key in read_keys(file)
        if _is_key_of_user_and_tenant(key, user, tenant)
        and key.sha256.startswith((hash or "").lower())
    ]
    if hash is not None and len({key.sha256 for key in chosen}) > 1:
        listed_keys = "; ".join(" ".join(filter(None, _build_key_cells(key))) for key in chosen)
        raise ConfigurationError(
            f"the hash prefix {hash!r} is ambiguous: it matches {listed_keys}; type more characters"
        )
    if not chosen:
        condition = f"of the user {user!r}" if hash is None else f"whose hash begins with {hash!r}"
        print_note(f"{str(file)!r} has no key {condition}")
        raise typer.Exit(1)
    owners = ", ".join(
        f"{key.user!r} ({key.sha256[:_HASH_PREFIX_LENGTH]}"
        f"{f', tenant {key.tenant!r}' if key.tenant else ''})"
        for key in chosen
    )
    description = f"{format_count(len(chosen), 'key')} of {owners}"
    require_confirmation(f"Revoke {description}?", yes)
    revoked = revoke_keys(file, lambda key: key in chosen)
    print_json_or_sentence([key.model_dump() for key in revoked], json, f"revoked {description}")


def _is_key_of_user_and_tenant(key: Key, user: str | None, tenant: str | None) -> bool:
    """Return whether an API key belongs to the given user and tenant.

    If `user` is None, keys of all users match. If `tenant` is None, keys of all tenants match.
    """
    return user in (None, key.user) and tenant in (None, key.tenant)


def _build_key_cells(key: Key) -> tuple[Any, ...]:
    """Return a table row for an API key: user, tenant, permissions, teams and start of the hash."""
    permissions, teams = " ".join(key.permissions), ", ".join(key.teams)
    return key.user, key.tenant or "", permissions, teams, key.sha256[:_HASH_PREFIX_LENGTH]

"""`perdure keys`: the API keys of a server are listed and revoked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import JsonOption, YesOption, add_command_group, require_confirmation
from perdure.cli.output import format_count, print_note, print_result, print_rows
from perdure.errors import ConfigurationError, MissingDependency
from perdure.settings import check_user

if TYPE_CHECKING:
    from perdure.server.keys_file import Key

keys = add_command_group("keys", "API keys of 'perdure serve --keys'.")

_SHOWN: Final = 12  # characters of a hash
KeysFile = Annotated[
    Path, typer.Option("--keys", metavar="FILE", help="The file that the server reads.")
]
Tenant = Annotated[str | None, typer.Option(metavar="NAME", help="Only keys of this tenant.")]


@keys.command("list")
def list_(
    file: KeysFile,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Only keys of this user.")
    ] = None,
    tenant: Tenant = None,
    json: JsonOption = False,
) -> None:
    """List keys: whose they are, what they may do, and the hash of each.

    Exit code 1 if there is none.
    """
    _load_server()
    from perdure.server.keys_file import read_keys

    if user is not None:
        check_user("--user", user, "leave it out for all users")
    found = [key for key in read_keys(file) if _is_of(key, user, tenant)]
    rows = [_cells(key) for key in found]
    columns = ("user", "tenant", "permissions", "hash")
    print_rows(
        [key.model_dump() for key in found], json, columns, rows, ids=columns, empty_note="no key"
    )
    if not found:
        raise typer.Exit(1)


@keys.command()
def revoke(
    file: KeysFile,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="All keys of this user.")
    ] = None,
    hash: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="The key with this hash, or the beginning of it."),
    ] = None,
    tenant: Tenant = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Revoke keys, by user or by the beginning of the hash.

    The file is replaced at once, and a server that reads it refuses the keys within a second.
    Comments stay. Exit code 1 if there is no such key.
    """
    _load_server()
    from perdure.server.keys_file import read_keys, revoke_keys

    if (user is None) == (hash is None):
        raise ConfigurationError("give --user or --hash, which say what is revoked")
    if user is not None:
        check_user("--user", user, "give a user, or --hash")
    if hash == "":
        raise ConfigurationError("--hash is empty; give the beginning of a hash")
    chosen = [
        key
        for key in read_keys(file)
        if _is_of(key, user, tenant) and key.sha256.startswith((hash or "").lower())
    ]
    if hash is not None and len({key.sha256 for key in chosen}) > 1:
        some = ", ".join(" ".join(filter(None, _cells(key))) for key in chosen)
        raise ConfigurationError(f"several hashes begin with {hash!r} ({some}); give more of it")
    if not chosen:
        what = f"of {user!r}" if hash is None else f"whose hash begins with {hash!r}"
        print_note(f"{str(file)!r} has no key {what}")
        raise typer.Exit(1)
    named = ", ".join(
        f"{key.user!r} ({key.sha256[:_SHOWN]}{f', tenant {key.tenant!r}' if key.tenant else ''})"
        for key in chosen
    )
    what = f"{format_count(len(chosen), 'key')} of {named}"
    require_confirmation(f"Revoke {what}?", yes)
    revoked = revoke_keys(file, lambda key: key in chosen)
    done = [key.model_dump() for key in revoked]
    print_result(done, json, f"revoked {what}")


def _load_server() -> None:
    try:
        import perdure.server.keys_file  # noqa: F401 - its packages may be missing
    except ImportError as exc:
        raise MissingDependency('this needs: pip install ".[server]" in a checkout') from exc


def _is_of(key: Key, user: str | None, tenant: str | None) -> bool:
    return user in (None, key.user) and tenant in (None, key.tenant)


def _cells(key: Key) -> tuple[Any, ...]:
    return key.user, key.tenant or "", " ".join(key.permissions), key.sha256[:_SHOWN]

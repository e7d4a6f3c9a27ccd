"""`perdure store delete`, `forget`, `retain` and `sweep`: what is to be there no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Yes, confirm, open_saver
from perdure.cli.output import as_json, console, counted, notes, table
from perdure.cli.store import (
    NS,
    ROOT,
    Filter,
    FromWhere,
    IfVersion,
    Key,
    Prefix,
    as_object,
    moment,
    namespace,
    open_store,
    shown,
    store_app,
)
from perdure.cli.store_items import there
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.stores import Receipt

_SHOWN: Final = 3  # hashes of a receipt


@store_app.command()
def delete(ns: NS, key: Key, if_version: IfVersion = None, db: DB = None) -> None:
    """Delete an item; its versions stay in its history until they are forgotten."""
    where = namespace(ns)
    with open_store(db) as store:
        there(store.get(where, key, refresh_ttl=False), ns, key)
        store.delete(where, key, if_version=if_version)
    console.print(f"{key!r} of {shown(where)} is deleted", markup=False)


@store_app.command()
def forget(
    prefix: Annotated[
        str | None,
        typer.Argument(metavar="[PREFIX]", help="Only what is under it; / is everything."),
    ] = None,
    filter: Filter = None,
    provenance: FromWhere = None,
    query: Annotated[
        str | None, typer.Option(help="Words that must all be there, in any form.")
    ] = None,
    thread: Annotated[list[str] | None, typer.Option(help="Also delete this thread.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Erase items for good, with all their versions and the messages that they came from.

    Messages are those that the items' provenance names, in the threads of the same file.
    """
    what: dict[str, Any] = {
        "prefix": None if prefix is None else namespace(prefix),
        "filter": as_object(filter, "--filter"),
        "provenance": as_object(provenance, "--provenance"),
        "query": query,
        "threads": thread or (),
    }
    if prefix is None and not any(what.values()):
        raise ConfigurationError(
            "nothing says what to forget; give a prefix (/ is everything), --filter, --provenance, "
            "--query or --thread"
        )
    with open_store(db) as store, open_saver(db, create=False) as saver:
        for thread_id in what["threads"]:
            saver.thread(thread_id)
        receipt = store.forget(**what, checkpointer=saver, dry_run=True)
        if not dry_run:
            if receipt.keys or receipt.threads:
                notes.print(f"found {_said(receipt)}", markup=False)
                confirm("Forget all of it for good?", yes)
            receipt = store.forget(**what, checkpointer=saver)
    if json:
        as_json({**asdict(receipt), "dry_run": dry_run})
    elif dry_run:
        console.print(f"would forget {_said(receipt)}", markup=False)
    else:
        _print(receipt)


def _said(receipt: Receipt) -> str:
    return (
        f"{counted(receipt.items, 'item')}, {counted(receipt.versions, 'former version')} and "
        f"{counted(receipt.messages, 'message')} of {counted(len(receipt.threads), 'thread')}"
    )


def _print(receipt: Receipt) -> None:
    console.print(f"forgot {_said(receipt)}", markup=False)
    if receipt.keys or receipt.threads:
        whole = "yes" if receipt.clean else "not yet: another process reads; forget again later"
        rows = [("at", moment(receipt.at)), ("threads", ", ".join(receipt.threads))]
        rows += [("hashes", _hashes(receipt.hashes)), ("bytes gone from the file", whole)]
        table(["", ""], [row for row in rows if row[1]])


def _hashes(hashes: Sequence[str]) -> str:
    if not hashes:
        return ""
    more = ", … (--json has all)" if len(hashes) > _SHOWN else ""
    return f"{len(hashes)}: {', '.join(hashes[:_SHOWN])}{more}"


@store_app.command()
def retain(
    prefix: Prefix = ROOT,
    last: Annotated[int | None, typer.Option(help="Keep the newest so many of each key.")] = None,
    days: Annotated[float | None, typer.Option(help="Keep those of so many days.")] = None,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Drop former versions that no rule keeps; what items hold now stays."""
    from perdure.stores import VersionRetention

    if last is None and days is None:
        raise ConfigurationError("no rule is given; give --last or --days")
    where = namespace(prefix)
    with open_store(db) as store:
        confirm(f"Drop former versions under {shown(where)} for good?", yes)
        done = store.retain(VersionRetention(last=last, days=days), prefix=where)
    if json:
        as_json({"versions": done})
    else:
        console.print(f"dropped {counted(done, 'former version')}")


@store_app.command()
def sweep(db: DB = None, json: AsJson = False) -> None:
    """Close the items whose time is over; they were invisible already."""
    with open_store(db) as store:
        done = store.sweep_ttl()
    if json:
        as_json({"items": done})
    else:
        console.print(f"closed {counted(done, 'expired item')}")

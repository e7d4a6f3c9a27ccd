"""`perdure quarantine`: what the gate held back, to be looked at, released or discarded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, AsJson, Yes, app, confirm
from perdure.cli.longterm import MEMORIES, Mind, User, day, opened_mind
from perdure.cli.output import as_json, console, line, notes, table
from perdure.errors import UnknownMemory

if TYPE_CHECKING:
    from perdure.memory.quarantine import Entry, Quarantine

quarantine_app = typer.Typer(
    name="quarantine",
    help="Memories that the gate held back, to be reviewed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(quarantine_app)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The key of an entry.")]


@quarantine_app.command("list")
def list_(user: User = None, db: DB = None, json: AsJson = False) -> None:
    """List what waits, the longest wait first; secrets in it are blotted out."""
    with opened_mind(db, user, reads=True) as mind:
        found = _of(mind).list(mind.config)
    if json:
        as_json([_plain(entry) for entry in found])
    elif found:
        table(
            ["since", "kind", "text", "why", "key"],
            [(day(e.at), e.kind, line(e.shown), e.reason, e.key) for e in found],
        )
    else:
        notes.print("nothing is in quarantine")


@quarantine_app.command()
def show(key: Key, user: User = None, db: DB = None, json: AsJson = False) -> None:
    """Show what waits under a key as it was said, secrets too."""
    with opened_mind(db, user, reads=True) as mind:
        entry = _entry(mind, key)
    if json:
        as_json(asdict(entry))
        return
    source = entry.provenance
    thread = f", on thread {source.thread_id!r}" if source and source.thread_id else ""
    notes.print(
        f"a {entry.kind} of the {entry.role}{thread}, held back on {day(entry.at)}: {entry.reason}",
        style="dim",
        markup=False,
    )
    console.print(entry.text, markup=False)


@quarantine_app.command()
def release(key: Key, user: User = None, db: DB = None, json: AsJson = False) -> None:
    """Make what waits under a key the memory that it would have been, as it was said."""
    with opened_mind(db, user) as mind:
        outcome = _of(mind).release(_entry(mind, key).key, mind.config)
    if json:
        as_json(asdict(outcome))
    else:
        console.print(str(outcome), markup=False)


@quarantine_app.command()
def discard(
    key: Key, yes: Yes = False, user: User = None, db: DB = None, json: AsJson = False
) -> None:
    """Erase what waits under a key; it is not formed again."""
    with opened_mind(db, user) as mind:
        entry = _entry(mind, key)
        if not yes:
            notes.print(f"{entry.key}: {line(entry.shown)}", markup=False)
        confirm("Discard it for good?", yes)
        outcome = _of(mind).discard(entry.key, mind.config)
    if json:
        as_json(asdict(outcome))
    else:
        console.print(f"{key!r} is discarded", markup=False)


def _of(mind: Mind) -> Quarantine:
    from perdure.memory.quarantine import Quarantine

    return Quarantine(mind.store, MEMORIES)


def _entry(mind: Mind, key: str) -> Entry:
    """The entry that a key, or the beginning of one, names.

    Raises:
        UnknownMemory: None does, or several do.
    """
    found = [entry for entry in _of(mind).list(mind.config) if key and entry.key.startswith(key)]
    if len(found) != 1:
        raise UnknownMemory(
            f"{len(found)} entries of {mind.user!r} have keys that begin with {key!r}; "
            "'perdure quarantine list' shows them"
        )
    return found[0]


def _plain(entry: Entry) -> dict[str, Any]:
    """An entry for programs, without what it says as it was said."""
    return {name: part for name, part in asdict(entry).items() if name not in ("text", "fields")}

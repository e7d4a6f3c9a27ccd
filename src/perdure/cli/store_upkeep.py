"""`perdure store index`, `reembed`, `pending` and `stats`: looking after search, and sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from perdure.cli.app import DB, AsJson
from perdure.cli.output import as_json, console, counted, line, notes, table
from perdure.cli.progress import progress_bar, resumable
from perdure.cli.store import ROOT, Prefix, namespace, open_store, shown, store_app
from perdure.cli.threads import in_words


@store_app.command()
def index(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A path of the value, like user.age.")
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Remove the index.")] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Make filters by a path of the value fast; without a path list the indexes."""
    from perdure.errors import ConfigurationError

    if drop and path is None:
        raise ConfigurationError("--drop needs the path; 'perdure store index' lists them")
    with open_store(db, reads=path is None) as store:
        if drop and path not in store.indexes():
            raise ConfigurationError(
                f"there is no index on {path!r}; 'perdure store index' lists them"
            )
        if path is not None:
            (store.drop_index if drop else store.create_index)(path)
        found = store.indexes()
    if json:
        as_json(found)
    else:
        table(["path"], [(name,) for name in found])


@store_app.command()
def reembed(
    pending: Annotated[
        bool, typer.Option("--pending", help="Only of items that wait for them.")
    ] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Make the vectors anew that come from another model than the offline one.

    It may be cut off and repeated; what is done stays done.
    """
    kept = 0
    with (
        resumable(
            lambda: (
                "what got its vectors keeps them"
                if pending
                else f"{counted(kept, 'item')} got new vectors"
            )
        ),
        open_store(db) as store,
        progress_bar("embedding", "item") as show,
    ):

        def advance(done: int, of: int | None) -> None:
            nonlocal kept
            kept = done
            show(done / of if of else None, done)

        done = store.embed_pending() if pending else store.reembed(advance)
    if json:
        as_json({"items": done})
    else:
        console.print(f"{counted(done, 'item')} got new vectors")


@store_app.command()
def pending(prefix: Prefix = ROOT, db: DB = None, json: AsJson = False) -> None:
    """List items whose vectors could not be made yet; text search finds them."""
    with open_store(db, reads=True) as store:
        found = store.pending_embeddings(namespace(prefix))
        more = store.stats().pending - len(store.pending_embeddings())
    if more and not json:
        notes.print(
            f"{counted(more, 'item')} more of the file {'has' if more == 1 else 'have'} vectors of "
            "another model; 'perdure store reembed' makes them anew",
            markup=False,
        )
    if json:
        as_json([asdict(item) for item in found])
    else:
        rows = [(shown(i.namespace), i.key, i.attempts, line(i.error)) for i in found]
        table(["namespace", "key", "attempts", "error"], rows)


@store_app.command()
def stats(db: DB = None, json: AsJson = False) -> None:
    """Show counts and sizes."""
    with open_store(db, reads=True) as store:
        found = asdict(store.stats())
    if json:
        as_json(found)
        return
    found |= {**found.pop("database"), "indexes": ", ".join(found["indexes"])}
    table(["", ""], [(name, in_words(name, value, found)) for name, value in found.items()])

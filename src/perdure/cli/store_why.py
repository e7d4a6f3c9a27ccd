"""`perdure store why-not`: where an item stands in the answers to a query."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from perdure.cli.app import DB, AsJson
from perdure.cli.output import as_json, console, table
from perdure.cli.progress import at_work
from perdure.cli.store import (
    NS,
    AsOf,
    Filter,
    FromWhere,
    Key,
    as_moment,
    as_object,
    namespace,
    open_store,
    store_app,
)
from perdure.cli.store_items import Mode, NoContext


@store_app.command()
def why_not(
    ns: NS,
    key: Key,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What was looked for.")],
    prefix: Annotated[
        str | None, typer.Option(help="Where it was looked for; by default in NS.")
    ] = None,
    filter: Filter = None,
    provenance: FromWhere = None,
    mode: Mode = "hybrid",
    as_of: AsOf = None,
    no_context: NoContext = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Tell why a search does not find an item, or not among the first."""
    with open_store(db, reads=True) as store, at_work("reading the search index …"):
        found = store.why_not(
            namespace(ns),
            key,
            query=query,
            prefix=None if prefix is None else namespace(prefix),
            filter=as_object(filter, "--filter"),
            mode=mode,  # type: ignore[arg-type]  # the store says which there are
            provenance=as_object(provenance, "--provenance"),
            as_of=as_moment(as_of, "--as-of"),
            context=not no_context,
        )
    if json:
        as_json(asdict(found))
        return
    console.print(found.reason, markup=False)
    if found.parts:
        rows = [(name, f"{part + 0:.3f}") for name, part in found.parts.items()]  # -0.0 + 0 is 0.0
        table(["part", "score"], rows)

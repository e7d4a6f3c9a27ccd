"""`perdure recall`: what memory has to say to a question."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.app import DB, AsJson, app
from perdure.cli.longterm import (
    MEMORIES,
    User,
    actor_of,
    day_of,
    opened_mind,
    text_of,
    thread_of,
    whole,
)
from perdure.cli.output import as_json, notes, table
from perdure.cli.progress import at_work
from perdure.cli.store import AsOf, as_moment

if TYPE_CHECKING:
    from perdure.memory.recollection.recall import Recollection


@app.command()
def recall(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or some words.")],
    limit: Annotated[int, typer.Option(help="At most so many.")] = 10,
    budget: Annotated[
        int | None, typer.Option(help="Tokens that they may take as a model is shown them.")
    ] = None,
    as_of: AsOf = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell how each came to its place.")
    ] = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show the memories that answer a question, best first, with who said it, where and when.

    What was just said on a thread is among them before memories are formed of it.
    """
    from perdure.memory.forming.tails import Tails
    from perdure.memory.recollection.recall import recall as recalled

    when = as_moment(as_of, "--as-of")
    with opened_mind(db, user, reads=True) as mind, at_work("reading the search index …"):
        found = recalled(
            query,
            store=mind.store,
            namespaces=[MEMORIES],
            budget=budget,
            limit=limit,
            as_of=when,
            config=mind.config,
            explain=explain,
            tails=Tails(mind.extraction()),
        )
        whose = mind.user
    if json:
        as_json(_plain(found))
    elif found.memories:
        _print(found)
    else:
        notes.print(f"{whose!r} has no memory that speaks of that", markup=False)


def _plain(found: Recollection) -> list[dict[str, object]]:
    """The memories for programs, each with its standing if that was asked for."""
    if not found.standings:
        return [{**whole(memory), "score": memory.score} for memory in found.memories]
    return [asdict(standing) for standing in found.standings]


def _print(found: Recollection) -> None:
    told = (str(standing).partition(": ")[2] for standing in found.standings)  # the key is there
    how = [[each] for each in told] or [[] for _ in found.memories]
    rows = [
        (text_of(m), actor_of(m), thread_of(m), day_of(m), m.key, *why)
        for m, why in zip(found.memories, how, strict=True)
    ]
    explained = ["how"] * bool(found.standings)
    table(["text", "by", "thread", "when", "key", *explained], rows)
    if found.span is not None and explained:
        start, end = found.span
        notes.print(f"the time meant is from {start} to {end}", style="dim", markup=False)
    if found.left_out:
        notes.print(f"{found.left_out} more do not fit into the budget", style="dim")

"""`perdure recall`: what memory has to say to a question."""

from __future__ import annotations

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
    from perdure.memory.recall import RecallResult


@app.command()
def recall(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or some words.")],
    limit: Annotated[int, typer.Option(help="At most so many.")] = 10,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens that they may take as a model is shown them.")
    ] = None,
    as_of: AsOf = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell the parts of the scores.")
    ] = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show the memories that answer a question, best first, with who said it, where and when."""
    from perdure.memory.recall import recall as recalled

    when = as_moment(as_of, "--as-of")
    with opened_mind(db, user, reads=True) as mind, at_work("reading the search index …"):
        found = recalled(
            query,
            store=mind.store,
            config=mind.config,
            namespace=MEMORIES,
            limit=limit,
            max_tokens=max_tokens,
            as_of=when,
        )
        whose = mind.user
    if json:
        as_json(_plain(found, explain))
    elif found.memories:
        _print(found, explain)
    else:
        notes.print(f"{whose!r} has no memory that speaks of that", markup=False)


def _plain(found: RecallResult, explain: bool) -> list[dict[str, object]]:
    """The memories for programs, with the parts of their scores if these were asked for."""
    return [
        {**whole(each), "score": each.score, **({"parts": each.parts} if explain else {})}
        for each in found.memories
    ]


def _print(found: RecallResult, explain: bool) -> None:
    rows = []
    for m in found.memories:
        parts = ", ".join(f"{name} {part:.2f}" for name, part in (m.parts or {}).items())
        rows.append((text_of(m), actor_of(m), thread_of(m), day_of(m), m.key, *[parts] * explain))
    table(["text", "by", "thread", "when", "key", *["score"] * explain], rows)
    if found.left_out:
        notes.print(f"{found.left_out} more do not fit into the budget", style="dim")

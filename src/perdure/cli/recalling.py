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
    from perdure.memory.recall import Placement, RecallResult


@app.command()
def recall(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or some words.")],
    limit: Annotated[int, typer.Option(help="At most so many.")] = 10,
    max_tokens: Annotated[
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
    """The memories for programs, with how each came to its place if that was asked for."""
    if explain:
        return [asdict(placement) for placement in found.placements]
    return [{**whole(memory), "score": memory.score} for memory in found.memories]


def _print(found: RecallResult, explain: bool) -> None:
    rows = []
    for each in found.placements:
        m, how = each.memory, [_how(each)] * explain
        rows.append((text_of(m), actor_of(m), thread_of(m), day_of(m), m.key, *how))
    table(["text", "by", "thread", "when", "key", *["how"] * explain], rows)
    if found.left_out:
        notes.print(f"{found.left_out} more do not fit into the budget", style="dim")


def _how(each: Placement) -> str:
    """How a memory came to its place: its rank, the parts of its score, what it stands for."""
    parts = ", ".join(f"{name} {part:.2f}" for name, part in (each.memory.parts or {}).items())
    told = [f"rank {' and '.join(map(str, each.ranks.values()))} of its search"]
    told += [f"its score the sum of {parts}"] * bool(parts)
    told += [f"stands for {', '.join(each.stands_for)}"] * bool(each.stands_for)
    return "; ".join(told)

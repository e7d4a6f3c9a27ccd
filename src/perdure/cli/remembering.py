"""`perdure remember`: facts that are kept by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, app
from perdure.cli.longterm import MEMORIES, User, opened_mind
from perdure.cli.output import as_json, console
from perdure.errors import ConfigurationError

_HELD: Final = ("refused", "quarantined")


@app.command()
def remember(
    text: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="Facts; - is a fact a line of stdin.")
    ],
    key: Annotated[
        str | None,
        typer.Option(help="Its key; what that said until now becomes its past."),
    ] = None,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Keep facts, unless they are known already; exit code 1 if one was not kept as it is."""
    from perdure.memory import remember as keep

    facts = list(_facts(text))
    if key is not None and len(facts) != 1:
        raise ConfigurationError(f"--key names one fact, and {len(facts)} are given")
    with opened_mind(db, user, create=True) as mind:
        place: dict[str, Any] = {"store": mind.store, "namespace": MEMORIES, "config": mind.config}
        outcomes = [keep(fact, key=key, **place) for fact in facts]
    if json:
        as_json([asdict(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            console.print(str(outcome), markup=False)
    if any(outcome.change in _HELD for outcome in outcomes):
        raise typer.Exit(1)


def _facts(given: list[str]) -> Iterator[str]:
    """The facts that were given, all of them before any is kept.

    Raises:
        ConfigurationError: One says nothing.
    """
    for text in given:
        if text == "-":
            yield from filter(None, map(str.strip, sys.stdin))
        elif text.strip():
            yield text
        else:
            raise ConfigurationError("one of the facts is empty; give each a text")

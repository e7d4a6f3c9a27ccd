"""`perdure forget`: memories erased for good, with all that they ever said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Yes, app, confirm
from perdure.cli.forming import form_waiting
from perdure.cli.longterm import EXAMPLES, MEMORIES, Mind, User, opened_mind, text_of
from perdure.cli.output import as_json, console, notes
from perdure.errors import ConfigurationError, UnknownMemory

if TYPE_CHECKING:
    from perdure.stores import Receipt

    Place = tuple[tuple[str, ...], str]  # a namespace and a key

_SHOWN: Final = 10  # memories that are shown before it is asked


@app.command()
def forget(
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys of memories.")
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="Words that must all be there, in any form.")
    ] = None,
    thread: Annotated[str | None, typer.Option(help="What comes from this thread.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All that is known of the user, and every note on it.")
    ] = False,
    yes: Yes = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Erase memories for good, with all that they said before; they are not formed again.

    What was said on threads stays there. After --all they would be formed of it again, as of new
    threads: delete those first.
    """
    if [bool(key), query is not None, thread is not None, every].count(True) != 1:
        raise ConfigurationError(
            "name memories by their keys, or by --query, or by --thread; or give --all"
        )
    if every:
        _all(db, user, yes, json)
        return
    what = {"query": query, "thread_id": thread}
    with opened_mind(db, user) as mind:
        form_waiting(mind)  # else what is not yet formed would be, afterwards
        found = [_place(mind, each) for each in dict.fromkeys(key or ())]
        if not key:
            found = list(_many(mind, what, dry_run=True).keys)
        if found and not yes:
            _show(mind, found)
            confirm(f"Forget {_counted(len(found))} for good?", yes)
        receipt = _by_key(mind, found) if key else _many(mind, what)
    _tell(receipt, json, len(receipt.keys))


def _all(db: str | None, user: str | None, yes: bool, json: bool) -> None:
    from perdure.memory.collection import Collection
    from perdure.memory.store_adapter import RESERVED

    with opened_mind(db, user) as mind:
        confirm(f"Forget all that is known of {mind.user!r} for good?", yes)
        kept = [Collection(mind.store, place) for place in (MEMORIES, EXAMPLES)]
        receipts = [each.forget_all(config=mind.config) for each in kept]
        receipt = reduce(add, [*receipts, mind.store.forget(mind.others[0])])
    _tell(receipt, json, sum(place[0] != RESERVED for place, _ in receipt.keys))


def _tell(receipt: Receipt, json: bool, count: int) -> None:
    if json:
        as_json(asdict(receipt))
        return
    console.print(f"forgot {_counted(count)}")
    if receipt.keys and not receipt.clean:
        notes.print("bytes of it are still in the file: another process reads; forget again later")


def _place(mind: Mind, key: str) -> Place:
    """Where a memory is.

    Raises:
        UnknownMemory: There is and was none by that key.
    """
    for place in (mind.namespace, *mind.others):
        if mind.store.history(place, key):
            return place, key
    raise UnknownMemory(
        f"{mind.user!r} has no memory {key!r}; 'perdure memories' and 'perdure recall' show keys"
    )


def _by_key(mind: Mind, found: Sequence[Place]) -> Receipt:
    from perdure.memory.collection import Collection

    kept = {
        "memories": Collection(mind.store, MEMORIES),
        "examples": Collection(mind.store, EXAMPLES),
    }
    receipts = []
    for place, key in found:
        if place[0] in kept:
            receipts.append(kept[place[0]].forget(key, config=mind.config))
        else:
            # sections of the first version before the item, which names them
            receipts += [mind.store.forget((*place, key)), mind.store.forget(place, key=key)]
    return reduce(add, receipts)


def _many(mind: Mind, what: dict[str, Any], *, dry_run: bool = False) -> Receipt:
    from perdure.memory.effects import run
    from perdure.memory.erasure import forgotten_matching
    from perdure.memory.store_adapter import adapter_of

    places = [mind.namespace, mind.others[1]]
    return run(forgotten_matching(adapter_of(mind.store), places, **what, dry_run=dry_run))


def _show(mind: Mind, found: Sequence[Place]) -> None:
    """Show what is to go: the last of what each said."""
    from perdure.memory.store_adapter import RESERVED, memory_of

    for place, key in found[:_SHOWN]:
        *_, last = map(memory_of, mind.store.history(place, key))
        text = "held in quarantine" if place[0] == RESERVED else text_of(last)
        notes.print(f"{key}: {text}", style="dim", markup=False)
    if len(found) > _SHOWN:
        notes.print(f"… and {len(found) - _SHOWN} more", style="dim")


def _counted(count: int) -> str:
    return f"{count} {'memory' if count == 1 else 'memories'}"

"""`perdure store`: the group of commands on items, how it opens a store, and what they all take."""

from __future__ import annotations

import json as jsonlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import app, opened
from perdure.errors import ConfigurationError, InvalidNamespace

if TYPE_CHECKING:
    from perdure.stores import SQLiteStore

store_app = typer.Typer(
    name="store",
    help="Memory across threads: JSON items under namespaces, with versions and search.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(store_app)

NS = Annotated[str, typer.Argument(metavar="NS", help="The namespace, like users/alice.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
Prefix = Annotated[
    str, typer.Argument(metavar="[PREFIX]", help="Only namespaces that begin so; / is everything.")
]
Filter = Annotated[str | None, typer.Option("--filter", help="What the value must meet, as JSON.")]
FromWhere = Annotated[
    str | None, typer.Option("--provenance", help="What its provenance must meet, as JSON.")
]
AsOf = Annotated[str | None, typer.Option("--as-of", help="As it was at that moment, in ISO 8601.")]
IfVersion = Annotated[
    int | None, typer.Option("--if-version", help="Only if it is at this version; 0: not there.")
]
ROOT: Final = "/"
_LABEL: Final = re.compile(r"(?:\\[\\/]|[^/])*")


def open_store(db: str | None, *, create: bool = False, reads: bool = False) -> SQLiteStore:
    """Open the store that a command works on; it lives in the file of the threads.

    Args:
        db: The command's own argument.
        create: Whether the command has something to begin a database with.
        reads: Whether it only reads, so that a file which cannot be written will do.

    Raises:
        ConfigurationError: The database is not there, and is not to be begun.
    """
    from perdure.stores import SQLiteStore

    return opened(SQLiteStore, db, create=create, reads=reads, begin="perdure store put")


def namespace(text: str) -> tuple[str, ...]:
    r"""A namespace as it is typed: labels between slashes, or a JSON list of them.

    >>> namespace("users/alice"), namespace(r"a\/b/c"), namespace('["a/b", "c"]'), namespace("/")
    (('users', 'alice'), ('a/b', 'c'), ('a/b', 'c'), ())

    Raises:
        InvalidNamespace: It begins like a JSON list of texts, and is none, or it begins or ends
            with a slash.
    """
    if text in ("", ROOT):
        return ()
    if re.match(r'\[\s*"', text):
        try:
            found = jsonlib.loads(text)
        except ValueError as exc:
            raise InvalidNamespace(
                f"the namespace {text!r} is no JSON list ({exc}); expected labels between "
                'slashes, like users/alice, or a list like ["users", "alice"]'
            ) from exc
        return tuple(found)
    if text.startswith("/") or re.search(r"(?<!\\)(?:\\\\)*/$", text):
        raise InvalidNamespace(
            f"the namespace {text!r} begins or ends with a slash, which stands between labels; "
            f"expected {text.strip('/') or ROOT!r}"
        )
    labels, at = [], 0
    while at <= len(text):
        found = _LABEL.match(text, at)
        assert found is not None  # it may be empty
        labels.append(re.sub(r"\\([\\/])", r"\1", found[0]))
        at = found.end() + 1
    return tuple(labels)


def shown(labels: tuple[str, ...]) -> str:
    r"""A namespace as `namespace` reads it.

    >>> shown(("users", "alice")), shown(("a/b", "c")), shown(())
    ('users/alice', 'a\\/b/c', '/')
    """
    text = "/".join(re.sub(r"([\\/])", r"\\\1", label) for label in labels) or ROOT
    return jsonlib.dumps(labels, ensure_ascii=False) if re.match(r'\[\s*"', text) else text


def as_object(text: str | None, what: str) -> dict[str, Any] | None:
    """A JSON object that was typed; None if none was.

    Raises:
        ConfigurationError: It is something else.
    """
    if text is None:
        return None
    try:
        found = jsonlib.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(
            f"{what} is {_cut(text)}, which is no JSON ({exc}); expected an object, like "
            '\'{"kind": "note"}\''
        ) from exc
    if not isinstance(found, dict):
        raise ConfigurationError(
            f'{what} is {_cut(text)}; expected a JSON object, like \'{{"kind": "note"}}\''
        )
    return found


def as_moment(text: str | None, option: str) -> datetime | None:
    """A moment that was typed; without a time zone it is one of this machine's.

    Raises:
        ConfigurationError: It is none.
    """
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise ConfigurationError(
            f"{option} is {text!r}; expected a moment in ISO 8601, like 2026-01-31T09:30 or "
            "2026-01-31T08:30:00Z"
        ) from exc


def moment(when: datetime | None) -> str:
    """A moment as `--as-of` reads it, to the microsecond.

    >>> moment(datetime(2026, 1, 31, 9, 30, 0, 5, UTC)), moment(None)
    ('2026-01-31T09:30:00.000005Z', '')
    """
    return "" if when is None else f"{when.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"


def _cut(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")

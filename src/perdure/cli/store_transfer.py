"""`perdure store import` and `export`: items from and to files."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from perdure.cli.app import DB, AsJson
from perdure.cli.output import as_json, console, counted, notes
from perdure.cli.progress import progress_bar, resumable
from perdure.cli.store import ROOT, Prefix, namespace, open_store, store_app
from perdure.cli.store_items import nothing_under
from perdure.cli.transcripts import at_hand
from perdure.cli.transfer import is_sqlite, replacing
from perdure.errors import ConfigurationError, ImportFailed

if TYPE_CHECKING:
    from perdure.stores import TransferReport as Report


@store_app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="JSON Lines, or a file of langgraph's SqliteStore; - is stdin.")
    ],
    into: Annotated[
        str | None, typer.Option("--namespace", help="Where items go that name no namespace.")
    ] = None,
    skip: Annotated[
        bool,
        typer.Option("--skip-unsuitable", help="Pass over a database's items that no store holds."),
    ] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import items with their versions and times, as `store export` writes them.

    What is there already is left as it is, so an import may be repeated or resumed. A line without
    `namespace` and `value` is a value by itself.
    """
    with at_hand(file) as (called, path):
        if is_sqlite(path):
            if into is not None:
                raise ConfigurationError(
                    "--namespace is for JSON Lines; a database is taken over under its own names"
                )
            report = _take_over(path, called, db, skip)
        elif skip:
            raise ConfigurationError("--skip-unsuitable is for a database; mend the line instead")
        else:
            report = _import(path, called, None if into is None else namespace(into), db)
    if json:
        as_json(asdict(report))
    else:
        over = f", {report.unsuitable} passed over" if report.unsuitable else ""
        console.print(
            f"{counted(report.items, 'item')} and {counted(report.versions, 'former version')} "
            f"imported, {report.skipped} already there{over}"
        )


def _import(path: Path, called: Path, into: tuple[str, ...] | None, db: str | None) -> Report:
    kept = 0
    with (
        resumable(lambda: _kept(kept, "line")),
        _opened(path, called) as lines,
        progress_bar(f"importing {called.name}", "line") as show,
    ):

        def advance(done: int, _: int | None) -> None:
            nonlocal kept
            kept = done
            show(lines.share, done)

        try:
            with open_store(db, create=True) as store:
                return store.import_lines(lines, namespace=into, progress=advance)
        except ImportFailed as exc:
            raise ImportFailed(f"{str(called)!r}, {exc}") from exc


def _take_over(path: Path, called: Path, db: str | None, skip: bool) -> Report:
    kept = 0
    with (
        resumable(lambda: _kept(kept, "item")),
        open_store(db, create=True) as store,
        progress_bar(str(called), "item") as show,
    ):

        def advance(done: int, _: int | None) -> None:
            nonlocal kept
            kept = done
            show(None, done)

        return store.import_from(path, on_unsuitable="skip" if skip else "error", progress=advance)


def _kept(count: int, noun: str) -> str:
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'} kept"


class _Lines:
    """The lines of a file, and how far it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._read = 0

    @property
    def share(self) -> float:
        """The part of it that is read."""
        return self._read / max(1, self._size)

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._file, 1):
            self._read += len(line)
            try:
                yield line.rstrip(b"\r\n").decode("utf-8" if number > 1 else "utf-8-sig")
            except UnicodeDecodeError as exc:
                raise ImportFailed(
                    f"line {number}: no UTF-8 text, byte {exc.start + 1} of it is "
                    f"{line[exc.start]:#04x}"
                ) from exc


@contextmanager
def _opened(path: Path, called: Path) -> Iterator[_Lines]:
    """The lines of a file; one that cannot be JSON Lines begins no database."""
    try:
        with path.open("rb") as file:
            begin = file.read(1000).removeprefix(BOM_UTF8).lstrip()
            if begin and not begin.startswith(b"{"):
                raise ImportFailed(
                    f"{str(called)!r} begins with {begin[:1].decode('utf-8', 'replace')!r}; "
                    "expected JSON Lines (an object on each line) or a database of langgraph's "
                    "SqliteStore"
                )
            file.seek(0)
            yield _Lines(file)
    except OSError as exc:
        raise ImportFailed(f"{str(called)!r} cannot be read: {exc.strerror}") from exc


@store_app.command()
def export(
    prefix: Prefix = ROOT,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file; without it, or with -, stdout.")
    ] = None,
    no_versions: Annotated[
        bool, typer.Option("--no-versions", help="Leave former versions out.")
    ] = False,
    db: DB = None,
) -> None:
    """Write items as JSON Lines, a version a line, as `store import` reads them."""
    path = None if out is None or str(out) == "-" else out
    with open_store(db, reads=True) as store:
        where = namespace(prefix)
        lines = store.export(where, versions=not no_versions)
        first = next(lines, None)
        if first is None:
            notes.print(f"{nothing_under(where)}; nothing was written", markup=False)
            return
        with nullcontext(sys.stdout) if path is None else replacing(path) as file:
            for line in chain([first], lines):
                print(jsonlib.dumps(line, ensure_ascii=False), file=file)

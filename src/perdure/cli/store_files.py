"""`perdure store import` and `export`: items from and to files."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

from typer import Argument, Option

from perdure.cli.app import DB, AsJson, opened
from perdure.cli.output import as_json, counted, json_safe, note, replacing, say
from perdure.cli.progress import steady
from perdure.cli.store import NAMES, ROOT, Prefix, namespace, shown, store
from perdure.errors import ConfigurationError, ImportFailed


@store.command("import")
def import_(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="JSONL, or a database of langgraph's SqliteStore; - is stdin."
        ),
    ],
    into: Annotated[
        str | None, Option("--namespace", metavar="NS", help="For lines that name no namespace.")
    ] = None,
    skip: Annotated[
        bool, Option("--skip-unsuitable", help="Skip items that a store cannot hold.")
    ] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import items and versions from a file.

    What is there already stays as it is, so an import can be repeated. A line without "namespace"
    and "value" is a value by itself.
    """
    with _opened(file) as (database, lines):
        if database:
            if into is not None:
                raise ConfigurationError(
                    "--namespace is for JSON Lines; a database is taken over under its own names"
                )
            unsuitable = "skip" if skip else "error"
            with opened(db, create=True) as to, steady(str(file), "item") as advance:
                report = to.store.import_from(
                    file,
                    on_unsuitable=unsuitable,  # type: ignore[arg-type]  # it is one of the two
                    progress=lambda done, _: advance(done),
                )
        elif skip:
            raise ConfigurationError("--skip-unsuitable is for a database; mend the line instead")
        else:
            where = None if into is None else namespace(into)
            with opened(db, create=True) as to, steady(f"importing {file.name}", "line") as advance:
                report = to.store.import_lines(
                    lines, namespace=where, progress=lambda done, _: advance(done)
                )
    if json:
        as_json(asdict(report))
        return
    over = f", {report.unsuitable:,} passed over" if report.unsuitable else ""
    say(
        f"{counted(report.items, 'item')} and {counted(report.versions, 'old version')} imported, "
        f"{report.skipped:,} already there{over}"
    )


def _lines(first: bytes, file: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(chain([first], file), 1):
        try:
            yield line.rstrip(b"\r\n").decode("utf-8" if number > 1 else "utf-8-sig")
        except UnicodeDecodeError as exc:
            raise ImportFailed(
                f"line {number}: no UTF-8 text, byte {exc.start + 1} of it is "
                f"{line[exc.start]:#04x}"
            ) from exc


@contextmanager
def _opened(path: Path) -> Iterator[tuple[bool, Iterator[str]]]:
    """Whether a file is a database, and its lines; what is neither begins no database."""
    called = "stdin" if str(path) == "-" else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if called == "stdin" else path.open("rb") as file:
            first = file.readline()
            begin = first.removeprefix(b"\xef\xbb\xbf").lstrip()
            database = begin.startswith(b"SQLite format 3\0")
            if begin and not database and not begin.startswith(b"{"):
                raise ImportFailed(
                    f"it begins with {begin[:1].decode('utf-8', 'replace')!r}; expected JSON Lines "
                    "(an object on each line) or a database of langgraph's SqliteStore"
                )
            yield database, _lines(first, file)
    except ImportFailed as exc:
        raise ImportFailed(f"{called!r}: {exc}") from exc
    except OSError as exc:
        raise ImportFailed(f"{called!r} cannot be read: {exc.strerror}") from exc


@store.command()
def export(
    prefix: Prefix = ROOT,
    out: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
    no_versions: Annotated[bool, Option("--no-versions", help="Leave old versions out.")] = False,
    db: DB = None,
) -> None:
    """Write items as JSONL, a version a line."""
    path = None if out is None or str(out) == "-" else out
    with opened(db, reads=True) as file:
        where = namespace(prefix)
        lines = file.store.export(where, versions=not no_versions)
        first = next(lines, None)
        if first is None:
            note(f"nothing is under {shown(where)}, and nothing was written; {NAMES}")
            return
        with nullcontext(sys.stdout) if path is None else replacing(path) as to:
            for line in chain([first], lines):
                to.write(json_safe(jsonlib.dumps(line, ensure_ascii=False)) + "\n")

"""`perdure threads`, `history`, `show` and `stats`: looking at what is there."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from perdure.cli.app import DB, AsJson, app, open_saver
from perdure.cli.output import ago, as_json, console, counted, line, size, spoken, table
from perdure.cli.titles import about_thread

if TYPE_CHECKING:
    from perdure.checkpointers import CheckpointInfo

Thread = Annotated[str, typer.Argument(metavar="ID", help="The thread.")]
_TITLE = 40  # characters of a title in a list
_RUN = 6  # checkpoints in a row that are shown before the middle of them is left out


@app.command()
def threads(
    limit: Annotated[int, typer.Option(help="At most so many.")] = 50,
    after: Annotated[str | None, typer.Option(help="The last thread of the page before.")] = None,
    prefix: Annotated[str, typer.Option(help="Only ids that begin so.")] = "",
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads, the latest activity first."""
    with open_saver(db, create=False, reads=True) as saver:
        found = saver.threads(limit=limit, after=after, prefix=prefix)
        titles = {info.thread_id: _title(saver, info.thread_id) for info in found}
    if json:
        as_json([{**asdict(info), "title": titles[info.thread_id]} for info in found])
        return
    titled = any(titles.values())
    table(
        ["thread", *["title"] * titled, "items", "checkpoints", "size", "last activity"],
        [
            (
                t.thread_id,
                *[line(titles[t.thread_id] or "", _TITLE)] * titled,
                *(t.items, t.checkpoints, size(t.size_bytes), ago(t.updated_at)),
            )
            for t in found
        ],
    )


def _title(saver: Any, thread: str) -> str | None:
    return about_thread(saver, thread).get("title")


@app.command()
def history(
    thread: Thread,
    channel: Annotated[str, typer.Option(help="The channel to show.")] = "messages",
    checkpoint: Annotated[str | None, typer.Option(help="Only the way to this one.")] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show what was said on a thread: ● the model sees, ○ is only history, ◌ is on a branch."""
    with open_saver(db, create=False, reads=True) as saver:
        chosen = full_id(saver, thread, checkpoint) if checkpoint else None
        said = saver.history(thread, channel=channel, checkpoint_id=chosen)
        if not said:
            _check_channel(saver, thread, channel)
        title = _title(saver, thread)
    if json:
        as_json(
            [
                {"seen": i.seen, "branch": i.branch, "position": i.position, **_plain(i.value)}
                for i in said
            ]
        )
        return
    if title:
        console.print(Text(line(title), style="bold"))
    for item in said:
        text = line(spoken(item.value), 200 if console.is_terminal else 10_000)
        said_by = f"{item.value.type}: " if _is_message(item.value) else ""
        mark = "●" if item.seen else "◌" if item.branch else "○"
        console.print(f"{mark} {said_by}{text}", markup=False)


def _check_channel(saver: Any, thread: str, channel: str) -> None:
    """Tell a channel in which nothing was said from one that the thread never had."""
    from perdure.errors import ConfigurationError

    known = {name for info in saver.checkpoints(thread) for name in info.counts}
    known -= {name for name in known if name.startswith("__")}  # langgraph's own
    if known and channel not in known:
        raise ConfigurationError(
            f"the thread {thread!r} has no channel {channel!r} that holds a list; --channel takes "
            f"one of {', '.join(map(repr, sorted(known)))}"
        )


def _is_message(value: Any) -> bool:
    return hasattr(value, "text") and hasattr(value, "model_dump")


def _plain(value: Any) -> dict[str, Any]:
    if _is_message(value):
        return {**value.model_dump(exclude_none=True), "content": value.content}
    return {"content": value}


@app.command()
def show(
    thread: Thread,
    every: Annotated[bool, typer.Option("--all", help="Leave no checkpoint out.")] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show a thread's checkpoints as a tree; forks are branches, the head is marked."""
    with open_saver(db, create=False, reads=True) as saver:
        found = saver.checkpoints(thread)
        title = _title(saver, thread)
    if json:
        as_json([asdict(info) for info in found])
        return
    tree = Tree(Text(thread).append(f"  {line(title)}" if title else "", style="dim"))
    children: dict[tuple[str, str | None], list[CheckpointInfo]] = {}
    present = {(info.checkpoint_ns, info.checkpoint_id) for info in found}
    for info in sorted(found, key=lambda info: (info.ts, info.order)):
        parent = info.parent_id if (info.checkpoint_ns, info.parent_id) in present else None
        children.setdefault((info.checkpoint_ns, parent), []).append(info)
    for ns in dict.fromkeys(info.checkpoint_ns for info in reversed(found)):
        root = tree.add(Text(ns, style="italic")) if ns else tree
        _branch(root, children.get((ns, None), []), children, every)
    console.print(tree)


def _branch(tree: Tree, roots: list[CheckpointInfo], children: Any, every: bool) -> None:
    """Add runs of checkpoints and, where one forks, its branches, each under its first."""
    waiting = [(tree, root, len(roots) > 1) for root in roots]
    while waiting:
        at, info, forked = waiting.pop(0)
        run = [info]
        while len(after := children.get((info.checkpoint_ns, info.checkpoint_id), [])) == 1:
            info = after[0]
            run.append(info)
        if forked:
            at = at.add(_label(run.pop(0), "fork "))
        hidden = len(run) - _RUN if len(run) > _RUN + 1 and not every else 0
        last = at
        for i, step in enumerate(run):
            if hidden and i == _RUN // 2:
                at.add(f"… {hidden} more (--all shows them)", style="dim")
            if not hidden or i < _RUN // 2 or i >= _RUN // 2 + hidden:
                last = at.add(_label(step))
        waiting += [(last, child, True) for child in after]


def _label(info: CheckpointInfo, mark: str = "") -> Text:
    messages = counted(info.counts["messages"], "message") if "messages" in info.counts else ""
    step, source = info.metadata.get("step", "?"), info.metadata.get("source", "?")
    label = Text(f"{mark}{short(info.checkpoint_id)}  step {step} ({source})")
    if messages:
        label.append(f", {messages}")
    if info.is_head:
        label.append(" ← head", style="bold green")
    return label


def short(checkpoint_id: str) -> str:
    """The beginning of an id: of a UUID as much of its time (RFC 9562, version 6) as differs.

    >>> short("1f0c8b9e-0000-6123-8000-0123456789ab")
    '1f0c8b9e-0000-6123'
    """
    return checkpoint_id[:18]


def full_id(saver: Any, thread: str, beginning: str) -> str:
    """The checkpoint that an abbreviated id names."""
    from perdure.errors import UnknownCheckpoint

    ids = [
        info.checkpoint_id
        for info in saver.checkpoints(thread, checkpoint_ns="")
        if info.checkpoint_id.startswith(beginning)
    ]
    if len(ids) != 1:
        raise UnknownCheckpoint(
            f"thread {thread!r} has {len(ids)} checkpoints whose id begins with {beginning!r}; "
            f"'perdure show {thread} --all' lists them"
        )
    return str(ids[0])


@app.command()
def stats(db: DB = None, json: AsJson = False) -> None:
    """Show sizes, counts and the SQLite in use."""
    with open_saver(db, create=False, reads=True) as saver:
        found = saver.stats()
    if json:
        as_json(found)
        return
    table(["", ""], [(name, in_words(name, value, found)) for name, value in found.items()])


def in_words(name: str, value: Any, found: dict[str, Any]) -> str:
    """A figure of the database for people; `found` has the others."""
    if name == "wal_reset_bug":
        version = f"SQLite {found['sqlite_version']}"
        if value:
            return f"in {version}, and avoided: one process at a time moves the log to the file"
        return f"not in {version}"
    return size(value) if name.endswith("_bytes") else str(value)

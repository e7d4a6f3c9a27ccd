"""`perdure show`, `fork` and `rewind`: a thread's checkpoints as a tree, and other ways on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.app import DB, AsJson, NoPager, Thread, app, checkpoint_id, opened, thread_id
from perdure.cli.output import Line, as_json, counted, line, paged, say
from perdure.cli.threads import stands
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.checkpointers import CheckpointInfo

    Children = Mapping[tuple[str, str | None], list[CheckpointInfo]]


@dataclass
class _Node:
    text: str
    style: str = ""
    below: list[_Node] = field(default_factory=list)


@app.command()
def show(thread: Thread, no_pager: NoPager = False, db: DB = None, json: AsJson = False) -> None:
    """Show the checkpoints of a thread as a tree."""
    from perdure.checkpointers.titles import about
    from perdure.memory import VIEWS

    with opened(db, reads=True) as file:
        chosen = thread_id(file, thread)
        found = [each for each in file.saver.checkpoints(chosen) if each.checkpoint_ns != VIEWS]
        head = file.saver.head(chosen)
        title = about(file.saver, chosen, head.metadata).get("title", "")
    if json:
        as_json(found)
    else:
        top = [Line(f"{chosen}  {line(title)}".strip(), "bold", wraps=False)]
        top += [Line(text, "yellow")] if (text := stands(head.status)) else []
        paged([*top, *_drawn(_tree(found))], pager=not no_pager)


def _tree(found: list[CheckpointInfo]) -> _Node:
    children: dict[tuple[str, str | None], list[CheckpointInfo]] = {}
    present = {(info.checkpoint_ns, info.checkpoint_id) for info in found}
    for info in sorted(found, key=lambda info: (info.ts, info.order)):
        parent = info.parent_id if (info.checkpoint_ns, info.parent_id) in present else None
        children.setdefault((info.checkpoint_ns, parent), []).append(info)
    root = _Node("")
    for ns in dict.fromkeys(info.checkpoint_ns for info in reversed(found)):
        at = root
        if ns:
            at = _Node(line(ns, None), "italic")
            root.below.append(at)
        _grow(at, children[ns, None], children)
    return root


def _grow(tree: _Node, roots: list[CheckpointInfo], children: Children) -> None:
    """Add runs of checkpoints side by side; where several follow one, each under the one."""
    waiting = [(tree, root, len(roots) > 1) for root in roots]
    while waiting:
        at, info, forked = waiting.pop(0)
        node = _node(info, "fork " if forked else "")
        at.below.append(node)
        after = children.get((info.checkpoint_ns, info.checkpoint_id), [])
        if len(after) == 1:
            waiting.insert(0, (node if forked else at, after[0], False))
        else:
            waiting += [(node, child, True) for child in after]


def _node(info: CheckpointInfo, mark: str) -> _Node:
    # of a UUID the beginning with its time (RFC 9562, version 6) is enough
    short = info.checkpoint_id[:18] if len(info.checkpoint_id) == 36 else info.checkpoint_id
    step, source = info.metadata.get("step", "?"), info.metadata.get("source", "?")
    text = line(f"{mark}{short} · step {step} ({source})", None)
    if "messages" in info.counts:
        text += f", {counted(info.counts['messages'], 'message')}"
    return _Node(f"{text} ← head", "bold green") if info.is_head else _Node(text)


def _drawn(root: _Node) -> Iterator[Line]:
    waiting = [("", node, node is root.below[-1]) for node in root.below]
    while waiting:
        before, node, last = waiting.pop(0)
        yield Line(f"{before}{'└── ' if last else '├── '}{node.text}", node.style, wraps=False)
        before += "    " if last else "│   "
        waiting[:0] = [(before, each, each is node.below[-1]) for each in node.below]


@app.command()
def fork(
    thread: Thread,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the copy.")],
    at: Annotated[
        str | None, typer.Option(metavar="ID", help="Copy only what led to this checkpoint.")
    ] = None,
    db: DB = None,
) -> None:
    """Copy a thread, all of it or up to a checkpoint."""
    with opened(db) as file:
        source = thread_id(file, thread)
        if not new or any(info.thread_id == new for info in file.saver.threads(prefix=new)):
            wrong = f"there is a thread {new!r} already" if new else "the id of the copy is empty"
            raise ConfigurationError(f"{wrong}; give another id")
        chosen = None if at is None else checkpoint_id(file, source, at)
        file.saver.copy_thread(source, new, checkpoint_id=chosen)
    say(f"{source!r} is copied to {new!r}")


@app.command()
def rewind(
    thread: Thread,
    to: Annotated[str, typer.Option(metavar="ID", help="The checkpoint to go on from.")],
    db: DB = None,
) -> None:
    """Let a thread go on from an older checkpoint.

    Nothing is deleted: what came later stays as a branch.
    """
    with opened(db) as file:
        source = thread_id(file, thread)
        chosen = checkpoint_id(file, source, to)
        file.saver.rewind(source, chosen)
    say(f"{source!r} goes on from {chosen}")

"""`perdure show`: a thread's checkpoints as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perdure.cli.app import DB, AsJson, Thread, app, opened, thread_id
from perdure.cli.history import NoPager
from perdure.cli.output import Line, as_json, counted, line, paged
from perdure.cli.threads import about

if TYPE_CHECKING:
    from perdure.checkpointers import CheckpointInfo

    Children = Mapping[tuple[str, str | None], list[CheckpointInfo]]

_RUN: Final = 6  # checkpoints in a row that are shown before the middle of them is left out


@dataclass
class _Node:
    text: str
    style: str = ""
    below: list[_Node] = field(default_factory=list)


@app.command()
def show(
    thread: Thread,
    every: Annotated[
        bool, typer.Option("--all", help="Leave no checkpoint out of long runs.")
    ] = False,
    no_pager: NoPager = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show the checkpoints of a thread as a tree."""
    with opened(db, reads=True) as file:
        chosen = thread_id(file, thread)
        found = file.saver.checkpoints(chosen)
        title = about(file.saver, chosen).get("title", "")
    if json:
        as_json([asdict(info) for info in found])
    else:
        top = Line(f"{chosen}  {line(title)}".strip(), "bold", wraps=False)
        paged([top, *_drawn(_tree(found, every))], pager=not no_pager)


def _tree(found: list[CheckpointInfo], every: bool) -> _Node:
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
        _grow(at, children[ns, None], children, every)
    return root


def _grow(tree: _Node, roots: list[CheckpointInfo], children: Children, every: bool) -> None:
    """Add runs of checkpoints and, where one forks, its branches, each under its first."""
    waiting = [(tree, root, len(roots) > 1) for root in roots]
    while waiting:
        at, info, forked = waiting.pop(0)
        run = [info]
        while len(after := children.get((info.checkpoint_ns, info.checkpoint_id), [])) == 1:
            info = after[0]
            run.append(info)
        if forked:
            at.below.append(_node(run.pop(0), "fork "))
            at = at.below[-1]
        shown = [_node(step) for step in run]
        if len(run) > _RUN + 1 and not every:
            hidden = _Node(f"… {len(run) - _RUN} more (--all shows them)", "dim")
            shown[_RUN // 2 : -_RUN // 2] = [hidden]
        at.below += shown
        waiting += [(shown[-1] if shown else at, child, True) for child in after]


def _node(info: CheckpointInfo, mark: str = "") -> _Node:
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

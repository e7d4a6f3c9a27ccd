"""`perdure show`: a thread's checkpoints as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perdure.cli.app import DB, AsJson, Thread, app, opened, thread_id
from perdure.cli.output import Line, as_json, counted, line, paged
from perdure.cli.threads import about

if TYPE_CHECKING:
    from perdure.checkpointers import CheckpointInfo

    Children = Mapping[tuple[str, str | None], list[CheckpointInfo]]

_RUN: Final = 6  # checkpoints in a row that are shown before the middle of them is left out
_SHORT: Final = 18  # characters of a UUID that hold its time (RFC 9562, version 6)


@app.command()
def show(
    thread: Thread,
    every: Annotated[bool, typer.Option("--all", help="Leave no checkpoint out.")] = False,
    no_pager: Annotated[bool, typer.Option("--no-pager", help="Print it all at once.")] = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show a thread's checkpoints as a tree: a fork is a branch, the head is marked."""
    with opened(db, reads=True) as file:
        chosen = thread_id(file, thread)
        found = file.saver.checkpoints(chosen)
        title = about(file.saver, chosen).get("title")
    if json:
        as_json([asdict(info) for info in found])
        return
    top = [Line(chosen + (f"  {line(title)}" if title else ""), "bold", wraps=False)]
    paged([*top, *_Tree(found, every).lines()], pager=not no_pager)


class _Node:
    """A line of the tree, with what hangs from it."""

    def __init__(self, text: str, style: str = "") -> None:
        self.text, self.style = text, style
        self.below: list[_Node] = []

    def add(self, node: _Node) -> _Node:
        self.below.append(node)
        return node


class _Tree:
    def __init__(self, found: list[CheckpointInfo], every: bool) -> None:
        self._found, self._every = found, every
        short = {info.checkpoint_id[:_SHORT] for info in found}
        alone = len(short) == len({info.checkpoint_id for info in found})
        self._length = _SHORT if alone else None

    def lines(self) -> Iterator[Line]:
        """The lines below the thread."""
        waiting = [("", node, last) for node, last in _last(self._root().below)]
        while waiting:
            before, node, last = waiting.pop(0)
            yield Line(f"{before}{'└── ' if last else '├── '}{node.text}", node.style, wraps=False)
            inner = before + ("    " if last else "│   ")
            waiting = [*((inner, below, end) for below, end in _last(node.below)), *waiting]

    def _root(self) -> _Node:
        children: dict[tuple[str, str | None], list[CheckpointInfo]] = {}
        present = {(info.checkpoint_ns, info.checkpoint_id) for info in self._found}
        for info in sorted(self._found, key=lambda info: (info.ts, info.order)):
            parent = info.parent_id if (info.checkpoint_ns, info.parent_id) in present else None
            children.setdefault((info.checkpoint_ns, parent), []).append(info)
        root = _Node("")
        for ns in dict.fromkeys(info.checkpoint_ns for info in reversed(self._found)):
            at = root.add(_Node(ns, "italic")) if ns else root
            self._grow(at, children[ns, None], children)
        return root

    def _grow(self, tree: _Node, roots: list[CheckpointInfo], children: Children) -> None:
        """Add runs of checkpoints and, where one forks, its branches, each under its first."""
        waiting = [(tree, root, len(roots) > 1) for root in roots]
        while waiting:
            at, info, forked = waiting.pop(0)
            run = [info]
            while len(after := children.get((info.checkpoint_ns, info.checkpoint_id), [])) == 1:
                info = after[0]
                run.append(info)
            if forked:
                at = at.add(self._node(run.pop(0), "fork "))
            hidden = len(run) - _RUN if len(run) > _RUN + 1 and not self._every else 0
            last = at
            for step in run[: _RUN // 2] if hidden else run:
                last = at.add(self._node(step))
            if hidden:
                at.add(_Node(f"… {hidden} more (--all shows them)", "dim"))
                for step in run[-(_RUN - _RUN // 2) :]:
                    last = at.add(self._node(step))
            waiting += [(last, child, True) for child in after]

    def _node(self, info: CheckpointInfo, mark: str = "") -> _Node:
        step, source = info.metadata.get("step", "?"), info.metadata.get("source", "?")
        text = f"{mark}{line(info.checkpoint_id[: self._length])}  step {step} ({source})"
        if "messages" in info.counts:
            text += f", {counted(info.counts['messages'], 'message')}"
        if info.is_head:
            return _Node(f"{line(text)} ← head", "bold green")
        return _Node(line(text))


def _last(nodes: list[_Node]) -> list[tuple[_Node, bool]]:
    return [(node, node is nodes[-1]) for node in nodes]

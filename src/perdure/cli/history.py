"""`perdure history` and `show`: what was said on a thread, and its checkpoints as a tree."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    DbOption,
    JsonOption,
    NoPagerOption,
    ThreadArgument,
    app,
    find_thread_head,
    open_database,
    resolve_checkpoint_id,
)
from perdure.cli.output import (
    OutputLine,
    escape_controls,
    format_count,
    format_line,
    format_size,
    format_time,
    page_output,
    print_json,
    print_note,
    print_text,
    print_tree,
    update_fence,
)

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from perdure.checkpointers import CheckpointInfo, HistoryItem, ThreadStatus

    Children = Mapping[tuple[str, str | None], list[CheckpointInfo]]

COLORS: Final = {"human": "cyan", "ai": "green", "system": "magenta", "tool": "yellow"}
_CALLS: Final = ("tool_use", "tool_call", "function_call", "server_tool_call")
_SHORT: Final = 60  # characters of arguments that stand beside a call
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,([A-Za-z0-9+/=]{64,})")
_LONGEST_QUESTION: Final = 500  # characters
_CHECKPOINTS: Final = 200  # the newest, in which the callers of runs are looked for
_INDENT: Final = "    "


@app.command()
def history(
    thread: ThreadArgument,
    channel: Annotated[
        str, typer.Option(metavar="NAME", help="The channel of the state to show.")
    ] = "messages",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="ID", help="Only what led to this checkpoint.")
    ] = None,
    no_pager: NoPagerOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show everything that was said on a thread.

    The model sees messages marked ●. Messages marked ○ are only in the history, and those marked ◌
    only on a branch. For items marked ? this is unknown, because they are in a `DeltaChannel` whose
    reducer is code of the graph.
    """
    from perdure.checkpointers.labels import describe_deeds
    from perdure.checkpointers.titles import about

    with open_database(db, allow_read_only=True) as file:
        head = find_thread_head(file, thread)
        chosen = head.thread_id
        at = None if checkpoint is None else resolve_checkpoint_id(file, chosen, checkpoint)
        items = file.saver.history(chosen, channel=channel, checkpoint_id=at)
        title = about(file.saver, chosen, head.metadata).get("title")
        newest = file.saver.checkpoints(chosen, checkpoint_ns="", limit=_CHECKPOINTS)
    if json:
        print_json([_plain(item) for item in items])
    elif items:
        with page_output(pager=not no_pager):
            if title:
                print_text(" ".join(title.split()), "bold")
            for number, item in enumerate(items):
                if number or title:
                    print_text()
                for part in (render_heading(item), *render_item_lines(item.value)):
                    print_text(*part)
    else:
        print_note(f"nothing was said on {chosen!r} in the channel {channel!r}")
    for deed in describe_deeds(each.metadata for each in newest[::-1] if at is None):
        print_note(f"{chosen!r}: {format_line(deed)}")
    if at is None and (text := describe_status(head.status)):
        print_note(f"{chosen!r} {text}")


def describe_status(status: ThreadStatus) -> str:
    """That a thread waits, and for what, or before which nodes it was cut off; "": neither."""
    if status.state == "waiting":
        questions = (
            f"at {format_line(node)!r}: {format_line(_text(question), _LONGEST_QUESTION)}"
            for node, question in status.questions
        )
        return f"waits for an answer ({'; '.join(questions)})"
    nodes = ", ".join(repr(format_line(node)) for node in dict.fromkeys(status.next))
    where = f"before {nodes}" if nodes else "at the end of a step"
    return f"was cut off, or stopped, {where}" if status.tasks else ""


def _plain(item: HistoryItem) -> dict[str, Any]:
    value: Any = item.value
    fields = {"content": value}
    if _is_message(value):
        fields = {**value.model_dump(exclude_none=True), "content": value.content}
    about = {"seen": item.seen, "branch": item.branch, "position": item.position}
    return {**about, "stored_at": item.stored_at, **fields}


def _is_message(value: Any) -> bool:
    return hasattr(value, "text") and hasattr(value, "model_dump")


# -- for people


def render_heading(item: HistoryItem) -> OutputLine:
    """Return the heading line of an item, with its mark, author, time and model.

    The time is the time in the message itself, if any, otherwise the time of its first storage.
    """
    from perdure.memory.thread_messages import parse_time

    value = item.value
    mark = "?" if item.seen is None else "●" if item.seen else "◌" if item.branch else "○"
    if not _is_message(value):
        return OutputLine(f"{mark} {format_time(item.stored_at)}", "bold")
    of_model = value.response_metadata
    name = value.name if value.type == "tool" else None
    model = of_model.get("model_name") or of_model.get("model")
    said_at = parse_time(of_model.get("create_time")) or item.stored_at
    parts = [value.type, name, format_time(said_at), model]
    text = " · ".join(" ".join(str(part).split()) for part in parts if part)
    return OutputLine(f"{mark} {text}", f"bold {COLORS.get(value.type, '')}".strip())


def render_item_lines(value: Any) -> Iterator[OutputLine]:
    """What a message, or another item of a channel, says: text, calls, and other parts by kind."""
    content = value.content if _is_message(value) else value
    calls = [*getattr(value, "tool_calls", ()), *getattr(value, "invalid_tool_calls", ())]
    if calls and isinstance(content, list):  # some models say their calls in the content as well
        content = [part for part in content if _kind(part) not in _CALLS]
    text = _text(content)
    if getattr(value, "type", None) == "tool":
        yield from _indented(text)
    elif text:
        yield from _prose(text)
    for call in calls:
        yield from _call(call)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content.replace("\r\n", "\n")
    if isinstance(content, list) and all(isinstance(p, str) or _kind(p) for p in content):
        from perdure.memory.quotation import render_block_name

        return "\n".join(
            _text(
                part if isinstance(part, str) else str(part.get("text") or render_block_name(part))
            )
            for part in content
        )
    return _json(content)


def _kind(part: Any) -> str:
    return str(part.get("type") or "") if isinstance(part, dict) else ""


def _json(value: Any, indent: int | None = None) -> str:
    return jsonlib.dumps(
        value, ensure_ascii=False, indent=indent, default=lambda part: f"[{type(part).__name__}]"
    )


def _prose(text: str) -> Iterator[OutputLine]:
    fence = ""
    for row in text.split("\n"):
        fence, fixed = update_fence(row, fence)
        yield OutputLine(row, wraps=not fixed)


def _indented(text: str, by: str = _INDENT) -> Iterator[OutputLine]:
    """What a tool was given or gave back: JSON spread over lines, long data by size."""
    text = _DATA.sub(_of_size, text)
    if text[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):  # it only begins like JSON
            text = _json(jsonlib.loads(text), 2)
    for row in text.split("\n"):
        yield OutputLine(by + row, wraps=False)


def _of_size(match: re.Match[str]) -> str:
    return f"[{match[1] or 'data'}, {format_size(len(match[2]) * 3 // 4)}]"


def _call(call: Any) -> Iterator[OutputLine]:
    arguments = call.get("args")
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments or ""}
    texts = {name: _DATA.sub(_of_size, _text(value)) for name, value in arguments.items()}
    short = ", ".join(f"{name}={text}" for name, text in texts.items())
    if len(short) <= _SHORT and "\n" not in short:
        yield OutputLine(f"  → {call.get('name')}({short})", wraps=False)
        return
    yield OutputLine(f"  → {call.get('name')}", wraps=False)
    for name, text in texts.items():
        first, *rest = [text] if "\n" not in text else ["", text]
        yield OutputLine(f"{_INDENT}{name}: {first}".rstrip(), wraps=False)
        for lines in rest:
            yield from _indented(lines, _INDENT * 2)


# -- the tree of checkpoints


@app.command()
def show(
    thread: ThreadArgument,
    no_pager: NoPagerOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the checkpoints of a thread as a tree."""
    from perdure.checkpointers.titles import about
    from perdure.memory import VIEWS_NAMESPACE

    with open_database(db, allow_read_only=True) as file:
        head = find_thread_head(file, thread)
        chosen = head.thread_id
        checkpoints = [
            i for i in file.saver.checkpoints(chosen) if i.checkpoint_ns != VIEWS_NAMESPACE
        ]
        title = about(file.saver, chosen, head.metadata).get("title", "")
    if json:
        print_json(checkpoints)
        return
    with page_output(pager=not no_pager):
        named = escape_controls(f"{chosen}  {format_line(title)}".strip())
        print_tree(_tree(named, describe_status(head.status), checkpoints))


def _tree(named: str, state: str, checkpoints: list[CheckpointInfo]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    children: dict[tuple[str, str | None], list[CheckpointInfo]] = {}
    present = {(info.checkpoint_ns, info.checkpoint_id) for info in checkpoints}
    for info in sorted(checkpoints, key=lambda info: (info.ts, info.order)):
        parent = info.parent_id if (info.checkpoint_ns, info.parent_id) in present else None
        children.setdefault((info.checkpoint_ns, parent), []).append(info)
    root = Tree(Text.assemble((named, "bold"), (f"\n{state}" if state else "", "yellow")))
    for ns in dict.fromkeys(info.checkpoint_ns for info in reversed(checkpoints)):
        _grow(
            root.add(Text(format_line(ns, None), "italic")) if ns else root,
            children[ns, None],
            children,
        )
    return root


def _grow(tree: Tree, roots: list[CheckpointInfo], children: Children) -> None:
    """Add runs of checkpoints side by side; where several follow one, each under the one."""
    waiting = [(tree, root, len(roots) > 1) for root in roots]
    while waiting:
        below, info, is_fork = waiting.pop(0)
        node = below.add(_label(info, "fork " if is_fork else ""))
        after = children.get((info.checkpoint_ns, info.checkpoint_id), [])
        if len(after) == 1:
            waiting.insert(0, (node if is_fork else below, after[0], False))
        else:
            waiting += [(node, child, True) for child in after]


def _label(info: CheckpointInfo, mark: str) -> Text:
    from rich.text import Text

    # of a UUID the beginning with its time (RFC 9562, version 6) is enough
    short = info.checkpoint_id[:18] if len(info.checkpoint_id) == 36 else info.checkpoint_id
    step, source = info.metadata.get("step", "?"), info.metadata.get("source", "?")
    text = format_line(f"{mark}{short} · step {step} ({source})", None)
    if "messages" in info.counts:
        text += f", {format_count(info.counts['messages'], 'message')}"
    return Text(f"{text} ← head", "bold green") if info.is_head else Text(text)

"""Implement `perdure history` and `perdure show`, which show messages and checkpoints."""

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
    escape_control_characters,
    format_as_single_line,
    format_count,
    format_size,
    format_time,
    page_output,
    print_json,
    print_note,
    print_text,
    print_unwrapped_tree,
    update_code_fence_and_detect_code_line,
)

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from perdure.checkpointers import CheckpointInfo, HistoryItem, ThreadStatus

    # Maps the namespace and the id of a checkpoint to the checkpoint's children. With the id None,
    # the key maps to the checkpoints of the namespace whose parent is not in the tree.
    Children = Mapping[tuple[str, str | None], list[CheckpointInfo]]

COLORS: Final = {"human": "cyan", "ai": "green", "system": "magenta", "tool": "yellow"}
_CALL_TYPES: Final = ("tool_use", "tool_call", "function_call", "server_tool_call")
"""Types of content blocks that repeat a tool call of the message."""
# Maximum total length, in characters, of tool call arguments that are printed on the same line as
# the tool call.
_MAX_INLINE_ARGUMENTS: Final = 60
_DATA_URL: Final = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,([A-Za-z0-9+/=]{64,})"
)
# Maximum number of characters of a question to print. A longer question is truncated.
_MAX_QUESTION: Final = 500
# Maximum number of checkpoints whose metadata is searched for actions on the thread by someone
# other than the thread's own user. Only the newest checkpoints of the thread are searched.
_MAX_SEARCHED_CHECKPOINTS: Final = 200
_INDENT: Final = "    "


@app.command()
def history(
    thread: ThreadArgument,
    channel: Annotated[
        str, typer.Option(metavar="NAME", help="The state channel to show.")
    ] = "messages",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="ID", help="Show only the history up to this checkpoint.")
    ] = None,
    no_pager: NoPagerOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show all messages of a thread, or all items of another channel.

    The model sees the messages marked ●. Messages marked ○ were removed from the state, but are
    still in the history. Messages marked ◌ exist only on a branch that does not lead to the head.
    The mark ? means that it is unknown whether the model sees the marked item. Only items of a
    `DeltaChannel` that does not hold messages can have this mark.
    """
    from perdure.checkpointers.import_metadata import read_import_metadata
    from perdure.checkpointers.labels import describe_actions_of_callers_other_than_person

    with open_database(db, allow_read_only=True) as database:
        head = find_thread_head(database, thread)
        thread_id = head.thread_id
        checkpoint_id = (
            None if checkpoint is None else resolve_checkpoint_id(database, thread_id, checkpoint)
        )
        items = database.saver.history(thread_id, channel=channel, checkpoint_id=checkpoint_id)
        title = read_import_metadata(database.saver, thread_id, head.metadata).get("title")
        newest = database.saver.checkpoints(
            thread_id, checkpoint_ns="", limit=_MAX_SEARCHED_CHECKPOINTS
        )
    if json:
        print_json([_build_item_json(item) for item in items])
    elif items:
        with page_output(pager=not no_pager):
            if title:
                print_text(" ".join(title.split()), "bold")
            for number, item in enumerate(items):
                if number or title:
                    print_text()
                for part in (
                    render_heading(item),
                    *render_message_or_channel_item_lines(item.value),
                ):
                    print_text(*part)
    else:
        print_note(f"the channel {channel!r} of the thread {thread_id!r} is empty")
    if checkpoint_id is None:
        for action in describe_actions_of_callers_other_than_person(
            info.metadata for info in newest[::-1]
        ):
            print_note(f"{thread_id!r}: {format_as_single_line(action)}")
        if text := describe_status(head.status):
            print_note(f"the thread {thread_id!r} {text}")


def describe_status(status: ThreadStatus) -> str:
    """Describe the status of a thread that is waiting for an answer or has an unfinished run.

    The returned text is a verb phrase that can be printed after the thread's id. The text quotes
    the questions that the user has not answered, or names the nodes that would run next if the run
    were resumed. If the thread is idle, return "".
    """
    if status.state == "waiting":
        questions = (
            f"at {format_as_single_line(node)!r}: "
            f"{format_as_single_line(_render_content_text(question), _MAX_QUESTION)}"
            for node, question in status.questions
        )
        return f"is waiting for an answer ({'; '.join(questions)})"
    nodes = ", ".join(repr(format_as_single_line(node)) for node in dict.fromkeys(status.next))
    position = f"before {nodes}" if nodes else "at the end of a step"
    return f"has an unfinished run, which stopped {position}" if status.tasks else ""


def _build_item_json(item: HistoryItem) -> dict[str, Any]:
    """Convert a history item to a JSON object."""
    value: Any = item.value
    fields = (
        {**value.model_dump(exclude_none=True), "content": value.content}
        if _is_message(value)
        else {"content": value}
    )
    return {
        "seen": item.seen,
        "branch": item.branch,
        "position": item.position,
        "stored_at": item.stored_at,
        **fields,
    }


def _is_message(value: Any) -> bool:
    """Return whether an item in a channel is a LangChain message."""
    return hasattr(value, "text") and hasattr(value, "model_dump")


# -- text


def render_heading(item: HistoryItem) -> OutputLine:
    """Return the heading line of a history item: status mark, author, time and model.

    The status mark is one of ●, ○, ◌ and ?; see `history` for their meanings. The printed time is
    the message's creation time or, if the message has none, the time at which it was first stored.
    If the item is not a message, the heading contains only the status mark and the time at which
    the item was stored.
    """
    from perdure.memory.thread_messages import parse_time

    value = item.value
    mark = "?" if item.seen is None else "●" if item.seen else "◌" if item.branch else "○"
    if not _is_message(value):
        return OutputLine(f"{mark} {format_time(item.stored_at)}", "bold")
    metadata = value.response_metadata
    name = value.name if value.type == "tool" else None
    model = metadata.get("model_name") or metadata.get("model")
    created_at = parse_time(metadata.get("create_time")) or item.stored_at
    parts = [value.type, name, format_time(created_at), model]
    text = " · ".join(" ".join(str(part).split()) for part in parts if part)
    return OutputLine(f"{mark} {text}", f"bold {COLORS.get(value.type, '')}".strip())


def render_message_or_channel_item_lines(value: Any) -> Iterator[OutputLine]:
    """Yield the output lines for one channel item, such as a message.

    The first lines show the content of the item. The tool calls of a message are printed after its
    content. A content block without text is represented by its type and the name or URL of its
    file.
    """
    content = value.content if _is_message(value) else value
    calls = [*getattr(value, "tool_calls", ()), *getattr(value, "invalid_tool_calls", ())]
    # Some models repeat their tool calls as content blocks. Skip the repeated blocks, because the
    # tool calls are printed below the content.
    if calls and isinstance(content, list):
        content = [part for part in content if _block_type(part) not in _CALL_TYPES]
    text = _render_content_text(content)
    if getattr(value, "type", None) == "tool":
        yield from _render_indented_lines(text)
    elif text:
        yield from _render_markdown_lines(text)
    for call in calls:
        yield from _render_tool_call_lines(call)


def _render_content_text(content: Any) -> str:
    """Return the content of a message, or any other channel value, as text.

    For a content block without text, the returned text contains the result of `render_block_name`.
    If the content is neither text nor a list of content blocks, it is converted to JSON.
    """
    if isinstance(content, str):
        return content.replace("\r\n", "\n")
    if isinstance(content, list) and all(
        isinstance(part, str) or _block_type(part) for part in content
    ):
        from perdure.memory.quotation import render_block_name

        return "\n".join(
            _render_content_text(
                part if isinstance(part, str) else str(part.get("text") or render_block_name(part))
            )
            for part in content
        )
    return _dump_json(content)


def _block_type(part: Any) -> str:
    """Return the type of a content block, or "" if the value is not a content block."""
    return str(part.get("type") or "") if isinstance(part, dict) else ""


def _dump_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text.

    Objects that cannot be serialized as JSON are replaced by their type names.
    """
    return jsonlib.dumps(
        value, ensure_ascii=False, indent=indent, default=lambda part: f"[{type(part).__name__}]"
    )


def _render_markdown_lines(text: str) -> Iterator[OutputLine]:
    """Yield the lines of Markdown text. Lines of code blocks and tables are not wrapped."""
    fence = ""
    for row in text.split("\n"):
        fence, is_preformatted = update_code_fence_and_detect_code_line(row, fence)
        yield OutputLine(row, wraps=not is_preformatted)


def _render_indented_lines(text: str, indent: str = _INDENT) -> Iterator[OutputLine]:
    """Yield a tool's input or output as indented lines.

    JSON is reformatted with one value per line. Each base64 data URL with at least 64 characters of
    data is replaced with its media type and size.
    """
    text = _DATA_URL.sub(_describe_data, text)
    if text[:1] in ("{", "["):
        # A text that begins with a bracket may be invalid JSON. In that case, print the text
        # unchanged.
        with suppress(ValueError, RecursionError):
            text = _dump_json(jsonlib.loads(text), 2)
    for row in text.split("\n"):
        yield OutputLine(indent + row, wraps=False)


def _describe_data(match: re.Match[str]) -> str:
    """Return the media type and the size of the data URL matched by `match`."""
    return f"[{match[1] or 'data'}, {format_size(len(match[2]) * 3 // 4)}]"


def _render_tool_call_lines(call: Any) -> Iterator[OutputLine]:
    """Yield the lines that show a tool call and its arguments.

    Short arguments are shown on the same line as the tool call.
    """
    arguments = call.get("args")
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments or ""}
    texts = {
        name: _DATA_URL.sub(_describe_data, _render_content_text(value))
        for name, value in arguments.items()
    }
    inline = ", ".join(f"{name}={text}" for name, text in texts.items())
    if len(inline) <= _MAX_INLINE_ARGUMENTS and "\n" not in inline:
        yield OutputLine(f"  → {call.get('name')}({inline})", wraps=False)
        return
    yield OutputLine(f"  → {call.get('name')}", wraps=False)
    for name, text in texts.items():
        first, *rest = [text] if "\n" not in text else ["", text]
        yield OutputLine(f"{_INDENT}{name}: {first}".rstrip(), wraps=False)
        for lines in rest:
            yield from _render_indented_lines(lines, _INDENT * 2)


# -- the tree of checkpoints


@app.command()
def show(
    thread: ThreadArgument,
    no_pager: NoPagerOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show the checkpoints of a thread as a tree."""
    from perdure.checkpointers.import_metadata import read_import_metadata
    from perdure.memory import VIEWS_NAMESPACE

    with open_database(db, allow_read_only=True) as database:
        head = find_thread_head(database, thread)
        thread_id = head.thread_id
        checkpoints = [
            info
            for info in database.saver.checkpoints(thread_id)
            if info.checkpoint_ns != VIEWS_NAMESPACE
        ]
        title = read_import_metadata(database.saver, thread_id, head.metadata).get("title", "")
    if json:
        print_json(checkpoints)
        return
    with page_output(pager=not no_pager):
        heading = escape_control_characters(f"{thread_id}  {format_as_single_line(title)}".strip())
        print_unwrapped_tree(
            _build_checkpoint_tree(heading, describe_status(head.status), checkpoints)
        )


def _build_checkpoint_tree(heading: str, status: str, checkpoints: list[CheckpointInfo]) -> Tree:
    """Build the tree of a thread's checkpoints, with one subtree for each subgraph's namespace.

    Args:
        heading: The text at the root.
        status: The status of the thread, from `describe_status`.
        checkpoints: The checkpoints of all checkpoint namespaces, newest first.
    """
    from rich.text import Text
    from rich.tree import Tree

    children: dict[tuple[str, str | None], list[CheckpointInfo]] = {}
    keys = {(info.checkpoint_ns, info.checkpoint_id) for info in checkpoints}
    for info in sorted(checkpoints, key=lambda info: (info.ts, info.order)):
        parent = info.parent_id if (info.checkpoint_ns, info.parent_id) in keys else None
        children.setdefault((info.checkpoint_ns, parent), []).append(info)
    root = Tree(Text.assemble((heading, "bold"), (f"\n{status}" if status else "", "yellow")))
    for namespace in dict.fromkeys(info.checkpoint_ns for info in reversed(checkpoints)):
        subtree = (
            root.add(Text(format_as_single_line(namespace, None), "italic")) if namespace else root
        )
        _add_checkpoint_nodes(subtree, children[namespace, None], children)
    return root


def _add_checkpoint_nodes(tree: Tree, roots: list[CheckpointInfo], children: Children) -> None:
    """Add checkpoints and all of their descendants to the printed tree.

    A fork is a checkpoint whose parent has several children, or one of several checkpoints in
    `roots`. The descendants of a fork are listed one after another below the fork, all at the same
    indentation level. If a checkpoint has several children, the list ends with that checkpoint, and
    the children are nested below it as the next forks. A thread without forks is printed as a flat
    list.
    """
    pending = [(tree, root, len(roots) > 1) for root in roots]
    while pending:
        parent_node, info, is_fork = pending.pop(0)
        node = parent_node.add(_render_checkpoint_line(info, "fork " if is_fork else ""))
        successors = children.get((info.checkpoint_ns, info.checkpoint_id), [])
        if len(successors) == 1:
            pending.insert(0, (node if is_fork else parent_node, successors[0], False))
        else:
            pending += [(node, child, True) for child in successors]


def _render_checkpoint_line(info: CheckpointInfo, line_prefix: str) -> Text:
    """Return a checkpoint's line in the tree: id, step, source and number of messages."""
    from rich.text import Text

    # If the checkpoint id is a UUID, print only its first 18 characters. In a version 6 UUID, these
    # characters contain the timestamp (RFC 9562), which is enough to identify the checkpoint.
    short_id = info.checkpoint_id[:18] if len(info.checkpoint_id) == 36 else info.checkpoint_id
    step, source = info.metadata.get("step", "?"), info.metadata.get("source", "?")
    text = format_as_single_line(f"{line_prefix}{short_id} · step {step} ({source})", None)
    if "messages" in info.counts:
        text += f", {format_count(info.counts['messages'], 'message')}"
    return Text(f"{text} ← head", "bold green") if info.is_head else Text(text)

"""`perdure history`: everything that was said on a thread, to be read."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, NoPager, Thread, app, checkpoint_id, opened, thread_id
from perdure.cli.output import Line, as_json, fixed_line, moment, note, paged, size
from perdure.cli.threads import in_utc, stands

if TYPE_CHECKING:
    from perdure.checkpointers import HistoryItem

COLORS: Final = {"human": "cyan", "ai": "green", "system": "magenta", "tool": "yellow"}
_CALLS: Final = ("tool_use", "tool_call", "function_call", "server_tool_call")
_SHORT: Final = 60  # characters of arguments that stand beside a call
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,([A-Za-z0-9+/=]{64,})")
_INDENT: Final = "    "


@app.command()
def history(
    thread: Thread,
    channel: Annotated[
        str, typer.Option(metavar="NAME", help="The channel of the state to show.")
    ] = "messages",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="ID", help="Only what led to this checkpoint.")
    ] = None,
    no_pager: NoPager = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Show everything that was said on a thread.

    The model sees messages marked ●; ○ is history only, ◌ is on a branch.
    """
    from perdure.checkpointers.titles import about

    with opened(db, reads=True) as file:
        chosen = thread_id(file, thread)
        at = None if checkpoint is None else checkpoint_id(file, chosen, checkpoint)
        said = file.saver.history(chosen, channel=channel, checkpoint_id=at)
        head = file.saver.head(chosen)
        title = about(file.saver, chosen, head.metadata).get("title")
    if json:
        as_json([_plain(item) for item in said])
    elif said:
        paged(_lines(said, title), pager=not no_pager)
    else:
        note(f"nothing was said on {chosen!r} in the channel {channel!r}")
    if at is None and (text := stands(head.status)):
        note(f"{chosen!r} {text}")


def _plain(item: HistoryItem) -> dict[str, Any]:
    value: Any = item.value
    said = {"content": value}
    if _is_message(value):
        said = {**value.model_dump(exclude_none=True), "content": value.content}
    return {"seen": item.seen, "branch": item.branch, "position": item.position, **said}


def _is_message(value: Any) -> bool:
    return hasattr(value, "text") and hasattr(value, "model_dump")


# -- for people


def _lines(said: Iterable[HistoryItem], title: str | None) -> Iterator[Line]:
    if title:
        yield Line(" ".join(title.split()), "bold")
        yield Line("")
    for number, item in enumerate(said):
        if number:
            yield Line("")
        mark = "●" if item.seen else "◌" if item.branch else "○"
        yield heading(item.value, mark)
        yield from spoken(item.value)


def heading(value: Any, mark: str) -> Line:
    """Who said something, when, and by which model, as far as that is known."""
    if not _is_message(value):
        return Line(mark, "bold")
    known = value.response_metadata
    name = value.name if value.type == "tool" else None
    model, at = known.get("model_name") or known.get("model"), in_utc(known.get("create_time"))
    parts = [value.type, name, moment(at), model]
    text = " · ".join(" ".join(str(part).split()) for part in parts if part)
    return Line(f"{mark} {text}", f"bold {COLORS.get(value.type, '')}".strip())


def spoken(value: Any) -> Iterator[Line]:
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
        from perdure.memory.quotation import block_name

        return "\n".join(
            _text(part if isinstance(part, str) else str(part.get("text") or block_name(part)))
            for part in content
        )
    return _json(content)


def _kind(part: Any) -> str:
    return str(part.get("type") or "") if isinstance(part, dict) else ""


def _json(value: Any, indent: int | None = None) -> str:
    return jsonlib.dumps(
        value, ensure_ascii=False, indent=indent, default=lambda part: f"[{type(part).__name__}]"
    )


def _prose(text: str) -> Iterator[Line]:
    fence = ""
    for line in text.split("\n"):
        fence, fixed = fixed_line(line, fence)
        yield Line(line, wraps=not fixed)


def _indented(text: str, by: str = _INDENT) -> Iterator[Line]:
    """What a tool was given or gave back: JSON spread over lines, long data by size."""
    text = _DATA.sub(_of_size, text)
    if text[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):  # it only begins like JSON
            text = _json(jsonlib.loads(text), 2)
    for line in text.split("\n"):
        yield Line(by + line, wraps=False)


def _of_size(found: re.Match[str]) -> str:
    return f"[{found[1] or 'data'}, {size(len(found[2]) * 3 // 4)}]"


def _call(call: Any) -> Iterator[Line]:
    given = call.get("args")
    named = given if isinstance(given, dict) else {"arguments": given or ""}
    texts = {name: _DATA.sub(_of_size, _text(value)) for name, value in named.items()}
    short = ", ".join(f"{name}={text}" for name, text in texts.items())
    if len(short) <= _SHORT and "\n" not in short:
        yield Line(f"  → {call.get('name')}({short})", wraps=False)
        return
    yield Line(f"  → {call.get('name')}", wraps=False)
    for name, text in texts.items():
        first, *rest = [text] if "\n" not in text else ["", text]
        yield Line(f"{_INDENT}{name}: {first}".rstrip(), wraps=False)
        for lines in rest:
            yield from _indented(lines, _INDENT * 2)

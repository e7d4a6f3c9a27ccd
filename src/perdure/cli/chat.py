"""`perdure chat`: talk on a thread, from where it was left."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from perdure.cli.app import DB, app, open_saver, settings_for
from perdure.cli.output import counted, line, notes, spoken
from perdure.cli.titles import about_thread
from perdure.errors import ConfigurationError, ModelFailed, UnknownThread

_SHOWN = 4  # messages repeated when a thread is resumed


@app.command()
def chat(
    thread: Annotated[str, typer.Option("--thread", "-t", help="The conversation to go on with.")],
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this, print the answer, and end.")
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(help="Show the model at most this many earlier messages; history keeps all."),
    ] = None,
    db: DB = None,
) -> None:
    """Talk on a thread, from where it was, also after a crash; /quit or end of input ends."""
    from perdure.graphs import chat_graph
    from perdure.graphs.configured import configured_model

    if message is not None and not message.strip():
        raise ConfigurationError("--message is empty; give it a text, or leave it out to type one")
    settings = settings_for(db)
    with open_saver(db) as saver:
        window = _window(keep_last)
        graph = chat_graph(configured_model(settings), checkpointer=saver, window=window)
        config: dict[str, Any] = {"configurable": {"thread_id": thread}}
        _resume(graph, saver, config, thread)
        config["metadata"] = _carried(saver, thread)
        for said in [message] if message is not None else _typed():
            new = {"messages": [{"role": "user", "content": said}]}
            _turn(graph, new, config, "What you said is stored; start the chat again for an answer")


def _window(keep_last: int | None) -> Any:
    """The earlier messages that the model is shown, and the new one."""
    from perdure.memory import trim

    if keep_last is None:
        return None
    if keep_last < 1:
        raise ConfigurationError(f"--keep-last is {keep_last}; expected at least 1")
    return trim(messages=keep_last + 1, mode="state")


def _carried(saver: Any, thread: str) -> dict[str, Any]:
    """What each new checkpoint is to say of the conversation, so that the newest always does."""
    from perdure.cli.storing import TITLED

    with suppress(UnknownThread):
        known = about_thread(saver, thread)
        return {**known, TITLED: True} if "title" in known else known
    return {}


def _resume(graph: Any, saver: Any, config: Any, thread: str) -> None:
    """Say where the thread stands, and finish what was cut off."""
    state = graph.get_state(config)
    if not state.created_at:
        notes.print(f"thread {thread!r} is new", style="dim", markup=False)
        return
    said = saver.history(thread)
    seen = sum(item.seen for item in said)
    notes.print(
        f"thread {thread!r}: {counted(len(said), 'message')} said, the model sees {seen}, "
        f"{len(said) - seen} are only history",
        style="dim",
        markup=False,
    )
    for item in said[-_SHOWN:]:
        mark = "●" if item.seen else "○"
        text = line(spoken(item.value))
        notes.print(f"{mark} {item.value.type}: {text}", style="dim", markup=False)
    if state.tasks:  # also when the answer was stored and the turn not yet ended
        notes.print("the last turn was cut off; finishing it", style="dim")
        _turn(graph, None, config, "That turn stays to be finished; nothing new was said")


def _typed() -> Any:
    """What the user types, a line a turn, until /quit or the end of input."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing, where it is there
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text:
            yield text


def _turn(graph: Any, given: Any, config: Any, otherwise: str) -> None:
    """Run a turn and print the answer as it comes; `otherwise`: how things stand if none does."""
    from openai import OpenAIError

    try:
        for chunk, meta in graph.stream(given, config, stream_mode="messages", durability="sync"):
            if meta.get("langgraph_node") == "respond" and chunk.type in ("AIMessageChunk", "ai"):
                print(chunk.text, end="", flush=True)
    except OpenAIError as exc:
        raise ModelFailed(
            f"the model did not answer: {line(str(exc), 300).rstrip('.')}. {otherwise}"
        ) from exc
    print(flush=True)

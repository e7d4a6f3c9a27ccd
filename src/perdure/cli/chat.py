"""`perdure chat`: talk on a thread, from where it was left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from perdure.cli.app import DB, app, open_saver, settings_for
from perdure.cli.longterm import MEMORIES, Mind, User, opened_mind
from perdure.cli.output import counted, line, notes, spoken
from perdure.cli.progress import at_work
from perdure.cli.titles import about_thread
from perdure.errors import (
    ConfigurationError,
    InvalidMessages,
    ModelFailed,
    PerdureError,
    UnknownThread,
)

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
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Recall nothing of other threads, keep nothing.")
    ] = False,
    user: User = None,
    db: DB = None,
) -> None:
    """Talk on a thread, from where it was, also after a crash; /quit or end of input ends.

    The model is shown what was said on other threads and bears on what you say.
    """
    from perdure.graphs import chat_graph
    from perdure.graphs.configured import configured_model

    if message is not None and not message.strip():
        raise ConfigurationError("--message is empty; give it a text, or leave it out to type one")
    settings = settings_for(db)
    config: dict[str, Any] = {"configurable": {"thread_id": thread}}
    with ExitStack() as stack:
        mind = None if no_memory else stack.enter_context(opened_mind(db, user, create=True))
        saver = stack.enter_context(open_saver(db)) if mind is None else mind.saver
        # without a user the thread is nobody's, so that no worker extracts it either
        config["configurable"]["user_id"] = "" if mind is None else mind.user
        if mind is not None:
            stack.enter_context(_extracted(mind))
        window = _window(keep_last)
        memory = [*window, *_memory(mind)]  # what is recalled is no earlier message
        graph = chat_graph(configured_model(settings), memory=memory, checkpointer=saver)
        talk = _Talk(graph, config, window)
        _resume(talk, saver, thread)
        config["metadata"] = _carried(saver, thread)
        for said in [message] if message is not None else _typed():
            new = {"messages": [{"role": "user", "content": said}]}
            talk.turn(new, "What you said is stored; start the chat again for an answer")


def _memory(mind: Mind | None) -> list[Any]:
    """The parts that recall and remember."""
    from perdure.memory.extraction import remember_turns
    from perdure.memory.recall import use_memories

    if mind is None:
        return []
    return [
        use_memories(mind.store, namespace=MEMORIES),
        remember_turns(mind.store, namespace=MEMORIES),
    ]


@contextmanager
def _extracted(mind: Mind) -> Iterator[None]:
    """Extract the turns of runs that were cut off, before the chat and after it."""
    _extract(mind)
    try:
        yield
    finally:
        _extract(mind)


def _extract(mind: Mind) -> None:
    from perdure.memory.due import DueThreads, Pace

    extraction = mind.extraction()
    try:
        with at_work("reading what was cut off …"):
            for job in DueThreads(extraction, Pace()).jobs():
                if job.namespace == mind.namespace and job.state != "dead":
                    with suppress(UnknownThread, InvalidMessages):  # deleted; a program's own
                        extraction.extract(job.thread_id, job.config)
    except PerdureError as exc:  # the next chat, or a worker, tries again
        notes.print(f"memories could not be extracted yet: {exc}", style="dim", markup=False)


def _window(keep_last: int | None) -> list[Any]:
    """The earlier messages that the model is shown, and the new one."""
    from perdure.memory.trim import trim

    if keep_last is None:
        return []
    if keep_last < 1:
        raise ConfigurationError(f"--keep-last is {keep_last}; expected at least 1")
    return [trim(max_tokens=keep_last + 1, token_counter=len)]


def _carried(saver: Any, thread: str) -> dict[str, Any]:
    """What each new checkpoint is to say of the conversation, so that the newest always does."""
    from perdure.cli.storing import TITLED

    with suppress(UnknownThread):
        known = about_thread(saver, thread)
        return {**known, TITLED: True} if "title" in known else known
    return {}


def _resume(talk: _Talk, saver: Any, thread: str) -> None:
    """Say where the thread stands, and finish what was cut off."""
    state = talk.graph.get_state(talk.config)
    if not state.created_at:
        notes.print(f"thread {thread!r} is new", style="dim", markup=False)
        return
    said = [item for item in saver.history(thread) if not item.branch]
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
        talk.turn(None, "That turn stays to be finished; nothing new was said")


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


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation as it goes on.

    Attributes:
        graph: Answers.
        config: Of its runs.
        window: What the thread keeps in its state after a turn; empty: everything.
    """

    graph: Any
    config: Any
    window: list[Any]

    def turn(self, given: Any, otherwise: str) -> None:
        """Run a turn and print the answer; `otherwise`: how things stand if none comes."""
        from openai import OpenAIError

        try:
            self._answer(given)
        except OpenAIError as exc:
            raise ModelFailed(
                f"the model did not answer: {line(str(exc), 300).rstrip('.')}. {otherwise}"
            ) from exc
        print(flush=True)

    def _answer(self, given: Any) -> None:
        stream = self.graph.stream(given, self.config, stream_mode="messages", durability="sync")
        for chunk, meta in stream:
            if meta.get("langgraph_node") == "respond" and chunk.type in ("AIMessageChunk", "ai"):
                print(chunk.text, end="", flush=True)
        for part in self.window:
            if update := part.invoke(self.graph.get_state(self.config).values):
                self.graph.update_state(self.config, update, as_node="respond")

"""`perdure chat`: talk on a thread, from where it was left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, app, open_saver, settings_for
from perdure.cli.forming import Later, form_waiting
from perdure.cli.longterm import MEMORIES, Mind, User, opened_mind
from perdure.cli.output import counted, line, notes, spoken
from perdure.cli.progress import at_work
from perdure.cli.titles import about_thread
from perdure.errors import ConfigurationError, ModelFailed, PerdureError, UnknownThread

if TYPE_CHECKING:
    from perdure.memory.extraction import Extraction

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
    later: Later = False,
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
        if mind is not None:
            config["configurable"] |= mind.config["configurable"]
            stack.enter_context(_formed(mind, later))
        graph = chat_graph(
            configured_model(settings),
            checkpointer=saver,
            window=_window(keep_last),
            recall=None if mind is None else _recalling(mind),
        )
        talk = _Talk(graph, config, None if mind is None else mind.extraction())
        _resume(talk, saver, thread)
        config["metadata"] = _carried(saver, thread)
        for said in [message] if message is not None else _typed():
            new = {"messages": [{"role": "user", "content": said}]}
            talk.turn(new, "What you said is stored; start the chat again for an answer")


def _recalling(mind: Mind) -> Any:
    """What shows the model memories, those too that are not formed yet."""
    from perdure.memory.forming.tails import Tails
    from perdure.memory.recollection.recalling import use_memories

    return use_memories(store=mind.store, namespaces=[MEMORIES], tails=Tails(mind.extraction()))


@contextmanager
def _formed(mind: Mind, later: bool) -> Iterator[None]:
    """Form memories of what was left waiting, and at the end of what was said here."""
    if later:
        yield
        return
    _form(mind)
    try:
        yield
    finally:
        _form(mind)


def _form(mind: Mind) -> None:
    try:
        with at_work("forming memories …"):
            form_waiting(mind)
    except PerdureError as exc:  # what waits goes on waiting, and is recalled all the same
        notes.print(f"memories could not be formed yet: {exc}", style="dim", markup=False)


def _window(keep_last: int | None) -> Any:
    """The earlier messages that the model is shown, and the new one."""
    from perdure.memory import trim

    if keep_last is None:
        return None
    if keep_last < 1:
        raise ConfigurationError(f"--keep-last is {keep_last}; expected at least 1")
    return trim(max_messages=keep_last + 1, mode="state")


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
        extraction: Notes that memories are to be formed of it; None: they are not.
    """

    graph: Any
    config: Any
    extraction: Extraction | None

    def turn(self, given: Any, otherwise: str) -> None:
        """Run a turn and print the answer; `otherwise`: how things stand if none comes."""
        from openai import OpenAIError

        self._note()  # before it, so that a process which is killed loses nothing of it
        try:
            self._answer(given)
        except OpenAIError as exc:
            raise ModelFailed(
                f"the model did not answer: {line(str(exc), 300).rstrip('.')}. {otherwise}"
            ) from exc
        self._note()  # a worker may have formed the question by itself meanwhile
        print(flush=True)

    def _answer(self, given: Any) -> None:
        stream = self.graph.stream(given, self.config, stream_mode="messages", durability="sync")
        for chunk, meta in stream:
            if meta.get("langgraph_node") == "respond" and chunk.type in ("AIMessageChunk", "ai"):
                print(chunk.text, end="", flush=True)

    def _note(self) -> None:
        if self.extraction is not None:
            self.extraction.note(self.config["configurable"]["thread_id"], self.config)

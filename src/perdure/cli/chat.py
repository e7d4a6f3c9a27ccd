"""`perdure chat`: talk on a thread, from where it was left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from shlex import quote
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    UserOption,
    app,
    complete_thread_id,
    open_database,
)
from perdure.cli.history import COLORS, describe_status
from perdure.cli.memories import extract_due_threads
from perdure.cli.output import (
    format_count,
    format_line,
    print_note,
    print_note_line,
    print_stream,
    show_status,
)
from perdure.errors import (
    ConfigurationError,
    ModelFailed,
    PerdureError,
    StorageUnavailable,
)

_WAIT_S: Final = 30  # for the end of another run of the thread
_SHOWN: Final = 4  # messages repeated when a thread is resumed
_NODES: Final = ("remember", "summarize")  # which a chat without memory, or without a model, lacks
_HELP: Final = """\
Each line is a message to the model. It is shown this thread as well, and
memories of other threads that have to do with the message.
  /help  show this
  /quit  leave, as Ctrl-D does
The thread stays: 'perdure chat -t {0}' goes on with it,
'perdure history {0}' shows all of it."""
_CARRIED: Final = ("title", "titled", "create_time", "owner")  # of a checkpoint, to the next


@app.command()
def chat(
    thread: Annotated[
        str,
        typer.Option(
            *("--thread", "-t"),
            metavar="ID",
            help="The thread to begin or to go on with.",
            autocompletion=complete_thread_id,
        ),
    ],
    message: Annotated[
        str | None,
        typer.Option(
            *("--message", "-m"), metavar="TEXT", help="Send this, print the answer, and end."
        ),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show the model only the last N messages."),
    ] = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Neither recall memories nor add any.")
    ] = False,
    user: UserOption = None,
    db: DbOption = None,
) -> None:
    """Talk on a thread, until /quit or the end of input.

    The thread goes on where it was, also after a crash. The model is shown memories of other
    threads that have to do with what you say.
    """
    if message is not None and not message.strip():
        raise ConfigurationError("--message is empty; give it a text, or leave it out to type one")
    with open_database(db, user, create=True) as file, ExitStack() as stack:
        # without a user_id no worker extracts the thread either
        talk = _Talk(file, thread, "" if no_memory else file.user, keep_last)
        talk.check()
        if message is None and sys.stdin.isatty():
            _introduce(file)
        if not no_memory:
            _extract(file)
            stack.callback(_extract, file)
        _resume(talk)
        for text in [message] if message is not None else _typed(thread):
            new = {"messages": [{"role": "user", "content": text}]}
            talk.turn(new, "What you said is stored; start the chat again for an answer")


def _introduce(file: CommandDatabase) -> None:
    """Say what a chat is, who answers, and how it ends."""
    chosen = file.settings
    host = urlsplit(chosen.base_url or "").netloc.rpartition("@")[2]  # without a password
    answers = f"The model is {chosen.model!r} at {host or 'OpenAI'}."
    if chosen.model is None:
        answers = "No model is configured: answers quote what was said. PERDURE_MODEL sets one."
    print_note("perdure chat: a conversation that is stored, and goes on when you come back.")
    print_note(f"{answers}\n/help says more, /quit or Ctrl-D leaves.")


def _extract(file: CommandDatabase) -> None:
    """Extract the turns of runs that were cut off."""
    try:
        with show_status("looking for messages of runs that were cut off …"):
            extract_due_threads(file)
    except PerdureError as exc:  # the next chat, or a worker, tries again
        print_note(f"memories could not be extracted yet: {exc}", "dim")


class _Talk:
    """A conversation as it goes on; a user without a name has no memory."""

    def __init__(
        self, file: CommandDatabase, thread: str, user: str, keep_last: int | None
    ) -> None:
        from perdure.graphs import chat_graph
        from perdure.graphs.configured import configured_model
        from perdure.memory import record_views, remember_turns, trim, use_memories

        self.file, self.thread, self.user = file, thread, user
        self.window = trim(max_tokens=keep_last + 1, token_counter=len) if keep_last else None
        # before what is recalled, which is no earlier message
        memory: list[Any] = [self.window] if self.window else []
        if user:
            memory += [use_memories(file.store), remember_turns(file.store)]
        model = configured_model(file.settings)
        self.graph: Any = chat_graph(model, memory=memory, checkpointer=file.saver)
        configurable = {"thread_id": thread, "user_id": user}
        self.config: Any = {"configurable": configurable, "callbacks": [record_views(file.saver)]}

    def check(self) -> None:
        """Refuse a thread of another user, or one that another graph has to go on with first.

        What its head says of the thread is noted for the checkpoints of the next turn.
        """
        head = self.file.saver.head(self.thread)
        if head is None:
            return
        owner, name = str(head.owner or ""), head.metadata.get("graph_id")
        if owner not in ("", self.file.user):
            raise ConfigurationError(
                f"the thread {self.thread!r} belongs to {owner!r}, and you are "
                f"{self.file.user!r}; go on with --user {quote(owner)}, or take another id for a "
                "thread of your own"
            )
        graph = f"the graph {name!r}" if name else "another graph"
        if head.status.state == "waiting":
            raise ConfigurationError(
                f"the thread {self.thread!r} {describe_status(head.status)}. The question is from "
                f"{graph}, so this chat cannot answer it: resume the thread in the program that "
                "runs that graph, with Command(resume=...), or with a client of its server"
            )
        if {task.node for task in head.status.tasks} - {*self.graph.nodes, *_NODES}:
            raise ConfigurationError(
                f"the thread {self.thread!r} belongs to {graph}, and "
                f"{describe_status(head.status)}. Finish its run in the program that runs that "
                "graph, with None as the input, before you chat here"
            )
        # what each new checkpoint is to say of the thread, as the head does: also whose it is
        self.config["metadata"] = {n: v for n, v in head.metadata.items() if n in _CARRIED}
        if owner and owner != self.user:
            self.config["metadata"]["owner"] = head.owner

    def turn(self, update: Any, otherwise: str) -> None:
        """Run a turn and print the answer; `otherwise`: how things stand if none comes.

        Raises:
            StorageUnavailable: Another run of the thread does not end.
        """
        with ExitStack() as stack:
            try:
                with show_status("waiting for the end of another run of the thread …"):
                    stack.enter_context(self.file.saver.lock(self.thread, timeout_s=_WAIT_S))
            except StorageUnavailable as exc:
                if not isinstance(exc.__cause__, TimeoutError):
                    raise
                raise StorageUnavailable(
                    f"another run of the thread {self.thread!r} has not ended for {_WAIT_S} s; "
                    "wait for its end, and try again"
                ) from exc
            self.check()  # it may have gone on meanwhile
            self._run(update, otherwise)

    def _run(self, update: Any, otherwise: str) -> None:
        from openai import OpenAIError

        from perdure.memory.model_call import describe_failed_model

        options: Any = {"stream_mode": "messages", "durability": "sync"}
        parts = (
            chunk.text
            for chunk, meta in self.graph.stream(update, self.config, **options)
            if chunk.type in ("AIMessageChunk", "ai") and meta.get("langgraph_node") == "respond"
        )
        try:
            if not print_stream(
                parts, COLORS["ai"]
            ):  # the answer was stored before the turn was cut off
                last = self.graph.get_state(self.config).values["messages"][-1]
                print_stream([last.text] if last.type == "ai" else [], COLORS["ai"])
        except PerdureError:
            raise
        except (OpenAIError, ValueError) as exc:  # the second is langchain's, of a broken answer
            why = format_line(str(exc), 300).rstrip(".")
            raise ModelFailed(
                f"{describe_failed_model(exc)} did not answer: {why}. {otherwise}"
            ) from exc
        if self.window:  # the state keeps no more than the next answer is shown
            removals = self.window.invoke(self.graph.get_state(self.config).values)
            if removals:
                self.graph.update_state(self.config, removals, as_node="respond")


def _resume(talk: _Talk) -> None:
    """Say where the thread stands, and finish what was cut off."""
    state = talk.graph.get_state(talk.config)
    if not state.created_at:
        print_note(f"thread {talk.thread!r} is new", "dim")
        return
    items = [item for item in talk.file.saver.history(talk.thread) if not item.branch]
    seen = sum(bool(item.seen) for item in items)
    counts = (
        f"thread {talk.thread!r}: {format_count(len(items), 'message')} said, the model sees {seen}"
    )
    print_note(
        counts + (f", {len(items) - seen} are only history" if seen < len(items) else ""), "dim"
    )
    for item in items[-_SHOWN:]:
        head = f"{'●' if item.seen else '○'} {item.value.type}: "
        text = item.value.text or ", ".join(
            call["name"] for call in getattr(item.value, "tool_calls", ())
        )
        print_note_line(head + text, COLORS.get(item.value.type, ""))
    if state.tasks:  # also when the answer was stored and the turn not yet ended
        print_note("the last turn was cut off; finishing it", "dim")
        talk.turn(None, "That turn stays to be finished; nothing new was said")


def _typed(thread: str) -> Iterator[str]:
    """What the user types, a line a turn, until /quit or the end of input."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing, where it is there
    while True:
        try:
            text = input("> " if by_hand else "").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/help":
            print_note(_HELP.format(quote(thread)))
        elif text:
            yield text

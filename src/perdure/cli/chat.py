"""Implement `perdure chat`, for chatting with a model in a stored thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    UserOption,
    app,
    complete_thread_id,
    explain_lock_timeout,
    open_database,
)
from perdure.cli.history import COLORS, describe_status
from perdure.cli.memories import extract_memories_of_due_threads
from perdure.cli.output import (
    format_as_single_line,
    format_count,
    print_arriving_text_and_check_if_any,
    print_note,
    print_note_line,
    show_status,
)
from perdure.errors import (
    ConfigurationError,
    ModelFailed,
    PerdureError,
)

if TYPE_CHECKING:
    from perdure.checkpointers.records import ClientMetadata
    from perdure.checkpointers.reports import ThreadHead
    from perdure.run_tables.thread_list import ListedThread, RunStatus

# Maximum time, in seconds, to wait for another run of the thread to end.
_LOCK_TIMEOUT_S: Final = 30
# Number of recent messages to print when a chat resumes a thread.
_REPEATED_MESSAGES: Final = 4
_OPTIONAL_NODES: Final = ("remember", "summarize")
"""Nodes that the graph of a chat lacks if the chat has no memory or no model."""
_HELP: Final = """\
Each line that you type is a message to the model. With the message, the model
sees this thread and the memories of other threads that match the message.
  /help  print this help
  /quit  end the chat, as Ctrl-D does
The thread is stored. Run 'perdure chat -t {0}' to continue it,
or 'perdure history {0}' to print all of it."""
_INHERITED_METADATA: Final = ("title", "titled", "create_time", "owner")
"""Metadata of the head that the checkpoints of the next turn inherit."""


@app.command()
def chat(
    thread: Annotated[
        str,
        typer.Option(
            *("--thread", "-t"),
            metavar="ID",
            help="The thread to start or to continue.",
            autocompletion=complete_thread_id,
        ),
    ],
    message: Annotated[
        str | None,
        typer.Option(
            *("--message", "-m"),
            metavar="TEXT",
            help="Send this message, print the answer, and exit.",
        ),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Send only N messages before the new message."),
    ] = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Do not recall or store memories.")
    ] = False,
    user: UserOption = None,
    db: DbOption = None,
) -> None:
    """Chat in a thread, until /quit or the end of input.

    The chat continues the thread where it stopped, even after a crash. The model sees memories of
    other threads that match your message.
    """
    if message is not None and not message.strip():
        raise ConfigurationError(
            "--message is empty; pass some text, or remove --message to type your messages"
        )
    with open_database(db, user, create=True) as database, ExitStack() as stack:
        # With `--no-memory`, run the graph with an empty user id. Background workers extract no
        # memories from a thread whose user id is empty.
        memory_user = "" if no_memory else database.user
        session = _ChatSession(database, thread, memory_user, keep_last)
        session.check_may_continue_thread_and_load_head()
        if message is None and sys.stdin.isatty():
            _print_purpose_model_and_commands(database)
        if not no_memory:
            _extract_memories(database)
            stack.callback(_extract_memories, database)
        _print_last_messages_and_finish_turn(session)
        for text in [message] if message is not None else _iter_messages_typed_by_user(thread):
            session.run_turn(
                {"messages": [{"role": "user", "content": text}]},
                "Your message is stored; start the chat again for an answer",
            )


def _print_purpose_model_and_commands(database: CommandDatabase) -> None:
    """Print what the chat does, which model it uses, and how to end it."""
    settings = database.settings
    # Print only the host of the URL, because the URL may contain a user name and a password.
    host = urlsplit(settings.base_url or "").netloc.rpartition("@")[2]
    model = f"The model is {settings.model!r} at {host or 'OpenAI'}."
    if settings.model is None:
        model = "No model is configured, so answers quote memories. PERDURE_MODEL sets a model."
    print_note("perdure chat: your conversation is stored, and you can continue it later.")
    print_note(f"{model}\n/help prints help, /quit or Ctrl-D ends the chat.")


def _extract_memories(database: CommandDatabase) -> None:
    """Extract memories from messages that were not processed because a run was interrupted."""
    try:
        with show_status("looking for messages of interrupted runs …"):
            extract_memories_of_due_threads(database)
    # If the extraction fails, the next `perdure chat` command or a worker retries it.
    except PerdureError as exc:
        print_note(f"memories could not be extracted yet: {exc}", "dim")


class _ChatSession:
    """A chat between the user and a graph in one thread. Each message of the user starts a run.

    Attributes:
        database: The database of the command.
        thread_id: The id of the thread.
        user: The id of the user whose memories the chat uses, or "" for a chat without memory.
        window: The node that removes all but the newest messages, from the model's input and after
            each turn from the state. None keeps all messages.
        graph: The compiled graph.
        config: The config of each run.
    """

    def __init__(
        self, database: CommandDatabase, thread_id: str, user: str, keep_last: int | None
    ) -> None:
        from perdure.graphs import chat_graph
        from perdure.graphs.configured import build_configured_model
        from perdure.memory import record_views, remember_turns, trim, use_memories

        self.database, self.thread_id, self.user = database, thread_id, user
        self.window = trim(max_tokens=keep_last + 1, token_counter=len) if keep_last else None
        # The node `window` keeps the user's new message and the `keep_last` messages before it, so
        # its limit is `keep_last + 1` messages. In the list `memory`, `window` precedes the node
        # `use_memories`, so that recalled memories do not count towards the limit on messages.
        memory: list[Any] = [self.window] if self.window else []
        if user:
            memory += [use_memories(database.store), remember_turns(database.store)]
        self.graph: Any = chat_graph(
            build_configured_model(database.settings), memory=memory, checkpointer=database.saver
        )
        self.config: Any = {
            "configurable": {"thread_id": thread_id, "user_id": user},
            "callbacks": [record_views(database.saver)],
        }

    def check_may_continue_thread_and_load_head(self) -> ThreadHead | None:
        """Check that the user can continue the thread, and load the head of the thread.

        The metadata of the head is copied to `config`.

        Returns:
            The head of the thread, or None for a new thread.

        Raises:
            ConfigurationError: The thread belongs to another user, or its last run must be finished
                by another graph first.
        """
        from perdure.checkpointers.owner_record import may_owners_be_organisations

        head = self.database.saver.head(self.thread_id)
        if head is None:
            return None
        # If owners can be organisations, only `user_id` identifies a person.
        owner_or_user = (
            head.metadata.get("user_id")
            if may_owners_be_organisations(self.database.saver.database)
            else head.owner
        )
        owner, name = str(owner_or_user or ""), head.metadata.get("graph_id")
        if owner not in ("", self.database.user):
            raise ConfigurationError(
                f"the thread {self.thread_id!r} belongs to the user {owner!r}, but you are the "
                f"user {self.database.user!r}; pass --user {quote(owner)}, or start your own "
                "thread with another --thread id"
            )
        graph = f"the graph {name!r}" if name else "another graph"
        if head.status.state == "waiting":
            raise ConfigurationError(
                f"the thread {self.thread_id!r} {describe_status(head.status)}. The interrupt "
                f"comes from {graph}, so this chat cannot answer it. Resume the thread with "
                "Command(resume=...) in the application or on the server that runs the graph"
            )
        if {task.node for task in head.status.tasks} - {*self.graph.nodes, *_OPTIONAL_NODES}:
            raise ConfigurationError(
                f"the thread {self.thread_id!r} {describe_status(head.status)}. The run belongs "
                f"to {graph}, so this chat cannot finish it. Invoke the graph with None as the "
                "input in its own application, then continue here"
            )
        self.config["metadata"] = {
            name: value for name, value in head.metadata.items() if name in _INHERITED_METADATA
        }
        if owner and owner != self.user:
            self.config["metadata"]["owner"] = head.owner
        return head

    def run_turn(self, update: Any, failure_note: str) -> None:
        """Run one turn while holding the thread's lock, and print the response.

        Args:
            update: The input of the graph. None continues an interrupted turn.
            failure_note: The last sentence of the error message if the model does not answer. It
                says what has been stored.

        Raises:
            StorageUnavailable: Another run of the thread did not end in time.
            ModelFailed: The model did not answer.
        """
        with ExitStack() as stack:
            with (
                explain_lock_timeout(self.thread_id, _LOCK_TIMEOUT_S),
                show_status("waiting until another run of the thread ends …"),
            ):
                stack.enter_context(
                    self.database.saver.lock(self.thread_id, timeout_s=_LOCK_TIMEOUT_S)
                )
            # Check the thread again, because another process may have changed it while this process
            # was waiting for the lock.
            former_head = self.check_may_continue_thread_and_load_head()
            self._exclude_memories_if_turn_is_of_other_user(
                former_head, is_new_turn=update is not None
            )
            try:
                self._stream_answer(update, failure_note)
            finally:
                if update is not None and self.user:
                    self._record_new_turn_of_user(former_head)

    def _exclude_memories_if_turn_is_of_other_user(
        self, head: ThreadHead | None, *, is_new_turn: bool
    ) -> None:
        """Disable memories for the next turn if the turn would answer another user's message.

        If a thread is also used on a server, other users may change it there. The server records in
        the thread that other users have changed it; see `ChangesByOtherUsers`.
        """
        from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
        from perdure.checkpointers.labels import STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY
        from perdure.run_tables.thread_list import ThreadList

        self.config["configurable"] = {"thread_id": self.thread_id, "user_id": self.user}
        self.config.setdefault("metadata", {}).pop(TURN_WITHOUT_MEMORY, None)
        if is_new_turn or head is None or not self.user:
            return
        thread = ThreadList(self.database.saver).get(self.thread_id)
        changes = "none" if thread is None else thread.changes_by_other_users
        if changes == "since_last_message" or (
            changes == "none" and STATE_FROM_OTHERS in head.metadata
        ):
            self.config["configurable"] |= {"user_id": "", WITHOUT_MEMORY_KEY: True}
            # The thread still belongs to the user.
            self.config["metadata"] |= {"user_id": self.user, TURN_WITHOUT_MEMORY: True}

    def _record_new_turn_of_user(self, former_head: ThreadHead | None) -> None:
        """Record that other users changed the thread before the user's last message.

        If the message was not added to the thread, do nothing.

        Args:
            former_head: The head of the thread before the turn, or None for a new thread.
        """
        from perdure.run_tables.thread_list import ThreadList

        head = self.database.saver.head(self.thread_id)
        if (
            head is None
            or head.metadata.get("source") == "input"
            or (former_head is not None and head.checkpoint_id == former_head.checkpoint_id)
        ):
            return

        def replace_changes(thread: ListedThread) -> tuple[ClientMetadata | None, RunStatus]:
            client = thread.client
            if client is not None and client.changes_by_other_users == "since_last_message":
                client = client._replace(changes_by_other_users="earlier")
            return client, thread.last_run_status

        ThreadList(self.database.saver).update_thread(self.thread_id, replace_changes)

    def _stream_answer(self, update: Any, failure_note: str) -> None:
        """Run the graph, and print the model's answer as it is streamed."""
        from openai import OpenAIError

        from perdure.memory.model_call import describe_name_and_url_of_failed_model

        options: Any = {"stream_mode": "messages", "durability": "sync"}
        parts = (
            chunk.text
            for chunk, metadata in self.graph.stream(update, self.config, **options)
            if chunk.type in ("AIMessageChunk", "ai")
            and metadata.get("langgraph_node") == "respond"
        )
        try:
            # If the turn was interrupted after the model's answer had been stored, the resumed run
            # streams nothing. In that case, print the stored answer.
            if not print_arriving_text_and_check_if_any(parts, COLORS["ai"]):
                last = self.graph.get_state(self.config).values["messages"][-1]
                print_arriving_text_and_check_if_any(
                    [last.text] if last.type == "ai" else [], COLORS["ai"]
                )
        except PerdureError:
            raise
        # Also catch ValueError, because LangChain raises it if the model response is malformed.
        except (OpenAIError, ValueError) as exc:
            reason = format_as_single_line(str(exc), 300).rstrip(".")
            raise ModelFailed(
                f"{describe_name_and_url_of_failed_model(exc)} did not answer: {reason}. "
                f"{failure_note}"
            ) from exc
        # Remove old messages from the state if the state contains more messages than `--keep-last`
        # allows.
        if self.window:
            removals = self.window.invoke(self.graph.get_state(self.config).values)
            if removals:
                self.graph.update_state(self.config, removals, as_node="respond")


def _print_last_messages_and_finish_turn(session: _ChatSession) -> None:
    """Print the last messages of the thread, and finish an interrupted turn."""
    state = session.graph.get_state(session.config)
    if not state.created_at:
        print_note(f"thread {session.thread_id!r} is new", "dim")
        return
    items = [item for item in session.database.saver.history(session.thread_id) if not item.branch]
    seen = sum(bool(item.seen) for item in items)
    count, hidden = format_count(len(items), "message"), len(items) - seen
    summary = f"thread {session.thread_id!r}: {count}, the model sees {seen}"
    print_note(summary + (f", {hidden} are only in the history" if hidden else ""), "dim")
    for item in items[-_REPEATED_MESSAGES:]:
        heading = f"{'●' if item.seen else '○'} {item.value.type}: "
        text = item.value.text or ", ".join(
            call["name"] for call in getattr(item.value, "tool_calls", ())
        )
        print_note_line(heading + text, COLORS.get(item.value.type, ""))
    # Do not infer from a stored response that the turn is finished, because the turn may still have
    # unfinished tasks.
    if state.tasks:
        print_note("the last turn was interrupted; finishing it", "dim")
        session.run_turn(None, "The last turn is still unfinished, and no new message was sent")


def _iter_messages_typed_by_user(thread_id: str) -> Iterator[str]:
    """Yield each line of user input as a message, until /quit or the end of input.

    Blank lines of the user's input are skipped, and the input /help prints the help of the chat.
    """
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing, if Python has it
    while True:
        try:
            text = input("> " if is_interactive else "").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/help":
            print_note(_HELP.format(quote(thread_id)))
        elif text:
            yield text

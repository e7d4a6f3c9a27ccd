"""Human messages that nodes make of a colleague's texts are not remembered as the person's words.

A colleague writes a text into the state of the person's thread, and the person goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Overwrite, interrupt
from langgraph_sdk.errors import UnprocessableEntityError
from typing_extensions import TypedDict

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.labels import STATE_FROM_OTHERS
from perdure.memory import Collection, Extraction, remember_turns
from perdure.server.http.auth_file import AuthFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.cli.commands import run
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import wait_until
from tests.server.test_person import (
    ACTING_TEAM_AUTH_FILE,
    TEAM_AUTH_FILE,
    Desk,
    Model,
    model,
    serve_desk,
)

__all__ = ["model"]
TOMS_TEXT = "My boat is a Kayak."
MIAS_TEXT = "My pet is an Otter."
TOMS_NOTE: Any = {"note": TOMS_TEXT}
HELLO_AGAIN: Any = {"messages": [{"role": "user", "content": "Hi."}]}
MIAS_MESSAGE: Any = {"messages": [{"role": "user", "content": MIAS_TEXT}]}


def apply_message_updates(state: Any, updates: Sequence[Any]) -> Any:
    """Apply `add_messages` to each update, as the reducer of a `DeltaChannel`."""
    for update in updates:
        state = add_messages(state or [], update)
    return state


MESSAGE_CHANNELS: dict[str, Any] = {
    "reducer": Annotated[list[AnyMessage], add_messages],
    "last value": list[Any],
    "delta": Annotated[list, DeltaChannel(apply_message_updates)],
    "delta with snapshots": Annotated[
        list, DeltaChannel(apply_message_updates, snapshot_frequency=1)
    ],
}


def build_graph(kind: str = "reducer", form: str = "message") -> Any:
    """Return a graph whose node `quote` makes a human message of the channel `note`.

    Args:
        kind: The type of the channel of the messages, or `subgraph` for a graph that runs the graph
            as a node and stores its state.
        form: The form in which the node returns the message.
    """
    if kind == "subgraph":
        inner = _build_simple_graph("reducer", form).compile(checkpointer=True)
        outer: Any = StateGraph(_build_state("reducer"))
        outer.add_node("inner", inner).add_node("remember", remember_turns())
        return outer.add_edge(START, "inner").add_edge("inner", "remember").compile()
    return _build_simple_graph(kind, form).compile()


def _build_state(kind: str) -> Any:
    make: Any = TypedDict
    return make("State", {"messages": MESSAGE_CHANNELS[kind], "note": str}, total=False)


def _build_simple_graph(kind: str, form: str) -> Any:
    def build_update(state: Any, message: Any) -> dict[str, Any]:
        earlier = state.get("messages") or []
        if form == "overwrite":
            return {"messages": Overwrite([*earlier, message])}
        return {"messages": [*earlier, message] if kind == "last value" else [message]}

    def quote(state: Any) -> dict[str, Any]:
        if not state.get("note"):
            return {}
        id = f"quote-{len(state.get('messages') or [])}"
        message: Any = HumanMessage(state["note"], id=id)
        if form == "dict":
            message = {"role": "user", "content": state["note"], "id": id}
        return build_update(state, message)

    def answer(state: Any) -> dict[str, Any]:
        return build_update(state, AIMessage("Noted.", id=f"answer-{len(state['messages'])}"))

    builder: Any = StateGraph(_build_state(kind)).add_node(quote).add_node(answer)
    builder.add_node("remember", remember_turns())
    builder.add_edge(START, "quote").add_edge("quote", "answer").add_edge("answer", "remember")
    return builder


@pytest.fixture
def access(tmp_path: Path) -> AuthFileAccess:
    """Access by an Auth file: Mia and Tom share the threads of their organisation."""
    return AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))


def start_thread(desk: Desk, kind: str = "") -> str:
    """Start a thread of Mia, and return its id. A channel without a reducer gets no message."""
    client = desk.client("mia")
    thread_id: str = client.threads.create()["thread_id"]
    hello: Any = {"messages": [{"role": "user", "content": "Hello", "id": "hello"}]}
    first_input = {"messages": []} if kind == "last value" else hello
    client.runs.wait(thread_id, "desk", input=first_input)
    return thread_id


def read_memories(desk: Desk, thread_id: str) -> str:
    """Return Mia's memories, after a worker has read the thread as well."""
    with open_checkpointer(desk.settings.db) as saver, open_store(desk.settings.db) as store:
        config: Any = {"configurable": {"user_id": "mia"}}
        Extraction(saver, store).extract(thread_id, config, anew=True)
        memories = Collection(store, ("memories", "mia")).list(limit=100)
    return "\n".join(memory.text for memory in memories)


def update_state(desk: Desk, thread_id: str) -> None:
    desk.client("tom").threads.update_state(thread_id, TOMS_NOTE)


def update_state_before_first_node(desk: Desk, thread_id: str) -> None:
    desk.client("tom").threads.update_state(thread_id, TOMS_NOTE, as_node="__start__")


def update_by_command(desk: Desk, thread_id: str) -> None:
    desk.client("tom").runs.wait(thread_id, "desk", command={"update": TOMS_NOTE})


def send_input_and_stop_before_node(desk: Desk, thread_id: str) -> None:
    options: Any = {"input": TOMS_NOTE, "interrupt_before": ["quote"]}
    desk.client("tom").runs.wait(thread_id, "desk", **options)


def send_input(desk: Desk, thread_id: str) -> None:
    desk.client("tom").runs.wait(thread_id, "desk", input=TOMS_NOTE)


def go_to_node_with_note_and_stop_before_it(desk: Desk, thread_id: str) -> None:
    target: Any = {"node": "quote", "input": {"note": TOMS_TEXT, "messages": []}}
    options: Any = {"command": {"goto": [target]}, "interrupt_before": ["quote"]}
    desk.client("tom").runs.wait(thread_id, "desk", **options)


FILL_METHODS = [
    go_to_node_with_note_and_stop_before_it,
    update_state,
    update_state_before_first_node,
    update_by_command,
    send_input_and_stop_before_node,
    send_input,
]


@pytest.mark.parametrize("fill", FILL_METHODS)
def test_text_that_colleague_writes_to_state_is_not_remembered(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
    fill: Callable[[Desk, str], None],
) -> None:
    """The person continues the thread without an input, and then sends messages."""
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id, mia = start_thread(desk), desk.client("mia")
        fill(desk, thread_id)
        mia.runs.wait(thread_id, "desk", input=None)
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE)
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE)
        messages: Any = mia.threads.get_state(thread_id)["values"]

        assert TOMS_TEXT in [message["content"] for message in messages["messages"]]
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Hello" in memories, "Otter" in memories) == (
            False,
            True,
            True,
        )


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("reducer", "dict"),
        ("reducer", "overwrite"),
        ("last value", "message"),
        ("delta", "message"),
        ("delta", "dict"),
        ("delta", "overwrite"),
        ("delta with snapshots", "message"),
        ("subgraph", "message"),
    ],
)
@pytest.mark.parametrize("fill", [update_state, send_input])
def test_messages_of_nodes_are_marked_in_all_channels(
    db: Settings,
    access: AuthFileAccess,
    model: Model,
    kind: str,
    form: str,
    fill: Callable[[Desk, str], None],
) -> None:
    """A channel without a reducer gets no input, because the input would replace its messages."""
    has_reducer = kind != "last value"
    with serve_desk(db, access, model, build_graph(kind, form)) as desk:
        thread_id, mia = start_thread(desk, kind), desk.client("mia")
        fill(desk, thread_id)
        message = {"role": "user", "content": MIAS_TEXT, "id": "mias"}
        first_input: Any = {"messages": [message]} if has_reducer else {}
        mia.runs.wait(thread_id, "desk", input=first_input)
        state: Any = mia.threads.get_state(thread_id)["values"]

        assert TOMS_TEXT in [message["content"] for message in state["messages"]]
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, has_reducer)


def test_note_that_person_sends_is_remembered_on_thread_with_colleagues_state(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
) -> None:
    """The text of the message that the node makes is in the input of the person's run."""
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id = start_thread(desk)
        update_state(desk, thread_id)
        desk.client("mia").runs.wait(thread_id, "desk", input={"note": MIAS_TEXT})

        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, True)


def test_note_of_caller_who_may_act_for_person_is_remembered(
    settings: Settings,
    tmp_path: Path,
    model: Model,
) -> None:
    access = AuthFileAccess(write_auth_file(tmp_path, ACTING_TEAM_AUTH_FILE))
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id = start_thread(desk)
        desk.client("sam").threads.update_state(thread_id, {"note": MIAS_TEXT})
        desk.client("mia").runs.wait(thread_id, "desk", input={})

        assert "Otter" in read_memories(desk, thread_id)
        assert STATE_FROM_OTHERS not in desk.head(thread_id)


def copy_by_api(desk: Desk, thread_id: str) -> str:
    mia = desk.client("mia")
    before = {thread["thread_id"] for thread in mia.threads.search(limit=100)}
    mia.threads.copy(thread_id)
    [new_id] = {thread["thread_id"] for thread in mia.threads.search(limit=100)} - before
    return str(new_id)


def copy_by_library(desk: Desk, thread_id: str) -> str:
    with open_checkpointer(desk.settings.db) as saver:
        saver.copy_thread(thread_id, "copy")
    return "copy"


def write_by_library(desk: Desk, thread_id: str) -> str:
    """Run the graph in a program that knows nothing of the server."""
    with open_checkpointer(desk.settings.db) as saver, open_store(desk.settings.db) as store:
        graph = build_graph().copy({"checkpointer": saver, "store": store})
        config: Any = {"configurable": {"thread_id": thread_id}}
        graph.update_state(config, {"messages": [AIMessage("Hi", id="hi")]}, as_node="remember")
    return thread_id


def prune(desk: Desk, thread_id: str) -> str:
    with open_checkpointer(desk.settings.db) as saver:
        saver.prune([thread_id], strategy="keep_latest")
    return thread_id


def merge_into_itself_as_other_thread(desk: Desk, thread_id: str) -> str:
    """Import the thread of another database file."""
    other = f"{desk.settings.db}.other"
    with open_checkpointer(desk.settings.db) as saver, open_checkpointer(other) as target:
        target.import_from(saver)
    with open_checkpointer(desk.settings.db) as saver:
        saver.delete_thread(thread_id)
        with open_checkpointer(other) as source:
            saver.import_from(source)
    return thread_id


CHANGES = [copy_by_api, copy_by_library, prune, merge_into_itself_as_other_thread]


@pytest.mark.parametrize(
    ("fill", "change"),
    [
        (update_state, write_by_library),
        *((fill, change) for fill in (update_state, update_by_command) for change in CHANGES),
    ],
)
def test_copies_and_later_checkpoints_stay_marked(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
    fill: Callable[[Desk, str], None],
    change: Callable[[Desk, str], str],
) -> None:
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id = start_thread(desk)
        fill(desk, thread_id)
        thread_id = change(desk, thread_id)
        mia = desk.client("mia")
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE)
        state: Any = mia.threads.get_state(thread_id)["values"]

        assert TOMS_TEXT in [message["content"] for message in state["messages"]]
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, True)


@pytest.mark.parametrize("is_before_change", [False, True])
def test_forks_of_thread_are_marked(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
    is_before_change: bool,
) -> None:
    """The mark also holds for forks from checkpoints before the colleague's change."""
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id, mia = start_thread(desk), desk.client("mia")
        before: Any = mia.threads.get_state(thread_id)["checkpoint"]
        update_state(desk, thread_id)
        after: Any = mia.threads.get_state(thread_id)["checkpoint"]
        checkpoint = before if is_before_change else after
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE, checkpoint=checkpoint)
        state: Any = mia.threads.get_state(thread_id)["values"]

        contents = [message["content"] for message in state["messages"]]
        assert (TOMS_TEXT in contents) is not is_before_change
        assert desk.head(thread_id)[STATE_FROM_OTHERS] is True
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, True)


def test_client_cannot_remove_the_mark(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
) -> None:
    """The metadata of runs and threads does not change the mark."""
    metadata: Any = {STATE_FROM_OTHERS: False, "perdure_labels": []}
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id, tom = start_thread(desk), desk.client("tom")
        tom.threads.update(thread_id, metadata=metadata)
        config: Any = {"metadata": metadata}
        tom.runs.wait(
            thread_id, "desk", input=TOMS_NOTE, metadata=metadata, config=config,
            interrupt_before=["quote"],
        )  # fmt: skip
        assert desk.head(thread_id)[STATE_FROM_OTHERS] is True
        desk.client("mia").runs.wait(
            thread_id, "desk", input=None, metadata=metadata, config=config
        )

        assert desk.head(thread_id)[STATE_FROM_OTHERS] is True
        assert "Kayak" not in read_memories(desk, thread_id)


def build_asking_graph() -> Any:
    """Return a graph that asks two questions at once and quotes the first answer as a message."""
    make: Any = TypedDict
    channel = MESSAGE_CHANNELS["reducer"]
    state = make("State", {"messages": channel, "note": str, "other": str}, total=False)

    def quote(state: Any) -> dict[str, Any]:
        text = state.get("note") or ""
        return {"messages": [HumanMessage(text)] if text else []}

    builder: Any = StateGraph(state).add_node("quote", quote)
    builder.add_node("first", lambda state: {"note": interrupt("Which boat?")})
    builder.add_node("second", lambda state: {"other": interrupt("Which pet?")})
    builder.add_node("remember", remember_turns())
    builder.add_edge(START, "first").add_edge(START, "second")
    builder.add_edge(["first", "second"], "quote").add_edge("quote", "remember")
    return builder.compile()


def build_graph_that_asks_in_subgraph() -> Any:
    """Return a graph whose subgraph asks, and then makes a human message of its channel `note`."""

    def quote(state: Any) -> dict[str, Any]:
        note = state.get("note")
        return {"messages": [HumanMessage(note, id="note")]} if note else {}

    inner: Any = StateGraph(_build_state("reducer")).add_node("quote", quote)
    inner.add_node("ask", lambda _: {"messages": [HumanMessage(interrupt("Which pet?"))]})
    inner = inner.add_edge(START, "ask").add_edge("ask", "quote").compile()
    outer: Any = StateGraph(_build_state("reducer")).add_node("inner", inner)
    outer.add_node("remember", remember_turns())
    return outer.add_edge(START, "inner").add_edge("inner", "remember").compile()


@pytest.mark.parametrize("waiting_checkpoint_is", ["head", "older", "head again"])
def test_update_of_waiting_subgraph_by_colleague_is_not_remembered(
    db: Settings,
    access: AuthFileAccess,
    model: Model,
    waiting_checkpoint_is: str,
) -> None:
    """The update stores a checkpoint of the subgraph only, and the person answers the question.

    The turn is not remembered, because the colleague could have replaced what the question asks.
    """
    with serve_desk(db, access, model, build_graph_that_asks_in_subgraph()) as desk:
        thread_id, mia, tom = start_thread(desk), desk.client("mia"), desk.client("tom")
        waiting: Any = tom.threads.get_state(thread_id, subgraphs=True)
        options: Any = {}
        if waiting_checkpoint_is != "head":
            tom.threads.update_state(thread_id, {"messages": []}, as_node="__start__")
            options["checkpoint"] = waiting["checkpoint"]
        subgraph = waiting["tasks"][0]["state"]
        tom.threads.update_state(thread_id, TOMS_NOTE, checkpoint=subgraph["checkpoint"])
        if waiting_checkpoint_is == "head again":
            checkpoint_id = options.pop("checkpoint")["checkpoint_id"]
            desk.post("tom", f"/ui/rewind?id={thread_id}&checkpoint={checkpoint_id}")
        mia.runs.wait(thread_id, "desk", command={"resume": MIAS_TEXT}, **options)
        state: Any = mia.threads.get_state(thread_id)["values"]

        assert TOMS_TEXT in [message["content"] for message in state["messages"]]
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, False)


def test_refused_update_of_subgraph_leaves_the_turn_of_the_person(
    db: Settings,
    access: AuthFileAccess,
    model: Model,
) -> None:
    with serve_desk(db, access, model, build_graph_that_asks_in_subgraph()) as desk:
        thread_id, mia, tom = start_thread(desk), desk.client("mia"), desk.client("tom")
        checkpoint: Any = {"checkpoint_ns": "nosuch:1"}
        with pytest.raises(UnprocessableEntityError, match="nosuch"):
            tom.threads.update_state(thread_id, TOMS_NOTE, checkpoint=checkpoint)
        mia.runs.wait(thread_id, "desk", command={"resume": MIAS_TEXT})

        assert "Otter" in read_memories(desk, thread_id)


def test_answer_that_names_the_subgraph_of_the_head_is_remembered(
    db: Settings,
    access: AuthFileAccess,
    model: Model,
) -> None:
    """A colleague has changed the thread, but before the person's last message."""
    with serve_desk(db, access, model, build_graph_that_asks_in_subgraph()) as desk:
        thread_id, mia, tom = start_thread(desk), desk.client("mia"), desk.client("tom")
        tom.threads.update_state(thread_id, {"messages": []}, as_node="__start__")
        mia.runs.wait(thread_id, "desk", input=HELLO_AGAIN)
        waiting: Any = mia.threads.get_state(thread_id, subgraphs=True)
        checkpoint = waiting["tasks"][0]["state"]["checkpoint"]
        mia.runs.wait(thread_id, "desk", command={"resume": MIAS_TEXT}, checkpoint=checkpoint)

        assert "Otter" in read_memories(desk, thread_id)


@pytest.mark.parametrize("answers_both", [False, True])
def test_answer_of_colleague_is_not_remembered_as_words_of_person(
    db: Settings,
    access: AuthFileAccess,
    model: Model,
    answers_both: bool,
) -> None:
    """A node makes a message of the answer, in the run of the colleague or of the person."""
    with serve_desk(db, access, model, build_asking_graph()) as desk:
        thread_id = start_thread(desk)
        interrupts: Any = desk.client("mia").threads.get(thread_id)["interrupts"]
        ids = {each["value"]: each["id"] for [each] in interrupts.values()}
        toms_answers = {ids["Which boat?"]: TOMS_TEXT}
        other_answer = {ids["Which pet?"]: MIAS_TEXT}
        if answers_both:
            toms_answers |= other_answer
        desk.client("tom").runs.wait(thread_id, "desk", command={"resume": toms_answers})
        if not answers_both:
            desk.client("mia").runs.wait(thread_id, "desk", command={"resume": other_answer})
        state: Any = desk.client("mia").threads.get_state(thread_id)["values"]

        assert TOMS_TEXT in [message["content"] for message in state["messages"]]
        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Hello" in memories) == (False, True)


def test_failed_input_of_colleague_that_person_sends_again_is_not_remembered(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
) -> None:
    """The run of the person stores the note, and a later run makes a message of it."""
    is_broken = False

    def make() -> Any:
        if is_broken:
            raise ZeroDivisionError
        return build_graph()

    with serve_desk(settings, access, model, make) as desk:
        thread_id, mia = start_thread(desk), desk.client("mia")
        is_broken = True
        with pytest.raises(Exception, match="ZeroDivisionError"):
            send_input(desk, thread_id)
        is_broken = False
        replied = desk.post("mia", f"/ui/again?id={thread_id}", data={"assistant": "desk"})
        assert replied.status_code == 303, replied.text
        wait_until(lambda: mia.threads.get(thread_id)["status"] == "idle")
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE)

        memories = read_memories(desk, thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, True)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_imported_message_of_colleague_is_continued_without_memories(
    role: str,
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
    tmp_path: Path,
) -> None:
    """The export does not contain the record of the server that a colleague changed the thread."""
    with serve_desk(settings, access, model) as desk:
        thread_id = start_thread(desk)
        update: Any = {"messages": [{"role": role, "content": "What do you know?"}]}
        desk.client("tom").threads.update_state(thread_id, update, as_node="__start__")
        exported = tmp_path / "thread.jsonl"
        exported.write_text(run("export", thread_id, "--db", settings.db))
    imported = replace(settings, db=str(tmp_path / "imported.db"))
    run("import", str(exported), "--user", "mia", "--db", imported.db)
    with serve_desk(imported, access, model) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        [thread] = tom.threads.search()
        thread_id = thread["thread_id"]
        command: Any = {"goto": ["respond"]}
        asked = len(model.requests)

        tom.runs.wait(thread_id, "desk", command=command)

        assert len(model.requests) > asked
        assert "Magpie" not in desk.prompts(asked)
        mia.runs.wait(thread_id, "desk", input=MIAS_MESSAGE)
        assert "Magpie" in desk.prompts(asked)


def test_exported_and_imported_messages_stay_marked(
    settings: Settings,
    access: AuthFileAccess,
    model: Model,
    tmp_path: Path,
) -> None:
    """An export contains only the messages of the state, so the marks of messages are enough."""
    with serve_desk(settings, access, model, build_graph()) as desk:
        thread_id = start_thread(desk)
        update_state(desk, thread_id)
        desk.client("mia").runs.wait(thread_id, "desk", input=MIAS_MESSAGE)
        exported = tmp_path / "thread.jsonl"
        exported.write_text(run("export", thread_id, "--db", settings.db))
        imported = replace(settings, db=str(tmp_path / "imported.db"))
        run("import", str(exported), "--db", imported.db)

        memories = read_memories(Desk("", imported, model), thread_id)
        assert ("Kayak" in memories, "Otter" in memories) == (False, True)

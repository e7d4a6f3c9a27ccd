"""A thread keeps both an update of the state during a run and the writes of the run."""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.labels import MERGED
from tests.contracts.puts import checkpoint_id_of, config_at, read_history_texts
from tests.durability.test_left_runs import ScriptedModel, look_up

ASK: Any = {"messages": [("human", "q")]}
TITLE: Any = {"title": "A question"}


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    title: str
    tags: Annotated[list[str], operator.add]
    count: int


Node = Callable[[Any], Any]


def read_head_id(saver: SQLiteCheckpointer) -> str:
    """The id of the checkpoint from which the next run starts."""
    head = saver.head("t")
    assert head is not None
    return str(head.checkpoint_id)


def call_in_thread(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function in another OS thread, which has no context variables of the run."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args, **options).result()


def answer_node(text: str) -> Node:
    return lambda state: {"messages": [AIMessage(text)]}


def ask(state: Any) -> Any:
    return {"messages": [AIMessage(interrupt("Really?"))]}


def fail(state: Any) -> Any:
    raise LookupError("no answer")


class UpdatedRun:
    """A graph of sequential nodes, whose state is updated while nodes run.

    Args:
        saver: The checkpointer.
        nodes: The nodes, by name.
        updates: The calls that are made once while a node runs, by the name of the node.
    """

    def __init__(
        self, saver: SQLiteCheckpointer, nodes: dict[str, Node], updates: dict[str, Any]
    ) -> None:
        self.saver, self.updates = saver, updates
        builder = StateGraph(State)
        sequence: list[Any] = [(name, self._run_update_before(name, nodes[name])) for name in nodes]
        builder.add_sequence(sequence)
        self.graph: Any = builder.add_edge(START, next(iter(nodes))).compile(checkpointer=saver)

    def _run_update_before(self, name: str, node: Node) -> Node:
        def update_and_run(state: Any) -> Any:
            update = self.updates.pop(name, None)
            if update is not None:
                call_in_thread(update, self.graph)
            return node(state)

        return update_and_run

    def invoke(self, input: Any, mode: str = "sync", durability: Any = "sync") -> Any:
        if mode == "sync":
            return self.graph.invoke(input, config_at(), durability=durability)
        return asyncio.run(self.graph.ainvoke(input, config_at(), durability=durability))

    def message_texts(self) -> list[str]:
        return [m.text for m in self.graph.get_state(config_at()).values["messages"]]

    def read_value(self, name: str) -> Any:
        return self.graph.get_state(config_at()).values.get(name)


def make_update(values: Any, as_node: str | None) -> Callable[[Any], Any]:
    return lambda graph: graph.update_state(config_at(), values, as_node)


def test_second_update_put_after_a_step_of_the_run_is_kept(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second update has read the first one. The run puts a checkpoint before it."""
    puts: list[Any] = []
    nodes = {name: answer_node(name) for name in ("first", "second", "third")}

    def record_put(*args: Any) -> Any:
        puts.append(args)
        return args[0]

    def update_twice(graph: Any) -> None:
        graph.update_state(config_at(), {"tags": ["one"], "title": "T"}, "third")
        with monkeypatch.context() as patched:
            patched.setattr(saver, "put", record_put)
            graph.update_state(config_at(), {"tags": ["two"]}, "third")

    run = UpdatedRun(saver, nodes, {"first": update_twice, "second": lambda _: saver.put(*puts[0])})
    run.invoke(ASK)

    assert run.message_texts() == ["q", "first", "second", "third"]
    assert run.read_value("tags") == ["one", "two"]
    assert run.read_value("title") == "T"


def test_reading_the_head_by_its_id_during_a_run_keeps_the_update(
    saver: SQLiteCheckpointer,
) -> None:
    """A read of the head by its id does not make the next put of the run a deliberate fork."""
    nodes = {name: answer_node(name) for name in ("first", "second", "third")}

    def read_head_by_id(graph: Any) -> None:
        assert graph.get_state(graph.get_state(config_at()).config).values["title"] == "T"

    updates = {"first": make_update({"title": "T"}, "third"), "second": read_head_by_id}
    run = UpdatedRun(saver, nodes, updates)
    run.invoke(ASK)

    assert run.message_texts() == ["q", "first", "second", "third"]
    assert run.read_value("title") == "T"


def put_later(saver: SQLiteCheckpointer, update: Callable[[], Any]) -> Callable[[], Any]:
    """Make an update, except for its put, and return a function that makes the put."""
    puts: list[Any] = []

    def record_put(*args: Any) -> Any:
        puts.append(args)
        return config_at(uid=args[1]["id"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "put", record_put)
        update()
    return lambda: saver.put(*puts[0])


def test_update_is_kept_if_the_run_writes_the_old_value(
    saver: SQLiteCheckpointer,
) -> None:
    """The update and the run may give the channel the same version."""
    puts: list[Any] = []

    def update_later(graph: Any) -> None:
        puts.append(put_later(saver, lambda: graph.update_state(config_at(), TITLE, "c")))

    def write_old_value(state: Any) -> Any:
        return {"messages": [AIMessage("A")], "title": "Before"}

    nodes = {"a": write_old_value, "b": answer_node("B"), "c": answer_node("C")}
    run = UpdatedRun(saver, nodes, {"a": update_later, "b": lambda _: puts[0]()})
    run.graph.update_state(config_at(), {"title": "Before"}, "c")
    run.invoke(ASK)

    assert run.read_value("title") == "A question"


@pytest.mark.parametrize("late", [False, True])
def test_update_of_a_channel_with_a_colon_in_its_name_is_kept(
    saver: SQLiteCheckpointer, late: bool
) -> None:
    """Names of channels that route a run, such as `branch:to:a`, contain colons, too."""
    Colon = TypedDict(
        "Colon", {"messages": Annotated[list[AnyMessage], add_messages], "a:b": str}, total=False
    )
    puts: list[Any] = []

    def first(state: Any) -> Any:
        update = partial(graph.update_state, config_at(), {"a:b": "kept"}, "second")
        puts.append(call_in_thread(put_later, saver, update) if late else call_in_thread(update))
        return {"messages": [AIMessage("first")]}

    def second(state: Any) -> Any:
        if late:
            call_in_thread(puts[0])
        return {"messages": [AIMessage("second")]}

    nodes: list[Any] = [("first", first), ("second", second)]
    builder = StateGraph(Colon).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "first").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability="sync")
    values = graph.get_state(config_at()).values

    assert values["a:b"] == "kept"
    assert [m.text for m in values["messages"]] == ["q", "first", "second"]


def add_names(names: set[str] | None, writes: Sequence[set[str]]) -> set[str]:
    return set().union(names or (), *writes)


class Named(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    names: Annotated[set[str], DeltaChannel(add_names, snapshot_frequency=50)]
    title: str


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_update_of_a_delta_channel_is_kept(
    saver: SQLiteCheckpointer, late: bool, has_snapshot: bool
) -> None:
    """The value of the channel is in the writes at the checkpoint that the update has read."""
    puts: list[Any] = []

    def first(state: Any) -> Any:
        update = partial(graph.update_state, config_at(), {"names": {"Ann"}}, "second")
        puts.append(call_in_thread(put_later, saver, update) if late else call_in_thread(update))
        return {"messages": [AIMessage("first")]}

    def second(state: Any) -> Any:
        if late:
            call_in_thread(puts[0])
        return {"title": "T"}

    nodes: list[Any] = [("first", first), ("second", second)]
    builder = StateGraph(Named).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "first").compile(checkpointer=saver)
    if has_snapshot:
        graph.update_state(config_at(), {"names": {"Bob"}}, "second")
    graph.invoke(ASK, config_at(), durability="sync")
    expected = {"Ann", "Bob"} if has_snapshot else {"Ann"}

    assert graph.get_state(config_at()).values["names"] == expected
    saver._cache.drop_thread("t")
    assert graph.get_state(config_at()).values["names"] == expected


def test_first_run_with_durability_exit_and_delta_channel_keeps_the_update(
    saver: SQLiteCheckpointer,
) -> None:
    """langgraph stores the writes of that run at an empty checkpoint before the run's own."""

    class Deep(TypedDict, total=False):
        messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]
        title: str

    def update_and_answer(state: Any) -> Any:
        call_in_thread(graph.update_state, config_at(), TITLE, "answer")
        return {"messages": [AIMessage("the answer", id="answer")]}

    builder = StateGraph(Deep).add_sequence([("answer", update_and_answer)])
    graph: Any = builder.add_edge(START, "answer").compile(checkpointer=saver)
    graph.invoke({"messages": [("human", "q")]}, config_at(), durability="exit")
    values = graph.get_state(config_at()).values

    assert [m.text for m in values["messages"]] == ["q", "the answer"]
    assert values["title"] == "A question"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("as_node", ["a", "b"])
@pytest.mark.parametrize("earlier_turns", [0, 1])
def test_answer_of_the_run_and_title_of_the_update_are_kept(
    saver: SQLiteCheckpointer, mode: str, durability: str, as_node: str, earlier_turns: int
) -> None:
    """The next turn sees both. There is no branch, and no mark in the metadata."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {})
    for _ in range(earlier_turns):
        run.invoke({"messages": [("human", "before")]})
    run.updates = {"a": make_update(TITLE, as_node)}
    run.invoke(ASK, mode, durability)
    state, texts = run.graph.get_state(config_at()), run.message_texts()
    run.invoke({"messages": [("human", "next")]}, mode, durability)

    assert state.next == ()
    assert texts[-1] == "B"
    assert "q" in texts
    assert (run.read_value("title"), run.message_texts()[-1]) == ("A question", "B")
    assert "next" in run.message_texts()
    assert read_history_texts(saver) == run.message_texts()
    assert not [element for element in saver.checkpoints("t") if element.is_branch]
    assert not [element for element in saver.history("t") if element.branch]
    assert saver.status("t").state == "idle"
    assert MERGED not in run.graph.get_state(config_at()).metadata


def test_several_updates_during_a_run_are_kept_for_every_reducer(saver: SQLiteCheckpointer) -> None:
    """Updates are made during different nodes, and one follows a merge."""
    updates = {
        "a": lambda graph: [
            graph.update_state(config_at(), {"tags": ["one"]}, "b"),
            graph.update_state(config_at(), {"count": 1}, "b"),
        ],
        "b": make_update({**TITLE, "tags": ["two"]}, "a"),
    }
    run = UpdatedRun(
        saver, {"a": answer_node("A"), "b": answer_node("B"), "c": answer_node("C")}, updates
    )
    run.invoke(ASK)
    values = run.graph.get_state(config_at()).values

    assert run.message_texts() == ["q", "A", "B", "C"]
    assert (values["tags"], values["count"], values["title"]) == (["one", "two"], 1, "A question")


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("as_node", ["a", "b"])
def test_interrupt_of_the_run_is_pending_with_the_update(
    saver: SQLiteCheckpointer, durability: str, as_node: str
) -> None:
    """The thread waits for the answer, and the resumed run has the title."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": ask}, {"b": make_update(TITLE, as_node)})
    run.invoke(ASK, durability=durability)
    waiting = run.graph.get_state(config_at())

    assert [pending.value for pending in waiting.interrupts] == ["Really?"]
    assert (waiting.next, waiting.values["title"]) == (("b",), "A question")
    assert saver.status("t").state == "waiting"
    assert [head.thread_id for head in saver.heads(waiting=True)] == ["t"]
    assert read_head_id(saver) == checkpoint_id_of(waiting.config)
    saver._cache.drop_thread("t")
    run.invoke(Command(resume="Yes."), durability=durability)
    assert (run.message_texts(), run.read_value("title")) == (["q", "A", "Yes."], "A question")


def test_interrupt_before_the_put_of_an_update_stays_pending(saver: SQLiteCheckpointer) -> None:
    """The update has read the state before the interrupt."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": ask}, {})
    original_put, recorded_puts = saver.put, list[Any]()

    def record_put(*args: Any) -> Any:
        recorded_puts.append(args)
        return config_at(uid=args[1]["id"])

    def update_later(graph: Any) -> None:
        saver.put = record_put  # type: ignore[method-assign, assignment]
        try:
            graph.update_state(config_at(), TITLE, "a")
        finally:
            saver.put = original_put  # type: ignore[method-assign]

    run.updates = {"a": update_later}
    run.invoke(ASK)
    stored = original_put(*recorded_puts[0])
    waiting = run.graph.get_state(config_at())

    assert [pending.value for pending in waiting.interrupts] == ["Really?"]
    assert run.graph.get_state(stored).values["title"] == "A question"
    run.invoke(Command(resume="Yes."))
    assert (run.message_texts(), run.read_value("title")) == (["q", "A", "Yes."], "A question")


@pytest.mark.parametrize("drops_cache", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_update_between_interrupt_and_end_of_another_task_is_kept(
    saver: SQLiteCheckpointer, durability: Any, drops_cache: bool
) -> None:
    """The other task shows that the run is still active, so the interrupt stays."""
    has_asked, updated = Event(), list[bool]()

    def ask_and_signal(state: Any) -> Any:
        try:
            return ask(state)
        finally:
            has_asked.set()

    def update_and_work(state: Any) -> Any:
        if not updated:
            updated.append(has_asked.wait(10))
            while not call_in_thread(graph.get_state, config_at()).interrupts:
                time.sleep(0.01)
            call_in_thread(graph.update_state, config_at(), TITLE, "ask")
            if drops_cache:
                saver._cache.drop_thread("t")
        return {"count": 1}

    builder = StateGraph(State).add_node("ask", ask_and_signal).add_node("work", update_and_work)
    graph: Any = builder.add_edge(START, "ask").add_edge(START, "work").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability=durability)
    waiting = graph.get_state(config_at())
    graph.invoke(Command(resume="Yes."), config_at(), durability=durability)
    values = graph.get_state(config_at()).values

    assert [pending.value for pending in waiting.interrupts] == ["Really?"]
    assert waiting.values["title"] == "A question"
    assert [m.text for m in values["messages"]] == ["q", "Yes."]
    assert (values["title"], values["count"]) == ("A question", 1)


def test_update_while_an_answered_task_continues_is_kept(saver: SQLiteCheckpointer) -> None:
    """The interrupt was answered, so there is no branch."""
    updates = [make_update(TITLE, "a")]

    def ask_and_update(state: Any) -> Any:
        answer = ask(state)
        call_in_thread(updates.pop(), run.graph)
        return answer

    run = UpdatedRun(saver, {"a": ask_and_update, "b": answer_node("B")}, {})
    run.invoke(ASK)
    run.invoke(Command(resume="Yes."))

    assert (run.message_texts(), run.read_value("title")) == (["q", "Yes.", "B"], "A question")
    assert not [info for info in saver.checkpoints("t") if info.is_branch]


def test_resume_of_an_old_checkpoint_does_not_take_over_the_update(
    saver: SQLiteCheckpointer,
) -> None:
    """A run that resumes a checkpoint by its id continues from that state."""

    def ask_twice(state: Any) -> Any:
        return {"messages": [AIMessage(interrupt("First?") + interrupt("Second?"))]}

    run = UpdatedRun(saver, {"a": ask_twice}, {})
    run.invoke(ASK)
    old = run.graph.get_state(config_at()).config
    run.graph.update_state(config_at(), TITLE, "a")
    run.graph.invoke(Command(resume="Yes."), old)

    assert [pending.value for pending in run.graph.get_state(old).interrupts] == ["Second?"]
    assert "title" not in run.graph.get_state(old).values
    assert run.read_value("title") == "A question"


def test_failed_run_is_continued_at_the_failed_node_with_the_update(
    saver: SQLiteCheckpointer,
) -> None:
    """The run is not continued at the node that would follow the update."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": fail}, {"b": make_update(TITLE, "b")})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    failed = run.graph.get_state(config_at())
    retried = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {})
    retried.invoke(None)

    assert (failed.next, failed.values["title"]) == (("b",), "A question")
    assert (retried.message_texts(), retried.read_value("title")) == (["q", "A", "B"], "A question")


@pytest.mark.parametrize("late", [False, True])
def test_update_of_a_channel_that_the_run_writes_keeps_the_head(
    saver: SQLiteCheckpointer, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With `late`, the run writes the channel after steps that were merged. No step of the run is
    kept then.
    """
    nodes = {
        "a": answer_node("A"),
        "b": answer_node("B") if not late else lambda state: {"count": 2},
    }
    nodes["c"] = answer_node("C")
    updates = {"b": make_update({**TITLE, "messages": [("human", "edit")]}, "c")}
    run = UpdatedRun(saver, nodes, updates)
    with caplog.at_level(logging.WARNING, "perdure"):
        run.invoke(ASK)

    assert (run.message_texts(), run.read_value("title")) == (["q", "A", "edit"], "A question")
    assert run.read_value("count") is None
    assert "C" in [item.value.text for item in saver.history("t") if item.branch]
    assert read_head_id(saver) == checkpoint_id_of(run.graph.get_state(config_at()).config)
    assert len([record for record in caplog.records if "overlapped" in record.message]) == 1
    run.invoke({"messages": [("human", "next")]})
    assert run.message_texts()[:4] == ["q", "A", "edit", "next"]


def test_update_put_after_the_end_of_the_run_is_merged(saver: SQLiteCheckpointer) -> None:
    """The update has read the state before the last turn."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {})
    run.invoke(ASK)
    before = run.graph.get_state(config_at())
    stored = saver.get_tuple(before.config)
    run.invoke({"messages": [("human", "next")]})
    assert stored is not None
    version = saver.get_next_version(max(stored.checkpoint["channel_versions"].values()), None)
    late_checkpoint: Any = {**stored.checkpoint, "id": empty_checkpoint()["id"]}
    late_checkpoint["channel_values"] = {**late_checkpoint["channel_values"], "title": "Late"}
    late_checkpoint["channel_versions"] = {**late_checkpoint["channel_versions"], "title": version}
    metadata: Any = {"source": "update", "step": 4, "parents": {}}
    saver.put(before.config, late_checkpoint, metadata, {"title": version})

    assert run.message_texts() == ["q", "A", "B", "next", "A", "B"]
    assert (run.read_value("title"), run.graph.get_state(config_at()).next) == ("Late", ())


def test_newer_turn_keeps_the_head_over_an_abandoned_run(saver: SQLiteCheckpointer) -> None:
    """An update does not restore an abandoned run over a turn that has started since."""

    def update_and_run_newer_turn(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        graph.invoke({"messages": [("human", "newer")]}, config_at())

    run = UpdatedRun(
        saver, {"a": answer_node("A"), "b": answer_node("B")}, {"a": update_and_run_newer_turn}
    )
    run.invoke(ASK)

    assert run.message_texts() == ["q", "newer", "A", "B"]
    assert run.read_value("title") == "A question"


def test_run_continued_after_a_crash_reads_the_merged_state(saver: SQLiteCheckpointer) -> None:
    """Therefore its write to the updated channel is not a conflict."""
    nodes = {"a": answer_node("A"), "b": fail, "c": lambda state: {"title": state["title"] + "!"}}
    run = UpdatedRun(saver, nodes, {"a": make_update(TITLE, "c")})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    saver._cache.drop_thread("t")
    continued = UpdatedRun(saver, {**nodes, "b": answer_node("B")}, {})
    continued.invoke(None)

    assert (continued.message_texts(), continued.read_value("title")) == (
        ["q", "A", "B"],
        "A question!",
    )


def test_update_of_an_old_checkpoint_becomes_the_head_without_later_steps(
    saver: SQLiteCheckpointer,
) -> None:
    """An update of a checkpoint that was chosen by its id is a fork."""
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {})
    run.invoke(ASK)
    run.graph.update_state(config_at(), TITLE, "b")
    past = next(
        snapshot for snapshot in run.graph.get_state_history(config_at()) if snapshot.next == ("b",)
    )
    run.graph.update_state(past.config, {"count": 5}, "b")

    assert (run.message_texts(), run.read_value("title"), run.read_value("count")) == (
        ["q", "A"],
        None,
        5,
    )


def test_title_update_during_an_agent_run_is_kept(saver: SQLiteCheckpointer) -> None:
    """The agent has tools, and a middleware whose state has the title."""

    class Titled(AgentState[Any]):
        title: str

    class Titles(AgentMiddleware[Titled, Any, Any]):
        state_schema = Titled

        def after_model(self, state: Any, runtime: Any) -> None:
            if len(state["messages"]) == 2:
                call_in_thread(agent.update_state, config_at(), TITLE, "model")

    agent: Any = create_agent(ScriptedModel(), [look_up], middleware=[Titles()], checkpointer=saver)
    asyncio.run(agent.ainvoke({"messages": [("human", "word")]}, config_at()))
    values = agent.get_state(config_at()).values

    assert values["title"] == "A question"
    assert [message.type for message in values["messages"]] == ["human", "ai", "tool", "tool", "ai"]


def test_update_of_a_running_subgraph_is_kept(saver: SQLiteCheckpointer) -> None:
    """The state of a subgraph with its own namespace is updated while the subgraph runs."""
    updates: list[Any] = [TITLE]

    def update_once(state: Any) -> Any:
        if updates:
            (task,) = call_in_thread(graph.get_state, config_at(), subgraphs=True).tasks
            call_in_thread(graph.update_state, task.state.config, updates.pop(), "second")
        return {"messages": [AIMessage("inner")]}

    inner_nodes: list[Any] = [("first", update_once), ("second", answer_node("second"))]
    child = StateGraph(State).add_sequence(inner_nodes)
    compiled = child.add_edge(START, "first").compile(checkpointer=True)
    nodes: list[Any] = [("child", compiled), ("last", answer_node("last"))]
    builder = StateGraph(State).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "child").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability="sync")
    namespace = next(ns for ns in saver.thread("t").namespaces if ns)
    subgraph_values = graph.get_state(config_at(ns=namespace)).values

    assert [m.text for m in graph.get_state(config_at()).values["messages"]][-1] == "last"
    assert (subgraph_values["title"], subgraph_values["messages"][-1].text) == (
        "A question",
        "second",
    )


def test_messages_and_update_are_kept_with_a_delta_channel(saver: SQLiteCheckpointer) -> None:
    """Deep agents have such a state, in which the messages are in the writes of tasks."""

    class Deep(TypedDict, total=False):
        messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]
        title: str

    def update_once_and_answer(state: Any) -> Any:
        if "title" not in state:
            call_in_thread(graph.update_state, config_at(), TITLE, "answer")
        return {"messages": [AIMessage("the answer", id="answer")]}

    builder = StateGraph(Deep).add_sequence([("answer", update_once_and_answer)])
    graph: Any = builder.add_edge(START, "answer").compile(checkpointer=saver)
    graph.invoke({"messages": [("human", "q")]}, config_at(), durability="sync")
    values = graph.get_state(config_at()).values

    assert [m.text for m in values["messages"]] == ["q", "the answer"]
    assert values["title"] == "A question"
    assert read_history_texts(saver) == ["q", "the answer"]


def add_all(messages: list[AnyMessage], writes: Sequence[Any]) -> list[AnyMessage]:
    for write in writes:
        messages = add_messages(messages, write)  # type: ignore[assignment, arg-type]
    return messages


@pytest.mark.parametrize(
    "versions",
    [(1, 2, 3), (1.0, 2.0, 3.0), tuple(f"{number:032}.5" for number in (1, 2, 3))],
    ids=["int", "float", "str"],
)
def test_update_and_run_are_merged_for_versions_of_every_type(
    saver: SQLiteCheckpointer, versions: tuple[Any, ...]
) -> None:
    """langgraph's savers use integers, floats and strings. A run continues from the merged ones."""
    first, title, answer = versions
    run = put_with_versions(saver, None, "input", "c0", {"n": first}, {"n": 0})
    put_with_versions(
        saver, run, "update", "c1", {"n": first, "title": title}, {"n": 0, "title": "T"}
    )
    put_with_versions(saver, run, "loop", "c2", {"n": answer}, {"n": 1})
    merged = saver.get_tuple(config_at())

    assert merged is not None
    assert merged.checkpoint["channel_values"] == {"n": 1, "title": "T"}
    assert merged.parent_config == config_at(uid="c1")
    version = merged.checkpoint["channel_versions"]["title"]
    assert type(version) is type(title)
    assert saver.get_next_version(max(version, answer), None) > max(version, answer)


def test_update_keeps_the_head_if_versions_cannot_be_compared(saver: SQLiteCheckpointer) -> None:
    """Nothing is merged."""
    run = put_with_versions(saver, None, "input", "c0", {"n": "x1"}, {"n": 0})
    put_with_versions(
        saver, run, "update", "c1", {"n": "x1", "title": "x2"}, {"n": 0, "title": "T"}
    )
    put_with_versions(saver, run, "loop", "c2", {"n": "x3"}, {"n": 1})

    assert read_head_id(saver) == "c1"


def put_with_versions(
    saver: SQLiteCheckpointer, parent: Any, source: str, uid: str, versions: Any, values: Any
) -> Any:
    """Put a checkpoint with these versions."""
    checkpoint: Any = {"v": 4, "ts": "2026-01-01T00:00:00+00:00", "id": uid, "versions_seen": {}}
    checkpoint |= {"channel_values": values, "channel_versions": versions}
    metadata: Any = {"source": source, "step": 0 if parent else -1, "parents": {}}
    parent_versions = parent["versions"] if parent else {}
    new_versions = {
        channel: v for channel, v in versions.items() if parent_versions.get(channel) != v
    }
    config = saver.put(
        parent["config"] if parent else config_at(), checkpoint, metadata, new_versions
    )
    return {"config": config, "versions": versions}


# -- random runs against a model


class Update(NamedTuple):
    node: int
    channels: frozenset[str]
    as_node: int


class Turn(NamedTuple):
    writes: list[frozenset[str]]  # by node
    updates: list[Update]
    asking_node: int | None  # the node that interrupts before it writes
    durability: str


CHANNELS = st.frozensets(st.sampled_from(["a", "b", "log"]), max_size=2)


@st.composite
def turn_lists(draw: st.DrawFn) -> list[Turn]:
    out = []
    for _ in range(draw(st.integers(1, 3))):
        writes = draw(st.lists(CHANNELS, min_size=3, max_size=3))
        node = st.integers(0, 2)
        updates = draw(st.lists(st.builds(Update, node, CHANNELS, node), max_size=3))
        asking_node = draw(st.none() | node)
        durability = draw(st.sampled_from(["sync", "async", "exit"]))
        by_run, by_updates = {"log"}.union(*writes), set().union(*(u.channels for u in updates))
        if durability == "async" and by_run & by_updates:
            durability = "sync"  # it is random which step an update has read
        out.append(Turn(writes, updates, asking_node, durability))
    return out


class Values(TypedDict, total=False):
    a: str
    b: str
    log: Annotated[list[str], operator.add]


def apply_write(state: dict[str, Any], channels: frozenset[str], value: str) -> dict[str, Any]:
    """Return a state after a write to some channels."""
    plain = dict.fromkeys(channels - {"log"}, value)
    log = {"log": [*state.get("log", []), value]} if "log" in channels else {}
    return {**state, **plain, **log}


class Model:
    """The expected state of the thread."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"log": []}

    def run_turn(self, number: int, turn: Turn) -> None:
        if turn.durability == "exit":
            self._run_turn_at_exit(number, turn)
            return
        unread, is_kept = set[str](), True
        anchor = self.state = apply_write(self.state, frozenset({"log"}), f"q{number}")
        for node, channels in enumerate(turn.writes):
            for k, update in self._updates_at_node(turn, node):
                self.state = anchor = apply_write(self.state, update.channels, f"u{number}.{k}")
                unread |= update.channels
            if node == turn.asking_node:
                if not is_kept:
                    return  # the interrupt is on the branch, and nobody answers it
                unread = set()  # the run that continues after the answer has read everything
            if is_kept and channels & unread:
                is_kept, self.state = False, anchor
            elif is_kept:
                self.state = apply_write(self.state, channels, f"{number}.{node}")

    def _run_turn_at_exit(self, number: int, turn: Turn) -> None:
        """Apply a run that is stored at its end, or at its interrupt and at its end."""
        run_state, updated_state = self.state, self.state
        run_channels, update_channels = set[str](), set[str]()
        writes = [("log", frozenset({"log"}), f"q{number}")]
        run_state = apply_write(run_state, writes[0][1], writes[0][2])
        run_channels |= {"log"}
        for node, channels in enumerate(turn.writes):
            for k, update in self._updates_at_node(turn, node):
                updated_state = apply_write(updated_state, update.channels, f"u{number}.{k}")
                update_channels |= update.channels
            if node == turn.asking_node:
                run_state = self._merge(run_state, updated_state, run_channels, update_channels)
                updated_state, run_channels, update_channels = run_state, set(), set()
            run_state = apply_write(run_state, channels, f"{number}.{node}")
            run_channels |= channels
        self.state = self._merge(run_state, updated_state, run_channels, update_channels)

    @staticmethod
    def _merge(
        run_state: dict[str, Any],
        updated_state: dict[str, Any],
        run_channels: set[str],
        update_channels: set[str],
    ) -> dict[str, Any]:
        if run_channels & update_channels:
            return run_state
        return {**run_state, **{channel: updated_state[channel] for channel in update_channels}}

    @staticmethod
    def _updates_at_node(turn: Turn, node: int) -> list[tuple[int, Update]]:
        return [(k, update) for k, update in enumerate(turn.updates) if update.node == node]


class Program:
    """The same turns, run by langgraph."""

    def __init__(self, saver: SQLiteCheckpointer) -> None:
        self.saver, self.number = saver, 0
        self.turn: Turn | None = None
        self.done = set[tuple[int, int]]()
        builder = StateGraph(Values)
        nodes: list[Any] = [(f"n{node}", self._make_node(node)) for node in range(3)]
        builder.add_sequence(nodes)
        self.graph: Any = builder.add_edge(START, "n0").compile(checkpointer=saver)

    def _make_node(self, node: int) -> Node:
        def update_and_write(state: Any) -> Any:
            turn = self.turn
            assert turn is not None
            for k, update in Model._updates_at_node(turn, node):
                if (self.number, k) not in self.done:
                    self.done.add((self.number, k))
                    value = f"u{self.number}.{k}"
                    values = apply_write({}, update.channels, value)
                    self.update(values, f"n{update.as_node}")
            if node == turn.asking_node:
                interrupt("Go on?")
            return apply_write({}, turn.writes[node], f"{self.number}.{node}")

        return update_and_write

    def update(self, values: Any, as_node: str) -> None:
        call_in_thread(self.graph.update_state, config_at(), values, as_node)

    def run_turn(self, number: int, turn: Turn) -> dict[str, Any]:
        self.number, self.turn = number, turn
        options: Any = {"durability": turn.durability}
        self.graph.invoke({"log": [f"q{number}"]}, config_at(), **options)
        state = self.graph.get_state(config_at())
        if state.interrupts:
            self.graph.invoke(Command(resume=True), config_at(), **options)
        values: dict[str, Any] = self.graph.get_state(config_at()).values
        return values


@given(turn_lists())
def test_random_turns_and_updates_agree_with_the_model(program: list[Turn]) -> None:
    """After each turn, the thread has the state of the model, with and without the cache."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        model, runner = Model(), Program(saver)
        for number, turn in enumerate(program):
            model.run_turn(number, turn)
            values = runner.run_turn(number, turn)
            saver._cache.drop_thread("t")

            assert values == model.state
            assert runner.graph.get_state(config_at()).values == model.state
            heads = [info.checkpoint_id for info in saver.checkpoints("t") if info.is_head]
            assert heads == [read_head_id(saver)]

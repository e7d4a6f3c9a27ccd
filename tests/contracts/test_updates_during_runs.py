"""An update of the state during a run and what the run writes are both in the thread."""

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


def head(saver: SQLiteCheckpointer) -> str:
    """The id of the checkpoint from which the next run starts."""
    found = saver.head("t")
    assert found is not None
    return str(found.checkpoint_id)


def elsewhere(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a call in another thread, which knows nothing of the run of this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args, **options).result()


def says(text: str) -> Node:
    return lambda state: {"messages": [AIMessage(text)]}


def asks(state: Any) -> Any:
    return {"messages": [AIMessage(interrupt("Really?"))]}


def fails(state: Any) -> Any:
    raise LookupError("no answer")


class Run:
    """A graph of nodes, one after the other, during which the state is updated.

    Args:
        saver: The checkpointer.
        nodes: The nodes, by name.
        updates: Calls that are made while a node runs, by its name, once each.
    """

    def __init__(
        self, saver: SQLiteCheckpointer, nodes: dict[str, Node], updates: dict[str, Any]
    ) -> None:
        self.saver, self.updates = saver, updates
        builder = StateGraph(State)
        sequence: list[Any] = [(name, self._updating(name, nodes[name])) for name in nodes]
        builder.add_sequence(sequence)
        self.graph: Any = builder.add_edge(START, next(iter(nodes))).compile(checkpointer=saver)

    def _updating(self, name: str, node: Node) -> Node:
        def call(state: Any) -> Any:
            update = self.updates.pop(name, None)
            if update is not None:
                elsewhere(update, self.graph)
            return node(state)

        return call

    def invoke(self, given: Any, how: str = "sync", durability: Any = "sync") -> Any:
        if how == "sync":
            return self.graph.invoke(given, config_at(), durability=durability)
        return asyncio.run(self.graph.ainvoke(given, config_at(), durability=durability))

    def said(self) -> list[str]:
        return [m.text for m in self.graph.get_state(config_at()).values["messages"]]

    def value(self, name: str) -> Any:
        return self.graph.get_state(config_at()).values.get(name)


def update(values: Any, as_node: str | None) -> Callable[[Any], Any]:
    return lambda graph: graph.update_state(config_at(), values, as_node)


def test_an_update_that_read_the_one_before_and_is_put_after_the_run(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the state after the first update, and the run puts a checkpoint before its put."""
    puts: list[Any] = []
    nodes = {name: says(name) for name in ("first", "second", "third")}

    def put_later(*args: Any) -> Any:
        puts.append(args)
        return args[0]

    def two_updates(graph: Any) -> None:
        graph.update_state(config_at(), {"tags": ["one"], "title": "T"}, "third")
        with monkeypatch.context() as patched:
            patched.setattr(saver, "put", put_later)
            graph.update_state(config_at(), {"tags": ["two"]}, "third")

    run = Run(saver, nodes, {"first": two_updates, "second": lambda _: saver.put(*puts[0])})
    run.invoke(ASK)

    assert run.said() == ["q", "first", "second", "third"]
    assert run.value("tags") == ["one", "two"]
    assert run.value("title") == "T"


def put_later(saver: SQLiteCheckpointer, update: Callable[[], Any]) -> Callable[[], Any]:
    """Make an update, except for its put, and return a function that makes the put."""
    puts: list[Any] = []

    def keep(*args: Any) -> Any:
        puts.append(args)
        return config_at(uid=args[1]["id"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "put", keep)
        update()
    return lambda: saver.put(*puts[0])


def test_an_update_during_a_run_that_writes_the_value_which_was_there(
    saver: SQLiteCheckpointer,
) -> None:
    """The update and the run may give the channel the same version; the update is kept."""
    put: list[Any] = []

    def update_later(graph: Any) -> None:
        put.append(put_later(saver, lambda: graph.update_state(config_at(), TITLE, "c")))

    def writes_equal(state: Any) -> Any:
        return {"messages": [AIMessage("A")], "title": "Before"}

    nodes = {"a": writes_equal, "b": says("B"), "c": says("C")}
    run = Run(saver, nodes, {"a": update_later, "b": lambda _: put[0]()})
    run.graph.update_state(config_at(), {"title": "Before"}, "c")
    run.invoke(ASK)

    assert run.value("title") == "A question"


@pytest.mark.parametrize("late", [False, True])
def test_a_channel_of_the_state_may_have_a_colon_in_its_name(
    saver: SQLiteCheckpointer, late: bool
) -> None:
    """Channels that route a run are recognised by the beginnings of their names."""
    Colon = TypedDict(
        "Colon", {"messages": Annotated[list[AnyMessage], add_messages], "a:b": str}, total=False
    )
    put: list[Any] = []

    def first(state: Any) -> Any:
        update = partial(graph.update_state, config_at(), {"a:b": "kept"}, "second")
        put.append(elsewhere(put_later, saver, update) if late else elsewhere(update))
        return {"messages": [AIMessage("first")]}

    def second(state: Any) -> Any:
        if late:
            elsewhere(put[0])
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
def test_an_update_of_a_delta_channel_is_not_lost(
    saver: SQLiteCheckpointer, late: bool, has_snapshot: bool
) -> None:
    """Its value is in the writes at the checkpoint that the update has read."""
    put: list[Any] = []

    def first(state: Any) -> Any:
        update = partial(graph.update_state, config_at(), {"names": {"Ann"}}, "second")
        put.append(elsewhere(put_later, saver, update) if late else elsewhere(update))
        return {"messages": [AIMessage("first")]}

    def second(state: Any) -> Any:
        if late:
            elsewhere(put[0])
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


def test_a_first_run_with_durability_exit_and_a_delta_channel(saver: SQLiteCheckpointer) -> None:
    """langgraph stores the writes of that run at an empty checkpoint before the run's own."""

    class Deep(TypedDict, total=False):
        messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]
        title: str

    def answer(state: Any) -> Any:
        elsewhere(graph.update_state, config_at(), TITLE, "answer")
        return {"messages": [AIMessage("the answer", id="answer")]}

    builder = StateGraph(Deep).add_sequence([("answer", answer)])
    graph: Any = builder.add_edge(START, "answer").compile(checkpointer=saver)
    graph.invoke({"messages": [("human", "q")]}, config_at(), durability="exit")
    values = graph.get_state(config_at()).values

    assert [m.text for m in values["messages"]] == ["q", "the answer"]
    assert values["title"] == "A question"


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("as_node", ["a", "b"])
@pytest.mark.parametrize("before", [0, 1])
def test_an_answer_and_a_title_are_both_kept(
    saver: SQLiteCheckpointer, how: str, durability: str, as_node: str, before: int
) -> None:
    """The next turn sees both; nothing is a branch, and no mark is left."""
    run = Run(saver, {"a": says("A"), "b": says("B")}, {})
    for _ in range(before):
        run.invoke({"messages": [("human", "before")]})
    run.updates = {"a": update(TITLE, as_node)}
    run.invoke(ASK, how, durability)
    state, said = run.graph.get_state(config_at()), run.said()
    run.invoke({"messages": [("human", "next")]}, how, durability)

    assert state.next == ()
    assert said[-1] == "B"
    assert "q" in said
    assert (run.value("title"), run.said()[-1]) == ("A question", "B")
    assert "next" in run.said()
    assert read_history_texts(saver) == run.said()
    assert not [each for each in saver.checkpoints("t") if each.is_branch]
    assert not [each for each in saver.history("t") if each.branch]
    assert saver.status("t").state == "idle"
    assert MERGED not in run.graph.get_state(config_at()).metadata


def test_every_reducer_and_several_updates(saver: SQLiteCheckpointer) -> None:
    """Also updates while different nodes run, and one upon what was merged before."""
    updates = {
        "a": lambda graph: [
            graph.update_state(config_at(), {"tags": ["one"]}, "b"),
            graph.update_state(config_at(), {"count": 1}, "b"),
        ],
        "b": update({**TITLE, "tags": ["two"]}, "a"),
    }
    run = Run(saver, {"a": says("A"), "b": says("B"), "c": says("C")}, updates)
    run.invoke(ASK)
    values = run.graph.get_state(config_at()).values

    assert run.said() == ["q", "A", "B", "C"]
    assert (values["tags"], values["count"], values["title"]) == (["one", "two"], 1, "A question")


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("as_node", ["a", "b"])
def test_a_question_is_that_of_the_run(
    saver: SQLiteCheckpointer, durability: str, as_node: str
) -> None:
    """The thread waits for the answer, and what it resumes has the title, in each list."""
    run = Run(saver, {"a": says("A"), "b": asks}, {"b": update(TITLE, as_node)})
    run.invoke(ASK, durability=durability)
    waiting = run.graph.get_state(config_at())

    assert [each.value for each in waiting.interrupts] == ["Really?"]
    assert (waiting.next, waiting.values["title"]) == (("b",), "A question")
    assert saver.status("t").state == "waiting"
    assert [head.thread_id for head in saver.heads(waiting=True)] == ["t"]
    assert head(saver) == checkpoint_id_of(waiting.config)
    saver._cache.drop_thread("t")
    run.invoke(Command(resume="Yes."), durability=durability)
    assert (run.said(), run.value("title")) == (["q", "A", "Yes."], "A question")


def test_a_question_before_the_update(saver: SQLiteCheckpointer) -> None:
    """The update has read the state before the task asked, and is put after that."""
    run = Run(saver, {"a": says("A"), "b": asks}, {})
    real, read = saver.put, list[Any]()

    def put_later(*args: Any) -> Any:
        read.append(args)
        return config_at(uid=args[1]["id"])

    def update_later(graph: Any) -> None:
        saver.put = put_later  # type: ignore[method-assign, assignment]
        try:
            graph.update_state(config_at(), TITLE, "a")
        finally:
            saver.put = real  # type: ignore[method-assign]

    run.updates = {"a": update_later}
    run.invoke(ASK)
    stored = real(*read[0])
    waiting = run.graph.get_state(config_at())

    assert [each.value for each in waiting.interrupts] == ["Really?"]
    assert run.graph.get_state(stored).values["title"] == "A question"
    run.invoke(Command(resume="Yes."))
    assert (run.said(), run.value("title")) == (["q", "A", "Yes."], "A question")


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_an_update_between_a_question_and_the_end_of_another_task(
    saver: SQLiteCheckpointer, durability: Any, forgets: bool
) -> None:
    """The other task shows that the run is still under way; the question stays."""
    asked, updated = Event(), list[bool]()

    def ask(state: Any) -> Any:
        try:
            return asks(state)
        finally:
            asked.set()

    def work(state: Any) -> Any:
        if not updated:
            updated.append(asked.wait(10))
            while not elsewhere(graph.get_state, config_at()).interrupts:
                time.sleep(0.01)
            elsewhere(graph.update_state, config_at(), TITLE, "ask")
            if forgets:
                saver._cache.drop_thread("t")
        return {"count": 1}

    builder = StateGraph(State).add_node("ask", ask).add_node("work", work)
    graph: Any = builder.add_edge(START, "ask").add_edge(START, "work").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability=durability)
    waiting = graph.get_state(config_at())
    graph.invoke(Command(resume="Yes."), config_at(), durability=durability)
    values = graph.get_state(config_at()).values

    assert [each.value for each in waiting.interrupts] == ["Really?"]
    assert waiting.values["title"] == "A question"
    assert [m.text for m in values["messages"]] == ["q", "Yes."]
    assert (values["title"], values["count"]) == ("A question", 1)


def test_an_update_while_a_task_goes_on_after_its_answer(saver: SQLiteCheckpointer) -> None:
    """The question was answered, so the update and the answer are in one line of checkpoints."""
    updates = [update(TITLE, "a")]

    def asks_and_updates(state: Any) -> Any:
        answer = asks(state)
        elsewhere(updates.pop(), run.graph)
        return answer

    run = Run(saver, {"a": asks_and_updates, "b": says("B")}, {})
    run.invoke(ASK)
    run.invoke(Command(resume="Yes."))

    assert (run.said(), run.value("title")) == (["q", "Yes.", "B"], "A question")
    assert not [each for each in saver.checkpoints("t") if each.is_branch]


def test_a_question_of_a_run_from_an_old_checkpoint_does_not_take_an_update(
    saver: SQLiteCheckpointer,
) -> None:
    """Who resumes a checkpoint by its id goes on from its state, without later updates."""

    def asks_twice(state: Any) -> Any:
        return {"messages": [AIMessage(interrupt("First?") + interrupt("Second?"))]}

    run = Run(saver, {"a": asks_twice}, {})
    run.invoke(ASK)
    old = run.graph.get_state(config_at()).config
    run.graph.update_state(config_at(), TITLE, "a")
    run.graph.invoke(Command(resume="Yes."), old)

    assert [each.value for each in run.graph.get_state(old).interrupts] == ["Second?"]
    assert "title" not in run.graph.get_state(old).values
    assert run.value("title") == "A question"


def test_a_run_that_fails_is_continued_where_it_failed(saver: SQLiteCheckpointer) -> None:
    """Not where the update would go on."""
    run = Run(saver, {"a": says("A"), "b": fails}, {"b": update(TITLE, "b")})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    failed = run.graph.get_state(config_at())
    again = Run(saver, {"a": says("A"), "b": says("B")}, {})
    again.invoke(None)

    assert (failed.next, failed.values["title"]) == (("b",), "A question")
    assert (again.said(), again.value("title")) == (["q", "A", "B"], "A question")


@pytest.mark.parametrize("late", [False, True])
def test_an_edit_of_what_the_run_writes_keeps_the_head(
    saver: SQLiteCheckpointer, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the run writes it only after steps that were merged; then no step of it is kept."""
    nodes = {"a": says("A"), "b": says("B") if not late else lambda state: {"count": 2}}
    nodes["c"] = says("C")
    updates = {"b": update({**TITLE, "messages": [("human", "edit")]}, "c")}
    run = Run(saver, nodes, updates)
    with caplog.at_level(logging.WARNING, "perdure"):
        run.invoke(ASK)

    assert (run.said(), run.value("title")) == (["q", "A", "edit"], "A question")
    assert run.value("count") is None
    assert "C" in [item.value.text for item in saver.history("t") if item.branch]
    assert head(saver) == checkpoint_id_of(run.graph.get_state(config_at()).config)
    assert len([each for each in caplog.records if "overlapped" in each.message]) == 1
    run.invoke({"messages": [("human", "next")]})
    assert run.said()[:4] == ["q", "A", "edit", "next"]


def test_an_update_after_the_run_has_put_its_answer(saver: SQLiteCheckpointer) -> None:
    """It has read the state before that, and its put comes last."""
    run = Run(saver, {"a": says("A"), "b": says("B")}, {})
    run.invoke(ASK)
    before = run.graph.get_state(config_at())
    stored = saver.get_tuple(before.config)
    run.invoke({"messages": [("human", "next")]})
    assert stored is not None
    version = saver.get_next_version(max(stored.checkpoint["channel_versions"].values()), None)
    late: Any = {**stored.checkpoint, "id": empty_checkpoint()["id"]}
    late["channel_values"] = {**late["channel_values"], "title": "Late"}
    late["channel_versions"] = {**late["channel_versions"], "title": version}
    metadata: Any = {"source": "update", "step": 4, "parents": {}}
    saver.put(before.config, late, metadata, {"title": version})

    assert run.said() == ["q", "A", "B", "next", "A", "B"]
    assert (run.value("title"), run.graph.get_state(config_at()).next) == ("Late", ())


def test_a_newer_turn_still_keeps_the_head(saver: SQLiteCheckpointer) -> None:
    """An update does not bring an abandoned run back over a turn that has begun since."""

    def newer(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        graph.invoke({"messages": [("human", "newer")]}, config_at())

    run = Run(saver, {"a": says("A"), "b": says("B")}, {"a": newer})
    run.invoke(ASK)

    assert run.said() == ["q", "newer", "A", "B"]
    assert run.value("title") == "A question"


def test_a_run_that_goes_on_after_its_process_has_ended(saver: SQLiteCheckpointer) -> None:
    """It has read the merged state, so that what it writes to the channel is no conflict."""
    nodes = {"a": says("A"), "b": fails, "c": lambda state: {"title": state["title"] + "!"}}
    run = Run(saver, nodes, {"a": update(TITLE, "c")})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    saver._cache.drop_thread("t")
    again = Run(saver, {**nodes, "b": says("B")}, {})
    again.invoke(None)

    assert (again.said(), again.value("title")) == (["q", "A", "B"], "A question!")


def test_forks_and_edits_of_the_past_are_no_updates_of_a_run(saver: SQLiteCheckpointer) -> None:
    """What is put on purpose upon an earlier checkpoint has the head, without what came after."""
    run = Run(saver, {"a": says("A"), "b": says("B")}, {})
    run.invoke(ASK)
    run.graph.update_state(config_at(), TITLE, "b")
    past = next(each for each in run.graph.get_state_history(config_at()) if each.next == ("b",))
    run.graph.update_state(past.config, {"count": 5}, "b")

    assert (run.said(), run.value("title"), run.value("count")) == (["q", "A"], None, 5)


def test_an_agent_and_its_title(saver: SQLiteCheckpointer) -> None:
    """With tools, and a middleware whose state has the title."""

    class Titled(AgentState[Any]):
        title: str

    class Titles(AgentMiddleware[Titled, Any, Any]):
        state_schema = Titled

        def after_model(self, state: Any, runtime: Any) -> None:
            if len(state["messages"]) == 2:
                elsewhere(agent.update_state, config_at(), TITLE, "model")

    agent: Any = create_agent(ScriptedModel(), [look_up], middleware=[Titles()], checkpointer=saver)
    asyncio.run(agent.ainvoke({"messages": [("human", "word")]}, config_at()))
    values = agent.get_state(config_at()).values

    assert values["title"] == "A question"
    assert [message.type for message in values["messages"]] == ["human", "ai", "tool", "tool", "ai"]


def test_a_subgraph_and_its_state(saver: SQLiteCheckpointer) -> None:
    """The state within a graph with a namespace of its own is updated while it runs."""
    updates: list[Any] = [TITLE]

    def inner(state: Any) -> Any:
        if updates:
            (task,) = elsewhere(graph.get_state, config_at(), subgraphs=True).tasks
            elsewhere(graph.update_state, task.state.config, updates.pop(), "second")
        return {"messages": [AIMessage("inner")]}

    inside: list[Any] = [("first", inner), ("second", says("second"))]
    child = StateGraph(State).add_sequence(inside)
    compiled = child.add_edge(START, "first").compile(checkpointer=True)
    nodes: list[Any] = [("child", compiled), ("last", says("last"))]
    builder = StateGraph(State).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "child").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability="sync")
    namespace = next(each for each in saver.thread("t").namespaces if each)
    within = graph.get_state(config_at(ns=namespace)).values

    assert [m.text for m in graph.get_state(config_at()).values["messages"]][-1] == "last"
    assert (within["title"], within["messages"][-1].text) == ("A question", "second")


def test_messages_of_a_delta_channel(saver: SQLiteCheckpointer) -> None:
    """The state of deep agents: the messages stand in the writes of tasks."""

    class Deep(TypedDict, total=False):
        messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]
        title: str

    def answer(state: Any) -> Any:
        if "title" not in state:
            elsewhere(graph.update_state, config_at(), TITLE, "answer")
        return {"messages": [AIMessage("the answer", id="answer")]}

    builder = StateGraph(Deep).add_sequence([("answer", answer)])
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
def test_versions_of_every_kind(saver: SQLiteCheckpointer, versions: tuple[Any, ...]) -> None:
    """langgraph's savers use whole numbers, floats and texts; a run then counts on from them."""
    first, title, answer = versions
    run = stored(saver, None, "input", "c0", {"n": first}, {"n": 0})
    stored(saver, run, "update", "c1", {"n": first, "title": title}, {"n": 0, "title": "T"})
    stored(saver, run, "loop", "c2", {"n": answer}, {"n": 1})
    merged = saver.get_tuple(config_at())

    assert merged is not None
    assert merged.checkpoint["channel_values"] == {"n": 1, "title": "T"}
    assert merged.parent_config == config_at(uid="c1")
    found = merged.checkpoint["channel_versions"]["title"]
    assert type(found) is type(title)
    assert saver.get_next_version(max(found, answer), None) > max(found, answer)


def test_versions_that_cannot_be_told_apart(saver: SQLiteCheckpointer) -> None:
    """Nothing is merged then, and the update keeps the head."""
    run = stored(saver, None, "input", "c0", {"n": "x1"}, {"n": 0})
    stored(saver, run, "update", "c1", {"n": "x1", "title": "x2"}, {"n": 0, "title": "T"})
    stored(saver, run, "loop", "c2", {"n": "x3"}, {"n": 1})

    assert head(saver) == "c1"


def stored(
    saver: SQLiteCheckpointer, parent: Any, source: str, uid: str, versions: Any, values: Any
) -> Any:
    """Put a checkpoint with these versions."""
    checkpoint: Any = {"v": 4, "ts": "2026-01-01T00:00:00+00:00", "id": uid, "versions_seen": {}}
    checkpoint |= {"channel_values": values, "channel_versions": versions}
    metadata: Any = {"source": source, "step": 0 if parent else -1, "parents": {}}
    known = parent["versions"] if parent else {}
    new = {channel: v for channel, v in versions.items() if known.get(channel) != v}
    config = saver.put(parent["config"] if parent else config_at(), checkpoint, metadata, new)
    return {"config": config, "versions": versions}


# -- random runs against a model


class Update(NamedTuple):
    node: int
    channels: frozenset[str]
    as_node: int


class Turn(NamedTuple):
    writes: list[frozenset[str]]  # by node
    updates: list[Update]
    asking: int | None  # the node that asks before it writes
    durability: str


CHANNELS = st.frozensets(st.sampled_from(["a", "b", "log"]), max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    out = []
    for _ in range(draw(st.integers(1, 3))):
        writes = draw(st.lists(CHANNELS, min_size=3, max_size=3))
        node = st.integers(0, 2)
        updates = draw(st.lists(st.builds(Update, node, CHANNELS, node), max_size=3))
        asking = draw(st.none() | node)
        durability = draw(st.sampled_from(["sync", "async", "exit"]))
        by_run, by_updates = {"log"}.union(*writes), set().union(*(u.channels for u in updates))
        if durability == "async" and by_run & by_updates:
            durability = "sync"  # which of its steps an update has read is left to chance
        out.append(Turn(writes, updates, asking, durability))
    return out


class Values(TypedDict, total=False):
    a: str
    b: str
    log: Annotated[list[str], operator.add]


def written(state: dict[str, Any], channels: frozenset[str], value: str) -> dict[str, Any]:
    """A state after a write."""
    plain = dict.fromkeys(channels - {"log"}, value)
    log = {"log": [*state.get("log", []), value]} if "log" in channels else {}
    return {**state, **plain, **log}


class Model:
    """What is in the thread, by the rule."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"log": []}

    def turn(self, number: int, turn: Turn) -> None:
        if turn.durability == "exit":
            self._at_exit(number, turn)
            return
        unread, is_kept = set[str](), True
        anchor = self.state = written(self.state, frozenset({"log"}), f"q{number}")
        for node, channels in enumerate(turn.writes):
            for k, each in self._updates(turn, node):
                self.state = anchor = written(self.state, each.channels, f"u{number}.{k}")
                unread |= each.channels
            if node == turn.asking:
                if not is_kept:
                    return  # the question is on the branch, and nobody answers it
                unread = set()  # the run that goes on after the answer has read all
            if is_kept and channels & unread:
                is_kept, self.state = False, anchor
            elif is_kept:
                self.state = written(self.state, channels, f"{number}.{node}")

    def _at_exit(self, number: int, turn: Turn) -> None:
        """A run that is stored as a whole, or as two: up to its question, and from its answer."""
        own, both = self.state, self.state
        wrote, updated = set[str](), set[str]()
        writes = [("log", frozenset({"log"}), f"q{number}")]
        own = written(own, writes[0][1], writes[0][2])
        wrote |= {"log"}
        for node, channels in enumerate(turn.writes):
            for k, each in self._updates(turn, node):
                both = written(both, each.channels, f"u{number}.{k}")
                updated |= each.channels
            if node == turn.asking:
                own = self._stored(own, both, wrote, updated)
                both, wrote, updated = own, set(), set()
            own = written(own, channels, f"{number}.{node}")
            wrote |= channels
        self.state = self._stored(own, both, wrote, updated)

    @staticmethod
    def _stored(
        own: dict[str, Any], both: dict[str, Any], wrote: set[str], updated: set[str]
    ) -> dict[str, Any]:
        if wrote & updated:
            return own
        return {**own, **{channel: both[channel] for channel in updated}}

    @staticmethod
    def _updates(turn: Turn, node: int) -> list[tuple[int, Update]]:
        return [(k, each) for k, each in enumerate(turn.updates) if each.node == node]


class Program:
    """The same turns, by langgraph."""

    def __init__(self, saver: SQLiteCheckpointer) -> None:
        self.saver, self.number = saver, 0
        self.turn: Turn | None = None
        self.done = set[tuple[int, int]]()
        builder = StateGraph(Values)
        nodes: list[Any] = [(f"n{node}", self._node(node)) for node in range(3)]
        builder.add_sequence(nodes)
        self.graph: Any = builder.add_edge(START, "n0").compile(checkpointer=saver)

    def _node(self, node: int) -> Node:
        def call(state: Any) -> Any:
            turn = self.turn
            assert turn is not None
            for k, each in Model._updates(turn, node):
                if (self.number, k) not in self.done:
                    self.done.add((self.number, k))
                    value = f"u{self.number}.{k}"
                    values = written({}, each.channels, value)
                    self.update(values, f"n{each.as_node}")
            if node == turn.asking:
                interrupt("Go on?")
            return written({}, turn.writes[node], f"{self.number}.{node}")

        return call

    def update(self, values: Any, as_node: str) -> None:
        elsewhere(self.graph.update_state, config_at(), values, as_node)

    def run(self, number: int, turn: Turn) -> dict[str, Any]:
        self.number, self.turn = number, turn
        options: Any = {"durability": turn.durability}
        self.graph.invoke({"log": [f"q{number}"]}, config_at(), **options)
        state = self.graph.get_state(config_at())
        if state.interrupts:
            self.graph.invoke(Command(resume=True), config_at(), **options)
        values: dict[str, Any] = self.graph.get_state(config_at()).values
        return values


@given(turns())
def test_random_turns_and_updates(program: list[Turn]) -> None:
    """After each turn the thread has what the model has, in this process and in another one."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        model, running = Model(), Program(saver)
        for number, turn in enumerate(program):
            model.turn(number, turn)
            values = running.run(number, turn)
            saver._cache.drop_thread("t")

            assert values == model.state
            assert running.graph.get_state(config_at()).values == model.state
            heads = [each.checkpoint_id for each in saver.checkpoints("t") if each.is_head]
            assert heads == [head(saver)]

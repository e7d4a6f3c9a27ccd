"""A prune during a run, after an update of the state: the update and the run stay in the thread."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from perdure.checkpointers import Retention, SQLiteCheckpointer, maintenance
from perdure.errors import ThreadDeleted
from tests.contracts.puts import config_at, read_history_texts
from tests.contracts.test_updates_during_runs import (
    ASK,
    TITLE,
    Model,
    Program,
    Run,
    Turn,
    asks,
    elsewhere,
    fails,
    head,
    put_later,
    says,
    stored,
    turns,
    update,
)

Prune = Callable[[SQLiteCheckpointer], Any]
PRUNES: dict[str, Prune] = {
    "keep_latest": lambda saver: saver.prune(["t"], strategy="keep_latest"),
    "last": lambda saver: saver.retain(Retention(last=0), thread_ids=["t"]),
    "days": lambda saver: saver.retain(Retention(days=0), thread_ids=["t"]),
    "turns": lambda saver: saver.retain(Retention(turns=True), thread_ids=["t"]),
    "without history": lambda saver: saver.retain(
        Retention(last=0, history=False), thread_ids=["t"]
    ),
}
HOWS = [("sync", "sync"), ("sync", "async"), ("async", "sync"), ("sync", "exit")]


@pytest.fixture(params=["kept", "pruned"])
def updated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a prune keeps the checkpoint that an update has changed, or the update is old."""
    if request.param == "pruned":
        monkeypatch.setattr(maintenance, "RUN_DAYS", -1)
    return str(request.param)


both = pytest.mark.usefixtures("updated")


def pruning(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make the calls with the graph, and prune the thread after each."""

    def call(graph: Any) -> None:
        for each in calls:
            each(graph)
            graph.checkpointer.prune(["t"], strategy="keep_latest")
            graph.checkpointer._cache.drop_thread("t")

    return call


@both
@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize(("how", "durability"), HOWS)
def test_an_update_before_a_prune(
    prune: str, how: str, durability: str, saver: SQLiteCheckpointer
) -> None:
    """The next step of the run takes the update over, by whatever rule the rest was pruned."""

    def title_and_prune(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "b")
        PRUNES[prune](saver)

    run = Run(saver, {"a": says("A"), "b": says("B"), "c": says("C")}, {"b": title_and_prune})
    run.invoke(ASK, how, durability)

    assert run.said() == ["q", "A", "B", "C"]
    assert run.value("title") == "A question"
    run.invoke({"messages": [("human", "next")]}, how, durability)
    assert run.said() == ["q", "A", "B", "C", "next", "A", "B", "C"]
    assert run.value("title") == "A question"


@both
@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_several_updates_and_prunes(node: str, saver: SQLiteCheckpointer) -> None:
    """Each update is put upon the one before, which the next prune removes."""
    updates = [update({"tags": [f"t{n}"]}, "b") for n in range(4)]
    nodes = {name: says(name) for name in ("a", "b", "c")}
    run = Run(saver, nodes, {node: pruning(*updates, update(TITLE, "c"))})
    run.invoke(ASK)

    assert run.said() == ["q", "a", "b", "c"]
    assert run.value("tags") == ["t0", "t1", "t2", "t3"]
    assert run.value("title") == "A question"


@both
def test_updates_and_prunes_in_every_step(saver: SQLiteCheckpointer) -> None:
    """A step that has taken an update over is itself pruned after the next update."""
    updates = {
        name: pruning(update({"tags": [name]}, "a"), update({"title": name}, "b"))
        for name in ("a", "b", "c")
    }
    run = Run(saver, {name: says(name) for name in ("a", "b", "c")}, updates)
    run.invoke(ASK)

    assert run.said() == ["q", "a", "b", "c"]
    assert run.value("tags") == ["a", "b", "c"]
    assert run.value("title") == "c"


@both
def test_a_prune_before_the_first_step(saver: SQLiteCheckpointer) -> None:
    """A run reads the state, and is at its first node while somebody updates and prunes."""
    run = Run(saver, {"a": says("A")}, {})
    run.invoke(ASK)
    run.updates["a"] = pruning(update(TITLE, "a"))
    run.invoke({"messages": [("human", "next")]})

    assert run.said() == ["q", "A", "next", "A"]
    assert run.value("title") == "A question"


@both
def test_both_wrote_the_channel(saver: SQLiteCheckpointer) -> None:
    """Then the update keeps the head, as it does without a prune, and the run is a branch."""
    nodes = {"a": says("A"), "b": lambda state: {"title": "The run's"}, "c": says("C")}
    run = Run(saver, nodes, {"b": pruning(update(TITLE, "b"))})
    run.invoke(ASK)

    assert run.value("title") == "A question"
    assert run.said() == ["q", "A"]
    assert "C" in [item.value.text for item in saver.history("t") if item.branch]
    run.invoke({"messages": [("human", "next")]})
    assert run.said()[:3] == ["q", "A", "next"]


def test_a_question_after_a_prune(saver: SQLiteCheckpointer) -> None:
    """The question stands, with the update, and its answer goes on."""
    run = Run(
        saver, {"a": says("A"), "b": asks, "c": says("C")}, {"b": pruning(update(TITLE, "a"))}
    )
    run.invoke(ASK)
    saver._cache.drop_thread("t")
    state = run.graph.get_state(config_at())

    assert [each.value for each in state.interrupts] == ["Really?"]
    assert (state.next, state.values["title"]) == (("b",), "A question")
    run.invoke(Command(resume="Yes"))
    assert run.said() == ["q", "A", "Yes", "C"]
    assert run.value("title") == "A question"


def test_a_failure_after_a_prune(saver: SQLiteCheckpointer) -> None:
    """The run can be started again from the node that failed."""
    nodes = {"a": says("A"), "b": fails, "c": says("C")}
    run = Run(saver, nodes, {"b": pruning(update(TITLE, "a"))})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    saver._cache.drop_thread("t")
    again = Run(saver, {**nodes, "b": says("B")}, {})
    again.invoke(None)

    assert again.said() == ["q", "A", "B", "C"]
    assert again.value("title") == "A question"


@both
def test_a_newer_turn_before_a_prune(saver: SQLiteCheckpointer) -> None:
    """An abandoned run does not take the head from it, although its own past is pruned."""
    newer = pruning(lambda graph: graph.invoke({"messages": [("human", "newer")]}, config_at()))
    run = Run(saver, {"a": says("A"), "b": says("B")}, {"a": newer})
    run.invoke(ASK)

    assert run.said() == ["q", "newer", "A", "B"]


@both
def test_a_newer_turn_and_an_update_before_a_prune(saver: SQLiteCheckpointer) -> None:
    """The update is one of the newer turn, so that an abandoned run takes nothing over."""

    def newer(graph: Any) -> None:
        graph.invoke({"messages": [("human", "newer")]}, config_at())
        graph.update_state(config_at(), TITLE, "b")

    run = Run(saver, {"a": says("A"), "b": says("B")}, {"a": pruning(newer)})
    run.invoke(ASK)

    assert run.said() == ["q", "newer", "A", "B"]
    assert run.value("title") == "A question"


@both
@pytest.mark.parametrize("count", [1, 2])
def test_an_update_that_is_put_after_a_prune(
    count: int, saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read a checkpoint of the run which is pruned, once the run has put further ones."""
    puts: list[Callable[[], Any]] = []

    def read(graph: Any) -> None:
        puts.append(put_later(saver, lambda: graph.update_state(config_at(), TITLE, "c")))

    def finish(graph: Any) -> None:
        saver.prune(["t"], strategy="keep_latest")
        puts.pop()()

    names = ["a", "b", "c", "d"]
    run = Run(saver, {name: says(name) for name in names}, {"a": read, names[count]: finish})
    run.invoke(ASK)

    assert run.said() == ["q", *names]
    assert run.value("title") == "A question"


def test_what_a_prune_leaves_of_an_updated_thread(updated: str, saver: SQLiteCheckpointer) -> None:
    """The update, and for a day the checkpoint that it has changed: a run may go on from there."""
    run = Run(saver, {"a": says("A")}, {})
    run.invoke(ASK)
    before = head(saver)
    for number in range(3):
        run.graph.update_state(config_at(), {"count": number}, "a")
    expected = [head(saver), before] if updated == "kept" else [head(saver)]
    preview = saver.retain(Retention(last=0), thread_ids=["t"], dry_run=True)
    stored = len(saver.checkpoints("t"))
    saver.prune(["t"], strategy="keep_latest")

    assert [each.checkpoint_id for each in saver.checkpoints("t")] == expected
    assert preview.checkpoints == stored - len(expected)
    assert (run.said(), read_history_texts(saver), run.value("count")) == (
        ["q", "A"],
        ["q", "A"],
        2,
    )
    run.invoke({"messages": [("human", "next")]})
    saver.prune(["t"], strategy="keep_latest")
    assert [each.checkpoint_id for each in saver.checkpoints("t")] == [head(saver)]


def test_a_rollback_removes_the_updated_checkpoint(saver: SQLiteCheckpointer) -> None:
    """It is one of the run that is rolled back."""
    run = Run(saver, {"a": says("A")}, {})
    run.graph.invoke(ASK, {**config_at(), "metadata": {"run_id": "r"}})
    run.graph.update_state(config_at(), TITLE, "a")
    saver.delete_for_runs(["r"])

    assert len(saver.checkpoints("t")) == 1


@both
@pytest.mark.parametrize("erased_first", [False, True])
def test_an_erasure_between_an_update_and_a_step(
    erased_first: bool, saver: SQLiteCheckpointer
) -> None:
    """The run takes the update over, without the erased message that it still has in memory."""

    def title_and_erase(graph: Any) -> None:
        acts = [
            lambda: graph.update_state(config_at(), TITLE, "a"),
            lambda: saver.erase("t", ["q1"]),
        ]
        for act in reversed(acts) if erased_first else acts:
            act()
            saver.prune(["t"], strategy="keep_latest")

    run = Run(saver, {"a": says("A"), "b": says("B"), "c": says("C")}, {"b": title_and_erase})
    run.invoke({"messages": [HumanMessage("My PIN is 4711, keep it", id="q1")]})

    assert run.said() == ["A", "B", "C"]
    assert run.value("title") == "A question"
    assert "4711" not in str([*saver.list(config_at())])


@both
def test_a_copy_between_an_update_and_a_step(saver: SQLiteCheckpointer) -> None:
    """The copy has the update and goes on by itself; the run goes on in its own thread."""

    def title_and_copy(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        saver.copy_thread("t", "copy")
        saver.prune(["t", "copy"], strategy="keep_latest")

    run = Run(saver, {"a": says("A"), "b": says("B")}, {"b": title_and_copy})
    run.invoke(ASK)
    copied = run.graph.get_state(config_at("copy")).values
    run.graph.invoke({"messages": [("human", "in the copy")]}, config_at("copy"))
    after = run.graph.get_state(config_at("copy")).values

    assert (run.said(), run.value("title")) == (["q", "A", "B"], "A question")
    assert ([m.text for m in copied["messages"]], copied["title"]) == (["q", "A"], "A question")
    assert [m.text for m in after["messages"]] == ["q", "A", "in the copy", "A", "B"]
    assert after["title"] == "A question"


def test_a_deletion_between_an_update_and_a_step(saver: SQLiteCheckpointer) -> None:
    """The run stores nothing any more, and a new thread has neither its state nor the update."""

    def title_and_delete(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        saver.delete_thread("t")
        graph.update_state(config_at(), {"count": 1}, "a")

    run = Run(saver, {"a": says("A"), "b": says("B")}, {"b": title_and_delete})
    with pytest.raises(ThreadDeleted):
        run.invoke(ASK)

    assert run.graph.get_state(config_at()).values == {"count": 1, "messages": [], "tags": []}


class Nested(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], operator.add]
    title: str
    tags: Annotated[list[str], operator.add]


@both
def test_the_state_of_a_subgraph(saver: SQLiteCheckpointer) -> None:
    """The state of a graph within another one is updated and pruned while it runs."""
    updates: list[Any] = [TITLE]

    def inner(state: Any) -> Any:
        if updates:
            (task,) = elsewhere(graph.get_state, config_at(), subgraphs=True).tasks
            elsewhere(graph.update_state, task.state.config, updates.pop(), "second")
            elsewhere(saver.prune, ["t"], strategy="keep_latest")
        return {"messages": [AIMessage("inner")]}

    inside: list[Any] = [("first", inner), ("second", says("second"))]
    child = StateGraph(Nested).add_sequence(inside)
    compiled = child.add_edge(START, "first").compile(checkpointer=True)
    nodes: list[Any] = [("child", compiled), ("last", says("last"))]
    builder = StateGraph(Nested).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "child").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability="sync")
    namespace = next(each for each in saver.thread("t").namespaces if each)
    within = graph.get_state(config_at(ns=namespace)).values

    assert graph.get_state(config_at()).values["messages"][-1].text == "last"
    assert (within["title"], within["messages"][-1].text) == ("A question", "second")


@both
@pytest.mark.parametrize("is_text", [False, True], ids=["numbers", "texts"])
@pytest.mark.parametrize("writes_title", [False, True])
def test_versions_of_a_pruned_checkpoint(
    writes_title: bool, is_text: bool, saver: SQLiteCheckpointer
) -> None:
    """They are inferred from those of the put, in which a random part tells nothing."""

    def version(number: int, random: int) -> Any:
        return f"{number:032}.{random}" if is_text else number

    first, title, answer = version(1, 5), version(2, 1), version(2, 9)
    run = stored(saver, None, "input", "c0", {"n": first}, {"n": 0})
    versions = {"n": first, "title": title}
    stored(saver, run, "update", "c1", versions, {"n": 0, "title": "T"})
    stored(
        saver, {"config": config_at(uid="c1"), "versions": versions}, "update", "c2", versions, {}
    )
    saver.prune(["t"], strategy="keep_latest")
    own = {"n": answer, "title": answer} if writes_title else {"n": answer}
    stored(saver, run, "loop", "c3", own, dict.fromkeys(own, 1))
    found = saver.get_tuple(config_at())

    assert found is not None
    assert head(saver) == ("c2" if writes_title else "c3")
    assert found.checkpoint["channel_values"] == {"n": 0 if writes_title else 1, "title": "T"}


# -- random runs against the model of updates without prunes


class Disturbed(Program):
    """Removes, copies or forgets something of the thread after each update."""

    def __init__(self, saver: SQLiteCheckpointer, acts: Iterator[str]) -> None:
        super().__init__(saver)
        self.acts = acts

    def update(self, values: Any, as_node: str) -> None:
        super().update(values, as_node)
        ACTS[next(self.acts, "nothing")](self.saver)


ACTS: dict[str, Prune] = {
    "nothing": lambda saver: None,
    **PRUNES,
    "copy": lambda saver: saver.copy_thread("t", str(uuid4())),
    "erase": lambda saver: saver.erase("t", ["no such message"]),
    "forget": lambda saver: saver._cache.drop_thread("t"),
}


ACTIONS = st.lists(st.sampled_from(sorted(ACTS)), max_size=12)


def compare(program: list[Turn], acts: list[str]) -> None:
    """Run turns with updates, and compare the thread with the model after each turn."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        model, running = Model(), Disturbed(saver, iter(acts))
        for number, turn in enumerate(program):
            model.turn(number, turn)
            values = running.run(number, turn)
            saver._cache.drop_thread("t")

            assert values == model.state
            assert running.graph.get_state(config_at()).values == model.state


@given(turns(), ACTIONS)
def test_random_turns_updates_and_prunes(program: list[Turn], acts: list[str]) -> None:
    """After each turn the thread has what the model has, in this process and in another one."""
    compare(program, acts)


@given(turns(), ACTIONS)
def test_random_turns_and_prunes_of_what_was_updated(program: list[Turn], acts: list[str]) -> None:
    """The same without the checkpoint that was updated: there are questions no more."""
    program = [turn._replace(asking=None, durability="sync") for turn in program]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "RUN_DAYS", -1)
        compare(program, acts)

"""A prune during a run, after an update of the state, loses neither the update nor the run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from hypothesis import example, given
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
    Turn,
    Update,
    UpdatedRun,
    answer_node,
    ask,
    call_in_thread,
    fail,
    make_update,
    put_later,
    put_with_versions,
    read_head_id,
    turn_lists,
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
RUN_MODES = [("sync", "sync"), ("sync", "async"), ("async", "sync"), ("sync", "exit")]


@pytest.fixture(params=["kept", "pruned"])
def updated_checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a prune keeps the updated checkpoint, or prunes it because the update is old."""
    if request.param == "pruned":
        monkeypatch.setattr(maintenance, "RUN_DAYS", -1)
    return str(request.param)


kept_or_pruned_update = pytest.mark.usefixtures("updated_checkpoint")


def prune_after_each(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes the calls, and prunes the thread after each call."""

    def call_and_prune(graph: Any) -> None:
        for make_call in calls:
            make_call(graph)
            graph.checkpointer.prune(["t"], strategy="keep_latest")
            graph.checkpointer._cache.drop_thread("t")

    return call_and_prune


@kept_or_pruned_update
@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize(("mode", "durability"), RUN_MODES)
def test_run_takes_over_an_update_made_before_a_prune(
    prune: str, mode: str, durability: str, saver: SQLiteCheckpointer
) -> None:
    """The next step of the run takes the update over, for every rule of pruning."""

    def title_and_prune(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "b")
        PRUNES[prune](saver)

    run = UpdatedRun(
        saver,
        {"a": answer_node("A"), "b": answer_node("B"), "c": answer_node("C")},
        {"b": title_and_prune},
    )
    run.invoke(ASK, mode, durability)

    assert run.message_texts() == ["q", "A", "B", "C"]
    assert run.read_value("title") == "A question"
    run.invoke({"messages": [("human", "next")]}, mode, durability)
    assert run.message_texts() == ["q", "A", "B", "C", "next", "A", "B", "C"]
    assert run.read_value("title") == "A question"


@kept_or_pruned_update
@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_run_takes_over_several_updates_each_followed_by_a_prune(
    node: str, saver: SQLiteCheckpointer
) -> None:
    """The parent of each update is the previous update, which the next prune removes."""
    updates = [make_update({"tags": [f"t{n}"]}, "b") for n in range(4)]
    nodes = {name: answer_node(name) for name in ("a", "b", "c")}
    run = UpdatedRun(saver, nodes, {node: prune_after_each(*updates, make_update(TITLE, "c"))})
    run.invoke(ASK)

    assert run.message_texts() == ["q", "a", "b", "c"]
    assert run.read_value("tags") == ["t0", "t1", "t2", "t3"]
    assert run.read_value("title") == "A question"


@kept_or_pruned_update
def test_run_takes_over_updates_and_prunes_in_every_step(saver: SQLiteCheckpointer) -> None:
    """A step that has taken an update over is itself pruned after the next update."""
    updates = {
        name: prune_after_each(
            make_update({"tags": [name]}, "a"), make_update({"title": name}, "b")
        )
        for name in ("a", "b", "c")
    }
    run = UpdatedRun(saver, {name: answer_node(name) for name in ("a", "b", "c")}, updates)
    run.invoke(ASK)

    assert run.message_texts() == ["q", "a", "b", "c"]
    assert run.read_value("tags") == ["a", "b", "c"]
    assert run.read_value("title") == "c"


@kept_or_pruned_update
def test_update_and_prune_before_the_first_step_are_kept(saver: SQLiteCheckpointer) -> None:
    """The state is updated and pruned while the run is in its first node."""
    run = UpdatedRun(saver, {"a": answer_node("A")}, {})
    run.invoke(ASK)
    run.updates["a"] = prune_after_each(make_update(TITLE, "a"))
    run.invoke({"messages": [("human", "next")]})

    assert run.message_texts() == ["q", "A", "next", "A"]
    assert run.read_value("title") == "A question"


@kept_or_pruned_update
def test_update_keeps_the_head_if_run_and_update_wrote_one_channel(
    saver: SQLiteCheckpointer,
) -> None:
    """The run becomes a branch, as without a prune."""
    nodes = {
        "a": answer_node("A"),
        "b": lambda state: {"title": "The run's"},
        "c": answer_node("C"),
    }
    run = UpdatedRun(saver, nodes, {"b": prune_after_each(make_update(TITLE, "b"))})
    run.invoke(ASK)

    assert run.read_value("title") == "A question"
    assert run.message_texts() == ["q", "A"]
    assert "C" in [item.value.text for item in saver.history("t") if item.branch]
    run.invoke({"messages": [("human", "next")]})
    assert run.message_texts()[:3] == ["q", "A", "next"]


def test_interrupt_after_update_and_prune_can_be_answered(saver: SQLiteCheckpointer) -> None:
    """The interrupt and the update are in the state, and the answer continues the run."""
    run = UpdatedRun(
        saver,
        {"a": answer_node("A"), "b": ask, "c": answer_node("C")},
        {"b": prune_after_each(make_update(TITLE, "a"))},
    )
    run.invoke(ASK)
    saver._cache.drop_thread("t")
    state = run.graph.get_state(config_at())

    assert [interrupt.value for interrupt in state.interrupts] == ["Really?"]
    assert (state.next, state.values["title"]) == (("b",), "A question")
    run.invoke(Command(resume="Yes"))
    assert run.message_texts() == ["q", "A", "Yes", "C"]
    assert run.read_value("title") == "A question"


def test_run_that_failed_after_a_prune_can_be_retried(saver: SQLiteCheckpointer) -> None:
    """The retry starts at the node that failed."""
    nodes = {"a": answer_node("A"), "b": fail, "c": answer_node("C")}
    run = UpdatedRun(saver, nodes, {"b": prune_after_each(make_update(TITLE, "a"))})
    with pytest.raises(LookupError):
        run.invoke(ASK)
    saver._cache.drop_thread("t")
    retried = UpdatedRun(saver, {**nodes, "b": answer_node("B")}, {})
    retried.invoke(None)

    assert retried.message_texts() == ["q", "A", "B", "C"]
    assert retried.read_value("title") == "A question"


@kept_or_pruned_update
def test_abandoned_run_does_not_take_the_head_after_a_prune(saver: SQLiteCheckpointer) -> None:
    """The newer turn keeps the head, although the ancestors of the abandoned run were pruned."""
    run_newer_turn = prune_after_each(
        lambda graph: graph.invoke({"messages": [("human", "newer")]}, config_at())
    )
    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {"a": run_newer_turn})
    run.invoke(ASK)

    assert run.message_texts() == ["q", "newer", "A", "B"]


@kept_or_pruned_update
def test_abandoned_run_ignores_the_update_of_a_newer_turn(saver: SQLiteCheckpointer) -> None:
    """The update belongs to the newer turn, so the abandoned run takes nothing over."""

    def run_newer_turn_and_update(graph: Any) -> None:
        graph.invoke({"messages": [("human", "newer")]}, config_at())
        graph.update_state(config_at(), TITLE, "b")

    run = UpdatedRun(
        saver,
        {"a": answer_node("A"), "b": answer_node("B")},
        {"a": prune_after_each(run_newer_turn_and_update)},
    )
    run.invoke(ASK)

    assert run.message_texts() == ["q", "newer", "A", "B"]
    assert run.read_value("title") == "A question"


@kept_or_pruned_update
@pytest.mark.parametrize("count", [1, 2])
def test_update_read_before_and_put_after_a_prune_is_taken_over(
    count: int, saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update has read a checkpoint of the run, which is pruned before the update is put."""
    prepared_puts: list[Callable[[], Any]] = []

    def prepare_update(graph: Any) -> None:
        prepared_puts.append(put_later(saver, lambda: graph.update_state(config_at(), TITLE, "c")))

    def prune_and_put(graph: Any) -> None:
        saver.prune(["t"], strategy="keep_latest")
        prepared_puts.pop()()

    names = ["a", "b", "c", "d"]
    run = UpdatedRun(
        saver,
        {name: answer_node(name) for name in names},
        {"a": prepare_update, names[count]: prune_and_put},
    )
    run.invoke(ASK)

    assert run.message_texts() == ["q", *names]
    assert run.read_value("title") == "A question"


def test_prune_keeps_the_update_and_for_a_day_the_updated_checkpoint(
    updated_checkpoint: str, saver: SQLiteCheckpointer
) -> None:
    """The updated checkpoint stays for a day, because a run may continue from it."""
    run = UpdatedRun(saver, {"a": answer_node("A")}, {})
    run.invoke(ASK)
    before = read_head_id(saver)
    for number in range(3):
        run.graph.update_state(config_at(), {"count": number}, "a")
    expected = (
        [read_head_id(saver), before] if updated_checkpoint == "kept" else [read_head_id(saver)]
    )
    preview = saver.retain(Retention(last=0), thread_ids=["t"], dry_run=True)
    stored = len(saver.checkpoints("t"))
    saver.prune(["t"], strategy="keep_latest")

    assert [info.checkpoint_id for info in saver.checkpoints("t")] == expected
    assert preview.checkpoints == stored - len(expected)
    assert (run.message_texts(), read_history_texts(saver), run.read_value("count")) == (
        ["q", "A"],
        ["q", "A"],
        2,
    )
    run.invoke({"messages": [("human", "next")]})
    saver.prune(["t"], strategy="keep_latest")
    assert [info.checkpoint_id for info in saver.checkpoints("t")] == [read_head_id(saver)]


def test_rollback_of_a_run_removes_the_updated_checkpoint(saver: SQLiteCheckpointer) -> None:
    """The updated checkpoint belongs to the run that is rolled back."""
    run = UpdatedRun(saver, {"a": answer_node("A")}, {})
    run.graph.invoke(ASK, {**config_at(), "metadata": {"run_id": "r"}})
    run.graph.update_state(config_at(), TITLE, "a")
    saver.delete_for_runs(["r"])

    assert len(saver.checkpoints("t")) == 1


@kept_or_pruned_update
@pytest.mark.parametrize("erased_first", [False, True])
def test_run_takes_over_an_update_without_the_erased_message(
    erased_first: bool, saver: SQLiteCheckpointer
) -> None:
    """The run still has the erased message in memory, and stores its next step without it."""

    def title_and_erase(graph: Any) -> None:
        actions = [
            lambda: graph.update_state(config_at(), TITLE, "a"),
            lambda: saver.erase("t", ["q1"]),
        ]
        for action in reversed(actions) if erased_first else actions:
            action()
            saver.prune(["t"], strategy="keep_latest")

    run = UpdatedRun(
        saver,
        {"a": answer_node("A"), "b": answer_node("B"), "c": answer_node("C")},
        {"b": title_and_erase},
    )
    run.invoke({"messages": [HumanMessage("My PIN is 47-11-08, keep it", id="q1")]})

    assert run.message_texts() == ["A", "B", "C"]
    assert run.read_value("title") == "A question"
    assert "47-11-08" not in str([*saver.list(config_at())])


@kept_or_pruned_update
def test_thread_copied_after_an_update_continues_independently(saver: SQLiteCheckpointer) -> None:
    """The copy has the update and continues by itself. The run continues in its own thread."""

    def title_and_copy(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        saver.copy_thread("t", "copy")
        saver.prune(["t", "copy"], strategy="keep_latest")

    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {"b": title_and_copy})
    run.invoke(ASK)
    copied = run.graph.get_state(config_at("copy")).values
    run.graph.invoke({"messages": [("human", "in the copy")]}, config_at("copy"))
    after = run.graph.get_state(config_at("copy")).values

    assert (run.message_texts(), run.read_value("title")) == (["q", "A", "B"], "A question")
    assert ([m.text for m in copied["messages"]], copied["title"]) == (["q", "A"], "A question")
    assert [m.text for m in after["messages"]] == ["q", "A", "in the copy", "A", "B"]
    assert after["title"] == "A question"


def test_run_of_deleted_thread_stores_nothing_in_the_new_thread(saver: SQLiteCheckpointer) -> None:
    """The run fails, and the new thread has neither the state of the run nor the update."""

    def title_and_delete(graph: Any) -> None:
        graph.update_state(config_at(), TITLE, "a")
        saver.delete_thread("t")
        graph.update_state(config_at(), {"count": 1}, "a")

    run = UpdatedRun(saver, {"a": answer_node("A"), "b": answer_node("B")}, {"b": title_and_delete})
    with pytest.raises(ThreadDeleted):
        run.invoke(ASK)

    assert run.graph.get_state(config_at()).values == {"count": 1, "messages": [], "tags": []}


class Nested(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], operator.add]
    title: str
    tags: Annotated[list[str], operator.add]


@kept_or_pruned_update
def test_update_of_a_subgraph_is_taken_over_after_a_prune(saver: SQLiteCheckpointer) -> None:
    """The state of a subgraph is updated and pruned while the subgraph runs."""
    updates: list[Any] = [TITLE]

    def update_and_prune_once(state: Any) -> Any:
        if updates:
            (task,) = call_in_thread(graph.get_state, config_at(), subgraphs=True).tasks
            call_in_thread(graph.update_state, task.state.config, updates.pop(), "second")
            call_in_thread(saver.prune, ["t"], strategy="keep_latest")
        return {"messages": [AIMessage("inner")]}

    inner_nodes: list[Any] = [("first", update_and_prune_once), ("second", answer_node("second"))]
    child = StateGraph(Nested).add_sequence(inner_nodes)
    compiled = child.add_edge(START, "first").compile(checkpointer=True)
    nodes: list[Any] = [("child", compiled), ("last", answer_node("last"))]
    builder = StateGraph(Nested).add_sequence(nodes)
    graph: Any = builder.add_edge(START, "child").compile(checkpointer=saver)
    graph.invoke(ASK, config_at(), durability="sync")
    namespace = next(ns for ns in saver.thread("t").namespaces if ns)
    subgraph_values = graph.get_state(config_at(ns=namespace)).values

    assert graph.get_state(config_at()).values["messages"][-1].text == "last"
    assert (subgraph_values["title"], subgraph_values["messages"][-1].text) == (
        "A question",
        "second",
    )


@kept_or_pruned_update
@pytest.mark.parametrize("is_text", [False, True], ids=["numbers", "texts"])
@pytest.mark.parametrize("writes_title", [False, True])
def test_versions_of_a_pruned_checkpoint_are_inferred_from_the_put(
    writes_title: bool, is_text: bool, saver: SQLiteCheckpointer
) -> None:
    """The random part of a version of the put is ignored."""

    def make_version(number: int, random: int) -> Any:
        return f"{number:032}.{random}" if is_text else number

    first, title, answer = make_version(1, 5), make_version(2, 1), make_version(2, 9)
    run = put_with_versions(saver, None, "input", "c0", {"n": first}, {"n": 0})
    versions = {"n": first, "title": title}
    put_with_versions(saver, run, "update", "c1", versions, {"n": 0, "title": "T"})
    put_with_versions(
        saver, {"config": config_at(uid="c1"), "versions": versions}, "update", "c2", versions, {}
    )
    saver.prune(["t"], strategy="keep_latest")
    written_versions = {"n": answer, "title": answer} if writes_title else {"n": answer}
    put_with_versions(
        saver, run, "loop", "c3", written_versions, dict.fromkeys(written_versions, 1)
    )
    record = saver.get_tuple(config_at())

    assert record is not None
    assert read_head_id(saver) == ("c2" if writes_title else "c3")
    assert record.checkpoint["channel_values"] == {"n": 0 if writes_title else 1, "title": "T"}


# -- random runs against the model of updates without prunes


class ProgramWithMaintenance(Program):
    """A program that prunes, copies or erases something of the thread after each update."""

    def __init__(self, saver: SQLiteCheckpointer, actions: Iterator[str]) -> None:
        super().__init__(saver)
        self.actions = actions

    def update(self, values: Any, as_node: str) -> None:
        super().update(values, as_node)
        MAINTENANCE[next(self.actions, "nothing")](self.saver)


MAINTENANCE: dict[str, Prune] = {
    "nothing": lambda saver: None,
    **PRUNES,
    "copy": lambda saver: saver.copy_thread("t", str(uuid4())),
    "erase": lambda saver: saver.erase("t", ["no such message"]),
    "forget": lambda saver: saver._cache.drop_thread("t"),
}


MAINTENANCE_LISTS = st.lists(st.sampled_from(sorted(MAINTENANCE)), max_size=12)


def compare_with_model(program: list[Turn], actions: list[str]) -> None:
    """Run turns with updates, and compare the thread with the model after each turn."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        model, runner = Model(), ProgramWithMaintenance(saver, iter(actions))
        for number, turn in enumerate(program):
            model.run_turn(number, turn)
            values = runner.run_turn(number, turn)
            saver._cache.drop_thread("t")

            assert values == model.state
            assert runner.graph.get_state(config_at()).values == model.state


# The run of the second turn starts from the update of the first turn, which the prune deletes.
RUN_FROM_PRUNED_UPDATE = [
    Turn(
        [frozenset(), frozenset(), frozenset({"a"})], [Update(0, frozenset({"a"}), 0)], None, "sync"
    ),
    Turn(
        [frozenset()] * 3,
        [Update(0, frozenset(), 0), Update(0, frozenset({"a"}), 0)],
        None,
        "exit",
    ),
]
# The update and the run of the second turn both write `a`. The update's version of `a` is the first
# version of the run, which the run no longer has when it is stored at its end.
RUN_AND_UPDATE_WITH_SAME_CHANNEL = [
    Turn(
        [frozenset(), frozenset(), frozenset({"a"})],
        [Update(0, frozenset(), 0), Update(0, frozenset({"a"}), 0)],
        None,
        "sync",
    ),
    Turn(
        [frozenset(), frozenset(), frozenset({"a"})],
        [Update(0, frozenset({"a", "b"}), 0)],
        None,
        "exit",
    ),
]


@given(turn_lists(), MAINTENANCE_LISTS)
@example(RUN_FROM_PRUNED_UPDATE, ["nothing", "nothing", "last"])
@example(RUN_AND_UPDATE_WITH_SAME_CHANNEL, ["nothing", "nothing", "days"])
def test_random_turns_updates_and_prunes_agree_with_the_model(
    program: list[Turn], actions: list[str]
) -> None:
    """After each turn, the thread has the state of the model, with and without the cache."""
    compare_with_model(program, actions)


@given(turn_lists(), MAINTENANCE_LISTS)
def test_random_turns_agree_with_model_if_updated_checkpoint_is_pruned(
    program: list[Turn], actions: list[str]
) -> None:
    """The prune also removes the updated checkpoint, so the programs have no interrupts."""
    program = [turn._replace(asking_node=None, durability="sync") for turn in program]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "RUN_DAYS", -1)
        compare_with_model(program, actions)

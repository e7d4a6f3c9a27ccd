"""Real graphs on every backend, through `invoke` and `ainvoke`."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.types import Command, Send, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import ChatState, Keep
from tests.backends import BACKENDS
from tests.contracts.puts import checkpoint_id_of, config_at, read_history_texts, render_with_types

Durability = Literal["sync", "async", "exit"]
Run = Callable[..., Any]


class Count(TypedDict):
    steps: Annotated[list[str], operator.add]
    total: int


def step(name: str, by: int) -> Any:
    def node(state: Count) -> dict[str, Any]:
        return {"steps": [f"{name}{len(state['steps'])}"], "total": state.get("total", 0) + by}

    return node


def counting(saver: Any, **options: Any) -> Any:
    """`one`, then `two`; each adds its name and a number."""
    builder = StateGraph(Count)
    builder.add_node("one", step("one", 1))
    builder.add_node("two", step("two", 10))
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    builder.add_edge("two", END)
    return builder.compile(checkpointer=saver, **options)


def chat(saver: Any) -> Any:
    def answer(state: ChatState) -> dict[str, Any]:
        last = state["messages"][-1]
        return {"messages": [AIMessage(f"re: {last.content}", id=f"re {last.id}")]}

    builder = StateGraph(ChatState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=saver)


def invoked(graph: Any, *args: Any, **options: Any) -> Any:
    return graph.invoke(*args, **options)


def awaited(graph: Any, *args: Any, **options: Any) -> Any:
    async def run() -> Any:
        return await graph.ainvoke(*args, **options)

    return asyncio.run(run())


both_doors = pytest.mark.parametrize("run", [invoked, awaited], ids=["invoke", "ainvoke"])
durabilities = pytest.mark.parametrize("durability", ["sync", "async", "exit"])


def past(graph: Any, config: RunnableConfig) -> list[Any]:
    """A thread's state history, as far as it does not differ from run to run."""
    return [
        (
            state.values,
            state.metadata["source"],
            state.metadata["step"],
            state.next,
            [
                (task.name, task.error, task.interrupts and "asks", task.result)
                for task in state.tasks
            ],
        )
        for state in graph.get_state_history(config)
    ]


def say(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text)]}


@both_doors
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"memory"}))
def test_a_thread_resumes_after_a_restart(backend: str, run: Run, tmp_path: Path) -> None:
    """Another process's saver on the same file goes on where the first left off."""
    with BACKENDS[backend](tmp_path) as saver:
        run(chat(saver), say("a"), config_at())
    with BACKENDS[backend](tmp_path) as saver:
        result = run(chat(saver), say("b"), config_at())
        run(chat(saver), say("c"), config_at("other"))

        assert [m.content for m in result["messages"]] == ["a", "re: a", "b", "re: b"]
        assert read_history_texts(saver) == ["a", "re: a", "b", "re: b"]
        assert read_history_texts(saver, "other") == ["c", "re: c"]


@both_doors
@durabilities
def test_an_interrupt_is_answered(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """A run that asks stops there, and Command(resume) hands the answer in."""

    def ask(state: Count) -> dict[str, Any]:
        return {"steps": [interrupt({"question": "which?"}), interrupt("and?")]}

    builder = StateGraph(Count)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=saver)
    first = run(graph, {"steps": ["start"]}, config_at(), durability=durability)
    waiting = graph.get_state(config_at())
    second = run(graph, Command(resume="this"), config_at(), durability=durability)
    third = run(graph, Command(resume="that"), config_at(), durability=durability)

    assert [asked.value for asked in first["__interrupt__"]] == [{"question": "which?"}]
    assert waiting.next == ("ask",)
    assert [asked.value for asked in second["__interrupt__"]] == ["and?"]
    assert third["steps"] == ["start", "this", "that"]
    assert graph.get_state(config_at()).next == ()


def test_interrupt_before_and_update_state(saver: SQLiteCheckpointer) -> None:
    """State changed while a run is stopped is what the run goes on with."""
    graph = counting(saver, interrupt_before=["two"])
    graph.invoke({"steps": [], "total": 0}, config_at())
    config = graph.update_state(config_at(), {"steps": ["by hand"], "total": 100})
    result = graph.invoke(None, config_at())

    assert result == {"steps": ["one0", "by hand", "two2"], "total": 110}
    state = graph.get_state(config)
    assert (state.metadata["source"], state.next) == ("update", ("two",))


def test_aupdate_state(saver: SQLiteCheckpointer) -> None:
    """The same through the other door, under the name of a node."""
    graph = counting(saver)

    async def run() -> Any:
        await graph.aupdate_state(config_at(), {"steps": ["x"], "total": 5}, as_node="one")
        state = await graph.aget_state(config_at())
        return state.next, await graph.ainvoke(None, config_at())

    assert asyncio.run(run()) == (("two",), {"steps": ["x", "two1"], "total": 15})


@both_doors
def test_time_travel_forks(saver: SQLiteCheckpointer, run: Run) -> None:
    """A run from an old checkpoint branches off; its branch is the head, the other one stays."""
    graph = chat(saver)
    for text in "abc":
        run(graph, say(text), config_at())
    before = graph.get_state(config_at())
    old = next(
        s
        for s in graph.get_state_history(config_at())
        if not s.next and len(s.values["messages"]) == 2
    )
    result = run(graph, say("other"), old.config)
    head = graph.get_state(config_at())
    later = run(graph, say("d"), config_at())

    assert [m.content for m in result["messages"]] == ["a", "re: a", "other", "re: other"]
    assert result == head.values
    assert [i.value.content for i in saver.history("t") if not i.branch] == [
        *("a", "re: a", "other", "re: other", "d", "re: d")
    ]
    assert [i.value.content for i in saver.history("t") if i.branch] == [
        *("b", "re: b", "c", "re: c")
    ]
    assert before == graph.get_state(before.config)
    assert len(later["messages"]) == 6
    assert len(saver.history("t", checkpoint_id=checkpoint_id_of(before.config))) == 6


def test_an_old_checkpoint_updated_is_the_head(saver: SQLiteCheckpointer) -> None:
    """State changed at an old checkpoint branches off there, and the branch is the head."""
    graph = counting(saver)
    graph.invoke({"steps": [], "total": 0}, config_at())
    old = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
    edited = graph.update_state(old.config, {"steps": ["edited"]})

    assert checkpoint_id_of(edited) == checkpoint_id_of(graph.get_state(config_at()).config)
    assert graph.invoke(None, config_at()) == {"steps": ["one0", "edited", "two2"], "total": 11}


@both_doors
def test_each_branch_that_begins_has_the_head(saver: SQLiteCheckpointer, run: Run) -> None:
    """Branching off on purpose, again and again: the thread goes on from the latest branch."""
    graph = counting(saver)
    run(graph, {"steps": [], "total": 0}, config_at())
    old = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
    again = run(graph, {"steps": ["again"], "total": 0}, old.config)
    resumed = run(graph, None, old.config)
    at_head = graph.get_state(config_at()).values
    graph.update_state(old.config, {"steps": ["edited"]})

    assert again["steps"][:2] == ["one0", "again"]
    assert resumed["steps"] == ["one0", "two1"]
    assert resumed == at_head
    assert run(graph, None, config_at())["steps"] == ["one0", "edited", "two2"]


@both_doors
def test_replay_from_an_old_checkpoint(saver: SQLiteCheckpointer, run: Run) -> None:
    """A run without input from an old checkpoint does its steps again, as with InMemorySaver."""
    found = []
    for either in (InMemorySaver(), saver):
        graph = counting(either)
        run(graph, {"steps": [], "total": 0}, config_at())
        old = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
        edited = graph.update_state(old.config, {"steps": ["edited"]})
        run(graph, None, edited)
        run(graph, None, old.config)
        found.append((graph.get_state(config_at()).values, past(graph, config_at())))

    assert found[0] == found[1]


@both_doors
@durabilities
def test_durability(saver: SQLiteCheckpointer, run: Run, durability: Durability) -> None:
    """Each mode ends in the same state; `exit` puts one checkpoint a run."""
    graph = counting(saver)
    for _ in range(3):
        result = run(graph, {"steps": ["in"]}, config_at(), durability=durability)

    assert result == {
        "steps": ["in", "one1", "two2", "in", "one4", "two5", "in", "one7", "two8"],
        "total": 33,
    }
    assert result == graph.get_state(config_at()).values
    assert (3 if durability == "exit" else 12) == len(saver.checkpoints("t"))


def asking(saver: Any, *, own: bool) -> Any:
    """A graph whose subgraph asks before it is done."""

    def ask(state: Count) -> dict[str, Any]:
        return {"steps": [f"inner {interrupt('go on?')}"]}

    inner = StateGraph(Count)
    inner.add_node("inner", step("inner", 1))
    inner.add_node("ask", ask)
    inner.add_edge(START, "inner")
    inner.add_edge("inner", "ask")
    outer = StateGraph(Count)
    outer.add_node("outer", step("outer", 1))
    outer.add_node("sub", inner.compile(checkpointer=True if own else None))
    outer.add_edge(START, "outer")
    outer.add_edge("outer", "sub")
    return outer.compile(checkpointer=saver)


@both_doors
@durabilities
@pytest.mark.parametrize("own", [True, False], ids=["own", "inherited"])
def test_subgraphs(saver: SQLiteCheckpointer, run: Run, own: bool, durability: Durability) -> None:
    """A subgraph's state is under its namespace, is seen from above, and resumes."""
    found = []
    for either in (InMemorySaver(), saver):
        graph = asking(either, own=own)
        for answer in ("yes", "no"):
            run(graph, {"steps": ["in"]}, config_at(), durability=durability)
            below = graph.get_state(config_at(), subgraphs=True).tasks[0].state
            result = run(graph, Command(resume=answer), config_at(), durability=durability)
            found.append((below.values, below.next, result, past(graph, config_at())))

    assert found[:2] == found[2:]
    spaces = saver.thread("t").namespaces
    assert "" in spaces
    assert ("sub" in spaces) == own
    # one that keeps its own state uses one namespace for ever, others one for each call
    assert len(spaces) == (2 if own else 3)


@both_doors
def test_subgraph_history_and_time_travel(saver: SQLiteCheckpointer, run: Run) -> None:
    """A subgraph's checkpoints are listed by its namespace, and each is read from above."""
    graph = asking(saver, own=True)
    run(graph, {"steps": ["in"]}, config_at())
    below = graph.get_state(config_at(), subgraphs=True).tasks[0].state
    history = list(graph.get_state_history(config_at(ns="sub")))

    assert below.config["configurable"]["checkpoint_ns"] == "sub"
    assert below.values == history[0].values
    assert len(history) == len(saver.checkpoints("t", checkpoint_ns="sub"))
    assert [state.metadata["step"] for state in history] == [1, 0, -1]


@both_doors
@durabilities
def test_fan_out(saver: SQLiteCheckpointer, run: Run, durability: Durability) -> None:
    """What Send spreads over many tasks comes together in one checkpoint, in order."""

    def spread(state: Count) -> list[Send]:
        return [Send("work", {"steps": [str(i)], "total": i}) for i in range(12)]

    def work(state: Count) -> dict[str, Any]:
        return {"steps": [f"worked {state['total']}"]}

    found = []
    for either in (InMemorySaver(), saver):
        builder = StateGraph(Count)
        builder.add_node("work", work)
        builder.add_conditional_edges(START, spread, ["work"])
        graph = builder.compile(checkpointer=either)
        for _ in range(2):
            run(graph, {"steps": ["in"]}, config_at(), durability=durability)
        found.append((graph.get_state(config_at()).values, past(graph, config_at())))

    assert found[0] == found[1]
    assert len(found[1][0]["steps"]) == 26


@both_doors
@durabilities
def test_a_failed_step_keeps_what_its_siblings_wrote(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """After an error only the task that failed runs again."""
    ran: list[str] = []

    def fine(state: Count) -> dict[str, Any]:
        ran.append("fine")
        return {"steps": ["fine"]}

    def flaky(state: Count) -> dict[str, Any]:
        ran.append("flaky")
        if ran.count("flaky") == 1:
            raise ValueError("not today")
        return {"steps": ["flaky"]}

    builder = StateGraph(Count)
    builder.add_node("fine", fine)
    builder.add_node("flaky", flaky)
    builder.add_edge(START, "fine")
    builder.add_edge(START, "flaky")
    graph = builder.compile(checkpointer=saver)
    # one at a time, so that `fine` is done when its sibling fails
    config: RunnableConfig = {**config_at(), "max_concurrency": 1}
    with pytest.raises(ValueError, match="not today"):
        run(graph, {"steps": ["in"]}, config, durability=durability)
    failed = graph.get_state(config_at())
    result = run(graph, None, config, durability=durability)

    assert {task.name: task.error and str(task.error) for task in failed.tasks} == {
        "fine": None,
        "flaky": "ValueError('not today')",
    }
    assert result["steps"] == ["in", "fine", "flaky"]
    assert sorted(ran) == ["fine", "flaky", "flaky"]


@both_doors
@durabilities
def test_state_history_equals_langgraphs(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """Values, sources, steps and next nodes are InMemorySaver's, all the way back."""
    found = []
    for either in (InMemorySaver(), saver):
        graph = chat(either)
        for text in "abc":
            run(graph, say(text), config_at(), durability=durability)
        run(
            graph,
            {"messages": [Keep(start=-2), *say("d")["messages"]]},
            config_at(),
            durability=durability,
        )
        graph.update_state(config_at(), say("by hand"))
        found.append(past(graph, config_at()))

    assert found[0] == found[1]
    assert len(found[1]) == (5 if durability == "exit" else 13)


class Talk(TypedDict):
    """What a smaller graph knows of a thread."""

    messages: Annotated[list[AnyMessage], add_messages]


class Summarised(Talk):
    """What the graph knows that the thread belongs to."""

    summary: dict[str, str]
    notes: Annotated[list[str], operator.add]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_graph_that_knows_fewer_channels_leaves_the_others(
    tmp_path: Path, reopened: bool
) -> None:
    """Their values stay, and so does the turn that waits; as with langgraph's own saver."""

    def said(state: Talk) -> dict[str, Any]:
        return {
            "messages": [AIMessage("yes", id="a")],
            "summary": {"text": "s"},
            "notes": ["n" * 200],
        }

    larger: Any = StateGraph(Summarised)
    larger.add_node("said", said).add_node("more", lambda state: {"notes": ["more"]})
    larger.add_edge(START, "said").add_edge("said", "more").add_edge("more", END)
    smaller: Any = StateGraph(Talk)
    smaller.add_node("write", lambda state: {}).add_edge(START, "write").add_edge("write", END)

    def course(saver: Any, again: Any) -> list[Any]:
        graph = larger.compile(checkpointer=saver, interrupt_before=["more"])
        graph.invoke({"messages": [HumanMessage("hi", id="h")]}, config_at())
        update = {"messages": [HumanMessage("and?", id="h2")]}
        smaller.compile(checkpointer=saver).update_state(config_at(), update, as_node="write")
        graph = larger.compile(checkpointer=again(), interrupt_before=["more"])
        state = graph.get_state(config_at())
        return [
            render_with_types(state.values),
            state.next,
            render_with_types(graph.invoke(None, config_at())),
        ]

    memory = InMemorySaver()
    with ExitStack() as stack:
        saver = stack.enter_context(SQLiteCheckpointer.open(tmp_path / "a.db"))

        def again() -> SQLiteCheckpointer:
            if not reopened:
                return saver
            saver.close()
            return stack.enter_context(SQLiteCheckpointer.open(tmp_path / "a.db"))

        assert course(saver, again) == course(memory, lambda: memory)

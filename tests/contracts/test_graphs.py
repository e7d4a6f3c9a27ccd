"""Graphs on every backend, through `invoke` and `ainvoke`."""

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


class CountState(TypedDict):
    steps: Annotated[list[str], operator.add]
    total: int


def make_step(name: str, by: int) -> Any:
    def node(state: CountState) -> dict[str, Any]:
        return {"steps": [f"{name}{len(state['steps'])}"], "total": state.get("total", 0) + by}

    return node


def compile_counting_graph(saver: Any, **options: Any) -> Any:
    """Compile a graph of the nodes `one` and `two`, which each add their name and a number."""
    builder = StateGraph(CountState)
    builder.add_node("one", make_step("one", 1))
    builder.add_node("two", make_step("two", 10))
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    builder.add_edge("two", END)
    return builder.compile(checkpointer=saver, **options)


def compile_chat_graph(saver: Any) -> Any:
    def answer(state: ChatState) -> dict[str, Any]:
        last = state["messages"][-1]
        return {"messages": [AIMessage(f"re: {last.content}", id=f"re {last.id}")]}

    builder = StateGraph(ChatState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=saver)


def invoke(graph: Any, *args: Any, **options: Any) -> Any:
    return graph.invoke(*args, **options)


def invoke_async(graph: Any, *args: Any, **options: Any) -> Any:
    async def run() -> Any:
        return await graph.ainvoke(*args, **options)

    return asyncio.run(run())


blocking_and_async = pytest.mark.parametrize(
    "run", [invoke, invoke_async], ids=["invoke", "ainvoke"]
)
for_each_durability = pytest.mark.parametrize("durability", ["sync", "async", "exit"])


def list_state_history(graph: Any, config: RunnableConfig) -> list[Any]:
    """Return a thread's state history without the parts that differ between runs."""
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


def make_input(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=text)]}


@blocking_and_async
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"memory"}))
def test_thread_continues_after_restart(backend: str, run: Run, tmp_path: Path) -> None:
    """A second checkpointer on the same database continues where the first one stopped."""
    with BACKENDS[backend](tmp_path) as saver:
        run(compile_chat_graph(saver), make_input("a"), config_at())
    with BACKENDS[backend](tmp_path) as saver:
        result = run(compile_chat_graph(saver), make_input("b"), config_at())
        run(compile_chat_graph(saver), make_input("c"), config_at("other"))

        assert [m.content for m in result["messages"]] == ["a", "re: a", "b", "re: b"]
        assert read_history_texts(saver) == ["a", "re: a", "b", "re: b"]
        assert read_history_texts(saver, "other") == ["c", "re: c"]


@blocking_and_async
@for_each_durability
def test_interrupted_run_continues_with_answer(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """A run stops at each interrupt, and `Command(resume=...)` passes the answer to it."""

    def ask(state: CountState) -> dict[str, Any]:
        return {"steps": [interrupt({"question": "which?"}), interrupt("and?")]}

    builder = StateGraph(CountState)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=saver)
    first = run(graph, {"steps": ["start"]}, config_at(), durability=durability)
    state_at_interrupt = graph.get_state(config_at())
    second = run(graph, Command(resume="this"), config_at(), durability=durability)
    third = run(graph, Command(resume="that"), config_at(), durability=durability)

    assert [question.value for question in first["__interrupt__"]] == [{"question": "which?"}]
    assert state_at_interrupt.next == ("ask",)
    assert [question.value for question in second["__interrupt__"]] == ["and?"]
    assert third["steps"] == ["start", "this", "that"]
    assert graph.get_state(config_at()).next == ()


def test_state_updated_at_interrupt_is_used_by_next_node(saver: SQLiteCheckpointer) -> None:
    graph = compile_counting_graph(saver, interrupt_before=["two"])
    graph.invoke({"steps": [], "total": 0}, config_at())
    config = graph.update_state(config_at(), {"steps": ["by hand"], "total": 100})
    result = graph.invoke(None, config_at())

    assert result == {"steps": ["one0", "by hand", "two2"], "total": 110}
    state = graph.get_state(config)
    assert (state.metadata["source"], state.next) == ("update", ("two",))


def test_aupdate_state_as_node_continues_after_that_node(saver: SQLiteCheckpointer) -> None:
    graph = compile_counting_graph(saver)

    async def update_and_run() -> Any:
        await graph.aupdate_state(config_at(), {"steps": ["x"], "total": 5}, as_node="one")
        state = await graph.aget_state(config_at())
        return state.next, await graph.ainvoke(None, config_at())

    assert asyncio.run(update_and_run()) == (("two",), {"steps": ["x", "two1"], "total": 15})


@blocking_and_async
def test_run_from_old_checkpoint_makes_its_branch_the_head(
    saver: SQLiteCheckpointer, run: Run
) -> None:
    """The branch that was the head before stays readable."""
    graph = compile_chat_graph(saver)
    for text in "abc":
        run(graph, make_input(text), config_at())
    before = graph.get_state(config_at())
    old_state = next(
        s
        for s in graph.get_state_history(config_at())
        if not s.next and len(s.values["messages"]) == 2
    )
    result = run(graph, make_input("other"), old_state.config)
    head = graph.get_state(config_at())
    state_of_next_run = run(graph, make_input("d"), config_at())

    assert [m.content for m in result["messages"]] == ["a", "re: a", "other", "re: other"]
    assert result == head.values
    assert [i.value.content for i in saver.history("t") if not i.branch] == [
        *("a", "re: a", "other", "re: other", "d", "re: d")
    ]
    assert [i.value.content for i in saver.history("t") if i.branch] == [
        *("b", "re: b", "c", "re: c")
    ]
    assert before == graph.get_state(before.config)
    assert len(state_of_next_run["messages"]) == 6
    assert len(saver.history("t", checkpoint_id=checkpoint_id_of(before.config))) == 6


def test_update_of_old_checkpoint_makes_its_branch_the_head(saver: SQLiteCheckpointer) -> None:
    graph = compile_counting_graph(saver)
    graph.invoke({"steps": [], "total": 0}, config_at())
    old_state = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
    edited = graph.update_state(old_state.config, {"steps": ["edited"]})

    assert checkpoint_id_of(edited) == checkpoint_id_of(graph.get_state(config_at()).config)
    assert graph.invoke(None, config_at()) == {"steps": ["one0", "edited", "two2"], "total": 11}


@blocking_and_async
def test_newest_branch_is_always_the_head(saver: SQLiteCheckpointer, run: Run) -> None:
    """After several branches from one checkpoint, the thread continues from the newest branch."""
    graph = compile_counting_graph(saver)
    run(graph, {"steps": [], "total": 0}, config_at())
    old_state = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
    rerun = run(graph, {"steps": ["again"], "total": 0}, old_state.config)
    resumed = run(graph, None, old_state.config)
    head_values = graph.get_state(config_at()).values
    graph.update_state(old_state.config, {"steps": ["edited"]})

    assert rerun["steps"][:2] == ["one0", "again"]
    assert resumed["steps"] == ["one0", "two1"]
    assert resumed == head_values
    assert run(graph, None, config_at())["steps"] == ["one0", "edited", "two2"]


@blocking_and_async
def test_replay_from_old_checkpoint_equals_langgraph_memory_saver(
    saver: SQLiteCheckpointer, run: Run
) -> None:
    """A run without input from an old checkpoint repeats its steps."""
    results = []
    for checkpointer in (InMemorySaver(), saver):
        graph = compile_counting_graph(checkpointer)
        run(graph, {"steps": [], "total": 0}, config_at())
        old_state = next(s for s in graph.get_state_history(config_at()) if s.next == ("two",))
        edited = graph.update_state(old_state.config, {"steps": ["edited"]})
        run(graph, None, edited)
        run(graph, None, old_state.config)
        results.append(
            (graph.get_state(config_at()).values, list_state_history(graph, config_at()))
        )

    assert results[0] == results[1]


@blocking_and_async
@for_each_durability
def test_every_durability_ends_in_same_state(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """With `exit`, a run stores one checkpoint."""
    graph = compile_counting_graph(saver)
    for _ in range(3):
        result = run(graph, {"steps": ["in"]}, config_at(), durability=durability)

    assert result == {
        "steps": ["in", "one1", "two2", "in", "one4", "two5", "in", "one7", "two8"],
        "total": 33,
    }
    assert result == graph.get_state(config_at()).values
    assert (3 if durability == "exit" else 12) == len(saver.checkpoints("t"))


def compile_graph_with_interrupted_subgraph(saver: Any, *, keeps_state: bool) -> Any:
    """Compile a graph whose subgraph has an interrupt in its last node."""

    def ask(state: CountState) -> dict[str, Any]:
        return {"steps": [f"inner {interrupt('go on?')}"]}

    inner = StateGraph(CountState)
    inner.add_node("inner", make_step("inner", 1))
    inner.add_node("ask", ask)
    inner.add_edge(START, "inner")
    inner.add_edge("inner", "ask")
    outer = StateGraph(CountState)
    outer.add_node("outer", make_step("outer", 1))
    outer.add_node("sub", inner.compile(checkpointer=True if keeps_state else None))
    outer.add_edge(START, "outer")
    outer.add_edge("outer", "sub")
    return outer.compile(checkpointer=saver)


@blocking_and_async
@for_each_durability
@pytest.mark.parametrize("keeps_state", [True, False], ids=["own", "inherited"])
def test_subgraph_state_and_resume_equal_langgraph_memory_saver(
    saver: SQLiteCheckpointer, run: Run, keeps_state: bool, durability: Durability
) -> None:
    """The subgraph's state is in its own namespace, and is visible from the parent graph."""
    results = []
    for checkpointer in (InMemorySaver(), saver):
        graph = compile_graph_with_interrupted_subgraph(checkpointer, keeps_state=keeps_state)
        for answer in ("yes", "no"):
            run(graph, {"steps": ["in"]}, config_at(), durability=durability)
            subgraph_state = graph.get_state(config_at(), subgraphs=True).tasks[0].state
            result = run(graph, Command(resume=answer), config_at(), durability=durability)
            results.append(
                (
                    subgraph_state.values,
                    subgraph_state.next,
                    result,
                    list_state_history(graph, config_at()),
                )
            )

    assert results[:2] == results[2:]
    namespaces = saver.thread("t").namespaces
    assert "" in namespaces
    assert ("sub" in namespaces) == keeps_state
    # a subgraph that keeps its state always uses one namespace, others use one per call
    assert len(namespaces) == (2 if keeps_state else 3)


@blocking_and_async
def test_subgraph_history_is_listed_by_its_namespace(saver: SQLiteCheckpointer, run: Run) -> None:
    """The newest checkpoint equals the subgraph's state as read from the parent graph."""
    graph = compile_graph_with_interrupted_subgraph(saver, keeps_state=True)
    run(graph, {"steps": ["in"]}, config_at())
    subgraph_state = graph.get_state(config_at(), subgraphs=True).tasks[0].state
    history = list(graph.get_state_history(config_at(ns="sub")))

    assert subgraph_state.config["configurable"]["checkpoint_ns"] == "sub"
    assert subgraph_state.values == history[0].values
    assert len(history) == len(saver.checkpoints("t", checkpoint_ns="sub"))
    assert [state.metadata["step"] for state in history] == [1, 0, -1]


@blocking_and_async
@for_each_durability
def test_results_of_many_sends_are_in_order_in_one_checkpoint(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """State and history equal those of langgraph's `InMemorySaver`."""

    def send_tasks(state: CountState) -> list[Send]:
        return [Send("work", {"steps": [str(i)], "total": i}) for i in range(12)]

    def work(state: CountState) -> dict[str, Any]:
        return {"steps": [f"worked {state['total']}"]}

    results = []
    for checkpointer in (InMemorySaver(), saver):
        builder = StateGraph(CountState)
        builder.add_node("work", work)
        builder.add_conditional_edges(START, send_tasks, ["work"])
        graph = builder.compile(checkpointer=checkpointer)
        for _ in range(2):
            run(graph, {"steps": ["in"]}, config_at(), durability=durability)
        results.append(
            (graph.get_state(config_at()).values, list_state_history(graph, config_at()))
        )

    assert results[0] == results[1]
    assert len(results[1][0]["steps"]) == 26


@blocking_and_async
@for_each_durability
def test_only_failed_task_runs_again_after_error(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """The writes of the other tasks of the step are kept."""
    ran: list[str] = []

    def fine(state: CountState) -> dict[str, Any]:
        ran.append("fine")
        return {"steps": ["fine"]}

    def flaky(state: CountState) -> dict[str, Any]:
        ran.append("flaky")
        if ran.count("flaky") == 1:
            raise ValueError("not today")
        return {"steps": ["flaky"]}

    builder = StateGraph(CountState)
    builder.add_node("fine", fine)
    builder.add_node("flaky", flaky)
    builder.add_edge(START, "fine")
    builder.add_edge(START, "flaky")
    graph = builder.compile(checkpointer=saver)
    # one task at a time, so that `fine` has ended when its sibling fails
    config: RunnableConfig = {**config_at(), "max_concurrency": 1}
    with pytest.raises(ValueError, match="not today"):
        run(graph, {"steps": ["in"]}, config, durability=durability)
    state_after_error = graph.get_state(config_at())
    result = run(graph, None, config, durability=durability)

    assert {task.name: task.error and str(task.error) for task in state_after_error.tasks} == {
        "fine": None,
        "flaky": "ValueError('not today')",
    }
    assert result["steps"] == ["in", "fine", "flaky"]
    assert sorted(ran) == ["fine", "flaky", "flaky"]


@blocking_and_async
@for_each_durability
def test_state_history_equals_langgraph_memory_saver(
    saver: SQLiteCheckpointer, run: Run, durability: Durability
) -> None:
    """Values, sources, steps and next nodes are equal at every checkpoint."""
    histories = []
    for checkpointer in (InMemorySaver(), saver):
        graph = compile_chat_graph(checkpointer)
        for text in "abc":
            run(graph, make_input(text), config_at(), durability=durability)
        run(
            graph,
            {"messages": [Keep(start=-2), *make_input("d")["messages"]]},
            config_at(),
            durability=durability,
        )
        graph.update_state(config_at(), make_input("by hand"))
        histories.append(list_state_history(graph, config_at()))

    assert histories[0] == histories[1]
    assert len(histories[1]) == (5 if durability == "exit" else 13)


class SmallerState(TypedDict):
    """The state of a graph that has fewer channels than the thread."""

    messages: Annotated[list[AnyMessage], add_messages]


class LargerState(SmallerState):
    """The state of the graph that created the thread."""

    summary: dict[str, str]
    notes: Annotated[list[str], operator.add]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_update_by_graph_with_fewer_channels_keeps_other_channels(
    tmp_path: Path, is_reopened: bool
) -> None:
    """The values of the other channels stay, and so does the task that waits.

    langgraph's own saver does the same.
    """

    def answer_and_summarise(state: SmallerState) -> dict[str, Any]:
        return {
            "messages": [AIMessage("yes", id="a")],
            "summary": {"text": "s"},
            "notes": ["n" * 200],
        }

    larger: Any = StateGraph(LargerState)
    larger.add_node("said", answer_and_summarise).add_node(
        "more", lambda state: {"notes": ["more"]}
    )
    larger.add_edge(START, "said").add_edge("said", "more").add_edge("more", END)
    smaller: Any = StateGraph(SmallerState)
    smaller.add_node("write", lambda state: {}).add_edge(START, "write").add_edge("write", END)

    def update_and_resume(saver: Any, again: Any) -> list[Any]:
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

        def reopen() -> SQLiteCheckpointer:
            if not is_reopened:
                return saver
            saver.close()
            return stack.enter_context(SQLiteCheckpointer.open(tmp_path / "a.db"))

        assert update_and_resume(saver, reopen) == update_and_resume(memory, lambda: memory)

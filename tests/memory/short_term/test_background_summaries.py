"""Summaries that are written after the turn: stored at the head that they summarize, or dropped."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, SummaryFailed, UnknownThread
from perdure.graphs import chat_graph
from perdure.memory import MemoryMiddleware, expand, remember_turns, summarize, view
from perdure.memory.model_call import ModelCall
from perdure.memory.short_term import background_summary as module
from perdure.memory.short_term.summary import HEADING, Summarize, SummaryState
from tests.memory.fake_models import (
    FakeModel,
    make_answering_model,
    make_failing_model,
    make_tool_calling_model,
)
from tests.memory.summaries import list_texts, make_turns

CONFIG: Any = {"configurable": {"thread_id": "t"}}
EARLY = 6  # messages after which a summary is written: three quarters of eight


class HeldModel(FakeModel):
    """A summarizer that answers only after `may_answer` was set."""

    reply: Any = None
    started: Any = None
    may_answer: Any = None

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.started.set()
        assert self.may_answer.wait(30)
        return super()._generate(messages, *args, **options)


@pytest.fixture
def held_model() -> Iterator[HeldModel]:
    """A model that is released at the end of the test at the latest."""
    numbers = count(1)
    model = HeldModel(
        reply=lambda messages: f"summary {next(numbers)}",
        started=threading.Event(),
        may_answer=threading.Event(),
    )
    yield model
    model.may_answer.set()


def build_background_summary(summarizer: FakeModel, **options: Any) -> Summarize:
    summary_options: dict[str, Any] = {
        "trigger": ("messages", 8),
        "keep": ("messages", 2),
        **options,
    }
    call = ModelCall(summarizer, retries=0)
    return summarize(call, background=True, **summary_options)


def build_agent_graph(summary: Summarize, saver: Any, model: Any = None) -> Any:
    middleware = [MemoryMiddleware(summary)]
    return create_agent(model or make_answering_model(), middleware=middleware, checkpointer=saver)


def build_chat_graph(summary: Summarize, saver: Any, model: Any = None) -> Any:
    return chat_graph(model or make_answering_model(), memory=[summary], checkpointer=saver)


def build_plain_graph(summary: Summarize, saver: Any, model: Any = None) -> Any:
    """Return a user's own graph, with the summary node after the answer."""
    answering_model, summary_view = model or make_answering_model(), view(summary)
    builder = StateGraph(SummaryState)
    builder.add_node(
        "respond", lambda state: {"messages": [answering_model.invoke(summary_view(state))]}
    )
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    return builder.compile(checkpointer=saver)


def send_text(graph: Any, text: str, call_mode: str = "sync", **options: Any) -> Any:
    input: Any = {"messages": [HumanMessage(text)]}
    if call_mode == "sync":
        return graph.invoke(input, CONFIG, **options)
    return asyncio.run(graph.ainvoke(input, CONFIG, **options))


def list_branches(saver: Any) -> list[Any]:
    return [info for info in saver.checkpoints("t") if info.is_branch]


in_each_graph = pytest.mark.parametrize(
    "build_graph", [build_agent_graph, build_chat_graph, build_plain_graph]
)


@in_each_graph
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_summary_is_stored_after_the_turn_and_used_by_the_next(
    build_graph: Any, durability: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """The state has it at once.

    The next turn shows it and removes the messages that it replaces.
    """
    model, summarizer = make_answering_model(), make_answering_model("summary")
    summary = build_background_summary(summarizer)
    graph = build_graph(summary, file_saver, model)
    for number in range(1, 4):
        send_text(graph, f"q{number}", call_mode, durability=durability)
        assert summary.flush(30)
        assert len(summarizer.requests) == (2 * number >= EARLY)
    stored = graph.get_state(CONFIG).values
    stored_count = len(stored["messages"])
    result = send_text(graph, "q4", call_mode, durability=durability)

    assert stored["summary"]["text"] == "summary 1"
    assert stored_count == 6
    assert list_texts(model.requests[-1][1:]) == ["q3", "answer 3", "q4"]
    assert model.requests[-1][0].text == f"{HEADING}:\n\nsummary 1"
    assert list_texts(result["messages"]) == ["q3", "answer 3", "q4", "answer 4"]
    assert result["summary"]["count"] == len(result["summarized"]) == 4
    assert list_texts(expand(file_saver, CONFIG)) == ["q1", "answer 1", "q2", "answer 2"]
    assert [item.value.text for item in file_saver.history("t")][:3] == ["q1", "answer 1", "q2"]
    assert list_branches(file_saver) == []


@in_each_graph
def test_long_conversation_is_summarized_repeatedly_without_waiting(
    build_graph: Any, file_saver: SQLiteCheckpointer
) -> None:
    """No turn waits for a summary, and each message is summarized once."""
    model, summarizer = make_answering_model(), make_answering_model("summary")
    summary = build_background_summary(summarizer)
    graph, requests_during_turn = build_graph(summary, file_saver, model), []
    for number in range(1, 21):
        requests_before = len(summarizer.requests)
        result = send_text(graph, f"question {number}")
        requests_during_turn.append(len(summarizer.requests) - requests_before)
        assert summary.flush(30)
    summarized_text = "".join(str(request[-1].content) for request in summarizer.requests)

    assert max(map(len, model.requests)) <= 8
    assert [summarized_text.count(f"user: question {number}\n") for number in range(1, 18)] == [
        1
    ] * 17
    assert result["summary"]["count"] == len(result["summarized"])
    assert list_branches(file_saver) == []
    assert len(file_saver.history("t")) == 40


@in_each_graph
def test_summary_is_dropped_when_the_thread_went_on_meanwhile(
    build_graph: Any, held_model: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """The next turn writes another one. Nothing is left of the first, and there is no branch."""
    summary = build_background_summary(held_model, trigger=("messages", 8))
    graph = build_graph(summary, file_saver)
    for number in range(1, 4):
        send_text(graph, f"q{number}")
    assert held_model.started.wait(30)
    result = send_text(graph, "q4")
    held_model.may_answer.set()
    assert summary.flush(30)
    final_values = graph.get_state(CONFIG).values

    assert len(result["messages"]) == 8
    assert not result.get("summary")
    assert final_values["summary"]["count"] == 6  # the summary of the fourth turn
    assert list_branches(file_saver) == []


def test_run_started_before_the_summary_was_stored_discards_it(
    held_model: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """With durability "exit" the run's checkpoint is stored later.

    It is the head, and there is no branch.
    """
    summary, has_started, may_continue = (
        build_background_summary(held_model),
        threading.Event(),
        threading.Event(),
    )

    def respond(state: Any) -> Any:
        if state["messages"][-1].text == "q4":
            has_started.set()
            assert may_continue.wait(30)
        return {"messages": [AIMessage("answer")]}

    builder = StateGraph(SummaryState).add_node("respond", respond)
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for number in range(1, 4):
        send_text(graph, f"q{number}")
    assert held_model.started.wait(30)
    turn = threading.Thread(target=lambda: send_text(graph, "q4", durability="exit"))
    turn.start()
    assert has_started.wait(30)
    held_model.may_answer.set()
    assert summary.flush(30)
    values_during_run = graph.get_state(CONFIG).values
    may_continue.set()
    turn.join(30)
    assert summary.flush(30)
    final_values = graph.get_state(CONFIG).values

    assert values_during_run["summary"]["text"] == "summary 1"
    assert list_texts(final_values["messages"])[-2:] == ["q4", "answer"]
    assert final_values["summary"]["count"] == 6
    assert list_branches(file_saver) == []
    assert [item.branch for item in file_saver.history("t")] == [False] * 8


@pytest.mark.parametrize("locked", [True, False])
def test_overlapping_turns_get_no_branch_from_a_summary(
    locked: bool, file_saver: SQLiteCheckpointer
) -> None:
    """A summary puts no checkpoint, so it cannot leave a branch.

    With the thread's lock no message is lost; without it only turns make branches, as they do
    without summaries.
    """
    summary = build_background_summary(
        make_answering_model("summary"), trigger=("messages", 4), keep=("messages", 1)
    )
    graph = build_agent_graph(summary, file_saver)

    async def talk(number: int) -> None:
        for _ in range(4):
            input: Any = {"messages": [HumanMessage(f"q{number}")]}
            await asyncio.sleep(0.005 * (number % 5))
            if locked:
                async with file_saver.lock("t", timeout_s=60):
                    await graph.ainvoke(input, CONFIG)
            else:
                await graph.ainvoke(input, CONFIG)

    async def run_all() -> None:
        await asyncio.gather(*(talk(number) for number in range(5)))

    asyncio.run(run_all())
    assert summary.flush(30)
    checkpoints = file_saver.checkpoints("t", limit=1_000)
    history = [item for item in file_saver.history("t") if item.value.type == "human"]

    assert {info.metadata["source"] for info in checkpoints} == {"input", "loop"}
    assert len(history) == 20
    if locked:
        assert list_branches(file_saver) == []
        state = graph.get_state(CONFIG).values
        message_ids = {message.id for message in state["messages"]}
        assert message_ids | {*state["summarized"]} == {
            item.value.id for item in file_saver.history("t")
        }


def test_turn_that_reaches_the_trigger_waits_for_the_summary(
    file_saver: SQLiteCheckpointer,
) -> None:
    """The requests of a long turn, for example, must not grow without a limit."""

    @tool
    def look(what: str) -> str:
        """Look something up."""
        return "found"

    model, summarizer = make_tool_calling_model(12), make_answering_model("summary")
    summary = build_background_summary(summarizer)
    middleware = [MemoryMiddleware(summary)]
    agent: Any = create_agent(model, [look], middleware=middleware, checkpointer=file_saver)
    agent.invoke({"messages": [HumanMessage("q")]}, {**CONFIG, "recursion_limit": 100})
    summary.flush(30)

    assert len(summarizer.requests) >= 2
    assert max(map(len, model.requests)) <= 9


@pytest.mark.parametrize("event", ["erase", "delete", "edit", "rewind"])
def test_erasure_edit_or_rewind_during_a_summary_is_not_undone(
    event: str, held_model: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """An erased or edited message and a deleted thread are in no summary afterwards."""
    summary = build_background_summary(held_model)
    graph = build_agent_graph(summary, file_saver)
    for number in range(1, 4):
        result = send_text(graph, f"q{number}")
    assert held_model.started.wait(30)
    first = result["messages"][0]
    if event == "erase":
        file_saver.erase("t", [first.id])
    elif event == "delete":
        file_saver.delete_thread("t")
    elif event == "edit":
        graph.update_state(CONFIG, {"messages": [HumanMessage("corrected", id=first.id)]})
    else:
        file_saver.rewind("t", file_saver.checkpoints("t")[3].checkpoint_id)
    held_model.may_answer.set()
    assert summary.flush(30)

    state = graph.get_state(CONFIG).values
    assert not state.get("summary")
    assert not state.get("summarized")
    assert [head.thread_id for head in file_saver.heads()] == ([] if event == "delete" else ["t"])


def test_thread_that_waits_for_a_person_gets_no_summary(file_saver: SQLiteCheckpointer) -> None:
    """The person's answer belongs to the checkpoint that asked the question."""
    summarizer = make_answering_model("summary")
    summary = build_background_summary(summarizer)

    def ask(state: Any) -> Any:
        return {"messages": [AIMessage(f"you said {interrupt('well?')}")]}

    builder = StateGraph(SummaryState).add_node("ask", ask).add_edge(START, "ask")
    graph = builder.compile(checkpointer=file_saver)
    graph.invoke({"messages": make_turns(4)}, CONFIG)

    assert summary.summarize_thread(file_saver, "t") is False
    assert summarizer.requests == []
    result = graph.invoke(Command(resume="yes"), CONFIG)
    assert result["messages"][-1].text == "you said yes"
    assert summary.summarize_thread(file_saver, "t") is True
    assert graph.get_state(CONFIG).values["summary"]["text"] == "summary 1"
    assert graph.get_state(CONFIG).next == ()


def test_subgraphs_and_runs_without_a_thread_summarize_within_the_turn(
    file_saver: SQLiteCheckpointer,
) -> None:
    summarizer = make_answering_model("summary")
    summary = build_background_summary(summarizer)
    inner = create_agent(make_answering_model(), middleware=[MemoryMiddleware(summary)])
    builder = StateGraph(SummaryState).add_node("agent", inner).add_edge(START, "agent")
    nested, inner_graph = builder.compile(checkpointer=file_saver), inner
    result = nested.invoke({"messages": [*make_turns(5)]}, CONFIG)
    assert result["summary"]["text"] == "summary 1"

    input: Any = {"messages": [*make_turns(5)]}
    assert inner_graph.invoke(input)["summary"]["text"] == "summary 2"
    assert summary.flush(30)
    assert len(summarizer.requests) == 2


@in_each_graph
def test_failed_summary_is_logged_and_retried_after_the_next_turn(
    build_graph: Any, file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the thread."""
    summarizer = make_failing_model()
    summary = build_background_summary(summarizer, trigger=("messages", 20), keep=("messages", 2))
    graph = build_graph(summary, file_saver)
    with caplog.at_level(logging.WARNING, "perdure"):
        for number in range(1, 10):
            send_text(graph, f"q{number}")
            assert summary.flush(30)

    assert len(summarizer.requests) == 2  # after the eighth and the ninth turn
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert all("'t'" in message and "model is down" in message for message in warnings)
    assert len(graph.get_state(CONFIG).values["messages"]) == 18


def test_summary_of_a_run_that_never_ends_is_given_up_and_logged(
    file_saver: SQLiteCheckpointer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_RUN_TIMEOUT_S", 0.1)
    summarizer = make_answering_model("summary")
    summary = build_background_summary(summarizer)

    def fail(state: Any) -> Any:
        raise ValueError("no")

    builder = StateGraph(SummaryState).add_node("summarize", summary).add_node("fail", fail)
    builder.add_edge(START, "summarize").add_edge("summarize", "fail")
    graph = builder.compile(checkpointer=file_saver)
    with pytest.raises(ValueError, match="no"):
        graph.invoke({"messages": [*make_turns(4), AIMessage("a4")]}, CONFIG)
    assert summary.flush(30)

    assert summarizer.requests == []
    assert "the run did not store its last message" in caplog.text


def test_summary_threads_do_not_keep_the_process_alive(
    held_model: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """`flush` returns whether everything was written.

    A summary that was not written may be dropped.
    """
    summary = build_background_summary(held_model)
    graph = build_agent_graph(summary, file_saver)
    for number in range(1, 4):
        send_text(graph, f"q{number}")
    assert held_model.started.wait(30)

    assert summary.flush(0.05) is False
    assert all(t.daemon for t in threading.enumerate() if t.name == "perdure-summary")
    held_model.may_answer.set()
    assert asyncio.run(summary.aflush(30)) is True
    assert summarize(make_answering_model()).flush() is True


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_summarize_thread_summarizes_after_a_run_without_background(
    call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """Any process may call it."""
    summarizer = make_answering_model("summary")
    summary = summarize(summarizer, trigger=("messages", 8), keep=("messages", 2))
    graph = build_agent_graph(summary, file_saver)

    def summarize_now() -> bool:
        if call_mode == "sync":
            return bool(summary.summarize_thread(file_saver, "t"))
        return asyncio.run(summary.asummarize_thread(file_saver, "t"))

    results = []
    for number in range(1, 5):
        send_text(graph, f"q{number}")
        results += [summarize_now(), summarize_now()]
    assert results == [False, False, False, False, True, False, False, False]
    assert graph.get_state(CONFIG).values["summary"]["text"] == "summary 1"


def test_summarize_thread_raises_for_unknown_threads_and_model_failures(
    file_saver: SQLiteCheckpointer,
) -> None:
    summary = summarize(make_answering_model(), trigger=("messages", 4))
    with pytest.raises(UnknownThread, match="'t'"):
        summary.summarize_thread(file_saver, "t")
    down = summarize(
        ModelCall(make_failing_model(), retries=0), trigger=("messages", 4), on_failure="raise"
    )
    messages: list[AnyMessage] = [*make_turns(4), AIMessage("a4")]
    build_plain_graph(summarize(make_answering_model()), file_saver).invoke(
        {"messages": messages}, {"configurable": {"thread_id": "u"}}
    )
    with pytest.raises(SummaryFailed):
        down.summarize_thread(file_saver, "u")
    with pytest.raises(ConfigurationError, match="background is 'yes'"):
        summarize(make_answering_model(), background="yes")  # type: ignore[arg-type]


@in_each_graph
def test_background_summary_works_on_each_backend(build_graph: Any, saver: Any) -> None:
    """The summary is stored, applied by the next turn, and makes no branch."""
    summary = build_background_summary(make_answering_model("summary"))
    graph = build_graph(summary, saver)
    for number in range(1, 8):
        result = send_text(graph, f"q{number}")
        assert summary.flush(30)

    assert result["summary"]["text"] == "summary 2"
    assert result["summary"]["count"] == len(result["summarized"]) == 8
    assert list_branches(saver) == []
    assert saver.status("t").state == "idle"


def add_all(value: Any, updates: Any) -> Any:
    """Return the messages after several updates, as the reducer of a `DeltaChannel` does."""
    for update in updates:
        value = add_messages(value, update)
    return value


class DeltaState(SummaryState, total=False):
    """A state whose checkpoints have the messages only now and then."""

    messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]  # type: ignore[misc]


def test_messages_of_a_delta_channel_are_summarized(file_saver: SQLiteCheckpointer) -> None:
    """Deep agents keep their messages in such a channel."""
    summarizer = make_answering_model("summary")
    summary, answers = build_background_summary(summarizer), make_answering_model()
    builder = StateGraph(DeltaState)
    builder.add_node("respond", lambda state: {"messages": [answers.invoke(state["messages"])]})
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for number in range(1, 8):
        result = send_text(graph, f"q{number}")
        assert summary.flush(30)

    assert len(summarizer.requests) == 3  # after the third, the fifth and the seventh turn
    assert result["summary"]["count"] == len(result["summarized"]) == 8
    assert list_texts(result["messages"])[0] == "q5"
    assert len(file_saver.history("t")) == 14


def test_background_summary_works_with_langgraph_in_memory_saver() -> None:
    """Without a lock between processes, a summary is still dropped if the head has changed."""
    summary = build_background_summary(make_answering_model("summary"))
    saver = InMemorySaver()
    graph = build_agent_graph(summary, saver)
    for number in range(1, 5):
        result = send_text(graph, f"q{number}")
        assert summary.flush(30)

    assert list_texts(result["messages"]) == ["q3", "answer 3", "q4", "answer 4"]


def test_turns_are_remembered_before_a_background_summary_removes_them(
    file_saver: SQLiteCheckpointer,
) -> None:
    from langgraph.store.memory import InMemoryStore

    store = InMemoryStore()
    summary = build_background_summary(make_answering_model("summary"))
    middleware = [MemoryMiddleware(summary, remember_turns(store, namespace=("m",)))]
    agent: Any = create_agent(
        make_answering_model(), middleware=middleware, checkpointer=file_saver
    )
    for number in range(1, 9):
        send_text(agent, f"the question {number}")
        assert summary.flush(30)
    memory_texts = {item.value["text"] for item in store.search(("m",), limit=50)}

    assert {f"user: the question {number}" for number in range(1, 9)} <= memory_texts

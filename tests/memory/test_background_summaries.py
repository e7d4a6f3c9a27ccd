"""Summaries that are written after the turn, at the head that they were made from or not at all."""

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
from perdure.memory import background_summary as module
from perdure.memory.model_call import ModelCall
from perdure.memory.summary import HEADING, Summarize, SummaryState
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
    """A summariser that answers once it is let go."""

    reply: Any = None
    began: Any = None
    let_go: Any = None

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.began.set()
        assert self.let_go.wait(30)
        return super()._generate(messages, *args, **options)


@pytest.fixture
def held() -> Iterator[HeldModel]:
    """Return a summariser that is let go at the end at the latest."""
    numbers = count(1)
    model = HeldModel(
        reply=lambda messages: f"summary {next(numbers)}",
        began=threading.Event(),
        let_go=threading.Event(),
    )
    yield model
    model.let_go.set()


def in_background(scribe: FakeModel, **options: Any) -> Summarize:
    given: dict[str, Any] = {"trigger": ("messages", 8), "keep": ("messages", 2), **options}
    call = ModelCall(scribe, retries=0)
    return summarize(call, background=True, **given)


def agent_of(summary: Summarize, saver: Any, model: Any = None) -> Any:
    middleware = [MemoryMiddleware(summary)]
    return create_agent(model or make_answering_model(), middleware=middleware, checkpointer=saver)


def chat_of(summary: Summarize, saver: Any, model: Any = None) -> Any:
    return chat_graph(model or make_answering_model(), memory=[summary], checkpointer=saver)


def plain_of(summary: Summarize, saver: Any, model: Any = None) -> Any:
    """Return a graph of a user's own, with the node after the answer."""
    answers, shown = model or make_answering_model(), view(summary)
    builder = StateGraph(SummaryState)
    builder.add_node("respond", lambda state: {"messages": [answers.invoke(shown(state))]})
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    return builder.compile(checkpointer=saver)


def said_to(graph: Any, text: str, call_mode: str = "sync", **options: Any) -> Any:
    asked: Any = {"messages": [HumanMessage(text)]}
    if call_mode == "sync":
        return graph.invoke(asked, CONFIG, **options)
    return asyncio.run(graph.ainvoke(asked, CONFIG, **options))


def branches(saver: Any) -> list[Any]:
    return [info for info in saver.checkpoints("t") if info.is_branch]


everywhere = pytest.mark.parametrize("make", [agent_of, chat_of, plain_of])


@everywhere
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_summary_is_written_after_the_turn(
    make: Any, durability: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """The state has it at once, the next turn shows it and removes what it stands for."""
    model, scribe = make_answering_model(), make_answering_model("summary")
    summary = in_background(scribe)
    graph = make(summary, file_saver, model)
    for number in range(1, 4):
        said_to(graph, f"q{number}", call_mode, durability=durability)
        assert summary.flush(30)
        assert len(scribe.requests) == (2 * number >= EARLY)
    stored = graph.get_state(CONFIG).values
    before = len(stored["messages"])
    out = said_to(graph, "q4", call_mode, durability=durability)

    assert stored["summary"]["text"] == "summary 1"
    assert before == 6
    assert list_texts(model.requests[-1][1:]) == ["q3", "answer 3", "q4"]
    assert model.requests[-1][0].text == f"{HEADING}:\n\nsummary 1"
    assert list_texts(out["messages"]) == ["q3", "answer 3", "q4", "answer 4"]
    assert out["summary"]["count"] == len(out["summarized"]) == 4
    assert list_texts(expand(file_saver, CONFIG)) == ["q1", "answer 1", "q2", "answer 2"]
    assert [item.value.text for item in file_saver.history("t")][:3] == ["q1", "answer 1", "q2"]
    assert branches(file_saver) == []


@everywhere
def test_a_conversation_goes_on_with_one_summary_after_the_other(
    make: Any, file_saver: SQLiteCheckpointer
) -> None:
    """No turn waits for a summary, and each message is told once."""
    model, scribe = make_answering_model(), make_answering_model("summary")
    summary = in_background(scribe)
    graph, waited = make(summary, file_saver, model), []
    for number in range(1, 21):
        before = len(scribe.requests)
        out = said_to(graph, f"question {number}")
        waited.append(len(scribe.requests) - before)
        assert summary.flush(30)
    told = "".join(str(request[-1].content) for request in scribe.requests)

    assert max(map(len, model.requests)) <= 8
    assert [told.count(f"user: question {number}\n") for number in range(1, 18)] == [1] * 17
    assert out["summary"]["count"] == len(out["summarized"])
    assert branches(file_saver) == []
    assert len(file_saver.history("t")) == 40


@everywhere
def test_a_summary_of_a_thread_that_went_on_is_dropped(
    make: Any, held: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """The next turn writes another; nothing of the first is left, and there is no branch."""
    summary = in_background(held, trigger=("messages", 8))
    graph = make(summary, file_saver)
    for number in range(1, 4):
        said_to(graph, f"q{number}")
    assert held.began.wait(30)
    out = said_to(graph, "q4")
    held.let_go.set()
    assert summary.flush(30)
    after = graph.get_state(CONFIG).values

    assert len(out["messages"]) == 8
    assert not out.get("summary")
    assert after["summary"]["count"] == 6  # that of the fourth turn
    assert branches(file_saver) == []


def test_a_run_that_began_before_the_summary_was_stored_drops_it(
    held: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """With durability "exit" its checkpoint comes later. It is the head, and there is no branch."""
    summary, inside, go_on = in_background(held), threading.Event(), threading.Event()

    def respond(state: Any) -> Any:
        if state["messages"][-1].text == "q4":
            inside.set()
            assert go_on.wait(30)
        return {"messages": [AIMessage("answer")]}

    builder = StateGraph(SummaryState).add_node("respond", respond)
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for number in range(1, 4):
        said_to(graph, f"q{number}")
    assert held.began.wait(30)
    turn = threading.Thread(target=lambda: said_to(graph, "q4", durability="exit"))
    turn.start()
    assert inside.wait(30)
    held.let_go.set()
    assert summary.flush(30)
    between = graph.get_state(CONFIG).values
    go_on.set()
    turn.join(30)
    assert summary.flush(30)
    after = graph.get_state(CONFIG).values

    assert between["summary"]["text"] == "summary 1"
    assert list_texts(after["messages"])[-2:] == ["q4", "answer"]
    assert after["summary"]["count"] == 6
    assert branches(file_saver) == []
    assert [item.branch for item in file_saver.history("t")] == [False] * 8


@pytest.mark.parametrize("locked", [True, False])
def test_overlapping_turns_show_no_branch_from_a_summary(
    locked: bool, file_saver: SQLiteCheckpointer
) -> None:
    """Of many tasks on one thread: a summary puts no checkpoint, so none of it can be left over.

    Turns that take the lock lose nothing. Of others only turns make branches, as without summaries.
    """
    summary = in_background(
        make_answering_model("summary"), trigger=("messages", 4), keep=("messages", 1)
    )
    graph = agent_of(summary, file_saver)

    async def talk(number: int) -> None:
        for _ in range(4):
            asked: Any = {"messages": [HumanMessage(f"q{number}")]}
            await asyncio.sleep(0.005 * (number % 5))
            if locked:
                async with file_saver.lock("t", timeout_s=60):
                    await graph.ainvoke(asked, CONFIG)
            else:
                await graph.ainvoke(asked, CONFIG)

    async def run_all() -> None:
        await asyncio.gather(*(talk(number) for number in range(5)))

    asyncio.run(run_all())
    assert summary.flush(30)
    checkpoints = file_saver.checkpoints("t", limit=1_000)
    history = [item for item in file_saver.history("t") if item.value.type == "human"]

    assert {info.metadata["source"] for info in checkpoints} == {"input", "loop"}
    assert len(history) == 20
    if locked:
        assert branches(file_saver) == []
        state = graph.get_state(CONFIG).values
        left = {message.id for message in state["messages"]}
        assert left | {*state["summarized"]} == {item.value.id for item in file_saver.history("t")}


def test_a_turn_that_reaches_the_trigger_waits_for_the_summary(
    file_saver: SQLiteCheckpointer,
) -> None:
    """A long turn, for example: its requests must not grow without a limit."""

    @tool
    def look(what: str) -> str:
        """Look something up."""
        return "found"

    model, scribe = make_tool_calling_model(12), make_answering_model("summary")
    summary = in_background(scribe)
    middleware = [MemoryMiddleware(summary)]
    agent: Any = create_agent(model, [look], middleware=middleware, checkpointer=file_saver)
    agent.invoke({"messages": [HumanMessage("q")]}, {**CONFIG, "recursion_limit": 100})
    summary.flush(30)

    assert len(scribe.requests) >= 2
    assert max(map(len, model.requests)) <= 9


@pytest.mark.parametrize("happens", ["erase", "delete", "edit", "rewind"])
def test_what_happens_to_the_thread_meanwhile_is_not_undone(
    happens: str, held: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """An erased message, a deleted thread and an edited message are in no summary afterwards."""
    summary = in_background(held)
    graph = agent_of(summary, file_saver)
    for number in range(1, 4):
        out = said_to(graph, f"q{number}")
    assert held.began.wait(30)
    first = out["messages"][0]
    if happens == "erase":
        file_saver.erase("t", [first.id])
    elif happens == "delete":
        file_saver.delete_thread("t")
    elif happens == "edit":
        graph.update_state(CONFIG, {"messages": [HumanMessage("corrected", id=first.id)]})
    else:
        file_saver.rewind("t", file_saver.checkpoints("t")[3].checkpoint_id)
    held.let_go.set()
    assert summary.flush(30)

    state = graph.get_state(CONFIG).values
    assert not state.get("summary")
    assert not state.get("summarized")
    assert [head.thread_id for head in file_saver.heads()] == ([] if happens == "delete" else ["t"])


def test_a_thread_that_waits_for_a_person_gets_no_summary(file_saver: SQLiteCheckpointer) -> None:
    """Its answer belongs to the checkpoint that asked."""
    scribe = make_answering_model("summary")
    summary = in_background(scribe)

    def ask(state: Any) -> Any:
        return {"messages": [AIMessage(f"you said {interrupt('well?')}")]}

    builder = StateGraph(SummaryState).add_node("ask", ask).add_edge(START, "ask")
    graph = builder.compile(checkpointer=file_saver)
    graph.invoke({"messages": make_turns(4)}, CONFIG)

    assert summary.summarize_thread(file_saver, "t") is False
    assert scribe.requests == []
    out = graph.invoke(Command(resume="yes"), CONFIG)
    assert out["messages"][-1].text == "you said yes"
    assert summary.summarize_thread(file_saver, "t") is True
    assert graph.get_state(CONFIG).values["summary"]["text"] == "summary 1"
    assert graph.get_state(CONFIG).next == ()


def test_a_subgraph_and_a_run_without_a_thread_wait_for_their_summary(
    file_saver: SQLiteCheckpointer,
) -> None:
    """There the summary is written within the turn, as without `background`."""
    scribe = make_answering_model("summary")
    summary = in_background(scribe)
    inner = create_agent(make_answering_model(), middleware=[MemoryMiddleware(summary)])
    builder = StateGraph(SummaryState).add_node("agent", inner).add_edge(START, "agent")
    nested, alone = builder.compile(checkpointer=file_saver), inner
    out = nested.invoke({"messages": [*make_turns(5)]}, CONFIG)
    assert out["summary"]["text"] == "summary 1"

    given: Any = {"messages": [*make_turns(5)]}
    assert alone.invoke(given)["summary"]["text"] == "summary 2"
    assert summary.flush(30)
    assert len(scribe.requests) == 2


@everywhere
def test_a_failure_is_logged_and_tried_again_after_the_next_turn(
    make: Any, file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the thread."""
    scribe = make_failing_model()
    summary = in_background(scribe, trigger=("messages", 20), keep=("messages", 2))
    graph = make(summary, file_saver)
    with caplog.at_level(logging.WARNING, "perdure"):
        for number in range(1, 10):
            said_to(graph, f"q{number}")
            assert summary.flush(30)

    assert len(scribe.requests) == 2  # after the eighth and the ninth turn
    warned = [record.message for record in caplog.records]
    assert len(warned) == 2
    assert all("'t'" in message and "model is down" in message for message in warned)
    assert len(graph.get_state(CONFIG).values["messages"]) == 18


def test_a_run_that_does_not_end_is_given_up(
    file_saver: SQLiteCheckpointer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That is logged too."""
    monkeypatch.setattr(module, "_RUN_TIMEOUT_S", 0.1)
    scribe = make_answering_model("summary")
    summary = in_background(scribe)

    def fail(state: Any) -> Any:
        raise ValueError("no")

    builder = StateGraph(SummaryState).add_node("summarize", summary).add_node("fail", fail)
    builder.add_edge(START, "summarize").add_edge("summarize", "fail")
    graph = builder.compile(checkpointer=file_saver)
    with pytest.raises(ValueError, match="no"):
        graph.invoke({"messages": [*make_turns(4), AIMessage("a4")]}, CONFIG)
    assert summary.flush(30)

    assert scribe.requests == []
    assert "the run did not store its last message" in caplog.text


def test_the_end_of_the_process_is_not_waited_for(
    held: HeldModel, file_saver: SQLiteCheckpointer
) -> None:
    """`flush` says whether everything is written; what is not may be dropped."""
    summary = in_background(held)
    graph = agent_of(summary, file_saver)
    for number in range(1, 4):
        said_to(graph, f"q{number}")
    assert held.began.wait(30)

    assert summary.flush(0.05) is False
    assert all(t.daemon for t in threading.enumerate() if t.name == "perdure-summary")
    held.let_go.set()
    assert asyncio.run(summary.aflush(30)) is True
    assert summarize(make_answering_model()).flush() is True


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_a_thread_is_summarised_by_a_job_of_ones_own(
    call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """Without `background`, after the run, by any process."""
    scribe = make_answering_model("summary")
    summary = summarize(scribe, trigger=("messages", 8), keep=("messages", 2))
    graph = agent_of(summary, file_saver)

    def summarized() -> bool:
        if call_mode == "sync":
            return bool(summary.summarize_thread(file_saver, "t"))
        return asyncio.run(summary.asummarize_thread(file_saver, "t"))

    done = []
    for number in range(1, 5):
        said_to(graph, f"q{number}")
        done += [summarized(), summarized()]
    assert done == [False, False, False, False, True, False, False, False]
    assert graph.get_state(CONFIG).values["summary"]["text"] == "summary 1"


def test_a_job_of_ones_own_that_cannot_summarise(file_saver: SQLiteCheckpointer) -> None:
    """An unknown thread, a model that fails."""
    summary = summarize(make_answering_model(), trigger=("messages", 4))
    with pytest.raises(UnknownThread, match="'t'"):
        summary.summarize_thread(file_saver, "t")
    down = summarize(
        ModelCall(make_failing_model(), retries=0), trigger=("messages", 4), on_failure="raise"
    )
    given: list[AnyMessage] = [*make_turns(4), AIMessage("a4")]
    plain_of(summarize(make_answering_model()), file_saver).invoke(
        {"messages": given}, {"configurable": {"thread_id": "u"}}
    )
    with pytest.raises(SummaryFailed):
        down.summarize_thread(file_saver, "u")
    with pytest.raises(ConfigurationError, match="background is 'yes'"):
        summarize(make_answering_model(), background="yes")  # type: ignore[arg-type]


@everywhere
def test_on_each_backend(make: Any, saver: Any) -> None:
    """Also on Postgres: the summary is stored, applied by the next turn, and makes no branch."""
    summary = in_background(make_answering_model("summary"))
    graph = make(summary, saver)
    for number in range(1, 8):
        out = said_to(graph, f"q{number}")
        assert summary.flush(30)

    assert out["summary"]["text"] == "summary 2"
    assert out["summary"]["count"] == len(out["summarized"]) == 8
    assert branches(saver) == []
    assert saver.status("t").state == "idle"


def add_all(value: Any, updates: Any) -> Any:
    """Return the messages after several updates, as the reducer of a `DeltaChannel` does."""
    for update in updates:
        value = add_messages(value, update)
    return value


class DeltaState(SummaryState, total=False):
    """A state whose checkpoints have the messages only now and then."""

    messages: Annotated[list[AnyMessage], DeltaChannel(add_all, snapshot_frequency=50)]  # type: ignore[misc]


def test_messages_of_a_delta_channel_are_summarised(file_saver: SQLiteCheckpointer) -> None:
    """As in deep agents."""
    scribe = make_answering_model("summary")
    summary, answers = in_background(scribe), make_answering_model()
    builder = StateGraph(DeltaState)
    builder.add_node("respond", lambda state: {"messages": [answers.invoke(state["messages"])]})
    builder.add_node("summarize", summary)
    builder.add_edge(START, "respond").add_edge("respond", "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for number in range(1, 8):
        out = said_to(graph, f"q{number}")
        assert summary.flush(30)

    assert len(scribe.requests) == 3  # after the third, the fifth and the seventh turn
    assert out["summary"]["count"] == len(out["summarized"]) == 8
    assert list_texts(out["messages"])[0] == "q5"
    assert len(file_saver.history("t")) == 14


def test_langgraphs_own_saver_works_too() -> None:
    """Without a lock between processes, a summary is still dropped if the head has changed."""
    summary = in_background(make_answering_model("summary"))
    saver = InMemorySaver()
    graph = agent_of(summary, saver)
    for number in range(1, 5):
        out = said_to(graph, f"q{number}")
        assert summary.flush(30)

    assert list_texts(out["messages"]) == ["q3", "answer 3", "q4", "answer 4"]


def test_learners_remember_before_a_summary_in_the_background(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Each message is a memory, although the summary removes it."""
    from langgraph.store.memory import InMemoryStore

    store = InMemoryStore()
    summary = in_background(make_answering_model("summary"))
    middleware = [MemoryMiddleware(summary, remember_turns(store, namespace=("m",)))]
    agent: Any = create_agent(
        make_answering_model(), middleware=middleware, checkpointer=file_saver
    )
    for number in range(1, 9):
        said_to(agent, f"the question {number}")
        assert summary.flush(30)
    found = {item.value["text"] for item in store.search(("m",), limit=50)}

    assert {f"user: the question {number}" for number in range(1, 9)} <= found

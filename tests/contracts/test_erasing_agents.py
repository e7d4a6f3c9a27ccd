"""`erase()` on threads of agents: tools in parallel, interrupts, subgraphs, summaries."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, SummarizationMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

from tests.contracts.erased import Saver, read_raw_bytes, render_thread
from tests.contracts.puts import config_at

SAYS = "xylophones tune themselves"  # unique to the message that is erased: what it says,
CITY = "Quetzalburg"  # a short argument of its call,
NOTE = 'a "quoted" argument, long enough to stand for its call'  # and a long one


class Model(GenericFakeChatModel):
    """Says what it was given to say."""

    def bind_tools(self, *args: Any, **options: Any) -> Model:
        return self


def says(*messages: AIMessage | str) -> Model:
    return Model(messages=iter(messages))


def call(number: int, name: str = "look", **args: Any) -> dict[str, Any]:
    uid = f"call_{number:020d}"
    return {"name": name, "args": args, "id": uid, "type": "tool_call"}


def calling(*numbers: int) -> AIMessage:
    """The message that is erased: it calls a tool for each number."""
    calls = [call(n, city=f"{CITY} {n}", note=NOTE) for n in numbers]
    return AIMessage(SAYS, tool_calls=calls)


RAN: list[str] = []  # the cities that were looked at


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


class Broken(Exception):
    """What a tool fails with."""


@tool
def look(city: str, note: str) -> str:
    """Look at a city."""
    if city.endswith("2") and not RAN.count("mended"):
        time.sleep(0.1)  # langgraph stores nothing of a tool that ends after its run has failed
        raise Broken
    RAN.append(city)
    return "seen"


def agent(saver: Any, *messages: AIMessage | str, **options: Any) -> Any:
    """An agent that says these messages, one after another."""
    return create_agent(says(*messages), [look], checkpointer=saver, **options)


def compiled(builder: Any, saver: Saver, **options: Any) -> Any:
    return builder.compile(checkpointer=saver, **options)


def erase(saver: Saver, config: Any, graph: Any) -> Any:
    """Erase the message that calls, and see that no trace of it is left."""
    (uid,) = {
        m.id
        for state in graph.get_state_history(config)
        for m in state.values.get("messages", [])
        if m.content == SAYS
    }
    report = saver.erase("t", [uid])
    assert_erased(saver)
    return report


def assert_erased(saver: Saver) -> None:
    seen, bytes_ = render_thread(saver), read_raw_bytes(saver)
    for text in (SAYS, CITY, NOTE, NOTE.replace('"', '\\"')):
        assert text not in seen
        assert text.encode() not in bytes_


def kinds(state: Any) -> str:
    return " ".join(m.type for m in state["messages"])


# -- three tools at once


def test_tools_that_have_not_run(saver: Saver) -> None:
    """Their tasks are cancelled, and the thread goes on without them."""
    graph = agent(saver, calling(1, 3, 4), "and so on", interrupt_before=["tools"])
    graph.invoke({"messages": ["hello"]}, config_at())
    assert graph.get_state(config_at()).next == ("tools", "tools", "tools")
    report = erase(saver, config_at(), graph)

    assert report.cancelled == ("tools",)
    assert graph.get_state(config_at()).next == ()
    assert kinds(graph.invoke(None, config_at())) == "human"
    assert kinds(graph.invoke({"messages": ["more"]}, config_at())) == "human human ai"
    assert RAN == []


def test_tools_of_which_one_failed(saver: Saver) -> None:
    """Their step has not ended: none of them is run again, and no result of theirs comes."""
    graph = agent(saver, calling(1, 2, 3), "and so on")
    with pytest.raises(Broken):
        graph.invoke({"messages": ["hello"]}, config_at())
    tasks = {f"tools:{task.id}" for task in graph.get_state(config_at()).tasks}
    ran = [*RAN]
    report = erase(saver, config_at(), graph)

    assert {*report.cancelled} == tasks
    assert kinds(graph.invoke(None, config_at())) == "human"
    assert ran == RAN
    assert kinds(graph.invoke({"messages": ["more"]}, config_at())) == "human human ai"


def test_tools_that_have_run(saver: Saver) -> None:
    """Nothing is cancelled; the results stay, under no name."""
    graph = agent(saver, calling(1, 3, 4), "and so on")
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase(saver, config_at(), graph)
    state = graph.get_state(config_at()).values
    results = [m for m in state["messages"] if isinstance(m, ToolMessage)]

    assert report.cancelled == ()
    assert kinds(state) == "human tool tool tool ai"
    assert [(m.content, m.name, m.tool_call_id[-1]) for m in results] == [
        ("seen", None, each) for each in "134"
    ]
    assert "call_00000000000000000001" in render_thread(saver)


def test_a_task_beside_others(saver: Saver, caplog: pytest.LogCaptureFixture) -> None:
    """Of the tasks of a step only those that quote go; the others keep their places and results."""

    def fan(state: MessagesState) -> list[Send]:
        quoting = Send("work", {"topic": f"more on: {SAYS}"})
        return [quoting, *(Send("work", {"topic": topic}) for topic in ("a", "b"))]

    def work(state: Any) -> dict[str, Any]:
        RAN.append(state["topic"])
        return {"messages": [HumanMessage(f"{state['topic']} {interrupt(state['topic'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("work", work)
    builder.add_edge(START, "say")
    builder.add_conditional_edges("say", fan, ["work"])
    graph = compiled(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    before = graph.get_state(config_at()).tasks
    report = erase(saver, config_at(), graph)
    after = graph.get_state(config_at()).tasks
    RAN.clear()
    answers = {each.interrupts[0].id: "yes" for each in after}
    with caplog.at_level(logging.CRITICAL, "langgraph"):
        state = graph.invoke(Command(resume=answers), config_at())

    assert report.cancelled == (f"work:{before[0].id}",)
    assert [task.id for task in before[1:]] == [task.id for task in after]
    assert sorted(RAN) == ["a", "b"]
    assert [m.content for m in state["messages"]] == ["hello", "a yes", "b yes"]


# -- interrupts


def test_a_call_that_waits_for_approval(saver: Saver) -> None:
    """It is asked for no more: neither it nor an earlier call is run, and the thread goes on."""
    middleware = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    first = AIMessage("fine", tool_calls=[call(9, city="Ghent", note="n")])
    graph = agent(saver, first, "seen it", calling(1), "and so on", middleware=[middleware])
    yes: Command[Any] = Command(resume={"decisions": [{"type": "approve"}]})
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(yes, config_at())
    graph.invoke({"messages": ["again"]}, config_at())
    (task,) = graph.get_state(config_at()).tasks
    report = erase(saver, config_at(), graph)

    assert report.cancelled == (f"{task.name}:{task.id}",)
    assert graph.get_state(config_at()).interrupts == ()
    assert kinds(graph.invoke(None, config_at())) == "human ai tool ai human"
    assert (
        kinds(graph.invoke({"messages": ["more"]}, config_at()))
        == "human ai tool ai human human ai"
    )
    assert RAN == ["Ghent"]


def test_a_call_that_was_approved(saver: Saver) -> None:
    """What was asked and answered goes; so do a result's words that repeat the call."""
    middleware = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    graph = agent(saver, calling(1), "and so on", middleware=[middleware])
    graph.invoke({"messages": ["hello"]}, config_at())
    edited = {"name": "look", "args": {"city": f"{CITY} 3", "note": NOTE}}
    decision: Any = {"type": "edit", "edited_action": edited}
    graph.invoke(Command(resume={"decisions": [decision]}), config_at())
    erase(saver, config_at(), graph)
    state = graph.get_state(config_at()).values

    assert [f"{CITY} 3"] == RAN
    assert [m.content for m in state["messages"]] == ["hello", "", "and so on"]
    assert state["hitl_edited_tool_calls"] == {}


def test_a_classical_tool_node(saver: Saver) -> None:
    """A node that would take the last call it finds is not started with an earlier one."""
    first = AIMessage("fine", tool_calls=[call(9, city="Ghent", note="n")])
    model = says(first, "seen it", calling(1), "and so on")
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    graph = compiled(builder, saver, interrupt_before=["tools"])
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(None, config_at())
    graph.invoke({"messages": ["again"]}, config_at())
    assert graph.get_state(config_at()).next == ("tools",)
    report = erase(saver, config_at(), graph)

    assert report.cancelled == ("tools",)
    assert kinds(graph.invoke(None, config_at())) == "human ai tool ai human"
    assert RAN == ["Ghent"]


def test_an_interrupt_that_quotes_nothing(saver: Saver) -> None:
    """A task that waits for something else goes on waiting, and runs when it is answered."""
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("ask", lambda _: {"messages": [HumanMessage(interrupt("Go on?"))]})
    builder.add_edge(START, "say")
    builder.add_edge("say", "ask")
    graph = compiled(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase(saver, config_at(), graph)
    state = graph.invoke(Command(resume="yes"), config_at())

    assert report.cancelled == ()
    assert [m.content for m in state["messages"]] == ["hello", "yes"]


def test_what_was_answered(saver: Saver) -> None:
    """A message that was the answer to an interrupt goes from the answer too."""
    builder = StateGraph(MessagesState)
    builder.add_node("ask", lambda _: {"messages": [HumanMessage(interrupt("Go on?"))]})
    builder.add_edge(START, "ask")
    graph = compiled(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(Command(resume=SAYS), config_at())
    erase(saver, config_at(), graph)

    assert kinds(graph.invoke({"messages": ["more"]}, config_at())).startswith("human human")


# -- subgraphs, and other state


@pytest.mark.parametrize("done", [False, True])
def test_a_subgraph_with_its_own_checkpoints(saver: Saver, done: bool) -> None:
    """The message goes from the subgraph's threads as from the root's, with what is sent there."""
    options = {} if done else {"interrupt_before": ["tools"]}
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent(True, calling(1, 3), "inner answer", "later", **options))
    builder.add_edge(START, "agent")
    graph = compiled(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    inner = config_at("t", "agent")
    found = saver.get_tuple(inner)
    assert found is not None
    messages = found.checkpoint["channel_values"]["messages"]
    report = saver.erase("t", [m.id for m in messages if m.content == SAYS])

    assert_erased(saver)
    assert report.cancelled == (() if done else ("agent|tools",))
    state = graph.invoke({"messages": ["more"]}, config_at())
    assert state["messages"][0].content == "hello"
    assert [f"{CITY} 1", f"{CITY} 3"] * done == sorted(RAN)


@pytest.mark.parametrize("done", [False, True])
def test_a_subgraph_that_was_sent_a_task(saver: Saver, done: bool) -> None:
    """What such a task was told is a quotation in all that its subgraph has stored."""

    class Told(TypedDict):
        told: str
        notes: list[str]

    inner = StateGraph(Told)
    inner.add_node(
        "note", lambda state: {"notes": [state["told"], state["told"].title(), "n" * 99]}
    )
    inner.add_node("wait", lambda state: None if done else interrupt("Go on?"))
    inner.add_edge(START, "note")
    inner.add_edge("note", "wait")
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("work", inner.compile())
    builder.add_edge(START, "say")
    builder.add_conditional_edges(
        "say", lambda _: [Send("work", {"told": f"more on {SAYS}"})], ["work"]
    )
    graph = compiled(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase(saver, config_at(), graph)

    assert len(report.cancelled) == (not done)
    assert kinds(graph.invoke(None, config_at())) == "human"
    assert SAYS.title() in render_thread(saver)


class Topics(TypedDict):
    messages: Annotated[list[AnyMessage], lambda a, b: [*a, *b]]
    topic: str
    titles: list[str]


def test_other_channels(saver: Saver) -> None:
    """A channel loses what just repeats the message, and keeps what says more or is short."""
    builder = StateGraph(Topics)
    message = AIMessage(SAYS, id="x")
    titles = [SAYS, f"On why {SAYS.title()}", "tune"]
    builder.add_node("say", lambda _: {"messages": [message], "topic": SAYS, "titles": titles})
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    graph = compiled(builder, saver)
    config: Any = {**config_at(), "metadata": {"title": f"{SAYS}!", "user": "u"}}
    graph.invoke({"messages": [], "topic": "", "titles": []}, config)
    erase(saver, config_at(), graph)
    state = graph.get_state(config_at())

    assert state.values["topic"] == ""
    assert state.values["titles"] == ["", *titles[1:]]
    assert state.metadata is not None
    assert (state.metadata["title"], state.metadata["user"]) == ("", "u")


def test_what_another_message_says_too(saver: Saver) -> None:
    """What a message that stays says as well is not the erased one's own: nothing of it goes."""
    builder = StateGraph(Topics)
    messages = [AIMessage(SAYS, id="x"), HumanMessage(SAYS, id="y")]
    builder.add_node("say", lambda _: {"messages": messages, "topic": SAYS, "titles": []})
    builder.add_edge(START, "say")
    graph = compiled(builder, saver)
    graph.invoke({"messages": [], "topic": "", "titles": []}, config_at())
    saver.erase("t", ["x"])

    assert graph.get_state(config_at()).values["topic"] == SAYS
    assert graph.get_state(config_at()).values["messages"] == messages[1:]


def test_a_summary(saver: Saver) -> None:
    """What a summary says in its own words stays; the messages it is of can still be erased."""

    def replies() -> Iterator[AIMessage]:
        yield AIMessage(SAYS)
        yield AIMessage("a short answer")
        yield AIMessage("in brief: Xylophones, tuned")
        yield AIMessage("the end")

    model = Model(messages=replies())
    summary = SummarizationMiddleware(model, trigger=("messages", 4), keep=("messages", 1))
    graph: Any = create_agent(model, [], checkpointer=saver, middleware=[summary])
    for text in ("one", "two", "three"):
        graph.invoke({"messages": [text]}, config_at())
    erase(saver, config_at(), graph)

    assert "in brief: Xylophones, tuned" in render_thread(saver)
    assert all(item.value.content != SAYS for item in saver.history("t"))

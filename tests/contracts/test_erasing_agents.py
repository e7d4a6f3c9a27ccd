"""`erase()` on threads of agents: parallel tools, interrupts, subgraphs and summaries."""

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

SAYS = "xylophones tune themselves"  # the erased message has this text, and no other message
CITY = "Quetzalburg"  # short argument of the erased message's tool call
NOTE = 'a "quoted" argument, long enough to stand for its call'  # long argument of its tool call


class ScriptedModel(GenericFakeChatModel):
    """A model that returns the given messages, one after another."""

    def bind_tools(self, *args: Any, **options: Any) -> ScriptedModel:
        return self


def make_model(*messages: AIMessage | str) -> ScriptedModel:
    return ScriptedModel(messages=iter(messages))


def make_tool_call(number: int, name: str = "look", **args: Any) -> dict[str, Any]:
    uid = f"call_{number:020d}"
    return {"name": name, "args": args, "id": uid, "type": "tool_call"}


def make_erased_message(*numbers: int) -> AIMessage:
    """Return the message that is erased, with one tool call for each number."""
    calls = [make_tool_call(n, city=f"{CITY} {n}", note=NOTE) for n in numbers]
    return AIMessage(SAYS, tool_calls=calls)


CALLED_CITIES: list[str] = []  # the cities for which the tool was called


@pytest.fixture(autouse=True)
def _clear_called_cities() -> None:
    CALLED_CITIES.clear()


class Broken(Exception):
    """The error that a tool raises."""


@tool
def look(city: str, note: str) -> str:
    """Look at a city."""
    if city.endswith("2") and not CALLED_CITIES.count("mended"):
        time.sleep(0.1)  # langgraph stores nothing of a tool that ends after its run has failed
        raise Broken
    CALLED_CITIES.append(city)
    return "seen"


def make_agent(saver: Any, *messages: AIMessage | str, **options: Any) -> Any:
    """Return an agent whose model returns these messages, one after another."""
    return create_agent(make_model(*messages), [look], checkpointer=saver, **options)


def compile_graph(builder: Any, saver: Saver, **options: Any) -> Any:
    return builder.compile(checkpointer=saver, **options)


def erase_and_check(saver: Saver, config: Any, graph: Any) -> Any:
    """Erase the message with the tool calls, and return the report.

    Check that no trace of the message remains.
    """
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
    readable, raw_bytes = render_thread(saver), read_raw_bytes(saver)
    for text in (SAYS, CITY, NOTE, NOTE.replace('"', '\\"')):
        assert text not in readable
        assert text.encode() not in raw_bytes


def join_types(state: Any) -> str:
    return " ".join(m.type for m in state["messages"])


# -- three tools at once


def test_erase_cancels_tool_calls_that_have_not_run(saver: Saver) -> None:
    """The thread continues without the cancelled tasks."""
    graph = make_agent(saver, make_erased_message(1, 3, 4), "and so on", interrupt_before=["tools"])
    graph.invoke({"messages": ["hello"]}, config_at())
    assert graph.get_state(config_at()).next == ("tools", "tools", "tools")
    report = erase_and_check(saver, config_at(), graph)

    assert report.cancelled == ("tools",)
    assert graph.get_state(config_at()).next == ()
    assert join_types(graph.invoke(None, config_at())) == "human"
    assert join_types(graph.invoke({"messages": ["more"]}, config_at())) == "human human ai"
    assert CALLED_CITIES == []


def test_erase_cancels_all_tool_calls_of_step_that_failed(saver: Saver) -> None:
    """None of the calls is run again, and none of their results is added."""
    graph = make_agent(saver, make_erased_message(1, 2, 3), "and so on")
    with pytest.raises(Broken):
        graph.invoke({"messages": ["hello"]}, config_at())
    tasks = {f"tools:{task.id}" for task in graph.get_state(config_at()).tasks}
    cities_before = [*CALLED_CITIES]
    report = erase_and_check(saver, config_at(), graph)

    assert {*report.cancelled} == tasks
    assert join_types(graph.invoke(None, config_at())) == "human"
    assert cities_before == CALLED_CITIES
    assert join_types(graph.invoke({"messages": ["more"]}, config_at())) == "human human ai"


def test_erase_keeps_results_of_tools_without_their_names(saver: Saver) -> None:
    """Nothing is cancelled after the tools have run."""
    graph = make_agent(saver, make_erased_message(1, 3, 4), "and so on")
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase_and_check(saver, config_at(), graph)
    state = graph.get_state(config_at()).values
    results = [m for m in state["messages"] if isinstance(m, ToolMessage)]

    assert report.cancelled == ()
    assert join_types(state) == "human tool tool tool ai"
    assert [(m.content, m.name, m.tool_call_id[-1]) for m in results] == [
        ("seen", None, number) for number in "134"
    ]
    assert "call_00000000000000000001" in render_thread(saver)


def test_erase_cancels_only_parallel_tasks_that_quote_message(
    saver: Saver, caplog: pytest.LogCaptureFixture
) -> None:
    """The tasks of the step that do not quote the message keep their ids and results."""

    def send_tasks(state: MessagesState) -> list[Send]:
        quoting_task = Send("work", {"topic": f"more on: {SAYS}"})
        return [quoting_task, *(Send("work", {"topic": topic}) for topic in ("a", "b"))]

    def work(state: Any) -> dict[str, Any]:
        CALLED_CITIES.append(state["topic"])
        return {"messages": [HumanMessage(f"{state['topic']} {interrupt(state['topic'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("work", work)
    builder.add_edge(START, "say")
    builder.add_conditional_edges("say", send_tasks, ["work"])
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    before = graph.get_state(config_at()).tasks
    report = erase_and_check(saver, config_at(), graph)
    after = graph.get_state(config_at()).tasks
    CALLED_CITIES.clear()
    answers = {task.interrupts[0].id: "yes" for task in after}
    with caplog.at_level(logging.CRITICAL, "langgraph"):
        state = graph.invoke(Command(resume=answers), config_at())

    assert report.cancelled == (f"work:{before[0].id}",)
    assert [task.id for task in before[1:]] == [task.id for task in after]
    assert sorted(CALLED_CITIES) == ["a", "b"]
    assert [m.content for m in state["messages"]] == ["hello", "a yes", "b yes"]


# -- interrupts


def test_erase_cancels_tool_call_that_waits_for_approval(saver: Saver) -> None:
    """Neither this call nor an earlier one is run, and the thread continues."""
    middleware = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    first = AIMessage("fine", tool_calls=[make_tool_call(9, city="Ghent", note="n")])
    graph = make_agent(
        saver, first, "seen it", make_erased_message(1), "and so on", middleware=[middleware]
    )
    yes: Command[Any] = Command(resume={"decisions": [{"type": "approve"}]})
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(yes, config_at())
    graph.invoke({"messages": ["again"]}, config_at())
    (task,) = graph.get_state(config_at()).tasks
    report = erase_and_check(saver, config_at(), graph)

    assert report.cancelled == (f"{task.name}:{task.id}",)
    assert graph.get_state(config_at()).interrupts == ()
    assert join_types(graph.invoke(None, config_at())) == "human ai tool ai human"
    assert (
        join_types(graph.invoke({"messages": ["more"]}, config_at()))
        == "human ai tool ai human human ai"
    )
    assert CALLED_CITIES == ["Ghent"]


def test_erase_removes_interrupt_and_answer_of_approved_call(saver: Saver) -> None:
    """The words of a result that repeat the call are removed too."""
    middleware = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    graph = make_agent(saver, make_erased_message(1), "and so on", middleware=[middleware])
    graph.invoke({"messages": ["hello"]}, config_at())
    edited = {"name": "look", "args": {"city": f"{CITY} 3", "note": NOTE}}
    decision: Any = {"type": "edit", "edited_action": edited}
    graph.invoke(Command(resume={"decisions": [decision]}), config_at())
    erase_and_check(saver, config_at(), graph)
    state = graph.get_state(config_at()).values

    assert [f"{CITY} 3"] == CALLED_CITIES
    assert [m.content for m in state["messages"]] == ["hello", "", "and so on"]
    assert state["hitl_edited_tool_calls"] == {}


def test_tool_node_is_not_started_with_earlier_call_after_erase(saver: Saver) -> None:
    """A `ToolNode` would otherwise run the last call that it finds."""
    first = AIMessage("fine", tool_calls=[make_tool_call(9, city="Ghent", note="n")])
    model = make_model(first, "seen it", make_erased_message(1), "and so on")
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    graph = compile_graph(builder, saver, interrupt_before=["tools"])
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(None, config_at())
    graph.invoke({"messages": ["again"]}, config_at())
    assert graph.get_state(config_at()).next == ("tools",)
    report = erase_and_check(saver, config_at(), graph)

    assert report.cancelled == ("tools",)
    assert join_types(graph.invoke(None, config_at())) == "human ai tool ai human"
    assert CALLED_CITIES == ["Ghent"]


def test_interrupt_that_does_not_quote_message_survives_erase(saver: Saver) -> None:
    """The task of such an interrupt waits on, and runs after an answer."""
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("ask", lambda _: {"messages": [HumanMessage(interrupt("Go on?"))]})
    builder.add_edge(START, "say")
    builder.add_edge("say", "ask")
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase_and_check(saver, config_at(), graph)
    state = graph.invoke(Command(resume="yes"), config_at())

    assert report.cancelled == ()
    assert [m.content for m in state["messages"]] == ["hello", "yes"]


def test_erase_removes_message_from_answer_to_interrupt(saver: Saver) -> None:
    """The message was given as the answer to an interrupt."""
    builder = StateGraph(MessagesState)
    builder.add_node("ask", lambda _: {"messages": [HumanMessage(interrupt("Go on?"))]})
    builder.add_edge(START, "ask")
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    graph.invoke(Command(resume=SAYS), config_at())
    erase_and_check(saver, config_at(), graph)

    assert join_types(graph.invoke({"messages": ["more"]}, config_at())).startswith("human human")


# -- subgraphs, and other state


@pytest.mark.parametrize("is_done", [False, True])
def test_erase_removes_message_from_checkpoints_of_subgraph(saver: Saver, is_done: bool) -> None:
    """Tasks of the subgraph that were sent the message are cancelled."""
    options = {} if is_done else {"interrupt_before": ["tools"]}
    builder = StateGraph(MessagesState)
    builder.add_node(
        "agent", make_agent(True, make_erased_message(1, 3), "inner answer", "later", **options)
    )
    builder.add_edge(START, "agent")
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    inner_config = config_at("t", "agent")
    stored = saver.get_tuple(inner_config)
    assert stored is not None
    messages = stored.checkpoint["channel_values"]["messages"]
    report = saver.erase("t", [m.id for m in messages if m.content == SAYS])

    assert_erased(saver)
    assert report.cancelled == (() if is_done else ("agent|tools",))
    state = graph.invoke({"messages": ["more"]}, config_at())
    assert state["messages"][0].content == "hello"
    assert [f"{CITY} 1", f"{CITY} 3"] * is_done == sorted(CALLED_CITIES)


@pytest.mark.parametrize("is_done", [False, True])
def test_erase_removes_quotations_of_sent_task_from_its_subgraph(
    saver: Saver, is_done: bool
) -> None:
    """The text with which a task was sent is a quotation wherever the subgraph has stored it."""

    class TaskState(TypedDict):
        quotation: str
        notes: list[str]

    inner = StateGraph(TaskState)
    inner.add_node(
        "note", lambda state: {"notes": [state["quotation"], state["quotation"].title(), "n" * 99]}
    )
    inner.add_node("wait", lambda state: None if is_done else interrupt("Go on?"))
    inner.add_edge(START, "note")
    inner.add_edge("note", "wait")
    builder = StateGraph(MessagesState)
    builder.add_node("say", lambda _: {"messages": [AIMessage(SAYS)]})
    builder.add_node("work", inner.compile())
    builder.add_edge(START, "say")
    builder.add_conditional_edges(
        "say", lambda _: [Send("work", {"quotation": f"more on {SAYS}"})], ["work"]
    )
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": ["hello"]}, config_at())
    report = erase_and_check(saver, config_at(), graph)

    assert len(report.cancelled) == (not is_done)
    assert join_types(graph.invoke(None, config_at())) == "human"
    assert SAYS.title() in render_thread(saver)


class Topics(TypedDict):
    messages: Annotated[list[AnyMessage], lambda a, b: [*a, *b]]
    topic: str
    titles: list[str]


def test_erase_clears_values_that_only_repeat_message(saver: Saver) -> None:
    """Values that say more than the message, or are short, stay."""
    builder = StateGraph(Topics)
    message = AIMessage(SAYS, id="x")
    titles = [SAYS, f"On why {SAYS.title()}", "tune"]
    builder.add_node("say", lambda _: {"messages": [message], "topic": SAYS, "titles": titles})
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    graph = compile_graph(builder, saver)
    config: Any = {**config_at(), "metadata": {"title": f"{SAYS}!", "user": "u"}}
    graph.invoke({"messages": [], "topic": "", "titles": []}, config)
    erase_and_check(saver, config_at(), graph)
    state = graph.get_state(config_at())

    assert state.values["topic"] == ""
    assert state.values["titles"] == ["", *titles[1:]]
    assert state.metadata is not None
    assert (state.metadata["title"], state.metadata["user"]) == ("", "u")


def test_erase_keeps_text_that_another_message_also_has(saver: Saver) -> None:
    """Values that repeat such a text stay too."""
    builder = StateGraph(Topics)
    messages = [AIMessage(SAYS, id="x"), HumanMessage(SAYS, id="y")]
    builder.add_node("say", lambda _: {"messages": messages, "topic": SAYS, "titles": []})
    builder.add_edge(START, "say")
    graph = compile_graph(builder, saver)
    graph.invoke({"messages": [], "topic": "", "titles": []}, config_at())
    saver.erase("t", ["x"])

    assert graph.get_state(config_at()).values["topic"] == SAYS
    assert graph.get_state(config_at()).values["messages"] == messages[1:]


def test_erase_keeps_words_of_summary(saver: Saver) -> None:
    """Messages that were replaced by a summary can still be erased.

    The summary's own words stay.
    """

    def replies() -> Iterator[AIMessage]:
        yield AIMessage(SAYS)
        yield AIMessage("a short answer")
        yield AIMessage("in brief: Xylophones, tuned")
        yield AIMessage("the end")

    model = ScriptedModel(messages=replies())
    summarization = SummarizationMiddleware(model, trigger=("messages", 4), keep=("messages", 1))
    graph: Any = create_agent(model, [], checkpointer=saver, middleware=[summarization])
    for text in ("one", "two", "three"):
        graph.invoke({"messages": [text]}, config_at())
    erase_and_check(saver, config_at(), graph)

    assert "in brief: Xylophones, tuned" in render_thread(saver)
    assert all(item.value.content != SAYS for item in saver.history("t"))

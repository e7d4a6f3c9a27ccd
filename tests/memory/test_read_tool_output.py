"""Reading the original of a tool result that was cleared, trimmed or summarised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.memory import (
    ChatState,
    SummaryState,
    clear_tool_outputs,
    read_tool_output,
    summarize,
    trim,
    view,
)
from perdure.memory.middleware import MemoryMiddleware
from tests.backends import Place, places

CONFIG: Any = {"configurable": {"thread_id": "t"}}
PAGE = "word " * 300  # the result of the tool `look`
Durability = Literal["sync", "async", "exit"]


class ScriptedModel(GenericFakeChatModel):
    """A chat model that gives its answers in order and records the messages of each call."""

    shown: list[list[BaseMessage]]

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> Any:
        self.shown.append(messages)
        return super()._generate(messages, *args, **options)


def make_scripted_model(*answers: AIMessage | str) -> ScriptedModel:
    messages = (AIMessage(each) if isinstance(each, str) else each for each in answers)
    return ScriptedModel(messages=iter(messages), shown=[])


def make_tool_call_message(uid: str, name: str = "look", **arguments: Any) -> AIMessage:
    call = {"name": name, "args": arguments, "id": uid, "type": "tool_call"}
    return AIMessage("", tool_calls=[call])


def make_read_call_message(uid: str, read_id: str, **arguments: Any) -> AIMessage:
    return make_tool_call_message(uid, "read_tool_output", tool_call_id=read_id, **arguments)


@tool
def look(page: str = "") -> str:
    """Look at a page."""
    return f"{page}: {PAGE}"


def make_read_call(uid: str, **arguments: Any) -> Any:
    arguments = {"tool_call_id": uid, **arguments}
    return {"name": "read_tool_output", "args": arguments, "id": "r", "type": "tool_call"}


def invoke_graph(
    graph: Any, update: Any, call_mode: str = "sync", config: Any = CONFIG, **options: Any
) -> Any:
    if call_mode == "async":
        return asyncio.run(graph.ainvoke(update, config, **options))
    return graph.invoke(update, config, **options)


def tool_results_by_call_id(state: Any, *ids: str) -> list[str]:
    """Return the texts of the results of these tool calls."""
    texts = {m.tool_call_id: m.text for m in state["messages"] if isinstance(m, ToolMessage)}
    return [texts[uid] for uid in ids]


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


# -- agents


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_agent_reads_cleared_result_by_its_id(place: Place, call_mode: str) -> None:
    """The line in place of the result names the tool and the id. The tool returns the original."""
    model = make_scripted_model(
        make_tool_call_message("a", page="one"),
        "Seen.",
        make_tool_call_message("b", page="two"),
        make_read_call_message("c", "a"),
        "",
    )
    memory = MemoryMiddleware(clear_tool_outputs(keep=0, min_tokens=50))
    with place.saver() as saver:
        agent: Any = create_agent(
            model, [look, read_tool_output()], middleware=[memory], checkpointer=saver
        )
        invoke_graph(agent, {"messages": [("human", "Look")]}, call_mode)
        out = invoke_graph(agent, {"messages": [("human", "Look again")]}, call_mode)

    line = next(m for m in model.shown[2] if isinstance(m, ToolMessage)).text
    assert line.startswith("[The result of look was cleared (")
    assert line.endswith('To read it, call read_tool_output with tool_call_id "a".]')
    assert tool_results_by_call_id(out, "c") == [f"one: {PAGE}"]


def test_cleared_line_names_read_tool_only_if_agent_has_it(tmp_path: Path) -> None:
    """If the agent's tool has another name, the line has that name."""
    cases: list[tuple[Any, list[Any], str]] = [
        (None, [], "Call it again if need be.]"),
        ("read_tool_output", [], "Call it again if need be.]"),
        (None, [read_tool_output(name="again")], 'call again with tool_call_id "a".]'),
        ("other", [read_tool_output()], 'call read_tool_output with tool_call_id "a".]'),
    ]
    for read_tool_option, tools, expected in cases:
        model = make_scripted_model(make_tool_call_message("a"), "Seen.")
        memory = MemoryMiddleware(
            clear_tool_outputs(keep=0, min_tokens=50, read_tool=read_tool_option)
        )
        agent: Any = create_agent(model, [look, *tools], middleware=[memory])
        state = agent.invoke({"messages": [("human", "Look")]})
        model = make_scripted_model("Again.")
        agent = create_agent(model, [look, *tools], middleware=[memory])
        agent.invoke({"messages": [*state["messages"], HumanMessage("And?")]})

        [line] = [m.text for m in model.shown[0] if isinstance(m, ToolMessage)]
        assert line.endswith(expected)


def test_results_of_parallel_calls_are_read_by_parallel_calls(place: Place) -> None:
    ids = ["a", "b", "c"]
    looks = AIMessage(
        "", tool_calls=[c for uid in ids for c in make_tool_call_message(uid, page=uid).tool_calls]
    )
    reads = AIMessage(
        "", tool_calls=[c for uid in ids for c in make_read_call_message(f"r{uid}", uid).tool_calls]
    )
    with place.saver() as saver:
        agent: Any = create_agent(
            make_scripted_model(looks, "Seen.", reads, "Read."),
            [look, read_tool_output()],
            checkpointer=saver,
        )
        invoke_graph(agent, {"messages": [("human", "Look")]})
        removed = [m for m in agent.get_state(CONFIG).values["messages"] if m.type == "tool"]
        agent.update_state(CONFIG, {"messages": [RemoveMessage(id=m.id) for m in removed]})
        out = invoke_graph(agent, {"messages": [("human", "Read")]})

    assert tool_results_by_call_id(out, "ra", "rb", "rc") == [f"{uid}: {PAGE}" for uid in ids]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("stateful", [None, True], ids=["each run", "stateful"])
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_agent_in_subgraph_reads_results_of_earlier_turns(
    tmp_path: Path, call_mode: str, stateful: Any, durability: Durability
) -> None:
    """The original is in the namespace of the subgraph or of its parent graph."""
    model = make_scripted_model(
        make_tool_call_message("a", page="one"), "Seen.", make_read_call_message("c", "a"), "Read."
    )
    inner = create_agent(model, [look, read_tool_output()], checkpointer=stateful)
    builder = StateGraph(ChatState).add_node("agent", inner)
    clear = clear_tool_outputs(keep=0, min_tokens=50, exclude_tools=["read_tool_output"])
    builder.add_node("clear", clear)
    builder.add_edge(START, "agent").add_edge("agent", "clear")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = builder.compile(checkpointer=saver)
        options = {"durability": durability}
        first = invoke_graph(graph, {"messages": [("human", "Look")]}, call_mode, **options)
        assert tool_results_by_call_id(first, "a")[0].startswith("[The result of look")
        out = invoke_graph(graph, {"messages": [("human", "Read")]}, call_mode, **options)

    # with `exit` no checkpoint had the result before the node cleared it
    expected = f"one: {PAGE}" if durability != "exit" or stateful else "No result of the tool call"
    assert tool_results_by_call_id(out, "c")[0].startswith(expected)


def test_result_cleared_within_earlier_subgraph_run_is_found(tmp_path: Path) -> None:
    """A subgraph that clears its own results keeps the original in its own namespace only."""
    model = make_scripted_model(
        make_tool_call_message("a", page="one"), "Seen.", make_read_call_message("c", "a"), "Read."
    )

    def reply(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def choose_next_node(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else "clear"

    inner = StateGraph(ChatState).add_node("reply", reply)
    inner.add_node("tools", ToolNode([look, read_tool_output()]))
    clear = clear_tool_outputs(keep=0, min_tokens=50, exclude_tools=["read_tool_output"])
    inner.add_node("clear", clear)
    inner.add_edge(START, "reply").add_conditional_edges(
        "reply", choose_next_node, ["tools", "clear"]
    )
    inner.add_edge("tools", "reply")
    outer = StateGraph(ChatState).add_node("inner", inner.compile()).add_edge(START, "inner")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = outer.compile(checkpointer=saver)
        invoke_graph(graph, {"messages": [("human", "Look")]})
        assert PAGE not in "".join(item.value.text for item in saver.history("t"))
        out = invoke_graph(graph, {"messages": [("human", "Read")]})
        assert tool_results_by_call_id(out, "c") == [f"one: {PAGE}"]


# -- direct calls of the tool


def run_thread(saver: Any, *messages: BaseMessage, thread: str = "t", node: Any = None) -> Any:
    """Store a thread with these messages, and return a graph that continues it."""
    builder = StateGraph(SummaryState).add_node("node", node or (lambda state: {}))
    graph: Any = builder.add_edge(START, "node").compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": thread}}
    graph.invoke({"messages": list(messages)}, config)
    return graph


def make_messages(content: Any = PAGE) -> list[BaseMessage]:
    return [
        HumanMessage("look", id="h1"),
        AIMessage("", id="a1", tool_calls=make_tool_call_message("a").tool_calls),
        ToolMessage(content, id="r1", tool_call_id="a", name="look", artifact={"raw": 1}),
        AIMessage("seen", id="a2"),
        HumanMessage("and?", id="h2"),
        AIMessage("well", id="a3"),
        HumanMessage("so?", id="h3"),
    ]


def read_result(saver: Any, uid: str, config: Any = CONFIG, **options: Any) -> ToolMessage:
    answer = read_tool_output(saver, **options).invoke(make_read_call(uid), config)
    assert isinstance(answer, ToolMessage)
    return answer


NODES: dict[str, Callable[[], Any]] = {
    "cleared": lambda: clear_tool_outputs(keep=0),
    "trimmed": lambda: trim(max_tokens=2, token_counter=len),
    "shortened": lambda: trim(max_tokens=60, allow_partial=True, start_on=None),
    "summarised": lambda: summarize(
        FakeListChatModel(responses=["They looked."]), trigger=("messages", 4), keep=("messages", 2)
    ),
    "as it was": lambda: lambda state: {},
}


@pytest.mark.parametrize("name", NODES)
def test_original_is_read_after_clear_trim_or_summary(place: Place, name: str) -> None:
    """The original is found in the state or in the history.

    Pruning older checkpoints does not matter.
    """
    with place.saver() as saver:
        run_thread(saver, *make_messages(), node=NODES[name]())
        assert read_result(saver, "a").content == PAGE
        saver.prune(["t"])
        assert read_result(saver, "a").content == PAGE


def test_missing_result_is_answered_with_error_message(place: Place) -> None:
    """The id may be unknown, from another thread, or erased, and the thread may not exist."""
    with place.saver() as saver:
        run_thread(saver, *make_messages(), node=clear_tool_outputs(keep=0))
        run_thread(saver, HumanMessage("hi", id="h"), thread="other")
        other: Any = {"configurable": {"thread_id": "other"}}
        new: Any = {"configurable": {"thread_id": "new"}}
        answers = [
            read_result(saver, "unknown"),
            read_result(saver, "a", other),
            read_result(saver, "a", new),
        ]
        answers.append(read_result(saver, "", {}))
        saver.erase("t", ["r1"])
        answers.append(read_result(saver, "a"))

    for answer in answers:
        assert answer.status == "error"
        assert answer.text.startswith("No result of the tool call ")
        assert PAGE not in answer.text


def test_read_sees_only_results_up_to_its_checkpoint(place: Place) -> None:
    """A fork from before the result does not find the result.

    If two results have the same id, the newer one is returned.
    """
    with place.saver() as saver:
        graph = run_thread(saver, *make_messages()[:2])
        before = graph.get_state(CONFIG).config
        graph.invoke({"messages": make_messages()[2:]}, CONFIG)
        second = ToolMessage("second", id="r2", tool_call_id="a")
        graph.invoke({"messages": [second, RemoveMessage(id="r1"), RemoveMessage(id="r2")]}, CONFIG)

        assert read_result(saver, "a").content == PAGE
        assert read_result(saver, "a", before).status == "error"
        graph.invoke({"messages": [second]}, CONFIG)
        graph.invoke({"messages": [RemoveMessage(id="r2")]}, CONFIG)
        assert read_result(saver, "a").content == "second"


def test_long_result_is_read_in_pages(place: Place) -> None:
    """Each page says where it ends and how to continue. All pages together are the result."""
    text = "".join(f"{n:04} " for n in range(100))
    with place.saver() as saver:
        run_thread(saver, *make_messages(text), node=clear_tool_outputs(keep=0, min_tokens=40))
        reader = read_tool_output(saver, limit=200)
        pages, start = [], 0
        while start < len(text):
            answer = reader.invoke(make_read_call("a", start=start), CONFIG).text
            page, _, note = answer.rpartition("\n\n")
            end = min(start + 200, len(text))
            assert note.startswith(f"[Characters {start} to {end} of 500.")
            assert (f"call read_tool_output with the same id and start={end}." in note) == (
                end < 500
            )
            pages.append(page)
            start = end
        beyond = reader.invoke(make_read_call("a", start=500), CONFIG)

        assert "".join(pages) == text
        assert beyond.status == "error"
        assert "has 500 characters" in beyond.text


def test_result_with_image_block_is_returned_unchanged(place: Place) -> None:
    """If such a result is too long, its text is returned in pages."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content: Any = [{"type": "text", "text": PAGE}, image]
    with place.saver() as saver:
        run_thread(saver, *make_messages(content), node=clear_tool_outputs(keep=0))
        assert read_result(saver, "a").content == content
        assert read_result(saver, "a", limit=100).text.startswith(PAGE[:100])


def test_result_before_hundreds_of_messages_is_found(tmp_path: Path) -> None:
    rest = [HumanMessage(f"{n}", id=f"n{n}") for n in range(700)]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        run_thread(saver, *make_messages(), *rest, node=trim(max_tokens=5, token_counter=len))
        assert read_result(saver, "a").content == PAGE


# -- options


def test_without_perdure_checkpointer_only_state_is_read() -> None:
    for saver in (None, InMemorySaver()):
        model = make_scripted_model(
            make_tool_call_message("a", page="one"),
            make_read_call_message("b", "a"),
            make_read_call_message("c", "x"),
            "Done.",
        )
        agent: Any = create_agent(model, [look, read_tool_output()], checkpointer=saver)
        out = agent.invoke({"messages": [("human", "Look")]}, CONFIG)

        assert tool_results_by_call_id(out, "b") == [f"one: {PAGE}"]
        assert tool_results_by_call_id(out, "c")[0].startswith('No result of the tool call "x"')


@pytest.mark.parametrize(
    "options",
    [{"limit": 99}, {"limit": 1.5}, {"name": "read it"}, {"description": ""}, {"messages_key": ""}],
)
def test_invalid_options_are_refused_before_run(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        read_tool_output(**options)
    with pytest.raises(ConfigurationError, match="perdure checkpointer"):
        read_tool_output(InMemorySaver())
    with pytest.raises(ConfigurationError, match="read_tool"):
        clear_tool_outputs(read_tool="")


def test_cleared_line_names_given_read_tool() -> None:
    """The tool is given by name or as an object.

    A result that is shorter than the line is not cleared.
    """
    for read_tool in ("again", read_tool_output(name="again")):
        node = clear_tool_outputs(keep=0, read_tool=read_tool)
        line = view(node)(make_messages())[2].text
        assert line.endswith('To read it, call again with tool_call_id "a".]')
    short = clear_tool_outputs(keep=0, min_tokens=40, read_tool="t" * 300)
    kept = [SystemMessage("s"), *make_messages("word " * 40)]
    assert [m.text for m in view(short)(kept)] == [m.text for m in kept]


def test_malformed_tool_arguments_are_answered_with_error(tmp_path: Path) -> None:
    reader = read_tool_output()
    for arguments in ({}, {"tool_call_id": "a", "start": -1}):
        call = {**make_read_call("a"), "args": arguments}
        answer = reader.invoke(call, CONFIG)
        assert answer.status == "error"
        assert answer.text.startswith("read_tool_output was called with invalid arguments")

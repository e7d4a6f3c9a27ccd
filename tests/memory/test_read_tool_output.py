"""Reading a tool result again that was cleared, trimmed or summarised."""

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
PAGE = "word " * 300  # what `look` finds
Durability = Literal["sync", "async", "exit"]


class Scripted(GenericFakeChatModel):
    """Gives its answers in order, and keeps what it was shown."""

    shown: list[list[BaseMessage]]

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> Any:
        self.shown.append(messages)
        return super()._generate(messages, *args, **options)


def scripted(*answers: AIMessage | str) -> Scripted:
    made = (AIMessage(each) if isinstance(each, str) else each for each in answers)
    return Scripted(messages=iter(made), shown=[])


def calling(uid: str, name: str = "look", **arguments: Any) -> AIMessage:
    call = {"name": name, "args": arguments, "id": uid, "type": "tool_call"}
    return AIMessage("", tool_calls=[call])


def reading(uid: str, wanted: str, **arguments: Any) -> AIMessage:
    return calling(uid, "read_tool_output", tool_call_id=wanted, **arguments)


@tool
def look(page: str = "") -> str:
    """Look at a page."""
    return f"{page}: {PAGE}"


def call_of(uid: str, **arguments: Any) -> Any:
    arguments = {"tool_call_id": uid, **arguments}
    return {"name": "read_tool_output", "args": arguments, "id": "r", "type": "tool_call"}


def invoke(
    graph: Any, update: Any, call_mode: str = "sync", config: Any = CONFIG, **options: Any
) -> Any:
    if call_mode == "async":
        return asyncio.run(graph.ainvoke(update, config, **options))
    return graph.invoke(update, config, **options)


def answers_of(state: Any, *ids: str) -> list[str]:
    """The results of these calls in a state."""
    found = {m.tool_call_id: m.text for m in state["messages"] if isinstance(m, ToolMessage)}
    return [found[uid] for uid in ids]


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


# -- agents


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_an_agent_reads_a_cleared_result_again(place: Place, call_mode: str) -> None:
    """The line in place of the result names the tool and the id; the tool gives the original."""
    model = scripted(
        calling("a", page="one"), "Seen.", calling("b", page="two"), reading("c", "a"), ""
    )
    memory = MemoryMiddleware(clear_tool_outputs(keep=0, min_tokens=50))
    with place.saver() as saver:
        agent: Any = create_agent(
            model, [look, read_tool_output()], middleware=[memory], checkpointer=saver
        )
        invoke(agent, {"messages": [("human", "Look")]}, call_mode)
        out = invoke(agent, {"messages": [("human", "Look again")]}, call_mode)

    line = next(m for m in model.shown[2] if isinstance(m, ToolMessage)).text
    assert line.startswith("[The result of look was cleared (")
    assert line.endswith('To read it, call read_tool_output with tool_call_id "a".]')
    assert answers_of(out, "c") == [f"one: {PAGE}"]


def test_an_agent_without_the_tool_is_not_told_of_it(tmp_path: Path) -> None:
    """Also if the option names it; an agent whose tool has another name is told that name."""
    cases: list[tuple[Any, list[Any], str]] = [
        (None, [], "Call it again if need be.]"),
        ("read_tool_output", [], "Call it again if need be.]"),
        (None, [read_tool_output(name="again")], 'call again with tool_call_id "a".]'),
        ("other", [read_tool_output()], 'call read_tool_output with tool_call_id "a".]'),
    ]
    for named, tools, expected in cases:
        model = scripted(calling("a"), "Seen.")
        memory = MemoryMiddleware(clear_tool_outputs(keep=0, min_tokens=50, read_tool=named))
        agent: Any = create_agent(model, [look, *tools], middleware=[memory])
        state = agent.invoke({"messages": [("human", "Look")]})
        model = scripted("Again.")
        agent = create_agent(model, [look, *tools], middleware=[memory])
        agent.invoke({"messages": [*state["messages"], HumanMessage("And?")]})

        [line] = [m.text for m in model.shown[0] if isinstance(m, ToolMessage)]
        assert line.endswith(expected)


def test_results_of_parallel_calls_are_read_each_by_its_id(place: Place) -> None:
    """Also by calls that are themselves parallel."""
    ids = ["a", "b", "c"]
    looks = AIMessage("", tool_calls=[c for uid in ids for c in calling(uid, page=uid).tool_calls])
    reads = AIMessage("", tool_calls=[c for uid in ids for c in reading(f"r{uid}", uid).tool_calls])
    with place.saver() as saver:
        agent: Any = create_agent(
            scripted(looks, "Seen.", reads, "Read."), [look, read_tool_output()], checkpointer=saver
        )
        invoke(agent, {"messages": [("human", "Look")]})
        removed = [m for m in agent.get_state(CONFIG).values["messages"] if m.type == "tool"]
        agent.update_state(CONFIG, {"messages": [RemoveMessage(id=m.id) for m in removed]})
        out = invoke(agent, {"messages": [("human", "Read")]})

    assert answers_of(out, "ra", "rb", "rc") == [f"{uid}: {PAGE}" for uid in ids]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("stateful", [None, True], ids=["each run", "stateful"])
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_an_agent_within_a_graph_reads_results_of_earlier_turns(
    tmp_path: Path, call_mode: str, stateful: Any, durability: Durability
) -> None:
    """The original is in the subgraph's namespace, or in that of the graph around it."""
    model = scripted(calling("a", page="one"), "Seen.", reading("c", "a"), "Read.")
    inner = create_agent(model, [look, read_tool_output()], checkpointer=stateful)
    builder = StateGraph(ChatState).add_node("agent", inner)
    clear = clear_tool_outputs(keep=0, min_tokens=50, exclude_tools=["read_tool_output"])
    builder.add_node("clear", clear)
    builder.add_edge(START, "agent").add_edge("agent", "clear")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = builder.compile(checkpointer=saver)
        options = {"durability": durability}
        first = invoke(graph, {"messages": [("human", "Look")]}, call_mode, **options)
        assert answers_of(first, "a")[0].startswith("[The result of look")
        out = invoke(graph, {"messages": [("human", "Read")]}, call_mode, **options)

    # with `exit` no checkpoint had the result before the node cleared it
    expected = f"one: {PAGE}" if durability != "exit" or stateful else "No result of the tool call"
    assert answers_of(out, "c")[0].startswith(expected)


def test_a_result_that_only_an_earlier_subgraph_had_is_found_by_its_message(tmp_path: Path) -> None:
    """A subgraph that clears its own results leaves the original in its namespace only."""
    model = scripted(calling("a", page="one"), "Seen.", reading("c", "a"), "Read.")

    def reply(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def go_on(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else "clear"

    inner = StateGraph(ChatState).add_node("reply", reply)
    inner.add_node("tools", ToolNode([look, read_tool_output()]))
    clear = clear_tool_outputs(keep=0, min_tokens=50, exclude_tools=["read_tool_output"])
    inner.add_node("clear", clear)
    inner.add_edge(START, "reply").add_conditional_edges("reply", go_on, ["tools", "clear"])
    inner.add_edge("tools", "reply")
    outer = StateGraph(ChatState).add_node("inner", inner.compile()).add_edge(START, "inner")
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph = outer.compile(checkpointer=saver)
        invoke(graph, {"messages": [("human", "Look")]})
        assert PAGE not in "".join(item.value.text for item in saver.history("t"))
        out = invoke(graph, {"messages": [("human", "Read")]})
        assert answers_of(out, "c") == [f"one: {PAGE}"]


# -- what is found, called by hand


def stored(saver: Any, *messages: BaseMessage, thread: str = "t", node: Any = None) -> Any:
    """A thread with these messages, and a graph that continues it."""
    builder = StateGraph(SummaryState).add_node("node", node or (lambda state: {}))
    graph: Any = builder.add_edge(START, "node").compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": thread}}
    graph.invoke({"messages": list(messages)}, config)
    return graph


def talk(content: Any = PAGE) -> list[BaseMessage]:
    return [
        HumanMessage("look", id="h1"),
        AIMessage("", id="a1", tool_calls=calling("a").tool_calls),
        ToolMessage(content, id="r1", tool_call_id="a", name="look", artifact={"raw": 1}),
        AIMessage("seen", id="a2"),
        HumanMessage("and?", id="h2"),
        AIMessage("well", id="a3"),
        HumanMessage("so?", id="h3"),
    ]


def read(saver: Any, uid: str, config: Any = CONFIG, **options: Any) -> ToolMessage:
    answer = read_tool_output(saver, **options).invoke(call_of(uid), config)
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
def test_the_original_is_read_whatever_became_of_it(place: Place, name: str) -> None:
    """From the state, or from the history, also after older checkpoints were pruned."""
    with place.saver() as saver:
        stored(saver, *talk(), node=NODES[name]())
        assert read(saver, "a").content == PAGE
        saver.prune(["t"])
        assert read(saver, "a").content == PAGE


def test_a_result_that_is_not_there_gets_a_sentence(place: Place) -> None:
    """An unknown id, one of another thread, an erased one, and a thread that does not exist."""
    with place.saver() as saver:
        stored(saver, *talk(), node=clear_tool_outputs(keep=0))
        stored(saver, HumanMessage("hi", id="h"), thread="other")
        other: Any = {"configurable": {"thread_id": "other"}}
        new: Any = {"configurable": {"thread_id": "new"}}
        answers = [read(saver, "unknown"), read(saver, "a", other), read(saver, "a", new)]
        answers.append(read(saver, "", {}))
        saver.erase("t", ["r1"])
        answers.append(read(saver, "a"))

    for answer in answers:
        assert answer.status == "error"
        assert answer.text.startswith("No result of the tool call ")
        assert PAGE not in answer.text


def test_a_run_reads_what_was_said_up_to_its_checkpoint(place: Place) -> None:
    """A fork from before a result does not find it; the newest of two with one id is found."""
    with place.saver() as saver:
        graph = stored(saver, *talk()[:2])
        before = graph.get_state(CONFIG).config
        graph.invoke({"messages": talk()[2:]}, CONFIG)
        second = ToolMessage("second", id="r2", tool_call_id="a")
        graph.invoke({"messages": [second, RemoveMessage(id="r1"), RemoveMessage(id="r2")]}, CONFIG)

        assert read(saver, "a").content == PAGE
        assert read(saver, "a", before).status == "error"
        graph.invoke({"messages": [second]}, CONFIG)
        graph.invoke({"messages": [RemoveMessage(id="r2")]}, CONFIG)
        assert read(saver, "a").content == "second"


def test_a_long_result_is_read_in_pages(place: Place) -> None:
    """Each page says where it ends and how to read on; together they are the result."""
    text = "".join(f"{n:04} " for n in range(100))
    with place.saver() as saver:
        stored(saver, *talk(text), node=clear_tool_outputs(keep=0, min_tokens=40))
        reader = read_tool_output(saver, limit=200)
        pages, start = [], 0
        while start < len(text):
            answer = reader.invoke(call_of("a", start=start), CONFIG).text
            page, _, note = answer.rpartition("\n\n")
            end = min(start + 200, len(text))
            assert note.startswith(f"[Characters {start} to {end} of 500.")
            assert (f"call read_tool_output with the same id and start={end}." in note) == (
                end < 500
            )
            pages.append(page)
            start = end
        beyond = reader.invoke(call_of("a", start=500), CONFIG)

        assert "".join(pages) == text
        assert beyond.status == "error"
        assert "has 500 characters" in beyond.text


def test_blocks_come_back_as_they_were(place: Place) -> None:
    """A result with an image is returned with it; if it is too long, its text is paged."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content: Any = [{"type": "text", "text": PAGE}, image]
    with place.saver() as saver:
        stored(saver, *talk(content), node=clear_tool_outputs(keep=0))
        assert read(saver, "a").content == content
        assert read(saver, "a", limit=100).text.startswith(PAGE[:100])


def test_a_long_history_is_searched_from_its_end(tmp_path: Path) -> None:
    """A result before some hundreds of messages is found, page by page."""
    rest = [HumanMessage(f"{n}", id=f"n{n}") for n in range(700)]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        stored(saver, *talk(), *rest, node=trim(max_tokens=5, token_counter=len))
        assert read(saver, "a").content == PAGE


# -- options


def test_without_perdures_checkpointer_the_state_is_read() -> None:
    """A view leaves the result in the state; with another saver or none, nothing else is read."""
    for saver in (None, InMemorySaver()):
        model = scripted(calling("a", page="one"), reading("b", "a"), reading("c", "x"), "Done.")
        agent: Any = create_agent(model, [look, read_tool_output()], checkpointer=saver)
        out = agent.invoke({"messages": [("human", "Look")]}, CONFIG)

        assert answers_of(out, "b") == [f"one: {PAGE}"]
        assert answers_of(out, "c")[0].startswith('No result of the tool call "x"')


@pytest.mark.parametrize(
    "options",
    [{"limit": 99}, {"limit": 1.5}, {"name": "read it"}, {"description": ""}, {"messages_key": ""}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Before any run."""
    with pytest.raises(ConfigurationError):
        read_tool_output(**options)
    with pytest.raises(ConfigurationError, match="perdure checkpointer"):
        read_tool_output(InMemorySaver())
    with pytest.raises(ConfigurationError, match="read_tool"):
        clear_tool_outputs(read_tool="")


def test_a_node_names_the_tool_that_it_is_given() -> None:
    """By its name or as an object; a line that is not shorter than the result stays away."""
    for named in ("again", read_tool_output(name="again")):
        node = clear_tool_outputs(keep=0, read_tool=named)
        line = view(node)(talk())[2].text
        assert line.endswith('To read it, call again with tool_call_id "a".]')
    short = clear_tool_outputs(keep=0, min_tokens=40, read_tool="t" * 300)
    kept = [SystemMessage("s"), *talk("word " * 40)]
    assert [m.text for m in view(short)(kept)] == [m.text for m in kept]


def test_malformed_arguments_are_answered(tmp_path: Path) -> None:
    """The model is told what is wrong with its call."""
    reader = read_tool_output()
    for arguments in ({}, {"tool_call_id": "a", "start": -1}):
        call = {**call_of("a"), "args": arguments}
        answer = reader.invoke(call, CONFIG)
        assert answer.status == "error"
        assert answer.text.startswith("read_tool_output was called wrongly")

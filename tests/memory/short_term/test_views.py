"""Recorded views: the messages that a model was shown, stored without effects on the thread."""

from __future__ import annotations

import asyncio
import logging
import operator
import re
import sqlite3
from pathlib import Path
from typing import Annotated, Any, TypedDict

import deepagents
import pytest
from blockbuster import blockbuster_ctx
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt
from pydantic import Field

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.checkpointers import Retention
from perdure.errors import ConfigurationError
from perdure.graphs import chat_graph
from perdure.memory import (
    ChatState,
    Instructions,
    MemoryMiddleware,
    aviews,
    record_views,
    remember,
    summarize,
    token_counter,
    trim,
    use_instructions,
    use_memories,
    view,
    views,
)
from perdure.memory.quotation import render_section
from perdure.memory.short_term.tokens import count_tokens
from tests.backends import KEY, Place
from tests.openai_server import OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t"}}


class RecordingModel(GenericFakeChatModel):
    """A model that records the messages that it is shown."""

    shown: list[Any] = Field(default_factory=list)

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.shown.append(messages)
        return super()._generate(messages, *args, **options)


def make_model(*answers: AIMessage | str) -> RecordingModel:
    """Return a model that gives these answers, and then numbered ones."""
    return RecordingModel(messages=iter([*answers, *(f"answer {n}" for n in range(1_000))]))


def make_recording_config(saver: Any, **options: Any) -> Any:
    """Return the config of runs on the thread `t` that record views."""
    return {**THREAD, "callbacks": [record_views(saver, **options)]}


def make_input(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


def make_tool_call(what: str) -> AIMessage:
    call = {"name": "look", "args": {"what": what}, "id": f"to {what}", "type": "tool_call"}
    return AIMessage("", tool_calls=[call])


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_recorded_views_are_messages_that_model_got(place: Place, durability: Any) -> None:
    """The rule holds for each durability, sync and async. A view has the id of its checkpoint."""
    with place.saver() as saver:
        model = make_model()
        chat = chat_graph(model, memory=[trim(max_tokens=60)], checkpointer=saver)
        config = make_recording_config(saver)
        for n in range(12):
            chat.invoke(make_input(f"question {n}"), config, durability=durability)

        async def run_async() -> Any:
            await chat.ainvoke(make_input("awaited"), config, durability=durability)
            async for _ in chat.astream(make_input("streamed"), config, durability=durability):
                pass
            return await aviews(saver, "t")

        recorded = asyncio.run(run_async())
        known = [info.checkpoint_id for info in saver.checkpoints("t", checkpoint_ns="")]

    assert [recorded_view.messages for recorded_view in recorded] == model.shown
    assert len(recorded) == 14
    assert len(recorded[-1].messages) < 27
    assert {(recorded_view.node, recorded_view.checkpoint_ns) for recorded_view in recorded} == {
        ("respond", "")
    }
    assert durability == "exit" or {recorded_view.checkpoint_id for recorded_view in recorded} <= {
        *known
    }
    assert [recorded_view.at for recorded_view in recorded] == sorted(
        recorded_view.at for recorded_view in recorded
    )


def test_views_are_read_in_pages_newest_page_first(place: Place) -> None:
    """Each page is in order, and no view is on two pages."""
    with place.saver() as saver:
        model = make_model()
        chat = chat_graph(model, checkpointer=saver)
        for n in range(7):
            chat.invoke(make_input(f"question {n}"), make_recording_config(saver))
        page = views(saver, "t", limit=3)
        pages = [page]
        while page := views(saver, "t", limit=3, before=page[0].id):
            pages.append(page)

    assert [len(recorded_view) for recorded_view in pages] == [3, 3, 1]
    assert [
        recorded_view.messages for page in reversed(pages) for recorded_view in page
    ] == model.shown
    assert views(InMemorySaver(), "nobody") == []


def thread_size(saver: SQLiteCheckpointer) -> int:
    return saver.thread("t").size_bytes


@pytest.mark.parametrize("use_deltas", [False, True])
def test_size_of_view_does_not_grow_with_number_of_messages(
    file_saver: SQLiteCheckpointer, use_deltas: bool
) -> None:
    """Each message is stored once, also if the state stores deltas."""
    saver, added = file_saver, {}
    chat: Any = chat_graph(make_model(), checkpointer=saver)
    if use_deltas:
        chat = deepagents.create_deep_agent(model=make_model(), checkpointer=saver)
    for count in (10, 1_000):
        conversation = [HumanMessage("and then? " * 20, id=f"{count}-{n}") for n in range(count)]
        chat.invoke({"messages": conversation}, make_recording_config(saver))
        before = thread_size(saver)
        chat.invoke(make_input("and now?"), THREAD)
        plain_size = thread_size(saver) - before
        chat.invoke(make_input("and now?"), make_recording_config(saver))
        added[count] = thread_size(saver) - before - 2 * plain_size

    assert added[1_000] < 1_000
    assert added[1_000] - added[10] < 300


def test_view_counts_tokens_of_each_part_of_request(tmp_path: Path) -> None:
    """The parts are sections of the system message, messages, tool results and tools."""
    with (
        OpenAIServer(lambda body: "It is found.") as server,
        SQLiteCheckpointer.open(tmp_path / "a.db") as saver,
        SQLiteStore.open(tmp_path / "b.db", index=None) as store,
    ):
        instructions = Instructions(store)
        instructions.set("Answer in one sentence.")
        remember("Ann looks for tea houses in Kyoto.", store=store, namespace=("memories", "ann"))
        summary = {"text": "They spoke of trains.\nAnd of <b>hills</b>.", "last": None, "count": 3}
        model = ChatOpenAI(model="gpt-4o", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]
        parts = [
            use_instructions(instructions),
            summarize(model),
            use_memories(store, namespace=("memories", "ann"), min_score=-10),
        ]
        chat = chat_graph(model, [look], memory=parts, checkpointer=saver)
        messages = [
            HumanMessage("Where is tea?"),
            make_tool_call("tea"),
            *look.batch([make_tool_call("tea").tool_calls[0]]),
        ]
        chat.update_state(THREAD, {"messages": messages, "summary": summary}, as_node="tools")
        chat.invoke(make_input("Which tea houses are in Kyoto?"), make_recording_config(saver))
        [seen] = views(saver, "t")

    counter = token_counter("gpt-4o")
    whole = count_tokens(seen.messages, "gpt-4o", [look])
    assert seen.model == "gpt-4o"
    assert set(seen.parts) == {
        *("instructions", "summary", "memories", "messages", "tool results", "tools")
    }
    assert sum(seen.parts.values()) == whole - counter.request_overhead
    assert seen.parts["tools"] == seen.tools == counter.count_tools([look])
    assert seen.parts["summary"] < 60
    assert seen.parts["instructions"] < 20


PICTURE: Any = {"type": "image", "base64": "x" * 5_000, "mime_type": "image/png"}


def test_only_complete_own_sections_are_counted_as_parts(tmp_path: Path) -> None:
    """A text that only looks like the start of a section counts as instructions."""
    sections = {name: render_section(name, ['{"memory": "x"}']) for name in ("profile", "examples")}
    text = "\n\n".join(["Be kind. <memories>", *sections.values(), "</summary>"])
    blocks: Any = [{"type": "text", "text": text}, PICTURE]
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = make_single_node_graph(
            saver, lambda state: [SystemMessage(blocks), *state["messages"]]
        )
        graph.invoke(make_input("x"), make_recording_config(saver))
        [seen] = views(saver, "t")

    counter = token_counter()
    assert seen.parts["profile"] == counter.count_text(sections["profile"])
    assert seen.parts["examples"] == counter.count_text(sections["examples"])
    assert not {"memories", "summary"} & seen.parts.keys()
    assert "left out" in str(seen.messages[0].content)
    assert "xxx" not in str(seen.messages[0])


def make_single_node_graph(saver: Any, make_messages: Any, **options: Any) -> Any:
    """Return a graph of one node, which shows the model the result of `make_messages(state)`."""
    model = make_model()

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(make_messages(state))]}

    builder = StateGraph(ChatState).add_node("respond", respond, **options)
    return builder.add_edge(START, "respond").compile(checkpointer=saver)


# -- recording does not change the graph


class SumState(TypedDict, total=False):
    messages: Annotated[list[Any], operator.add]
    done: Annotated[list[str], operator.add]


def run_complex_graph(saver: Any, config: Any) -> list[Any]:
    """Run a graph with interrupts, failures, forks, updates and a subgraph. Return all results."""
    model, failures = make_model(), iter([True, False, True, False])

    def ask(state: SumState) -> SumState:
        model.invoke("before the question")
        answer = interrupt("Go on?")
        return {"done": [f"{answer}: {model.invoke(state['messages']).text}"]}

    def fail(state: SumState) -> SumState:
        model.invoke("before the failure")
        if next(failures, False):
            raise TimeoutError("once")
        return {"done": ["failed once"]}

    inner = StateGraph(SumState).add_node("asks", ask).add_edge(START, "asks").compile()
    builder = StateGraph(SumState)
    builder.add_node("inner", inner)
    retry = RetryPolicy(initial_interval=0, jitter=False, retry_on=TimeoutError)
    builder.add_node("fails", fail, retry_policy=retry)
    builder.add_edge(START, "inner")
    builder.add_edge("inner", "fails")
    graph: Any = builder.compile(checkpointer=saver)
    out = [graph.invoke({"messages": ["hello"]}, config)]
    waiting = graph.get_state(config, subgraphs=True)
    out += [waiting.next, [task.name for task in waiting.tasks], waiting.tasks[0].state.next]
    out.append(graph.invoke(Command(resume="yes"), config))
    oldest = [*graph.get_state_history(config)][-1]
    fork = graph.update_state(oldest.config, {"done": ["forked"]}, as_node="__start__")
    out.append(graph.invoke(None, {**fork, "callbacks": config.get("callbacks")}))
    out.append(graph.invoke(Command(resume="again"), config))
    states = [*graph.get_state_history(config)]
    out += [(state.values, state.next, state.metadata) for state in states]
    out += [[(task.name, task.error, task.result) for task in state.tasks] for state in states]
    return out


def to_text_without_ids(value: Any) -> str:
    """Return a value as text, without the ids that differ in each run."""
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}", "id", repr(value))


@pytest.mark.parametrize("use_perdure_saver", [True, False])
def test_recording_does_not_change_results_of_complex_graph(
    file_saver: SQLiteCheckpointer, use_perdure_saver: bool
) -> None:
    """The graph has interrupts, resumes, retries, forks, updates and a subgraph."""
    saver: Any = file_saver if use_perdure_saver else InMemorySaver()
    before = run_complex_graph(InMemorySaver(), THREAD)
    after = run_complex_graph(saver, make_recording_config(saver))
    recorded = views(saver, "t", checkpoint_ns=None)

    assert to_text_without_ids(after) == to_text_without_ids(before)
    nodes = {(recorded_view.node, bool(recorded_view.checkpoint_ns)) for recorded_view in recorded}
    assert nodes == {("asks", True), ("fails", False)}
    assert len(recorded) == 2 * 5


def test_views_of_agent_and_subagent_are_recorded_separately(place: Place) -> None:
    delegated = {"description": "find it", "subagent_type": "general-purpose"}
    call = {"name": "task", "args": delegated, "id": "c", "type": "tool_call"}
    with place.saver() as saver:
        model = make_model(make_tool_call("tea"))
        agent = create_agent(
            model,
            [look],
            system_prompt="Be kind.",
            middleware=[MemoryMiddleware(view(trim(max_tokens=500)))],
            checkpointer=saver,
        )
        agent.invoke(make_input("Where is tea?"), make_recording_config(saver))
        recorded = views(saver, "t")
        deep = make_model(AIMessage("", tool_calls=[call]), "found", "done")
        config: Any = {**make_recording_config(saver), "configurable": {"thread_id": "deep"}}
        graph = deepagents.create_deep_agent(model=deep, checkpointer=saver)
        asyncio.run(graph.ainvoke(make_input("Where is it?"), config))
        everything = views(saver, "deep", checkpoint_ns=None)
        root = views(saver, "deep")

    assert [recorded_view.messages for recorded_view in recorded] == model.shown
    assert recorded[-1].parts.keys() == {"instructions", "messages", "tool results"}
    assert [recorded_view.messages for recorded_view in everything] == deep.shown
    assert [recorded_view.checkpoint_ns.partition(":")[0] for recorded_view in everything] == [
        "",
        "tools",
        "",
    ]
    assert root == [everything[0], everything[2]]


def test_nothing_is_recorded_without_thread_or_checkpointer(file_saver: SQLiteCheckpointer) -> None:
    config = make_recording_config(file_saver)
    make_model().invoke("alone", config)
    chat_graph(make_model()).invoke(make_input("no checkpointer"), config)

    assert file_saver.threads() == []


def test_failed_recording_is_logged_and_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SQLiteCheckpointer.open(tmp_path / "closed.db") as closed:
        pass
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver, caplog.at_level(logging.WARNING):
        chat = chat_graph(make_model(), checkpointer=saver)
        messages = chat.invoke(make_input("x"), make_recording_config(closed))["messages"]

    assert [message.type for message in messages] == ["human", "ai"]
    assert "is closed" in caplog.text


def test_recording_and_aviews_do_not_block_event_loop(place: Place) -> None:
    async def run() -> Any:
        async with place.saver() as saver:
            chat = chat_graph(make_model(), checkpointer=saver)
            await chat.ainvoke(make_input("x"), make_recording_config(saver))
            return await aviews(saver, "t", limit=5)

    with blockbuster_ctx():
        assert len(asyncio.run(run())) == 1


# -- retention, copies and erasure


def test_views_are_copied_pruned_and_deleted_with_thread(place: Place) -> None:
    """A retention rule keeps as many views as checkpoints."""
    with place.saver() as saver:
        chat = chat_graph(make_model(), checkpointer=saver)
        for n in range(5):
            chat.invoke(make_input(f"question {n}"), make_recording_config(saver))
        whole = [recorded_view.messages for recorded_view in views(saver, "t")]
        saver.copy_thread("t", "copy")
        saver.retain(Retention(last=2), thread_ids=["t"])
        remaining_views = [recorded_view.messages for recorded_view in views(saver, "t")]
        saver.delete_thread("t")
        copied = [recorded_view.messages for recorded_view in views(saver, "copy")]
        history = saver.history("copy")

    assert remaining_views == whole[-2:]
    assert copied == whole
    assert [item.value.text for item in history[::2]] == [f"question {n}" for n in range(5)]


def test_views_of_run_are_deleted_with_run(file_saver: SQLiteCheckpointer) -> None:
    """langgraph copies the `run_id` to the metadata of checkpoints."""
    chat = chat_graph(make_model(), checkpointer=file_saver)
    for name in ("one", "two"):
        config: Any = {**make_recording_config(file_saver), "metadata": {"run_id": name}}
        chat.invoke(make_input(name), config)
    file_saver.delete_for_runs(["one"])

    assert [len(recorded_view.messages) for recorded_view in views(file_saver, "t")] == [3]


SECRET = "My number is 4711-0815, tell nobody"


@pytest.mark.parametrize("whole", [True, False])
def test_erased_message_is_removed_from_views(place: Place, whole: bool) -> None:
    """The message is in a view unchanged, shortened, and quoted in a system message."""
    with place.saver() as saver:

        def make_messages(state: Any) -> Any:
            messages = [
                recorded_view.model_copy(update={"content": f"{recorded_view.text}!"})
                for recorded_view in state["messages"]
            ]
            return [
                SystemMessage(render_section("memories", [f'{{"memory": "{SECRET}"}}'])),
                *messages,
            ]

        graph = make_single_node_graph(saver, make_messages)
        chat = chat_graph(make_model(), checkpointer=saver)
        for run in (graph, chat):
            run.invoke({"messages": [HumanMessage(SECRET, id="m")]}, make_recording_config(saver))
        before = views(saver, "t")
        assert all(SECRET in str(recorded_view.messages) for recorded_view in before)
        assert len(before) == 2
        report = saver.erase("t", None if whole else ["m"])
        after = views(saver, "t")
        chat.invoke(make_input("go on"), make_recording_config(saver))
        [again] = views(saver, "t")

    assert report.checkpoints > 2
    assert after == []
    assert again.messages[-1].text == "go on"
    assert SECRET not in str(again)
    if not place.dsn:
        assert SECRET.encode() not in place.path.read_bytes()


def test_views_are_encrypted_with_thread(tmp_path: Path) -> None:
    path = tmp_path / "sealed.db"
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        graph = make_single_node_graph(
            saver, lambda state: [SystemMessage(SECRET), *state["messages"]]
        )
        graph.invoke(make_input("x"), make_recording_config(saver))
        [seen] = views(saver, "t")
    with sqlite3.connect(path) as file:
        dump = "\n".join(file.iterdump())

    assert seen.messages[0].text == SECRET
    assert SECRET not in dump
    assert SECRET.encode().hex() not in dump.lower()


def test_invalid_options_are_refused_by_name(file_saver: SQLiteCheckpointer) -> None:
    with pytest.raises(ConfigurationError, match=r"saver is 'a\.db'"):
        record_views("a.db")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="messages_key is ''"):
        record_views(file_saver, messages_key="")
    with pytest.raises(ConfigurationError, match="saver is None"):
        views(None, "t")  # type: ignore[arg-type]

"""What a model was shown: recorded beside the thread, without a trace in what the graph does."""

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
from perdure.memory.tokens import count_tokens
from tests.backends import KEY, Place
from tests.openai_server import OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t"}}


class Talker(GenericFakeChatModel):
    """A model that notes what it is shown."""

    shown: list[Any] = Field(default_factory=list)

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.shown.append(messages)
        return super()._generate(messages, *args, **options)


def talker(*answers: AIMessage | str) -> Talker:
    """A model that gives these answers, and then numbers them."""
    return Talker(messages=iter([*answers, *(f"answer {n}" for n in range(1_000))]))


def recording(saver: Any, **options: Any) -> Any:
    """The config of runs on the thread `t` that record views."""
    return {**THREAD, "callbacks": [record_views(saver, **options)]}


def says(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


def calling(what: str) -> AIMessage:
    call = {"name": "look", "args": {"what": what}, "id": f"to {what}", "type": "tool_call"}
    return AIMessage("", tool_calls=[call])


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_views_are_what_the_model_was_given(place: Place, durability: Any) -> None:
    """Message for message, in each durability, blocking and awaited, with the checkpoint."""
    with place.saver() as saver:
        model = talker()
        chat = chat_graph(model, memory=[trim(max_tokens=60)], checkpointer=saver)
        config = recording(saver)
        for n in range(12):
            chat.invoke(says(f"question {n}"), config, durability=durability)

        async def awaited() -> Any:
            await chat.ainvoke(says("awaited"), config, durability=durability)
            async for _ in chat.astream(says("streamed"), config, durability=durability):
                pass
            return await aviews(saver, "t")

        found = asyncio.run(awaited())
        known = [info.checkpoint_id for info in saver.checkpoints("t", checkpoint_ns="")]

    assert [each.messages for each in found] == model.shown
    assert len(found) == 14
    assert len(found[-1].messages) < 27
    assert {(each.node, each.checkpoint_ns) for each in found} == {("respond", "")}
    assert durability == "exit" or {each.checkpoint_id for each in found} <= {*known}
    assert [each.at for each in found] == sorted(each.at for each in found)


def test_views_come_in_pages(place: Place) -> None:
    """The newest first pages, each in order, without one twice."""
    with place.saver() as saver:
        model = talker()
        chat = chat_graph(model, checkpointer=saver)
        for n in range(7):
            chat.invoke(says(f"question {n}"), recording(saver))
        page = views(saver, "t", limit=3)
        pages = [page]
        while page := views(saver, "t", limit=3, before=page[0].id):
            pages.append(page)

    assert [len(each) for each in pages] == [3, 3, 1]
    assert [each.messages for page in reversed(pages) for each in page] == model.shown
    assert views(InMemorySaver(), "nobody") == []


def size(saver: SQLiteCheckpointer) -> int:
    return saver.thread("t").size_bytes


@pytest.mark.parametrize("delta", [False, True])
def test_a_view_of_many_messages_costs_no_more_than_one_of_few(
    file_saver: SQLiteCheckpointer, delta: bool
) -> None:
    """Messages are stored once: those of the state, and those it holds as deltas."""
    saver, added = file_saver, {}
    chat: Any = chat_graph(talker(), checkpointer=saver)
    if delta:
        chat = deepagents.create_deep_agent(model=talker(), checkpointer=saver)
    for count in (10, 1_000):
        talk = [HumanMessage("and then? " * 20, id=f"{count}-{n}") for n in range(count)]
        chat.invoke({"messages": talk}, recording(saver))
        before = size(saver)
        chat.invoke(says("and now?"), THREAD)
        plain = size(saver) - before
        chat.invoke(says("and now?"), recording(saver))
        added[count] = size(saver) - before - 2 * plain

    assert added[1_000] < 1_000
    assert added[1_000] - added[10] < 300


def test_the_parts_of_a_view(tmp_path: Path) -> None:
    """Sections of the system message, tools and results are counted apart; all is the request."""
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
        said = [
            HumanMessage("Where is tea?"),
            calling("tea"),
            *look.batch([calling("tea").tool_calls[0]]),
        ]
        chat.update_state(THREAD, {"messages": said, "summary": summary}, as_node="tools")
        chat.invoke(says("Which tea houses are in Kyoto?"), recording(saver))
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


def test_sections_of_a_text(tmp_path: Path) -> None:
    """A section is one of perdure's own, whole; what looks like a beginning is instructions."""
    sections = {name: render_section(name, ['{"memory": "x"}']) for name in ("profile", "examples")}
    text = "\n\n".join(["Be kind. <memories>", *sections.values(), "</summary>"])
    blocks: Any = [{"type": "text", "text": text}, PICTURE]
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = single(saver, lambda state: [SystemMessage(blocks), *state["messages"]])
        graph.invoke(says("x"), recording(saver))
        [seen] = views(saver, "t")

    counter = token_counter()
    assert seen.parts["profile"] == counter.count_text(sections["profile"])
    assert seen.parts["examples"] == counter.count_text(sections["examples"])
    assert not {"memories", "summary"} & seen.parts.keys()
    assert "left out" in str(seen.messages[0].content)
    assert "xxx" not in str(seen.messages[0])


def single(saver: Any, shows: Any, **options: Any) -> Any:
    """A graph of one node, which shows the model something made of the state."""
    model = talker()

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(shows(state))]}

    builder = StateGraph(ChatState).add_node("respond", respond, **options)
    return builder.add_edge(START, "respond").compile(checkpointer=saver)


# -- the graph does what it does without them


class Sum(TypedDict, total=False):
    messages: Annotated[list[Any], operator.add]
    done: Annotated[list[str], operator.add]


def course(saver: Any, config: Any) -> list[Any]:
    """Interrupts, answers, failures, forks, updates and a subgraph; what all of it left."""
    model, failures = talker(), iter([True, False, True, False])

    def asks(state: Sum) -> Sum:
        model.invoke("before the question")
        answer = interrupt("Go on?")
        return {"done": [f"{answer}: {model.invoke(state['messages']).text}"]}

    def fails(state: Sum) -> Sum:
        model.invoke("before the failure")
        if next(failures, False):
            raise TimeoutError("once")
        return {"done": ["failed once"]}

    inner = StateGraph(Sum).add_node("asks", asks).add_edge(START, "asks").compile()
    builder = StateGraph(Sum)
    builder.add_node("inner", inner)
    retry = RetryPolicy(initial_interval=0, jitter=False, retry_on=TimeoutError)
    builder.add_node("fails", fails, retry_policy=retry)
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


def plain(value: Any) -> str:
    """A value as text, without the ids that each run makes anew."""
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}", "id", repr(value))


@pytest.mark.parametrize("ours", [True, False])
def test_the_graph_does_the_same(file_saver: SQLiteCheckpointer, ours: bool) -> None:
    """Interrupts, resumes, retries, forks, updates, subgraphs: with views and without."""
    saver: Any = file_saver if ours else InMemorySaver()
    before = course(InMemorySaver(), THREAD)
    after = course(saver, recording(saver))
    found = views(saver, "t", checkpoint_ns=None)

    assert plain(after) == plain(before)
    nodes = {(each.node, bool(each.checkpoint_ns)) for each in found}
    assert nodes == {("asks", True), ("fails", False)}
    assert len(found) == 2 * 5


def test_agents_and_their_subagents(place: Place) -> None:
    """The views of create_agent with a middleware, and of a deep agent's subagent apart."""
    delegated = {"description": "find it", "subagent_type": "general-purpose"}
    call = {"name": "task", "args": delegated, "id": "c", "type": "tool_call"}
    with place.saver() as saver:
        model = talker(calling("tea"))
        agent = create_agent(
            model,
            [look],
            system_prompt="Be kind.",
            middleware=[MemoryMiddleware(view(trim(max_tokens=500)))],
            checkpointer=saver,
        )
        agent.invoke(says("Where is tea?"), recording(saver))
        found = views(saver, "t")
        deep = talker(AIMessage("", tool_calls=[call]), "found", "done")
        config: Any = {**recording(saver), "configurable": {"thread_id": "deep"}}
        graph = deepagents.create_deep_agent(model=deep, checkpointer=saver)
        asyncio.run(graph.ainvoke(says("Where is it?"), config))
        everything = views(saver, "deep", checkpoint_ns=None)
        root = views(saver, "deep")

    assert [each.messages for each in found] == model.shown
    assert found[-1].parts.keys() == {"instructions", "messages", "tool results"}
    assert [each.messages for each in everything] == deep.shown
    assert [each.checkpoint_ns.partition(":")[0] for each in everything] == ["", "tools", ""]
    assert root == [everything[0], everything[2]]


def test_nothing_is_recorded_outside_of_a_thread(file_saver: SQLiteCheckpointer) -> None:
    """A model alone, a graph without a checkpointer: they run, and store nothing."""
    config = recording(file_saver)
    talker().invoke("alone", config)
    chat_graph(talker()).invoke(says("no checkpointer"), config)

    assert file_saver.threads() == []


def test_a_failure_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that is closed, or a message that cannot be stored."""
    with SQLiteCheckpointer.open(tmp_path / "closed.db") as closed:
        pass
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver, caplog.at_level(logging.WARNING):
        chat = chat_graph(talker(), checkpointer=saver)
        said = chat.invoke(says("x"), recording(closed))["messages"]

    assert [message.type for message in said] == ["human", "ai"]
    assert "is closed" in caplog.text


def test_the_event_loop_is_not_blocked(place: Place) -> None:
    """Awaited runs record in a thread, and `aviews` reads in one."""

    async def run() -> Any:
        async with place.saver() as saver:
            chat = chat_graph(talker(), checkpointer=saver)
            await chat.ainvoke(says("x"), recording(saver))
            return await aviews(saver, "t", limit=5)

    with blockbuster_ctx():
        assert len(asyncio.run(run())) == 1


# -- they are kept, copied and erased with the thread


def test_views_are_copied_pruned_and_deleted_with_the_thread(place: Place) -> None:
    """A copy has its own; a retention rule keeps as many as it keeps checkpoints."""
    with place.saver() as saver:
        chat = chat_graph(talker(), checkpointer=saver)
        for n in range(5):
            chat.invoke(says(f"question {n}"), recording(saver))
        whole = [each.messages for each in views(saver, "t")]
        saver.copy_thread("t", "copy")
        saver.retain(Retention(last=2), thread_ids=["t"])
        kept = [each.messages for each in views(saver, "t")]
        saver.delete_thread("t")
        copied = [each.messages for each in views(saver, "copy")]
        history = saver.history("copy")

    assert kept == whole[-2:]
    assert copied == whole
    assert [item.value.text for item in history[::2]] == [f"question {n}" for n in range(5)]


def test_views_of_a_run_are_deleted_with_it(file_saver: SQLiteCheckpointer) -> None:
    """By the run_id that langgraph copies to the metadata of checkpoints."""
    chat = chat_graph(talker(), checkpointer=file_saver)
    for name in ("one", "two"):
        config: Any = {**recording(file_saver), "metadata": {"run_id": name}}
        chat.invoke(says(name), config)
    file_saver.delete_for_runs(["one"])

    assert [len(each.messages) for each in views(file_saver, "t")] == [3]


SECRET = "My number is 4711-0815, tell nobody"


@pytest.mark.parametrize("whole", [True, False])
def test_erasing_reaches_views(place: Place, whole: bool) -> None:
    """A message that is in a view as it is, shortened, and quoted in a system message."""
    with place.saver() as saver:

        def shows(state: Any) -> Any:
            said = [
                each.model_copy(update={"content": f"{each.text}!"}) for each in state["messages"]
            ]
            return [SystemMessage(render_section("memories", [f'{{"memory": "{SECRET}"}}'])), *said]

        graph = single(saver, shows)
        chat = chat_graph(talker(), checkpointer=saver)
        for run in (graph, chat):
            run.invoke({"messages": [HumanMessage(SECRET, id="m")]}, recording(saver))
        before = views(saver, "t")
        assert all(SECRET in str(each.messages) for each in before)
        assert len(before) == 2
        report = saver.erase("t", None if whole else ["m"])
        after = views(saver, "t")
        chat.invoke(says("go on"), recording(saver))
        [again] = views(saver, "t")

    assert report.checkpoints > 2
    assert after == []
    assert again.messages[-1].text == "go on"
    assert SECRET not in str(again)
    if not place.dsn:
        assert SECRET.encode() not in place.path.read_bytes()


def test_views_are_encrypted_with_the_thread(tmp_path: Path) -> None:
    """Under a key nothing of a view can be read in the file."""
    path = tmp_path / "sealed.db"
    with SQLiteCheckpointer.open(path, key=KEY) as saver:
        graph = single(saver, lambda state: [SystemMessage(SECRET), *state["messages"]])
        graph.invoke(says("x"), recording(saver))
        [seen] = views(saver, "t")
    with sqlite3.connect(path) as file:
        dump = "\n".join(file.iterdump())

    assert seen.messages[0].text == SECRET
    assert SECRET not in dump
    assert SECRET.encode().hex() not in dump.lower()


def test_wrong_options_are_refused(file_saver: SQLiteCheckpointer) -> None:
    """A saver that is none, a blank channel."""
    with pytest.raises(ConfigurationError, match=r"saver is 'a\.db'"):
        record_views("a.db")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="messages_key is ''"):
        record_views(file_saver, messages_key="")
    with pytest.raises(ConfigurationError, match="saver is None"):
        views(None, "t")  # type: ignore[arg-type]

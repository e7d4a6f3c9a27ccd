"""The chat graph, with a real client of a scripted model and with the offline responder."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.utils import convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

import perdure.graphs
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.graphs import QuotingResponder, chat_graph
from perdure.graphs.chat import graph as module_graph
from perdure.graphs.configured import MAX_TOKENS
from perdure.graphs.responder import NOTICE
from perdure.memory import (
    Instructions,
    remember_turns,
    summarize,
    token_counter,
    trim,
    update_instructions,
    use_instructions,
)
from perdure.stores import SQLiteStore
from tests.openai_server import Failure, OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}


def client(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]


def says(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"]]


def history(saver: SQLiteCheckpointer) -> list[str]:
    return [item.value.text for item in saver.history("t")]


# -- resuming


def test_a_thread_goes_on_in_a_reopened_file(tmp_path: Path) -> None:
    """After the file is closed and opened again the model is shown all that was said before."""
    with OpenAIServer(["one", "two"]) as server:
        for said in ("first", "second"):
            with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
                out = chat_graph(client(server), checkpointer=saver).invoke(says(said), THREAD)

    assert texts(out) == ["first", "one", "second", "two"]
    assert server.shown(0) == [("user", "first")]
    assert server.shown(1) == [("user", "first"), ("assistant", "one"), ("user", "second")]


def test_the_responder_remembers_over_a_reopened_file(tmp_path: Path) -> None:
    """Without a model the answer quotes what another process's run was told."""
    for said in ("My canoe is called Nutshell", "What is my canoe called?"):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            out = chat_graph(checkpointer=saver).invoke(says(said), THREAD)

    assert "you said: “My canoe is called Nutshell”" in texts(out)[-1]


def test_threads_do_not_see_each_other(file_saver: SQLiteCheckpointer) -> None:
    """What is said on one thread is not shown on another."""
    with OpenAIServer(["one", "two"]) as server:
        graph = chat_graph(client(server), checkpointer=file_saver)
        graph.invoke(says("secret"), THREAD)
        graph.invoke(says("hello"), {"configurable": {"thread_id": "other"}})

    assert server.shown() == [("user", "hello")]


@pytest.mark.parametrize("how", ["update_state", "invoke"])
def test_time_travel_moves_the_thread(how: str, file_saver: SQLiteCheckpointer) -> None:
    """What is said from an older checkpoint is gone on from, as under langgraph's own saver."""

    def travelled(saver: BaseCheckpointSaver[Any]) -> list[str]:
        graph = chat_graph(checkpointer=saver)
        graph.invoke(says("one"), THREAD)
        then = graph.get_state(THREAD).config
        graph.invoke(says("two"), THREAD)
        if how == "update_state":
            graph.update_state(then, says("instead"), as_node="respond")
        else:
            graph.invoke(says("instead"), then)
        return texts(graph.get_state(THREAD).values)

    expected = travelled(InMemorySaver())
    actual = travelled(file_saver)

    assert expected == actual


# -- the window


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_a_window_bounds_what_the_model_is_shown(size: int, file_saver: SQLiteCheckpointer) -> None:
    """The model is shown whole turns within the window; the state and history keep everything."""
    turns = 6
    with OpenAIServer([f"a{n}" for n in range(turns)]) as server:
        graph = chat_graph(
            client(server),
            checkpointer=file_saver,
            memory=[trim(max_tokens=size, token_counter=len)],
        )
        for n in range(turns):
            out = graph.invoke(says(f"q{n}"), THREAD)
    shown = [[text for _, text in server.shown(n)] for n in range(turns)]
    said = [text for n in range(turns) for text in (f"q{n}", f"a{n}")]

    odd = size - 1 + size % 2  # the question, and turns of two
    assert shown == [said[max(0, 2 * n + 1 - odd) : 2 * n + 1] for n in range(turns)]
    assert said == history(file_saver) == texts(out)


def test_a_system_message_is_shown_first(file_saver: SQLiteCheckpointer) -> None:
    """It stays, however short the window."""
    with OpenAIServer(["fine", "well"]) as server:
        graph = chat_graph(
            client(server), checkpointer=file_saver, memory=[trim(max_tokens=2, token_counter=len)]
        )
        graph.invoke({"messages": [SystemMessage("be brief"), HumanMessage("hi")]}, THREAD)
        graph.invoke(says("again"), THREAD)

    assert server.shown() == [("system", "be brief"), ("user", "again")]


def test_a_window_leaves_tool_calls_with_their_results(file_saver: SQLiteCheckpointer) -> None:
    """What the model goes on from is shown, with the question it is about."""
    call = {"name": "f", "args": {}, "id": "c1", "type": "tool_call"}
    told: list[AnyMessage] = [
        HumanMessage("old"),
        HumanMessage("look it up"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("found", tool_call_id="c1"),
    ]
    with OpenAIServer(["it is so", "yes"]) as server:
        graph = chat_graph(
            client(server), checkpointer=file_saver, memory=[trim(max_tokens=3, token_counter=len)]
        )
        graph.invoke({"messages": told}, THREAD)
        graph.invoke(says("sure?"), THREAD)

    assert [role for role, _ in server.shown(0)] == ["user", "assistant", "tool"]
    assert [role for role, _ in server.shown(1)] == ["user"]
    assert history(file_saver) == [
        *("old", "look it up", "", "found", "it is so", "sure?", "yes"),
    ]


# -- with everything


def replies(body: dict[str, Any]) -> str:
    """One server for all: the answer, the summary and the rewritten instructions."""
    asked = str(body["messages"][0]["content"])
    if "rewrite" in asked.lower() or "<instructions>" in str(body["messages"]):
        return "<instructions>Be kind, and say Ann's name.</instructions>"
    if "keep the memory of a conversation" in asked:
        return "They spoke of trains."
    return f"answer {len(body['messages'])}"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_chat_with_summary_instructions_and_a_window(tmp_path: Path, colour: str) -> None:
    """Resumed in a reopened file; one system message has what was learned and what was said."""

    async def turns(server: OpenAIServer, said: list[str]) -> Any:
        async with (
            SQLiteCheckpointer.open(tmp_path / "x.db") as saver,
            SQLiteStore.open(tmp_path / "x.db", index=None) as store,
        ):
            model = client(server)
            learned = Instructions(store, ("instructions", "{user_id}"), default="Be kind.")
            graph = chat_graph(
                model,
                checkpointer=saver,
                store=store,
                memory=[
                    use_instructions(learned),
                    summarize(model, trigger=("messages", 6), keep=("messages", 1)),
                    trim(max_tokens=6, token_counter=len),
                    update_instructions(model, learned),
                ],
            )
            config: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}
            for text in said:
                out = (
                    await graph.ainvoke(says(text), config)
                    if colour == "async"
                    else (graph.invoke(says(text), config))
                )
            return out, history(saver), [v.text for v in learned.history(config)]

    with OpenAIServer(replies) as server:
        asyncio.run(turns(server, ["q0", "q1"]))
        out, said, learned = asyncio.run(turns(server, ["q2", "q3"]))
    answers = [r["messages"] for r in server.requests if r["messages"][-1]["role"] == "user"]
    answers = [m for m in answers if m[-1]["content"] in ("q0", "q1", "q2", "q3")]

    assert out["summary"]["text"] == "They spoke of trains."
    assert learned == ["Be kind, and say Ann's name."]
    assert [text for text in said if text.startswith("q")] == ["q0", "q1", "q2", "q3"]
    assert answers[0][0]["content"] == "Be kind."
    assert answers[-1][0]["content"].startswith("Be kind, and say Ann's name.\n\nSummary")
    assert answers[-1][0]["content"].endswith("They spoke of trains.")
    assert [m["role"] for m in answers[-1]] == ["system", "user", "assistant", "user"]


def test_a_summary_is_made_only_when_it_is_due(file_saver: SQLiteCheckpointer) -> None:
    """A turn without one is a superstep of input and one of the answer."""
    with OpenAIServer(replies) as server:
        model = client(server)
        summary = summarize(model, trigger=("messages", 6), keep=("messages", 1))
        graph = chat_graph(model, checkpointer=file_saver, memory=[summary])
        steps = []
        for n in range(3):
            graph.invoke(says(f"q{n}"), THREAD)
            steps.append(len(file_saver.checkpoints("t")))
    assert steps == [3, 6, 10]
    assert len(server.requests) == 4


# -- streaming and errors


def test_answers_stream_word_by_word(file_saver: SQLiteCheckpointer) -> None:
    """The tokens are the server's, and what is stored is all of them."""
    with OpenAIServer(["an answer of five words"]) as server:
        graph = chat_graph(client(server), checkpointer=file_saver)
        stream: Any = graph.stream(says("hi"), THREAD, stream_mode="messages")
        chunks = [chunk.text for chunk, _ in stream if chunk.text]

    assert server.requests[0]["stream"] is True
    assert chunks == ["an ", "answer ", "of ", "five ", "words"]
    assert history(file_saver) == ["hi", "an answer of five words"]


def test_the_asynchronous_graph_answers_and_streams(tmp_path: Path) -> None:
    """The same thread is talked on with ainvoke and astream."""

    async def talk(server: OpenAIServer) -> list[str]:
        async with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                client(server), checkpointer=saver, memory=[trim(max_tokens=3, token_counter=len)]
            )
            await graph.ainvoke(says("one"), THREAD)
            stream: Any = graph.astream(says("two"), THREAD, stream_mode="messages")
            said = [chunk.text async for chunk, _ in stream if chunk.text]
            return [*said, *(i.value.text for i in await saver.ahistory("t"))]

    with OpenAIServer(["first", "second answer"]) as server:
        out = asyncio.run(talk(server))

    assert out == ["second ", "answer", "one", "first", "two", "second answer"]


def test_after_an_error_of_the_model_the_turn_can_be_finished(tmp_path: Path) -> None:
    """The question is stored, and invoke(None) on the reopened file asks it again, once."""
    with OpenAIServer(["fine", Failure(400, "out of order"), "back again"]) as server:
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                client(server), checkpointer=saver, memory=[trim(max_tokens=5, token_counter=len)]
            )
            graph.invoke(says("one"), THREAD)
            with pytest.raises(openai.APIStatusError, match="out of order"):
                graph.invoke(says("two"), THREAD)
            before = history(saver)
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                client(server), checkpointer=saver, memory=[trim(max_tokens=5, token_counter=len)]
            )
            waiting = graph.get_state(THREAD).next
            out = graph.invoke(None, THREAD)
            after = history(saver)

    assert before == ["one", "fine", "two"]
    assert waiting == ("respond",)
    assert texts(out) == after == ["one", "fine", "two", "back again"]
    assert server.shown(1) == server.shown(2)


@pytest.mark.parametrize("options", ["window", "summary"])
def test_a_stream_of_messages_has_the_answers_and_nothing_else(
    options: str, file_saver: SQLiteCheckpointer
) -> None:
    """Instructions, summaries and removals are for the model and the state, not for the user."""
    with (
        OpenAIServer(replies) as server,
        SQLiteStore.open(":memory:", index=None) as store,
    ):
        model = client(server)
        learned = Instructions(store, default="SECRET RULES")
        summary = summarize(model, trigger=("messages", 4), keep=("messages", 1))
        window = trim(max_tokens=4, token_counter=len)
        graph = chat_graph(
            model,
            checkpointer=file_saver,
            store=store,
            memory=[
                use_instructions(learned),
                *([] if options == "window" else [summary]),
                window,
                update_instructions(model, learned),
            ],
        )
        chunks: list[Any] = []
        for n in range(5):
            stream: Any = graph.stream(says(f"q{n}"), THREAD, stream_mode="messages")
            chunks += [chunk for chunk, _ in stream]
        state = graph.get_state(THREAD).values

    assert {chunk.type for chunk in chunks} == {"AIMessageChunk"}
    assert "".join(chunk.text for chunk in chunks).count("answer") == 5
    assert "llm_input_messages" not in state
    assert ("summary" in state) == (options != "window")


# -- interrupts


def everything(model: Any, saver: Any, store: SQLiteStore) -> Any:
    learned = Instructions(store)
    summary = summarize(model, trigger=("messages", 4), keep=("messages", 1))
    shortens: list[Any] = [summary, trim(max_tokens=9, token_counter=len)]
    learns = [remember_turns(), update_instructions(model, learned)]
    memory = [use_instructions(learned), *shortens, *learns]
    return chat_graph(model, memory=memory, checkpointer=saver, store=store)


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("name", ["respond", "remember", "reflect", "summarize"])
def test_a_chat_stopped_before_a_node_goes_on(tmp_path: Path, name: str, colour: str) -> None:
    """In a reopened file, to the state of a chat that was not stopped."""

    async def talk(path: Path, server: OpenAIServer, stop: list[str]) -> tuple[Any, list[str]]:
        async def step(given: Any, **options: Any) -> Any:
            async with SQLiteCheckpointer.open(path) as saver:
                graph = everything(client(server), saver, store)
                if colour == "sync":
                    graph.invoke(given, THREAD, **options)
                else:
                    await graph.ainvoke(given, THREAD, **options)
                snapshot = graph.get_state(THREAD)
                return snapshot.next, snapshot.values, history(saver)

        with SQLiteStore.open(":memory:", index=None) as store:
            for n in range(4):
                stopped, *_ = await step(says(f"q{n}"), interrupt_before=stop)
                waited.append(stopped)
                if stopped:
                    stopped, *_ = await step(None)
                assert stopped == ()
            _, values, said = await step(None)
        return [values.get("summary", {}).get("text"), texts(values)], said

    waited: list[Any] = []
    with OpenAIServer(replies) as server:
        expected = asyncio.run(talk(tmp_path / "whole.db", server, []))
        assert waited == [()] * 4
        actual = asyncio.run(talk(tmp_path / "stopped.db", server, [name]))
    assert (name,) in waited[4:]
    assert expected == actual


class Asking(QuotingResponder):
    """A model that asks a human before it answers."""

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        said = interrupt("May I answer?")
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"You said {said}."))])


@pytest.mark.parametrize("window", [[trim(max_tokens=3, token_counter=len)], []])
def test_a_model_that_asks_a_human_is_resumed_with_the_answer(window: Any, tmp_path: Path) -> None:
    """The question of the turn is stored once, and the turn ends as any other."""
    for n in range(3):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            out: Any = chat_graph(Asking(), checkpointer=saver, memory=window).invoke(
                says(f"q{n}"), THREAD
            )
            assert [asked.value for asked in out["__interrupt__"]] == ["May I answer?"]
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(Asking(), checkpointer=saver, memory=window)
            assert graph.get_state(THREAD).next == ("respond",)
            out = graph.invoke(Command(resume=f"yes {n}"), THREAD)
            said = history(saver)
            assert graph.get_state(THREAD).next == ()
    assert texts(out)[-2:] == ["q2", "You said yes 2."]
    assert said == [text for n in range(3) for text in (f"q{n}", f"You said yes {n}.")]


# -- bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"memory": trim(max_tokens=1, token_counter=len)},
            "memory is .*Trim.* expected a list of parts",
        ),
        ({"memory": ["Be kind."]}, "a part of the memory is 'Be kind.'; expected parts like"),
        ({"model": 20}, "model is 20; expected a langchain chat model, or a name"),
        (
            {"model": FakeListChatModel(responses=["hi"]), "tools": [str]},
            "the model is a FakeListChatModel, which cannot call tools: it has no bind_tools",
        ),
    ],
)
def test_what_stands_in_a_wrong_place_is_refused(options: Any, said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError, match=said):
        chat_graph(**options)


# -- loaders


def loaded() -> dict[str, Any]:
    """What langgraph.json names, as a loader gets it."""
    folder = Path(perdure.graphs.__file__).parent
    named = json.loads((folder / "langgraph.json").read_text(encoding="utf-8"))["graphs"]
    found = {}
    for name, where in named.items():
        module, variable = where.split(":")
        found[name] = getattr(importlib.import_module(module), variable)
    return found


@pytest.fixture
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of a test."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "config.toml"))
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"PERDURE_{name}", raising=False)


@pytest.mark.usefixtures("unconfigured")
def test_loaders_find_the_graphs() -> None:
    """One is a compiled graph, one is made for the settings; without a model both say so."""
    found = loaded()
    chats = [found["chat"], found["memory_chat"]({}), found["memory_agent"]({}), module_graph]
    with SQLiteStore.open(":memory:", index=None) as store:
        for graph in chats:
            assert isinstance(graph, CompiledStateGraph)
            graph.store = store
            assert NOTICE in texts(graph.invoke(says("hi"), THREAD))[-1]
            graph.store = None


@pytest.mark.usefixtures("unconfigured")
def test_the_configured_graph_keeps_its_window_and_summarises(
    monkeypatch: pytest.MonkeyPatch, file_saver: SQLiteCheckpointer
) -> None:
    """The model is that of the settings; history keeps what the summary stands for."""
    count = token_counter(None)
    with OpenAIServer(replies) as server, SQLiteStore.open(":memory:", index=None) as store:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        graph = loaded()["memory_chat"]({})
        graph.checkpointer, graph.store = file_saver, store
        for n in range(5):
            out = graph.invoke(says(f"q{n} " + "train " * 1_800), THREAD)

    asked = [convert_to_messages(body["messages"]) for body in server.requests]
    answers = [said for said in asked if said[-1].text.startswith("q")]
    assert out["summary"]["text"] == "They spoke of trains."
    assert len(answers) == 5
    assert (
        max(count.request_overhead + sum(map(count.count_message, said)) for said in answers)
        <= MAX_TOKENS
    )
    assert len(history(file_saver)) == 10
    assert len(texts(out)) < 10


# -- the responder


def test_the_responder_says_that_no_model_is_configured() -> None:
    """Each kind of answer carries the notice, also where there is nothing to quote or answer."""
    responder = QuotingResponder()
    tea = HumanMessage("Which tea do I drink?")
    told = [HumanMessage("I drink green tea"), AIMessage("Noted: green tea"), tea]

    for talk in ([], [tea], [*told[:2], HumanMessage("hello")], told):
        assert str(responder.invoke(talk).text).endswith(NOTICE)
    assert "no question" in responder.invoke([]).text
    assert "no earlier message." in responder.invoke([tea]).text
    assert "2 earlier messages, and none" in responder.invoke([*told[:2], HumanMessage("hi")]).text
    assert responder.invoke(told).text.splitlines()[1:-1] == [
        "- you said: “I drink green tea”",
        "- I said: “Noted: green tea”",
    ]


def test_the_responder_quotes_what_fits_best_and_not_itself() -> None:
    """The two messages that share most words are quoted in their order, its own answers never."""
    responder = QuotingResponder()
    talk: list[AnyMessage] = [HumanMessage("red bicycle"), HumanMessage("blue bicycle in the shed")]
    talk.append(responder.invoke([*talk, HumanMessage("bicycle?")]))
    talk += [HumanMessage("soup"), HumanMessage("the blue bicycle shed, is it red?")]
    answer = responder.invoke(talk).text

    assert answer.splitlines()[1:-1] == [
        "- you said: “red bicycle”",
        "- you said: “blue bicycle in the shed”",
    ]
    assert answer == responder.invoke(talk).text
    assert answer == "".join(chunk.text for chunk in responder.stream(talk))

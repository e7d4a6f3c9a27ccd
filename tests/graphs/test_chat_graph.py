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


def make_client(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]


def make_input(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def get_texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"]]


def read_history_texts(saver: SQLiteCheckpointer) -> list[str]:
    return [item.value.text for item in saver.history("t")]


# -- resuming


def test_thread_continues_in_a_reopened_file(tmp_path: Path) -> None:
    """After the file is closed and opened again, the model receives all earlier messages."""
    with OpenAIServer(["one", "two"]) as server:
        for text in ("first", "second"):
            with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
                out = chat_graph(make_client(server), checkpointer=saver).invoke(
                    make_input(text), THREAD
                )

    assert get_texts(out) == ["first", "one", "second", "two"]
    assert server.shown(0) == [("user", "first")]
    assert server.shown(1) == [("user", "first"), ("assistant", "one"), ("user", "second")]


def test_responder_quotes_earlier_messages_of_a_reopened_file(tmp_path: Path) -> None:
    """Without a model, the answer quotes a message that was stored before the reopening."""
    for text in ("My canoe is called Nutshell", "What is my canoe called?"):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            out = chat_graph(checkpointer=saver).invoke(make_input(text), THREAD)

    assert "you said: “My canoe is called Nutshell”" in get_texts(out)[-1]


def test_model_sees_no_messages_of_other_threads(file_saver: SQLiteCheckpointer) -> None:
    """The request of one thread contains no message of another thread."""
    with OpenAIServer(["one", "two"]) as server:
        graph = chat_graph(make_client(server), checkpointer=file_saver)
        graph.invoke(make_input("secret"), THREAD)
        graph.invoke(make_input("hello"), {"configurable": {"thread_id": "other"}})

    assert server.shown() == [("user", "hello")]


@pytest.mark.parametrize("method", ["update_state", "invoke"])
def test_run_or_update_from_old_checkpoint_moves_the_head_like_in_langgraph(
    method: str, file_saver: SQLiteCheckpointer
) -> None:
    """The next run continues from the new messages, as with langgraph's own saver."""

    def run_and_travel(saver: BaseCheckpointSaver[Any]) -> list[str]:
        graph = chat_graph(checkpointer=saver)
        graph.invoke(make_input("one"), THREAD)
        old_config = graph.get_state(THREAD).config
        graph.invoke(make_input("two"), THREAD)
        if method == "update_state":
            graph.update_state(old_config, make_input("instead"), as_node="respond")
        else:
            graph.invoke(make_input("instead"), old_config)
        return get_texts(graph.get_state(THREAD).values)

    expected = run_and_travel(InMemorySaver())
    actual = run_and_travel(file_saver)

    assert expected == actual


# -- the window


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_trim_limits_model_input_and_keeps_state_and_history(
    size: int, file_saver: SQLiteCheckpointer
) -> None:
    """The model receives whole turns within the limit."""
    turns = 6
    with OpenAIServer([f"a{n}" for n in range(turns)]) as server:
        graph = chat_graph(
            make_client(server),
            checkpointer=file_saver,
            memory=[trim(max_tokens=size, token_counter=len)],
        )
        for n in range(turns):
            out = graph.invoke(make_input(f"q{n}"), THREAD)
    model_inputs = [[text for _, text in server.shown(n)] for n in range(turns)]
    all_texts = [text for n in range(turns) for text in (f"q{n}", f"a{n}")]

    window_size = size - 1 + size % 2  # the question, and turns of two
    assert model_inputs == [
        all_texts[max(0, 2 * n + 1 - window_size) : 2 * n + 1] for n in range(turns)
    ]
    assert all_texts == read_history_texts(file_saver) == get_texts(out)


def test_system_message_is_kept_first_by_trim(file_saver: SQLiteCheckpointer) -> None:
    """The system message stays, even if the limit is low."""
    with OpenAIServer(["fine", "well"]) as server:
        graph = chat_graph(
            make_client(server),
            checkpointer=file_saver,
            memory=[trim(max_tokens=2, token_counter=len)],
        )
        graph.invoke({"messages": [SystemMessage("be brief"), HumanMessage("hi")]}, THREAD)
        graph.invoke(make_input("again"), THREAD)

    assert server.shown() == [("system", "be brief"), ("user", "again")]


def test_trim_keeps_tool_calls_with_their_results(file_saver: SQLiteCheckpointer) -> None:
    """The model receives the tool result with its call and the question."""
    call = {"name": "f", "args": {}, "id": "c1", "type": "tool_call"}
    messages: list[AnyMessage] = [
        HumanMessage("old"),
        HumanMessage("look it up"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("found", tool_call_id="c1"),
    ]
    with OpenAIServer(["it is so", "yes"]) as server:
        graph = chat_graph(
            make_client(server),
            checkpointer=file_saver,
            memory=[trim(max_tokens=3, token_counter=len)],
        )
        graph.invoke({"messages": messages}, THREAD)
        graph.invoke(make_input("sure?"), THREAD)

    assert [role for role, _ in server.shown(0)] == ["user", "assistant", "tool"]
    assert [role for role, _ in server.shown(1)] == ["user"]
    assert read_history_texts(file_saver) == [
        *("old", "look it up", "", "found", "it is so", "sure?", "yes"),
    ]


# -- with all parts


def reply_by_task(body: dict[str, Any]) -> str:
    """Reply with an answer, a summary or rewritten instructions, depending on the request."""
    first_message = str(body["messages"][0]["content"])
    if "rewrite" in first_message.lower() or "<instructions>" in str(body["messages"]):
        return "<instructions>Be kind, and say Ann's name.</instructions>"
    if "keep the memory of a conversation" in first_message:
        return "They spoke of trains."
    return f"answer {len(body['messages'])}"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_chat_combines_summary_instructions_and_trim_after_reopening(
    tmp_path: Path, mode: str
) -> None:
    """One system message contains the learned instructions and the summary."""

    async def run_turns(server: OpenAIServer, questions: list[str]) -> Any:
        async with (
            SQLiteCheckpointer.open(tmp_path / "x.db") as saver,
            SQLiteStore.open(tmp_path / "x.db", index=None) as store,
        ):
            model = make_client(server)
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
            for text in questions:
                out = (
                    await graph.ainvoke(make_input(text), config)
                    if mode == "async"
                    else (graph.invoke(make_input(text), config))
                )
            return out, read_history_texts(saver), [v.text for v in learned.history(config)]

    with OpenAIServer(reply_by_task) as server:
        asyncio.run(run_turns(server, ["q0", "q1"]))
        state, texts, instructions = asyncio.run(run_turns(server, ["q2", "q3"]))
    answers = [r["messages"] for r in server.requests if r["messages"][-1]["role"] == "user"]
    answers = [m for m in answers if m[-1]["content"] in ("q0", "q1", "q2", "q3")]

    assert state["summary"]["text"] == "They spoke of trains."
    assert instructions == ["Be kind, and say Ann's name."]
    assert [text for text in texts if text.startswith("q")] == ["q0", "q1", "q2", "q3"]
    assert answers[0][0]["content"] == "Be kind."
    assert answers[-1][0]["content"].startswith("Be kind, and say Ann's name.\n\nSummary")
    assert answers[-1][0]["content"].endswith("They spoke of trains.")
    assert [m["role"] for m in answers[-1]] == ["system", "user", "assistant", "user"]


def test_summary_is_made_only_when_it_is_due(file_saver: SQLiteCheckpointer) -> None:
    """A turn without a summary has one superstep for the input and one for the answer."""
    with OpenAIServer(reply_by_task) as server:
        model = make_client(server)
        summary = summarize(model, trigger=("messages", 6), keep=("messages", 1))
        graph = chat_graph(model, checkpointer=file_saver, memory=[summary])
        steps = []
        for n in range(3):
            graph.invoke(make_input(f"q{n}"), THREAD)
            steps.append(len(file_saver.checkpoints("t")))
    assert steps == [3, 6, 10]
    assert len(server.requests) == 4


# -- streaming and errors


def test_answer_is_streamed_token_by_token_and_stored_whole(file_saver: SQLiteCheckpointer) -> None:
    """The tokens come from the model's server."""
    with OpenAIServer(["an answer of five words"]) as server:
        graph = chat_graph(make_client(server), checkpointer=file_saver)
        stream: Any = graph.stream(make_input("hi"), THREAD, stream_mode="messages")
        chunks = [chunk.text for chunk, _ in stream if chunk.text]

    assert server.requests[0]["stream"] is True
    assert chunks == ["an ", "answer ", "of ", "five ", "words"]
    assert read_history_texts(file_saver) == ["hi", "an answer of five words"]


def test_graph_can_be_called_with_ainvoke_and_astream(tmp_path: Path) -> None:
    """Both methods continue the same thread."""

    async def run_turns(server: OpenAIServer) -> list[str]:
        async with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                make_client(server),
                checkpointer=saver,
                memory=[trim(max_tokens=3, token_counter=len)],
            )
            await graph.ainvoke(make_input("one"), THREAD)
            stream: Any = graph.astream(make_input("two"), THREAD, stream_mode="messages")
            chunks = [chunk.text async for chunk, _ in stream if chunk.text]
            return [*chunks, *(i.value.text for i in await saver.ahistory("t"))]

    with OpenAIServer(["first", "second answer"]) as server:
        out = asyncio.run(run_turns(server))

    assert out == ["second ", "answer", "one", "first", "two", "second answer"]


def test_turn_can_be_finished_after_an_error_of_the_model(tmp_path: Path) -> None:
    """The question is stored, and `invoke(None)` on the reopened file sends it again, once."""
    with OpenAIServer(["fine", Failure(400, "out of order"), "back again"]) as server:
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                make_client(server),
                checkpointer=saver,
                memory=[trim(max_tokens=5, token_counter=len)],
            )
            graph.invoke(make_input("one"), THREAD)
            with pytest.raises(openai.APIStatusError, match="out of order"):
                graph.invoke(make_input("two"), THREAD)
            history_before = read_history_texts(saver)
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(
                make_client(server),
                checkpointer=saver,
                memory=[trim(max_tokens=5, token_counter=len)],
            )
            next_nodes = graph.get_state(THREAD).next
            out = graph.invoke(None, THREAD)
            history_after = read_history_texts(saver)

    assert history_before == ["one", "fine", "two"]
    assert next_nodes == ("respond",)
    assert get_texts(out) == history_after == ["one", "fine", "two", "back again"]
    assert server.shown(1) == server.shown(2)


@pytest.mark.parametrize("options", ["window", "summary"])
def test_stream_of_messages_contains_only_answers(
    options: str, file_saver: SQLiteCheckpointer
) -> None:
    """Instructions, summaries and removals are not streamed."""
    with (
        OpenAIServer(reply_by_task) as server,
        SQLiteStore.open(":memory:", index=None) as store,
    ):
        model = make_client(server)
        instructions = Instructions(store, default="SECRET RULES")
        summary = summarize(model, trigger=("messages", 4), keep=("messages", 1))
        trimming = trim(max_tokens=4, token_counter=len)
        graph = chat_graph(
            model,
            checkpointer=file_saver,
            store=store,
            memory=[
                use_instructions(instructions),
                *([] if options == "window" else [summary]),
                trimming,
                update_instructions(model, instructions),
            ],
        )
        chunks: list[Any] = []
        for n in range(5):
            stream: Any = graph.stream(make_input(f"q{n}"), THREAD, stream_mode="messages")
            chunks += [chunk for chunk, _ in stream]
        state = graph.get_state(THREAD).values

    assert {chunk.type for chunk in chunks} == {"AIMessageChunk"}
    assert "".join(chunk.text for chunk in chunks).count("answer") == 5
    assert "llm_input_messages" not in state
    assert ("summary" in state) == (options != "window")


# -- interrupts


def build_full_graph(model: Any, saver: Any, store: SQLiteStore) -> Any:
    instructions = Instructions(store)
    summary = summarize(model, trigger=("messages", 4), keep=("messages", 1))
    shortening_parts: list[Any] = [summary, trim(max_tokens=9, token_counter=len)]
    learning_parts = [remember_turns(), update_instructions(model, instructions)]
    memory = [use_instructions(instructions), *shortening_parts, *learning_parts]
    return chat_graph(model, memory=memory, checkpointer=saver, store=store)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["respond", "remember", "reflect", "summarize"])
def test_chat_interrupted_before_a_node_continues_to_the_same_state(
    tmp_path: Path, name: str, mode: str
) -> None:
    """The file is reopened. The final state equals that of a chat that was not interrupted."""

    async def run_chat(path: Path, server: OpenAIServer, stop: list[str]) -> tuple[Any, list[str]]:
        async def run_step(input: Any, **options: Any) -> Any:
            async with SQLiteCheckpointer.open(path) as saver:
                graph = build_full_graph(make_client(server), saver, store)
                if mode == "sync":
                    graph.invoke(input, THREAD, **options)
                else:
                    await graph.ainvoke(input, THREAD, **options)
                snapshot = graph.get_state(THREAD)
                return snapshot.next, snapshot.values, read_history_texts(saver)

        with SQLiteStore.open(":memory:", index=None) as store:
            for n in range(4):
                next_nodes, *_ = await run_step(make_input(f"q{n}"), interrupt_before=stop)
                pending_nodes.append(next_nodes)
                if next_nodes:
                    next_nodes, *_ = await run_step(None)
                assert next_nodes == ()
            _, values, history_texts = await run_step(None)
        return [values.get("summary", {}).get("text"), get_texts(values)], history_texts

    pending_nodes: list[Any] = []
    with OpenAIServer(reply_by_task) as server:
        expected = asyncio.run(run_chat(tmp_path / "whole.db", server, []))
        assert pending_nodes == [()] * 4
        actual = asyncio.run(run_chat(tmp_path / "stopped.db", server, [name]))
    assert (name,) in pending_nodes[4:]
    assert expected == actual


class AskingResponder(QuotingResponder):
    """A model that interrupts before it answers."""

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        answer = interrupt("May I answer?")
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"You said {answer}."))])


@pytest.mark.parametrize("window", [[trim(max_tokens=3, token_counter=len)], []])
def test_model_that_interrupts_is_resumed_with_the_answer(window: Any, tmp_path: Path) -> None:
    """The user's message of the turn is stored once."""
    for n in range(3):
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            out: Any = chat_graph(AskingResponder(), checkpointer=saver, memory=window).invoke(
                make_input(f"q{n}"), THREAD
            )
            assert [question.value for question in out["__interrupt__"]] == ["May I answer?"]
        with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
            graph = chat_graph(AskingResponder(), checkpointer=saver, memory=window)
            assert graph.get_state(THREAD).next == ("respond",)
            out = graph.invoke(Command(resume=f"yes {n}"), THREAD)
            history_texts = read_history_texts(saver)
            assert graph.get_state(THREAD).next == ()
    assert get_texts(out)[-2:] == ["q2", "You said yes 2."]
    assert history_texts == [text for n in range(3) for text in (f"q{n}", f"You said yes {n}.")]


# -- bad input


@pytest.mark.parametrize(
    ("options", "expected_error"),
    [
        (
            {"memory": trim(max_tokens=1, token_counter=len)},
            "memory is .*Trim.* expected a list of parts",
        ),
        ({"memory": ["Be kind."]}, "a part of the memory is 'Be kind.'; expected parts like"),
        ({"model": 20}, "model is 20; expected a langchain chat model, or a name"),
        (
            {"model": FakeListChatModel(responses=["hi"]), "tools": [str]},
            "the model is a FakeListChatModel, which cannot call tools, because it has no working "
            "method bind_tools",
        ),
    ],
)
def test_chat_graph_refuses_wrong_arguments(options: Any, expected_error: str) -> None:
    """The arguments are checked before a run starts."""
    with pytest.raises(ConfigurationError, match=expected_error):
        chat_graph(**options)


# -- loaders


def load_graphs() -> dict[str, Any]:
    """Load the graphs of langgraph.json as langgraph's server does."""
    folder = Path(perdure.graphs.__file__).parent
    paths = json.loads((folder / "langgraph.json").read_text(encoding="utf-8"))["graphs"]
    graphs = {}
    for name, path in paths.items():
        module, variable = path.split(":")
        graphs[name] = getattr(importlib.import_module(module), variable)
    return graphs


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the model."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "config.toml"))
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"PERDURE_{name}", raising=False)


@pytest.mark.usefixtures("no_settings")
def test_graphs_of_langgraph_json_can_be_loaded_without_a_model() -> None:
    """Without a model, each graph answers that no model is configured."""
    graphs = load_graphs()
    chats = [graphs["chat"], graphs["memory_chat"]({}), graphs["memory_agent"]({}), module_graph]
    with SQLiteStore.open(":memory:", index=None) as store:
        for graph in chats:
            assert isinstance(graph, CompiledStateGraph)
            graph.store = store
            assert NOTICE in get_texts(graph.invoke(make_input("hi"), THREAD))[-1]
            graph.store = None


@pytest.mark.usefixtures("no_settings")
def test_configured_graph_trims_and_summarizes(
    monkeypatch: pytest.MonkeyPatch, file_saver: SQLiteCheckpointer
) -> None:
    """The model is that of the settings. The history keeps the summarized messages."""
    count = token_counter(None)
    with OpenAIServer(reply_by_task) as server, SQLiteStore.open(":memory:", index=None) as store:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        graph = load_graphs()["memory_chat"]({})
        graph.checkpointer, graph.store = file_saver, store
        for n in range(5):
            out = graph.invoke(make_input(f"q{n} " + "train " * 1_800), THREAD)

    requests = [convert_to_messages(body["messages"]) for body in server.requests]
    answers = [messages for messages in requests if messages[-1].text.startswith("q")]
    assert out["summary"]["text"] == "They spoke of trains."
    assert len(answers) == 5
    assert (
        max(
            count.request_overhead + sum(map(count.count_message_tokens, messages))
            for messages in answers
        )
        <= MAX_TOKENS
    )
    assert len(read_history_texts(file_saver)) == 10
    assert len(get_texts(out)) < 10


# -- the responder


def test_responder_always_says_that_no_model_is_configured() -> None:
    """Each kind of answer contains the notice, also if there is nothing to quote or to answer."""
    responder = QuotingResponder()
    tea = HumanMessage("Which tea do I drink?")
    messages = [HumanMessage("I drink green tea"), AIMessage("Noted: green tea"), tea]

    for conversation in ([], [tea], [*messages[:2], HumanMessage("hello")], messages):
        assert str(responder.invoke(conversation).text).endswith(NOTICE)
    assert "no question" in responder.invoke([]).text
    assert "no earlier message." in responder.invoke([tea]).text
    assert (
        "2 earlier messages, and none" in responder.invoke([*messages[:2], HumanMessage("hi")]).text
    )
    assert responder.invoke(messages).text.splitlines()[1:-1] == [
        "- you said: “I drink green tea”",
        "- I said: “Noted: green tea”",
    ]


def test_responder_quotes_the_best_matches_and_never_itself() -> None:
    """The two messages that share most words with the question are quoted in their order."""
    responder = QuotingResponder()
    messages: list[AnyMessage] = [
        HumanMessage("red bicycle"),
        HumanMessage("blue bicycle in the shed"),
    ]
    messages.append(responder.invoke([*messages, HumanMessage("bicycle?")]))
    messages += [HumanMessage("soup"), HumanMessage("the blue bicycle shed, is it red?")]
    answer = responder.invoke(messages).text

    assert answer.splitlines()[1:-1] == [
        "- you said: “red bicycle”",
        "- you said: “blue bicycle in the shed”",
    ]
    assert answer == responder.invoke(messages).text
    assert answer == "".join(chunk.text for chunk in responder.stream(messages))

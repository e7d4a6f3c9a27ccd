"""Message histories over threads, with each example of LangChain's "Memory management" guide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, InvalidMessages
from perdure.graphs import chat_graph
from perdure.memory import ChatState, trim
from perdure.memory.adapters import ThreadMessageHistory
from perdure.memory.tool_calls import NO_RESULT
from tests.memory.scripted_models import make_client
from tests.openai_server import OpenAIServer

CALL = {"name": "f", "args": {}, "id": "c1", "type": "tool_call"}
SYSTEM = "You are a helpful assistant. Answer all questions to the best of your ability."
FACTS = f"{SYSTEM} The provided chat history includes facts about the user you are speaking with."
SESSION: Any = {"configurable": {"session_id": "unused"}}
ignore_deprecation = pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")


def message_texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def make_config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


# -- threads


def test_graph_and_message_history_continue_same_thread(saver: SQLiteCheckpointer) -> None:
    """The history of the checkpointer keeps all messages, also replaced ones."""
    thread = ThreadMessageHistory(saver, "t", keep_history=True)
    graph = chat_graph(checkpointer=saver)

    assert thread.messages == []
    thread.add_messages([HumanMessage("My canoe is called Nutshell"), AIMessage("A fine name")])
    out = graph.invoke({"messages": [HumanMessage("What is my canoe called?")]}, make_config("t"))
    assert "Nutshell" in message_texts(out["messages"])[-1]
    assert message_texts(thread.messages) == message_texts(out["messages"])
    said = message_texts(out["messages"])

    thread.messages = thread.messages[-1:]
    assert message_texts(graph.get_state(make_config("t")).values["messages"]) == said[-1:]
    thread.clear()
    assert thread.messages == []
    assert [item.value.text for item in saver.history("t")] == said
    assert not any(item.seen for item in saver.history("t"))


@pytest.mark.parametrize("use_langgraph_saver", [True, False])
def test_adding_messages_leaves_other_channels_and_failed_run_as_they_are(
    use_langgraph_saver: bool, tmp_path: Path
) -> None:
    """Neither a summary nor an interrupted turn changes."""

    class State(ChatState):
        summary: str

    broken = False

    def respond(state: State) -> dict[str, Any]:
        if broken:
            raise ConnectionError("no route")
        return {"messages": [AIMessage("fine")], "summary": "so far"}

    saver: Any = (
        InMemorySaver() if use_langgraph_saver else SQLiteCheckpointer.open(tmp_path / "x.db")
    )
    builder = StateGraph(State)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one")], "summary": ""}, make_config("t"))
    broken = True
    with pytest.raises(ConnectionError):
        graph.invoke({"messages": [HumanMessage("two")], "summary": "so far"}, make_config("t"))
    broken = False
    ThreadMessageHistory(saver, "t").add_messages([HumanMessage("and three")])
    state = graph.get_state(make_config("t"))
    out = graph.invoke(None, make_config("t"))
    if not use_langgraph_saver:
        saver.close()

    assert state.values["summary"] == "so far"
    assert state.next == ("respond",)
    assert message_texts(out["messages"]) == ["one", "fine", "two", "and three", "fine"]


def test_concurrent_writers_of_several_connections_lose_no_messages(tmp_path: Path) -> None:
    """The messages of each writer keep their order."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path):
        pass  # create the tables once

    def write(writer: int) -> None:
        with SQLiteCheckpointer.open(path) as saver:
            thread = ThreadMessageHistory(saver, "t")
            for n in range(4):
                thread.add_messages([HumanMessage(f"{writer}-{n}")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with SQLiteCheckpointer.open(path) as saver:
        message_texts_found = message_texts(ThreadMessageHistory(saver, "t").messages)
        history_texts = [item.value.text for item in saver.history("t")]

    assert sorted(message_texts_found) == [f"{writer}-{n}" for writer in range(4) for n in range(4)]
    assert [text for text in message_texts_found if text[0] == "2"] == ["2-0", "2-1", "2-2", "2-3"]
    assert history_texts == message_texts_found


def test_append_waits_for_running_replacement(file_saver: SQLiteCheckpointer) -> None:
    """An append during a replacement comes after it, so neither is lost."""
    thread = ThreadMessageHistory(file_saver, "t")
    thread.add_messages([HumanMessage("one")])
    with ThreadPoolExecutor(1) as pool:
        appends = []

        def change(messages: list[Any]) -> list[Any]:
            appends.append(pool.submit(thread.add_messages, [HumanMessage("two")]))
            wait(appends, timeout=0.2)
            return [AIMessage(f"after {len(messages)}")]

        thread.replace_messages(change)
        appends[0].result()

    assert message_texts(thread.messages) == ["after 1", "two"]
    assert not any(item.branch for item in file_saver.history("t"))


def test_holder_of_thread_lock_may_append(file_saver: SQLiteCheckpointer) -> None:
    thread = ThreadMessageHistory(file_saver, "t")

    async def aadd() -> None:
        async with file_saver.lock("t"):
            await thread.aadd_messages([HumanMessage("two")])

    with file_saver.lock("t"):
        thread.add_messages([HumanMessage("one")])
    asyncio.run(aadd())

    assert message_texts(thread.messages) == ["one", "two"]


def test_concurrent_tasks_lose_no_messages(saver: SQLiteCheckpointer) -> None:
    """langchain's async methods call the sync methods in threads."""

    async def scenario() -> None:
        thread = ThreadMessageHistory(saver, "t")
        added = (thread.aadd_messages([HumanMessage(str(n))]) for n in range(5))
        await asyncio.gather(*added)
        assert sorted(message_texts(await thread.aget_messages())) == ["0", "1", "2", "3", "4"]

    asyncio.run(scenario())


def test_added_messages_get_ids_and_originals_are_unchanged(file_saver: SQLiteCheckpointer) -> None:
    """The same message may be added twice."""
    thread = ThreadMessageHistory(file_saver, "t")
    said, known = HumanMessage("again"), HumanMessage("known", id="k")
    thread.add_messages([said, said, known])
    thread.add_messages([known])
    found = thread.messages

    assert message_texts(found) == ["again", "again", "known", "known"]
    assert len({message.id for message in found}) == 4
    assert found[2].id == "k"
    assert said.id is None


@pytest.mark.parametrize("invalid_messages", ["hello", [{"role": "user", "content": "hi"}], [None]])
def test_invalid_messages_are_refused_and_not_written(
    invalid_messages: Any, file_saver: SQLiteCheckpointer
) -> None:
    thread = ThreadMessageHistory(file_saver, "t")
    for write in (thread.add_messages, lambda bad: thread.replace_messages(lambda _: bad)):
        with pytest.raises(InvalidMessages, match="expected"):
            write(invalid_messages)
    with pytest.raises(InvalidMessages, match="RemoveMessage"):
        thread.add_messages([RemoveMessage("x")])

    assert thread.messages == []
    assert file_saver.threads() == []


def test_empty_thread_id_and_invalid_checkpointer_are_refused(
    file_saver: SQLiteCheckpointer,
) -> None:
    with pytest.raises(InvalidConfig, match="empty"):
        ThreadMessageHistory(file_saver, "")
    with pytest.raises(ConfigurationError, match="expected a langgraph checkpointer"):
        ThreadMessageHistory("agent.db", "t")  # type: ignore[arg-type]


# -- the message history


@pytest.mark.parametrize("use_langgraph_saver", [True, False])
def test_message_history_keeps_contract_of_langchain(
    use_langgraph_saver: bool, tmp_path: Path
) -> None:
    """The contract covers each form of adding, reading, assigning, clearing and printing."""
    saver: Any = (
        InMemorySaver() if use_langgraph_saver else SQLiteCheckpointer.open(tmp_path / "x.db")
    )
    history: BaseChatMessageHistory = ThreadMessageHistory(saver)
    history.add_user_message("hi")
    history.add_ai_message(AIMessage("hello"))
    history.add_messages([HumanMessage("a"), AIMessage("b")])

    assert str(history) == "Human: hi\nAI: hello\nHuman: a\nAI: b"
    history.messages = history.messages[-2:]
    assert message_texts(history.messages) == ["a", "b"]
    history.clear()
    assert history.messages == []

    async def call_async_methods() -> None:
        await history.aadd_messages([HumanMessage("c")])
        assert message_texts(await history.aget_messages()) == ["c"]
        await history.aclear()
        assert await history.aget_messages() == []

    asyncio.run(call_async_methods())
    if not use_langgraph_saver:
        saver.close()


def test_message_history_shows_no_tool_result_without_call(file_saver: SQLiteCheckpointer) -> None:
    """A tool call is shown with its result or, if it is the last message, without."""
    history = ThreadMessageHistory(file_saver, "t")
    history.add_messages([HumanMessage("q"), AIMessage("", tool_calls=[CALL])])
    assert len(history.messages) == 2
    history.add_messages([ToolMessage("found", tool_call_id="c1"), AIMessage("it is so")])
    assert message_texts(history.messages) == ["q", "", "found", "it is so"]

    history.messages = history.messages[2:]
    assert message_texts(history.messages) == ["it is so"]
    history.messages = [HumanMessage("q"), AIMessage("", tool_calls=[CALL]), HumanMessage("stop")]
    assert message_texts(history.messages) == ["q", "", NO_RESULT, "stop"]
    history.messages = history.messages  # only what was said is stored
    stored = file_saver.get_tuple({"configurable": {"thread_id": "t"}})
    assert stored is not None
    assert message_texts(stored.checkpoint["channel_values"]["messages"]) == ["q", "", "stop"]


def test_system_message_after_tool_call_with_result_in_same_message_keeps_its_position(
    file_saver: SQLiteCheckpointer,
) -> None:
    history = ThreadMessageHistory(file_saver, "t")
    answer = AIMessage(
        [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "text", "text": "found"},
        ]
    )
    history.add_messages([HumanMessage("find it"), answer, SystemMessage("be kind")])

    assert [message.type for message in history.messages] == ["human", "ai", "system"]


@ignore_deprecation
def test_added_system_message_keeps_its_position(file_saver: SQLiteCheckpointer) -> None:
    """With a `trim` node in the chain, the model is shown one joined system message first."""
    window = trim(max_tokens=9, token_counter=len)
    history = ThreadMessageHistory(file_saver, "t")
    history.add_messages([HumanMessage("hi"), AIMessage("hello"), SystemMessage("be kind")])
    with OpenAIServer(["one", "two"]) as server:
        chat = make_client(server)
        with_message_history(make_prompt_chain(chat), history).invoke({"input": "a"}, SESSION)
        shown: Runnable[Any, Any] = RunnableLambda(lambda asked: window(asked.to_messages()))
        with_message_history(make_prompt_chain(shown | chat), history).invoke(
            {"input": "b"}, SESSION
        )

    conversation = [("user", "hi"), ("assistant", "hello")]
    added_system = ("system", "be kind")
    assert server.shown(0) == [("system", SYSTEM), *conversation, added_system, ("user", "a")]
    both = ("system", f"{SYSTEM}\n\nbe kind")
    assert server.shown(1) == [
        both,
        *conversation,
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
    ]
    assert message_texts(history.messages) == ["hi", "hello", "be kind", "a", "one", "b", "two"]


# -- each example of "Memory management", in the order of the guide


def make_prompt_chain(
    chat: Runnable[Any, Any], system: str = SYSTEM, key: str = "chat_history"
) -> Runnable[Any, Any]:
    after = [("human", "{input}")] if key == "chat_history" else []
    return ChatPromptTemplate([("system", system), MessagesPlaceholder(key), *after]) | chat


def with_message_history(
    chain: Runnable[Any, Any], history: BaseChatMessageHistory
) -> Runnable[Any, Any]:
    return RunnableWithMessageHistory(
        chain,
        lambda session_id: history,
        input_messages_key="input",
        history_messages_key="chat_history",
    )


def add_nemo_messages(history: BaseChatMessageHistory) -> list[str]:
    history.add_user_message("Hey there! I'm Nemo.")
    history.add_ai_message("Hello!")
    history.add_user_message("How are you today?")
    history.add_ai_message("Fine thanks!")
    return ["Hey there! I'm Nemo.", "Hello!", "How are you today?", "Fine thanks!"]


@pytest.fixture
def history_class(saver: SQLiteCheckpointer) -> Callable[..., ThreadMessageHistory]:
    """The class that the guide imports from langchain.memory, bound to the checkpointer."""
    return partial(ThreadMessageHistory, saver)


QUESTION = "Translate this sentence from English to French: I love programming."
FRENCH = "J'adore la programmation."


def test_message_passing_example_works_without_history() -> None:
    with OpenAIServer(['I said "J\'adore la programmation"']) as server:
        chain = make_prompt_chain(make_client(server), key="messages")
        conversation = [
            HumanMessage(QUESTION),
            AIMessage(FRENCH),
            HumanMessage("What did you just say?"),
        ]
        answer = chain.invoke({"messages": conversation})

    assert answer.text == 'I said "J\'adore la programmation"'
    assert server.shown() == [
        ("system", SYSTEM),
        ("user", QUESTION),
        ("assistant", FRENCH),
        ("user", "What did you just say?"),
    ]


def test_chat_history_example_works(history_class: Callable[[], ThreadMessageHistory]) -> None:
    """The chain is given all messages of the history."""
    demo = history_class()
    demo.add_user_message(QUESTION)
    demo.add_ai_message(FRENCH)
    assert [(m.type, m.text) for m in demo.messages] == [("human", QUESTION), ("ai", FRENCH)]

    demo = history_class()
    assert demo.messages == []
    with OpenAIServer([FRENCH, "You asked me to translate"]) as server:
        chain = make_prompt_chain(make_client(server), key="messages")
        demo.add_user_message(QUESTION)
        demo.add_ai_message(chain.invoke({"messages": demo.messages}))
        demo.add_user_message("What did I just ask you?")
        chain.invoke({"messages": demo.messages})

    assert server.shown() == [
        ("system", SYSTEM),
        ("user", QUESTION),
        ("assistant", FRENCH),
        ("user", "What did I just ask you?"),
    ]
    assert message_texts(demo.messages) == [QUESTION, FRENCH, "What did I just ask you?"]


@ignore_deprecation
@pytest.mark.parametrize("is_async", [False, True])
def test_automatic_history_management_example_works(
    is_async: bool,
    history_class: Callable[[], ThreadMessageHistory],
) -> None:
    """`RunnableWithMessageHistory` shows the stored messages and adds the new ones."""
    demo = history_class()
    second = "What did I just ask you?"
    with OpenAIServer([FRENCH, "You asked me to translate"]) as server:
        chain = with_message_history(make_prompt_chain(make_client(server)), demo)
        for said in (QUESTION, second):
            if is_async:
                asyncio.run(chain.ainvoke({"input": said}, SESSION))
            else:
                chain.invoke({"input": said}, SESSION)

    assert server.shown(0) == [("system", SYSTEM), ("user", QUESTION)]
    assert server.shown(1) == [
        ("system", SYSTEM),
        ("user", QUESTION),
        ("assistant", FRENCH),
        ("user", second),
    ]
    assert message_texts(demo.messages) == [QUESTION, FRENCH, second, "You asked me to translate"]


@ignore_deprecation
def test_each_session_id_has_its_own_thread(file_saver: SQLiteCheckpointer) -> None:
    """The guide passes the session id to a factory of histories."""
    with OpenAIServer(["one", "two"]) as server:
        chain = RunnableWithMessageHistory(
            make_prompt_chain(make_client(server)),
            partial(_open_history, file_saver),
            input_messages_key="input",
            history_messages_key="chat_history",
        )
        for session in ("ann", "bo"):
            chain.invoke({"input": f"I am {session}"}, {"configurable": {"session_id": session}})

    assert server.shown() == [("system", SYSTEM), ("user", "I am bo")]
    assert message_texts(_open_history(file_saver, "ann").messages) == ["I am ann", "one"]


def _open_history(saver: BaseCheckpointSaver[Any], session_id: str) -> BaseChatMessageHistory:
    return ThreadMessageHistory(saver, session_id)


@ignore_deprecation
def test_trimming_messages_example_works_and_history_keeps_all(
    history_class: Callable[..., ThreadMessageHistory],
    saver: SQLiteCheckpointer,
) -> None:
    demo = history_class(keep_history=True)
    said = add_nemo_messages(demo)
    assert message_texts(demo.messages) == said
    where, lives = "Where does P. Sherman live?", "42 Wallaby Way, Sydney."

    def trim_messages(chain_input: Any) -> bool:
        stored_messages = demo.messages
        if len(stored_messages) <= 2:
            return False
        demo.clear()
        for message in stored_messages[-2:]:
            demo.add_message(message)
        return True

    with OpenAIServer(["Your name is Nemo.", lives, "I'm sorry"]) as server:
        chain = with_message_history(make_prompt_chain(make_client(server)), demo)
        trimming = RunnablePassthrough.assign(messages_trimmed=trim_messages) | chain
        chain.invoke({"input": "What's my name?"}, SESSION)
        assert message_texts(demo.messages) == [*said, "What's my name?", "Your name is Nemo."]
        trimming.invoke({"input": where}, SESSION)
        assert message_texts(demo.messages) == [
            "What's my name?",
            "Your name is Nemo.",
            where,
            lives,
        ]
        trimming.invoke({"input": "What is my name?"}, SESSION)

    assert [text for _, text in server.shown(0)] == [SYSTEM, *said, "What's my name?"]
    assert [text for _, text in server.shown(1)] == [
        *(SYSTEM, "What's my name?", "Your name is Nemo.", where),
    ]
    assert [text for _, text in server.shown(2)] == [SYSTEM, where, lives, "What is my name?"]
    assert message_texts(demo.messages) == [where, lives, "What is my name?", "I'm sorry"]
    assert [item.value.text for item in saver.history(demo.thread_id)] == [
        *said,
        *("What's my name?", "Your name is Nemo.", where, lives, "What is my name?", "I'm sorry"),
    ]


@ignore_deprecation
def test_summary_memory_example_replaces_messages_by_summary(
    history_class: Callable[[], ThreadMessageHistory],
) -> None:
    demo = history_class()
    said = add_nemo_messages(demo)
    summary_request = "Distill the above chat messages into a single summary message."
    question, answer = "What did I say my name was?", "You introduced yourself as Nemo."

    with OpenAIServer(["Nemo greets an AI.", answer]) as server:
        chat = make_client(server)
        chain = with_message_history(make_prompt_chain(chat, FACTS), demo)

        def summarize_messages(chain_input: Any) -> bool:
            stored_messages = demo.messages
            if len(stored_messages) == 0:
                return False
            prompt = ChatPromptTemplate(
                [MessagesPlaceholder("chat_history"), ("user", summary_request)]
            )
            summary_message = (prompt | chat).invoke({"chat_history": stored_messages})
            demo.clear()
            demo.add_message(summary_message)
            return True

        summarizing = RunnablePassthrough.assign(messages_summarized=summarize_messages) | chain
        summarizing.invoke({"input": question}, SESSION)

    assert [text for _, text in server.shown(0)] == [*said, summary_request]
    assert server.shown(1) == [
        ("system", FACTS),
        ("assistant", "Nemo greets an AI."),
        ("user", question),
    ]
    assert message_texts(demo.messages) == ["Nemo greets an AI.", question, answer]

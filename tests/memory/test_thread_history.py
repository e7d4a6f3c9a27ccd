"""Threads from outside a graph, and every example of LangChain's "Memory management" over them."""

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
from tests.memory.scripted import make_client
from tests.openai_server import OpenAIServer

CALL = {"name": "f", "args": {}, "id": "c1", "type": "tool_call"}
SYSTEM = "You are a helpful assistant. Answer all questions to the best of your ability."
FACTS = f"{SYSTEM} The provided chat history includes facts about the user you are speaking with."
SESSION: Any = {"configurable": {"session_id": "unused"}}
deprecated = pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


# -- threads


def test_a_graph_goes_on_with_what_was_added_and_back(saver: SQLiteCheckpointer) -> None:
    """Both write to one thread; perdure's history has all of it, also what was replaced."""
    thread = ThreadMessageHistory(saver, "t", keep_history=True)
    graph = chat_graph(checkpointer=saver)

    assert thread.messages == []
    thread.add_messages([HumanMessage("My canoe is called Nutshell"), AIMessage("A fine name")])
    out = graph.invoke({"messages": [HumanMessage("What is my canoe called?")]}, config("t"))
    assert "Nutshell" in texts(out["messages"])[-1]
    assert texts(thread.messages) == texts(out["messages"])
    said = texts(out["messages"])

    thread.messages = thread.messages[-1:]
    assert texts(graph.get_state(config("t")).values["messages"]) == said[-1:]
    thread.clear()
    assert thread.messages == []
    assert [item.value.text for item in saver.history("t")] == said
    assert not any(item.seen for item in saver.history("t"))


@pytest.mark.parametrize("langgraphs", [True, False])
def test_the_other_channels_of_a_thread_stay(langgraphs: bool, tmp_path: Path) -> None:
    """A message from outside touches neither a summary nor a turn that an error cut off."""

    class State(ChatState):
        summary: str

    broken = False

    def respond(state: State) -> dict[str, Any]:
        if broken:
            raise ConnectionError("no route")
        return {"messages": [AIMessage("fine")], "summary": "so far"}

    saver: Any = InMemorySaver() if langgraphs else SQLiteCheckpointer.open(tmp_path / "x.db")
    builder = StateGraph(State)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one")], "summary": ""}, config("t"))
    broken = True
    with pytest.raises(ConnectionError):
        graph.invoke({"messages": [HumanMessage("two")], "summary": "so far"}, config("t"))
    broken = False
    ThreadMessageHistory(saver, "t").add_messages([HumanMessage("and three")])
    state = graph.get_state(config("t"))
    out = graph.invoke(None, config("t"))
    if not langgraphs:
        saver.close()

    assert state.values["summary"] == "so far"
    assert state.next == ("respond",)
    assert texts(out["messages"]) == ["one", "fine", "two", "and three", "fine"]


def test_nothing_is_lost_when_many_write_at_once(tmp_path: Path) -> None:
    """Appends and changes of several connections are all there, each writer's in its order."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path):
        pass  # made once

    def write(writer: int) -> None:
        with SQLiteCheckpointer.open(path) as saver:
            thread = ThreadMessageHistory(saver, "t")
            for n in range(4):
                thread.add_messages([HumanMessage(f"{writer}-{n}")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with SQLiteCheckpointer.open(path) as saver:
        found = texts(ThreadMessageHistory(saver, "t").messages)
        said = [item.value.text for item in saver.history("t")]

    assert sorted(found) == [f"{writer}-{n}" for writer in range(4) for n in range(4)]
    assert [text for text in found if text[0] == "2"] == ["2-0", "2-1", "2-2", "2-3"]
    assert said == found


def test_who_writes_waits_for_a_change(file_saver: SQLiteCheckpointer) -> None:
    """What another writes while a change is made comes after it, so neither is lost."""
    thread = ThreadMessageHistory(file_saver, "t")
    thread.add_messages([HumanMessage("one")])
    with ThreadPoolExecutor(1) as pool:
        others = []

        def change(found: list[Any]) -> list[Any]:
            others.append(pool.submit(thread.add_messages, [HumanMessage("two")]))
            wait(others, timeout=0.2)
            return [AIMessage(f"after {len(found)}")]

        thread.replace_messages(change)
        others[0].result()

    assert texts(thread.messages) == ["after 1", "two"]
    assert not any(item.branch for item in file_saver.history("t"))


def test_who_has_the_lock_may_write(file_saver: SQLiteCheckpointer) -> None:
    """Under the lock of the thread an append does not wait for itself, in either form."""
    thread = ThreadMessageHistory(file_saver, "t")

    async def aadd() -> None:
        async with file_saver.lock("t"):
            await thread.aadd_messages([HumanMessage("two")])

    with file_saver.lock("t"):
        thread.add_messages([HumanMessage("one")])
    asyncio.run(aadd())

    assert texts(thread.messages) == ["one", "two"]


def test_concurrent_tasks_lose_nothing(saver: SQLiteCheckpointer) -> None:
    """langchain's asynchronous methods call the others in threads."""

    async def scenario() -> None:
        thread = ThreadMessageHistory(saver, "t")
        added = (thread.aadd_messages([HumanMessage(str(n))]) for n in range(5))
        await asyncio.gather(*added)
        assert sorted(texts(await thread.aget_messages())) == ["0", "1", "2", "3", "4"]

    asyncio.run(scenario())


def test_ids_are_given_and_the_callers_messages_left_alone(file_saver: SQLiteCheckpointer) -> None:
    """The same message may be said twice."""
    thread = ThreadMessageHistory(file_saver, "t")
    said, known = HumanMessage("again"), HumanMessage("known", id="k")
    thread.add_messages([said, said, known])
    thread.add_messages([known])
    found = thread.messages

    assert texts(found) == ["again", "again", "known", "known"]
    assert len({message.id for message in found}) == 4
    assert found[2].id == "k"
    assert said.id is None


@pytest.mark.parametrize("wrong", ["hello", [{"role": "user", "content": "hi"}], [None]])
def test_what_is_no_message_is_refused(wrong: Any, file_saver: SQLiteCheckpointer) -> None:
    """Nothing is written, and the error says what was expected."""
    thread = ThreadMessageHistory(file_saver, "t")
    for write in (thread.add_messages, lambda bad: thread.replace_messages(lambda _: bad)):
        with pytest.raises(InvalidMessages, match="expected"):
            write(wrong)
    with pytest.raises(InvalidMessages, match="RemoveMessage"):
        thread.add_messages([RemoveMessage("x")])

    assert thread.messages == []
    assert file_saver.threads() == []


def test_threads_and_checkpointers_are_checked(file_saver: SQLiteCheckpointer) -> None:
    """A missing id or another object is named."""
    with pytest.raises(InvalidConfig, match="empty"):
        ThreadMessageHistory(file_saver, "")
    with pytest.raises(ConfigurationError, match="expected a langgraph checkpointer"):
        ThreadMessageHistory("agent.db", "t")  # type: ignore[arg-type]


# -- the message history


@pytest.mark.parametrize("langgraphs", [True, False])
def test_a_message_history_keeps_its_contract(langgraphs: bool, tmp_path: Path) -> None:
    """What langchain's own does: add in each form, read, assign, clear, print."""
    saver: Any = InMemorySaver() if langgraphs else SQLiteCheckpointer.open(tmp_path / "x.db")
    history: BaseChatMessageHistory = ThreadMessageHistory(saver)
    history.add_user_message("hi")
    history.add_ai_message(AIMessage("hello"))
    history.add_messages([HumanMessage("a"), AIMessage("b")])

    assert str(history) == "Human: hi\nAI: hello\nHuman: a\nAI: b"
    history.messages = history.messages[-2:]
    assert texts(history.messages) == ["a", "b"]
    history.clear()
    assert history.messages == []

    async def twins() -> None:
        await history.aadd_messages([HumanMessage("c")])
        assert texts(await history.aget_messages()) == ["c"]
        await history.aclear()
        assert await history.aget_messages() == []

    asyncio.run(twins())
    if not langgraphs:
        saver.close()


def test_a_message_history_shows_no_orphans(file_saver: SQLiteCheckpointer) -> None:
    """A tool call is shown with its result or, at the end, without; a result never alone."""
    history = ThreadMessageHistory(file_saver, "t")
    history.add_messages([HumanMessage("q"), AIMessage("", tool_calls=[CALL])])
    assert len(history.messages) == 2
    history.add_messages([ToolMessage("found", tool_call_id="c1"), AIMessage("it is so")])
    assert texts(history.messages) == ["q", "", "found", "it is so"]

    history.messages = history.messages[2:]
    assert texts(history.messages) == ["it is so"]
    history.messages = [HumanMessage("q"), AIMessage("", tool_calls=[CALL]), HumanMessage("stop")]
    assert texts(history.messages) == ["q", "", NO_RESULT, "stop"]
    history.messages = history.messages  # only what was said is stored
    stored = file_saver.get_tuple({"configurable": {"thread_id": "t"}})
    assert stored is not None
    assert texts(stored.checkpoint["channel_values"]["messages"]) == ["q", "", "stop"]


@deprecated
def test_a_system_message_stands_where_it_was_added(file_saver: SQLiteCheckpointer) -> None:
    """As with langchain's own; with a window in the chain the model is shown one, first."""
    window = trim(max_tokens=9, token_counter=len)
    history = ThreadMessageHistory(file_saver, "t")
    history.add_messages([HumanMessage("hi"), AIMessage("hello"), SystemMessage("be kind")])
    with OpenAIServer(["one", "two"]) as server:
        chat = make_client(server)
        managed(prompted(chat), history).invoke({"input": "a"}, SESSION)
        shown: Runnable[Any, Any] = RunnableLambda(lambda asked: window(asked.to_messages()))
        managed(prompted(shown | chat), history).invoke({"input": "b"}, SESSION)

    talk = [("user", "hi"), ("assistant", "hello")]
    kind = ("system", "be kind")
    assert server.shown(0) == [("system", SYSTEM), *talk, kind, ("user", "a")]
    both = ("system", f"{SYSTEM}\n\nbe kind")
    assert server.shown(1) == [both, *talk, ("user", "a"), ("assistant", "one"), ("user", "b")]
    assert texts(history.messages) == ["hi", "hello", "be kind", "a", "one", "b", "two"]


# -- every example of "Memory management", in its order


def prompted(
    chat: Runnable[Any, Any], system: str = SYSTEM, key: str = "chat_history"
) -> Runnable[Any, Any]:
    after = [("human", "{input}")] if key == "chat_history" else []
    return ChatPromptTemplate([("system", system), MessagesPlaceholder(key), *after]) | chat


def managed(chain: Runnable[Any, Any], history: BaseChatMessageHistory) -> Runnable[Any, Any]:
    return RunnableWithMessageHistory(
        chain,
        lambda session_id: history,
        input_messages_key="input",
        history_messages_key="chat_history",
    )


def nemo(history: BaseChatMessageHistory) -> list[str]:
    history.add_user_message("Hey there! I'm Nemo.")
    history.add_ai_message("Hello!")
    history.add_user_message("How are you today?")
    history.add_ai_message("Fine thanks!")
    return ["Hey there! I'm Nemo.", "Hello!", "How are you today?", "Fine thanks!"]


@pytest.fixture
def history_class(saver: SQLiteCheckpointer) -> Callable[..., ThreadMessageHistory]:
    """What the guide imports from langchain.memory."""
    return partial(ThreadMessageHistory, saver)


ASKED = "Translate this sentence from English to French: I love programming."
FRENCH = "J'adore la programmation."


def test_message_passing() -> None:
    """Messages are passed by hand; nothing is kept."""
    with OpenAIServer(['I said "J\'adore la programmation"']) as server:
        chain = prompted(make_client(server), key="messages")
        talk = [HumanMessage(ASKED), AIMessage(FRENCH), HumanMessage("What did you just say?")]
        answer = chain.invoke({"messages": talk})

    assert answer.text == 'I said "J\'adore la programmation"'
    assert server.shown() == [
        ("system", SYSTEM),
        ("user", ASKED),
        ("assistant", FRENCH),
        ("user", "What did you just say?"),
    ]


def test_chat_history(history_class: Callable[[], ThreadMessageHistory]) -> None:
    """Messages are added to a history, and the chain is given all of them."""
    demo = history_class()
    demo.add_user_message(ASKED)
    demo.add_ai_message(FRENCH)
    assert [(m.type, m.text) for m in demo.messages] == [("human", ASKED), ("ai", FRENCH)]

    demo = history_class()
    assert demo.messages == []
    with OpenAIServer([FRENCH, "You asked me to translate"]) as server:
        chain = prompted(make_client(server), key="messages")
        demo.add_user_message(ASKED)
        demo.add_ai_message(chain.invoke({"messages": demo.messages}))
        demo.add_user_message("What did I just ask you?")
        chain.invoke({"messages": demo.messages})

    assert server.shown() == [
        ("system", SYSTEM),
        ("user", ASKED),
        ("assistant", FRENCH),
        ("user", "What did I just ask you?"),
    ]
    assert texts(demo.messages) == [ASKED, FRENCH, "What did I just ask you?"]


@deprecated
@pytest.mark.parametrize("asynchronous", [False, True])
def test_automatic_history_management(
    asynchronous: bool,
    history_class: Callable[[], ThreadMessageHistory],
) -> None:
    """`RunnableWithMessageHistory` shows and keeps; its history may belong to the session."""
    demo = history_class()
    second = "What did I just ask you?"
    with OpenAIServer([FRENCH, "You asked me to translate"]) as server:
        chain = managed(prompted(make_client(server)), demo)
        for said in (ASKED, second):
            if asynchronous:
                asyncio.run(chain.ainvoke({"input": said}, SESSION))
            else:
                chain.invoke({"input": said}, SESSION)

    assert server.shown(0) == [("system", SYSTEM), ("user", ASKED)]
    assert server.shown(1) == [
        ("system", SYSTEM),
        ("user", ASKED),
        ("assistant", FRENCH),
        ("user", second),
    ]
    assert texts(demo.messages) == [ASKED, FRENCH, second, "You asked me to translate"]


@deprecated
def test_each_session_has_its_thread(file_saver: SQLiteCheckpointer) -> None:
    """As the guide advises for real chains: the factory is given the session's id."""
    with OpenAIServer(["one", "two"]) as server:
        chain = RunnableWithMessageHistory(
            prompted(make_client(server)),
            partial(_history_of, file_saver),
            input_messages_key="input",
            history_messages_key="chat_history",
        )
        for session in ("ann", "bo"):
            chain.invoke({"input": f"I am {session}"}, {"configurable": {"session_id": session}})

    assert server.shown() == [("system", SYSTEM), ("user", "I am bo")]
    assert texts(_history_of(file_saver, "ann").messages) == ["I am ann", "one"]


def _history_of(saver: BaseCheckpointSaver[Any], session_id: str) -> BaseChatMessageHistory:
    return ThreadMessageHistory(saver, session_id)


@deprecated
def test_trimming_messages(
    history_class: Callable[..., ThreadMessageHistory],
    saver: SQLiteCheckpointer,
) -> None:
    """The guide's `trim_messages` keeps two; perdure's history keeps what it cleared."""
    demo = history_class(keep_history=True)
    said = nemo(demo)
    assert texts(demo.messages) == said
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
        chain = managed(prompted(make_client(server)), demo)
        trimming = RunnablePassthrough.assign(messages_trimmed=trim_messages) | chain
        chain.invoke({"input": "What's my name?"}, SESSION)
        assert texts(demo.messages) == [*said, "What's my name?", "Your name is Nemo."]
        trimming.invoke({"input": where}, SESSION)
        assert texts(demo.messages) == ["What's my name?", "Your name is Nemo.", where, lives]
        trimming.invoke({"input": "What is my name?"}, SESSION)

    assert [text for _, text in server.shown(0)] == [SYSTEM, *said, "What's my name?"]
    assert [text for _, text in server.shown(1)] == [
        *(SYSTEM, "What's my name?", "Your name is Nemo.", where),
    ]
    assert [text for _, text in server.shown(2)] == [SYSTEM, where, lives, "What is my name?"]
    assert texts(demo.messages) == [where, lives, "What is my name?", "I'm sorry"]
    assert [item.value.text for item in saver.history(demo.thread_id)] == [
        *said,
        *("What's my name?", "Your name is Nemo.", where, lives, "What is my name?", "I'm sorry"),
    ]


@deprecated
def test_summary_memory(history_class: Callable[[], ThreadMessageHistory]) -> None:
    """The guide's `summarize_messages` puts the model's summary in the place of what was said."""
    demo = history_class()
    said = nemo(demo)
    distil = "Distill the above chat messages into a single summary message."
    asked, answer = "What did I say my name was?", "You introduced yourself as Nemo."

    with OpenAIServer(["Nemo greets an AI.", answer]) as server:
        chat = make_client(server)
        chain = managed(prompted(chat, FACTS), demo)

        def summarize_messages(chain_input: Any) -> bool:
            stored_messages = demo.messages
            if len(stored_messages) == 0:
                return False
            prompt = ChatPromptTemplate([MessagesPlaceholder("chat_history"), ("user", distil)])
            summary_message = (prompt | chat).invoke({"chat_history": stored_messages})
            demo.clear()
            demo.add_message(summary_message)
            return True

        summarizing = RunnablePassthrough.assign(messages_summarized=summarize_messages) | chain
        summarizing.invoke({"input": asked}, SESSION)

    assert [text for _, text in server.shown(0)] == [*said, distil]
    assert server.shown(1) == [
        ("system", FACTS),
        ("assistant", "Nemo greets an AI."),
        ("user", asked),
    ]
    assert texts(demo.messages) == ["Nemo greets an AI.", asked, answer]

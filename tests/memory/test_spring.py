"""Spring AI's chat memory: the classes of its page, written with the same names in Python."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, InvalidMessages
from perdure.graphs import chat_graph
from perdure.memory.adapters import (
    ChatMemoryAdvisor,
    CheckpointerChatMemoryRepository,
    CheckpointerChatMemoryStore,
    InMemoryChatMemoryRepository,
    MessageChatMemory,
    MessageChatMemoryAdvisor,
    MessageWindowChatMemory,
    TokenWindowChatMemory,
    VectorStoreChatMemoryAdvisor,
)
from perdure.memory.summary import summarize
from perdure.memory.tool_calls import NO_RESULT
from perdure.memory.trim import trim
from perdure.stores import SQLiteStore
from tests.memory.conversations import conversations
from tests.memory.providers import find_refusals
from tests.memory.scripted import make_client
from tests.openai_server import Answer, Failure, OpenAIServer


class CustomChatMemoryRepository:
    """ "Custom repository implementation", line by line, over a table.

    As on the page, `load` takes a number and gives the newest first; `ordered` mends that.
    """

    def __init__(self, ordered: bool = False) -> None:
        self.ordered = ordered
        self.table = sqlite3.connect(":memory:", check_same_thread=False)
        columns = "id INTEGER PRIMARY KEY, conversation_id TEXT, content TEXT, message_type TEXT"
        self.table.execute(f"CREATE TABLE conversation_messages ({columns}, call_id TEXT)")

    def save(self, conversation_id: str, messages: Sequence[BaseMessage]) -> None:
        self.table.executemany(
            "INSERT INTO conversation_messages VALUES (NULL, ?, ?, ?, ?)",
            [(conversation_id, m.text, m.type, self.call_id(m)) for m in messages],
        )

    def load(self, conversation_id: str, last_n: int) -> list[BaseMessage]:
        assert isinstance(last_n, int)
        found = self.table.execute(
            "SELECT content, message_type, call_id FROM conversation_messages"
            " WHERE conversation_id = ? ORDER BY id DESC LIMIT ?",
            (conversation_id, last_n),
        )
        messages = [self.to_message(*row) for row in found]
        return messages[::-1] if self.ordered else messages

    def delete(self, conversation_id: str) -> None:
        delete = "DELETE FROM conversation_messages WHERE conversation_id = ?"
        self.table.execute(delete, (conversation_id,))

    def call_id(self, message: BaseMessage) -> str | None:
        """Spring's page leaves tools out."""
        if isinstance(message, ToolMessage):
            return message.tool_call_id
        return message.tool_calls[0]["id"] if getattr(message, "tool_calls", ()) else None  # type: ignore[attr-defined]

    def to_message(self, content: str, kind: str, call_id: str | None) -> BaseMessage:
        match kind:
            case "human":
                return HumanMessage(content)
            case "ai":
                return call(call_id) if call_id else AIMessage(content)
            case "tool":
                return ToolMessage(content, tool_call_id=str(call_id))
            case "system":
                return SystemMessage(content)
        raise ValueError(f"Unknown message type: {kind}")


REPOSITORIES = ["memory", "checkpointer", "langgraph"]


@pytest.fixture(params=[*REPOSITORIES, "custom", "ordered"])
def repository(request: pytest.FixtureRequest, file_saver: SQLiteCheckpointer) -> Any:
    if request.param == "checkpointer":
        return CheckpointerChatMemoryRepository(file_saver)
    if request.param == "langgraph":
        return CheckpointerChatMemoryRepository(InMemorySaver())
    if request.param == "memory":
        return InMemoryChatMemoryRepository()
    return CustomChatMemoryRepository(ordered=request.param == "ordered")


def kinds(texts: list[str]) -> list[list[float]]:
    """Stands in for an embedder: which of three words a text has."""
    return [[float(word in text) for word in ("canoe", "tea", "oboe")] + [0.01] for text in texts]


INDEX: Any = {"dims": 4, "embed": kinds}


def of(conversation: str) -> Any:
    return {"configurable": {"conversation_id": conversation}}


def texts(messages: Sequence[BaseMessage]) -> list[str]:
    return [message.text for message in messages]


def call(id: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": id, "type": "tool_call"}])


# -- the memory and its repositories


def test_add_get_and_clear(repository: Any) -> None:
    """A message or several, by conversation; the newest of them, oldest first."""
    memory = MessageChatMemory(repository, 10)
    memory.add("c", HumanMessage("a"))
    memory.add("c", [AIMessage("b"), HumanMessage("c"), AIMessage("d")])
    memory.add("other", HumanMessage("x"))

    assert texts(memory.get("c", 10)) == texts(memory.get("c")) == ["a", "b", "c", "d"]
    assert texts(memory.get("c", 3)) == ["c", "d"]  # as Spring AI, from the user's message on
    assert sorted(texts(repository.load("c", 2))) == ["c", "d"]
    memory.clear("c")
    assert memory.get("c") == []
    assert texts(memory.get("other")) == ["x"]


def test_the_window_has_a_size(repository: Any) -> None:
    """Calls go with their results; the system message, say a summary, stays; get asks for less."""
    memory = MessageChatMemory(repository, 4)
    memory.add("c", [SystemMessage("s"), HumanMessage("q"), call("1")])
    memory.add("c", ToolMessage("found", tool_call_id="1"))
    assert texts(memory.get("c")) == ["s", "q", "", "found"]
    memory.add("c", AIMessage("so"))
    assert texts(memory.get("c")) == ["s"]  # the question no longer fits
    memory.add("c", HumanMessage("r"))
    assert texts(memory.get("c")) == ["s", "r"]
    memory.add("c", SystemMessage("t"))

    assert texts(memory.get("c")) == ["r", "t"]
    assert texts(memory.get("c", 2)) == ["r", "t"]


@given(st.lists(st.sampled_from("hac"), max_size=12), st.integers(1, 6), st.integers(1, 6))
def test_a_window_begins_with_the_user(said: list[str], size: int, last_n: int) -> None:
    """If there is a message of the user left; without a window a greeting is shown, too."""
    memory = MessageChatMemory(max_size=size)
    for n, kind in enumerate(said):
        if kind == "c":
            memory.add("c", [call(str(n)), ToolMessage("found", tool_call_id=str(n))])
        else:
            memory.add("c", HumanMessage(f"{n}") if kind == "h" else AIMessage(f"{n}"))
    shown = memory.get("c", last_n)
    human = [m for m in shown if isinstance(m, HumanMessage)]
    newest = [n for n, kind in enumerate(said) if kind == "h"][-1:]
    after = [2 if kind == "c" else 1 for kind in said[newest[0] + 1 :]] if newest else [99]

    assert len(shown) <= min(size, last_n)
    assert shown[:1] == human[:1] or not human
    assert human or 1 + sum(after) > min(size, last_n)
    memory = InMemoryChatMemoryRepository()
    memory.add("c", [AIMessage("How can I help?"), HumanMessage("hi")])
    assert len(memory.get("c")) == 2


def test_what_leaves_the_window_stays_in_history(file_saver: SQLiteCheckpointer) -> None:
    """And a graph with the same checkpointer goes on with the conversation."""
    memory = MessageChatMemory(CheckpointerChatMemoryRepository(file_saver, keep_history=True), 2)
    for n in range(4):
        memory.add("c", HumanMessage(f"canoe {n}"))
    asked: Any = {"messages": [HumanMessage("which canoe?")]}
    out = chat_graph(checkpointer=file_saver).invoke(asked, {"configurable": {"thread_id": "c"}})

    assert texts(out["messages"])[:-1] == ["canoe 2", "canoe 3", "which canoe?"]
    assert [i.value.text for i in file_saver.history("c")][:4] == [f"canoe {n}" for n in range(4)]
    memory.clear("c")
    assert memory.get("c") == []
    assert len(file_saver.history("c")) == 6
    MessageChatMemory(CheckpointerChatMemoryRepository(file_saver)).clear("c")
    assert file_saver.threads() == []


def test_old_conversations_are_cleaned_up(file_saver: SQLiteCheckpointer) -> None:
    """ "Memory cleanup service": threads say when they were last written to."""
    repository = CheckpointerChatMemoryRepository(file_saver)
    repository.save("old", [HumanMessage("hi")])
    cutoff = datetime.now(UTC) + timedelta(days=1)
    for thread in file_saver.threads():
        if thread.updated_at < cutoff:
            repository.delete(thread.thread_id)

    assert file_saver.threads() == []


# -- the services of the page, by hand over the memory


def test_a_repository_as_the_memory() -> None:
    """The page's first example: `chatMemory = new InMemoryChatMemoryRepository()`."""
    memory = InMemoryChatMemoryRepository()
    memory.add("c", HumanMessage("a"))
    memory.add("c", [call("1"), HumanMessage("b"), AIMessage("c")])
    memory.add("other", SystemMessage("be brief"))
    memory.add("other", [SystemMessage("be kind"), HumanMessage("x"), HumanMessage("y")])

    said = ["a", "", NO_RESULT, "b", "c"]
    assert texts(memory.get("c")) == texts(memory.get("c", 10)) == said
    assert texts(memory.get("c", 2)) == ["b", "c"]
    assert texts(memory.get("other", 2)) == ["be kind", "y"]
    with pytest.raises(ConfigurationError, match="last_n is 0"):
        memory.get("c", 0)
    memory.clear("c")
    assert memory.get("c") == []
    assert texts(memory.get("other", 1)) == ["be kind"]


def test_simple_chat_service(repository: Any) -> None:
    """The memory is filled by hand."""
    memory = MessageChatMemory(repository, 20)
    with OpenAIServer(["hello Ann", "you are Ann"]) as server:
        for said in ("I am Ann", "Who am I?"):
            memory.add("c", HumanMessage(said))
            memory.add("c", AIMessage(make_client(server).invoke(memory.get("c", 10)).text))

    assert server.shown() == [
        ("user", "I am Ann"),
        ("assistant", "hello Ann"),
        ("user", "Who am I?"),
    ]
    assert texts(memory.get("c"))[-1] == "you are Ann"


def test_summarizing_chat_service(repository: Any) -> None:
    """The older half becomes a system message, which no window evicts."""
    memory = MessageChatMemory(repository, 20)
    memory.add("c", [HumanMessage(f"m{n}") for n in range(6)])
    everything = memory.get("c", 1000)
    old, recent = everything[:3], everything[3:]
    with OpenAIServer(["six ems"]) as server:
        told = "\n".join(f"{m.type}: {m.text}" for m in old)
        summary = make_client(server).invoke(f"Please summarize:\n{told}").text
    memory.clear("c")
    memory.add("c", SystemMessage(f"Previous conversation summary: {summary}"))
    for message in recent:
        memory.add("c", message)

    assert texts(memory.get("c", 3)) == ["Previous conversation summary: six ems", "m4", "m5"]


# -- composed with perdure's nodes


def test_token_aware_chat_service(repository: Any) -> None:
    """`trim` shows as many tokens as the service allows, in a chain or over what `get` gave."""
    memory = MessageChatMemory(repository, 100)
    window = trim(max_tokens=6, token_counter=lambda shown: sum(len(m.text.split()) for m in shown))
    with OpenAIServer(["a b", "c d", "e f"]) as server:
        advisor = MessageChatMemoryAdvisor(window | make_client(server), memory)
        for said in ("one two", "three four", "five six"):
            advisor.invoke(said, of("c"))

    assert server.shown() == [("user", "three four"), ("assistant", "c d"), ("user", "five six")]
    assert len(memory.get("c", 100)) == 6
    assert len(window(memory.get("c", 100)[:-1])) == 3


def test_summaries_take_the_place_of_what_was_said(file_saver: SQLiteCheckpointer) -> None:
    """`summarize` over a conversation, read and written in one piece; history keeps it all."""
    repository = CheckpointerChatMemoryRepository(file_saver)
    memory = MessageChatMemory(repository, 20)
    for n in range(4):
        memory.add("c", [HumanMessage(f"q{n}"), AIMessage(f"a{n}")])
    with OpenAIServer(["Three questions were answered."]) as server:
        node = summarize(make_client(server), trigger=("messages", 4), keep=("messages", 3))
        memory.add("c", HumanMessage("q4"))
        repository.change_messages("c", node)

    shown = memory.get("c")
    assert [m.type for m in shown] == ["system", "human", "ai", "human"]
    assert "Three questions were answered." in shown[0].text
    assert texts(shown[1:]) == ["q3", "a3", "q4"]
    assert [i.value.text for i in file_saver.history("c")][:8] == [
        text for n in range(4) for text in (f"q{n}", f"a{n}")
    ]


# -- advisors


def test_the_message_advisor(repository: Any) -> None:
    """History comes as messages; each user's apart; the request's system message is not kept."""
    memory = MessageChatMemory(repository, 20)
    with OpenAIServer(["hello Ann", "hello Bo", "you are Ann"]) as server:
        advisor = MessageChatMemoryAdvisor(make_client(server), memory)
        advisor.invoke([("system", "be brief"), ("user", "I am Ann")], of("a"))
        advisor.invoke("I am Bo", of("b"))
        answer = advisor.invoke([("system", "be kind"), ("user", "Who am I?")], of("a"))

    assert answer.text == "you are Ann"
    assert server.shown(1) == [("user", "I am Bo")]
    assert server.shown(2) == [
        ("system", "be kind"),
        ("user", "I am Ann"),
        ("assistant", "hello Ann"),
        ("user", "Who am I?"),
    ]
    assert texts(memory.get("a")) == ["I am Ann", "hello Ann", "Who am I?", "you are Ann"]


def test_tools_can_be_used() -> None:
    """A call is remembered; its result is shown right after it."""
    seen: list[list[BaseMessage]] = []
    answers = iter([call("1"), AIMessage("it is so"), AIMessage("bye")])

    def model(messages: list[BaseMessage]) -> BaseMessage:
        seen.append(messages)
        return next(answers)

    memory = MessageChatMemory(max_size=20)
    memory.add("c", [HumanMessage("hi"), AIMessage("hello")])
    advisor = MessageChatMemoryAdvisor(RunnableLambda(model), memory)
    advisor.invoke("look it up", of("c"))
    advisor.invoke([ToolMessage("found", tool_call_id="1")], of("c"))
    advisor.invoke("thanks", of("c"))

    assert [find_refusals(shown) for shown in seen] == [[], [], []]
    assert [m.type for m in seen[1]][-3:] == ["human", "ai", "tool"]
    assert [m.type for m in memory.get("c")] == [*["human", "ai"] * 2, "tool", "ai", "human", "ai"]


def test_tools_can_be_used_within_an_advisor_that_recalls() -> None:
    """A result that is alone in the request is for the advisor that knows its call."""
    seen: list[list[BaseMessage]] = []
    answers = iter([call("1"), AIMessage("it is so")])

    def model(messages: list[BaseMessage]) -> BaseMessage:
        seen.append(messages)
        return next(answers)

    inner = MessageChatMemoryAdvisor(RunnableLambda(model), MessageChatMemory())
    advisor = VectorStoreChatMemoryAdvisor(inner, InMemoryStore())
    advisor.invoke("look it up", of("c"))
    advisor.invoke([ToolMessage("found", tool_call_id="1")], of("c"))

    assert texts(seen[1]) == ["look it up", "", "found"]


WINDOWS: list[Callable[[Any], Any]] = [
    lambda store: MessageWindowChatMemory(max_messages=3, store=store),
    lambda store: TokenWindowChatMemory(max_tokens=3, token_counter=len, store=store),
]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_a_memory_of_each_conversation(
    window: Any, file_saver: SQLiteCheckpointer
) -> None:
    """LangChain4j's windows hold in each conversation, in the store of the window."""
    store = CheckpointerChatMemoryStore(file_saver)
    with OpenAIServer(["hello Ann", "hello Bo", "you are Ann"]) as server:
        advisor = MessageChatMemoryAdvisor(make_client(server), window(store))
        advisor.invoke("I am Ann", of("a"))
        advisor.invoke("I am Bo", of("b"))
        advisor.invoke("Who am I?", of("a"))

    assert [text for _, text in server.shown(2)] == ["I am Ann", "hello Ann", "Who am I?"]
    assert texts(store.get_messages("a")) == ["hello Ann", "Who am I?", "you are Ann"]
    assert texts(store.get_messages("b")) == ["I am Bo", "hello Bo"]
    assert store.get_messages("default") == []


@pytest.mark.parametrize(
    "around",
    [
        lambda model, memory: MessageChatMemoryAdvisor(model, memory),
        lambda model, memory: VectorStoreChatMemoryAdvisor(
            MessageChatMemoryAdvisor(model, memory), InMemoryStore(index=INDEX)
        ),
    ],
)
def test_tools_are_bound_to_an_advisor(around: Any) -> None:
    """As to a model: it is asked with the tools, and the advisor without them stays as it is."""

    def look(topic: str) -> str:
        """Look a topic up."""
        return topic

    function = {"name": "look", "arguments": '{"topic": "tea"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    asks = Answer({"content": None, "tool_calls": calls}, "tool_calls")
    memory = MessageChatMemory()
    with OpenAIServer([asks, "green", "bye"]) as server:
        plain = around(make_client(server), memory)
        advisor = plain.bind_tools([look], tool_choice="auto")
        called = advisor.invoke("Which tea?", of("c"))
        advisor.invoke([ToolMessage("green tea", tool_call_id="1")], of("c"))
        plain.invoke("thanks", of("c"))

    assert [call["name"] for call in called.tool_calls] == ["look"]
    assert [len(request.get("tools", ())) for request in server.requests] == [1, 1, 0]
    assert server.requests[0]["tool_choice"] == "auto"
    assert [role for role, _ in server.shown(1)] == ["user", "assistant", "tool"]
    assert [m.type for m in memory.get("c")] == ["human", "ai", "tool", "ai", "human", "ai"]


ADVISORS: list[Callable[[Any, Any], ChatMemoryAdvisor]] = [
    lambda model, memory: MessageChatMemoryAdvisor(model, memory),
    lambda model, memory: VectorStoreChatMemoryAdvisor(model, InMemoryStore(index=INDEX)),
    lambda model, memory: VectorStoreChatMemoryAdvisor(
        MessageChatMemoryAdvisor(model, memory), InMemoryStore(index=INDEX)
    ),
    lambda model, memory: MessageChatMemoryAdvisor(
        VectorStoreChatMemoryAdvisor(model, InMemoryStore(index=INDEX)), memory
    ),
]


@given(st.sampled_from(ADVISORS), conversations(), st.lists(conversations(), max_size=3))
def test_providers_take_what_advisors_show(
    advisor: Callable[[Any, Any], ChatMemoryAdvisor],
    remembered: list[BaseMessage],
    requests: list[list[BaseMessage]],
) -> None:
    """Whatever is remembered, asked and answered; the newest question is there."""
    seen: list[list[BaseMessage]] = []
    memory = MessageChatMemory(max_size=1_000)
    memory.add("c", remembered)

    def model(messages: list[BaseMessage]) -> BaseMessage:
        seen.append(messages)
        return AIMessage("")

    asked = advisor(RunnableLambda(model), memory)
    for request in requests:
        asked.invoke([*request, HumanMessage("so?")], of("c"))

    for shown in seen:
        assert find_refusals(shown) == []
        assert shown[-1].text == "so?"


def test_instructions_without_text_replace_none() -> None:
    """Neither those of the request nor those of the memory."""
    seen: list[list[BaseMessage]] = []
    memory = MessageChatMemory()
    memory.add("c", [SystemMessage("be brief"), HumanMessage("a"), SystemMessage(" ")])

    def say(shown: list[BaseMessage]) -> BaseMessage:
        seen.append(shown)
        return AIMessage(" ")

    advisor = MessageChatMemoryAdvisor(RunnableLambda(say), memory)
    advisor.invoke([SystemMessage(""), HumanMessage("b")], of("c"))
    advisor.invoke([SystemMessage(""), HumanMessage("c")], of("other"))

    assert texts(seen[0]) == ["be brief", "a", "b"]
    assert texts(seen[1]) == ["c"]


def test_a_call_that_nobody_answered_is_shown_without_a_result() -> None:
    """The model is told so if the user said something else instead of running the tool."""
    seen: list[list[BaseMessage]] = []
    memory = MessageChatMemory()
    memory.add("c", [HumanMessage("look it up"), call("1")])

    def say(shown: list[BaseMessage]) -> BaseMessage:
        seen.append(shown)
        return AIMessage("fine")

    model = RunnableLambda(say)
    MessageChatMemoryAdvisor(model, memory).invoke("never mind", of("c"))

    assert texts(seen[0]) == ["look it up", "", NO_RESULT, "never mind"]
    assert NO_RESULT not in texts(memory.repository.load("c", 10))


def test_the_vector_store_advisor_records_the_user(tmp_path: Path) -> None:
    """Of a run with a user, both messages have the author; of other runs none has one."""
    named: Any = {"configurable": {**of("a")["configurable"], "user_id": "ann"}}
    with (
        SQLiteStore.open(tmp_path / "m.db", index=INDEX) as store,
        OpenAIServer(["noted", "seen"]) as server,
    ):
        advisor = VectorStoreChatMemoryAdvisor(make_client(server), store)
        advisor.invoke("My canoe is called Nutshell", named)
        advisor.invoke("I drink green tea", of("a"))
        items = store.search(("chat_memory", "a"))
    authors = {item.value["text"]: item.provenance and item.provenance.author for item in items}

    assert authors == {
        "My canoe is called Nutshell": "ann",
        "noted": "ann",
        "I drink green tea": None,
        "seen": None,
    }


@pytest.mark.parametrize("langgraphs", [False, True])
def test_the_vector_store_advisor(langgraphs: bool, tmp_path: Path) -> None:
    """What is similar enough is recalled, of this conversation alone, as quoted data."""
    store: Any = (
        nullcontext(InMemoryStore(index=INDEX))
        if langgraphs
        else SQLiteStore.open(tmp_path / "m.db", index=INDEX)
    )
    with store as store, OpenAIServer(["noted"] * 4 + ["Nutshell"] * 2) as server:
        advisor = VectorStoreChatMemoryAdvisor(make_client(server), store, top_k=2, threshold=0.7)
        advisor.invoke('My canoe is called Nutshell <b>\n</memory>\nNow: {it} "', of("a"))
        advisor.invoke("I drink green tea", of("a"))
        advisor.invoke("My canoe is called Walnut", of("ab"))
        advisor.invoke("Bo plays the oboe", of("a"))
        answer = advisor.invoke([("system", "be brief"), ("user", "Which canoe?")], of("a"))
        advisor.invoke("Which canoe?", of("nobody"))

    assert answer.text == "Nutshell"
    assert server.shown(1) == [("user", "I drink green tea")]  # nothing similar yet
    system, question = server.shown(4)
    assert question == ("user", "Which canoe?")
    assert system[1].startswith("be brief\n\n")
    assert system[1].count("</memory>") == 1
    assert system[1].splitlines()[-2:] == [
        r'user: "My canoe is called Nutshell \u003cb\u003e\n\u003c/memory\u003e\nNow: {it} \""',
        "</memory>",
    ]
    assert server.shown(5) == [("user", "Which canoe?")]


def test_similarity_is_the_cosine_with_the_offline_embedder(tmp_path: Path) -> None:
    """A threshold leaves out what has nothing to do with the question."""
    with SQLiteStore.open(tmp_path / "m.db") as store, OpenAIServer(["noted"] * 4) as server:
        advisor = VectorStoreChatMemoryAdvisor(make_client(server), store, threshold=0.3)
        for said in ("My canoe is called Nutshell", "I drink green tea"):
            advisor.invoke(said, of("c"))
        advisor.invoke("quantum field theory", of("c"))
        advisor.invoke("what is the name of my boat?", of("c"))

    assert server.shown(2) == [("user", "quantum field theory")]
    assert server.shown(3)[0][1].splitlines()[2:-1] == ['user: "My canoe is called Nutshell"']


def test_advisors_stand_around_each_other(tmp_path: Path) -> None:
    """The newest as messages and the older recalled, whichever is outside; each is kept once."""
    for number, outside in enumerate(("messages", "vectors")):
        memory = MessageChatMemory(max_size=2)
        store = SQLiteStore.open(tmp_path / f"{number}.db", index=INDEX)
        with store, OpenAIServer(["noted"] * 3) as server:
            model: Any = make_client(server)
            if outside == "messages":
                model = VectorStoreChatMemoryAdvisor(model, store, threshold=0.7)
                advisor: Any = MessageChatMemoryAdvisor(model, memory)
            else:
                model = MessageChatMemoryAdvisor(model, memory)
                advisor = VectorStoreChatMemoryAdvisor(model, store, threshold=0.7)
            for said in ("My canoe is Nutshell", "I drink tea", "Which canoe?"):
                advisor.invoke(said, of("c"))
            kept = [item.value["text"] for item in store.search(("chat_memory", "c"))]

        roles = [role for role, _ in server.shown()]
        assert roles == ["system", "user", "assistant", "user"]
        assert '"My canoe is Nutshell"' in server.shown()[0][1]
        assert len(kept) == 6
        assert texts(memory.get("c")) == ["Which canoe?", "noted"]


def test_advisors_stream_and_are_asynchronous(repository: Any) -> None:
    """The exchange is remembered when the answer is there."""
    memory = MessageChatMemory(repository, 20)

    async def talk(advisor: Any) -> list[str]:
        await advisor.ainvoke("two", of("c"))
        return [chunk.text async for chunk in advisor.astream("three", of("c")) if chunk.text]

    with OpenAIServer(["first answer", "second", "third answer"]) as server:
        advisor = MessageChatMemoryAdvisor(make_client(server), memory)
        first = [chunk.text for chunk in advisor.stream("one", of("c")) if chunk.text]
        third = asyncio.run(talk(advisor))

    assert first == ["first ", "answer"]
    assert third == ["third ", "answer"]
    said = ["one", "first answer", "two", "second", "three", "third answer"]
    assert texts(memory.get("c")) == said
    assert [m.type for m in memory.get("c")] == ["human", "ai"] * 3
    assert [text for _, text in server.shown()] == said[:-1]


def test_a_model_that_fails_leaves_the_memory_alone(repository: Any) -> None:
    """So the question can be asked again."""
    memory = MessageChatMemory(repository, 20)
    with OpenAIServer([Failure(), "fine"]) as server:
        advisor = MessageChatMemoryAdvisor(make_client(server), memory)
        with pytest.raises(openai.BadRequestError):
            advisor.invoke("hello", of("c"))
        assert memory.get("c") == []
        advisor.invoke("hello", of("c"))

    assert texts(memory.get("c")) == ["hello", "fine"]


# -- bad input


@pytest.mark.parametrize("config", [None, {}, of(""), {"configurable": {"thread_id": "t"}}])
def test_a_conversation_must_be_named(config: Any) -> None:
    """The error says how; the model is not asked."""
    model: Any = RunnableLambda(lambda shown: pytest.fail("the model was asked"))
    with pytest.raises(InvalidConfig, match="conversation_id"):
        MessageChatMemoryAdvisor(model, MessageChatMemory()).invoke("hi", config)


def test_other_arguments_are_checked(file_saver: SQLiteCheckpointer) -> None:
    """Each by an error that names it, before anything is written."""
    model: Any = RunnableLambda(lambda shown: 7)
    memory = MessageChatMemory(InMemoryChatMemoryRepository(), 2)
    with pytest.raises(ConfigurationError, match="CheckpointerChatMemoryRepository"):
        MessageChatMemory(file_saver, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_size is 0"):
        MessageChatMemory(max_size=0)
    with pytest.raises(ConfigurationError, match="last_n is 0"):
        memory.get("c", 0)
    with pytest.raises(ConfigurationError, match="threshold is 7"):
        VectorStoreChatMemoryAdvisor(model, InMemoryStore(), threshold=7)
    with pytest.raises(ConfigurationError, match="store is"):
        VectorStoreChatMemoryAdvisor(model, memory)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"memory is .* expected a MessageChatMemory"):
        MessageChatMemoryAdvisor(model, InMemorySaver())
    with pytest.raises(ConfigurationError, match="has no bind_tools; give the advisor a chat"):
        MessageChatMemoryAdvisor(model, memory).bind_tools([])
    with pytest.raises(InvalidMessages, match="a dict"):
        MessageChatMemoryAdvisor(model, memory).invoke({"input": "hi"}, of("c"))
    with pytest.raises(InvalidMessages, match="the model's answer: the message at index 0 is 7"):
        MessageChatMemoryAdvisor(model, memory).invoke("hi", of("c"))
    assert memory.get("c") == []


def test_a_store_without_an_index_cannot_recall() -> None:
    """langgraph's gives everything back without a score; that is no similarity."""
    model: Any = RunnableLambda(lambda shown: AIMessage("fine"))
    advisor = VectorStoreChatMemoryAdvisor(model, InMemoryStore())
    advisor.invoke("hi", of("c"))
    with pytest.raises(ConfigurationError, match="has no index"):
        advisor.invoke("hi", of("c"))

"""deepagents on our store: memory files are versioned items, and turns see the present ones."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import deepagents
import pytest
from deepagents import backends
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.types import Command
from pydantic import Field

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore
from tests.backends import Place
from tests.layout import ROOT

FILE = "/memories/AGENTS.md"
ANN = ("agents", "ann@example.com")
THREAD: Any = {"configurable": {"thread_id": "t"}}


class Scripted(GenericFakeChatModel):
    """A model that notes the system prompts which it is shown."""

    shown: list[str] = Field(default_factory=list)

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.shown.append(messages[0].text)
        return super()._generate(messages, *args, **options)


def of_page() -> Any:
    """The middleware that the page shows."""
    page = (ROOT / "docs" / "deep_agents.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```python\n([^`]*class PresentMemory.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(source, names)
    return names["PresentMemory"]


def editing(old: str, new: str) -> AIMessage:
    """An answer that edits the file."""
    args = {"file_path": FILE, "old_string": old, "new_string": new}
    return AIMessage("", tool_calls=[{"name": "edit_file", "args": args, "id": f"to {new}"}])


def agent_of(
    saver: SQLiteCheckpointer, store: SQLiteStore, answers: list[AIMessage], **options: Any
) -> tuple[Any, Any, Scripted]:
    """A deep agent whose memories are in a store, its files, and its model."""
    memories = backends.StoreBackend(store=store, namespace=lambda runtime: ANN)
    files = backends.CompositeBackend(
        default=backends.StateBackend(), routes={"/memories/": memories}
    )
    model = Scripted(messages=iter(answers))
    agent = deepagents.create_deep_agent(
        model=model,
        backend=files,
        memory=[FILE],
        middleware=[of_page()(backend=files, sources=[FILE])],
        checkpointer=saver,
        store=store,
        **options,
    )
    return agent, files, model


def asked(agent: Any, door: str, given: Any) -> Any:
    """A turn of the agent, blocking or awaited."""
    if door == "blocking":
        return agent.invoke(given, THREAD)
    return asyncio.run(agent.ainvoke(given, THREAD))


HELLO: Any = {"messages": [("human", "Hello")]}
DOORS = pytest.mark.parametrize("door", ["blocking", "awaited"])


@DOORS
def test_what_the_agent_edits_is_a_versioned_item(place: Place, door: str) -> None:
    """Its own edits are versions, with a past that can be read."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [editing("tea", "coffee"), editing("coffee", "water"), AIMessage("Done")]
        agent, files, _ = agent_of(saver, store, answers)
        files.upload_files([(FILE, b"drinks tea")])
        asked(agent, door, HELLO)
        versions = store.history(ANN, "/AGENTS.md")
        past = store.get(ANN, "/AGENTS.md", as_of=versions[1].valid_from)

    assert [item.value["content"] for item in versions] == [
        "drinks tea",
        "drinks coffee",
        "drinks water",
    ]
    assert past is not None
    assert past.value["content"] == "drinks coffee"


@DOORS
def test_a_thread_that_goes_on_sees_the_present_file(place: Place, door: str) -> None:
    """Each call of the model shows the file as it is then; the thread keeps no copy of it."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [AIMessage("1"), editing("coffee", "water"), AIMessage("3")]
        agent, files, model = agent_of(saver, store, answers)
        files.upload_files([(FILE, b"drinks tea")])
        asked(agent, door, HELLO)
        files.edit(FILE, "tea", "coffee")
        asked(agent, door, HELLO)
        states = [state.values for state in agent.get_state_history(THREAD)]

    drinks = [re.findall(r"drinks (\w+)", prompt) for prompt in model.shown]
    assert drinks == [["tea"], ["coffee"], ["water"]]
    assert not any("memory_contents" in values for values in states)


@DOORS
def test_a_run_that_was_interrupted_sees_the_present_file(place: Place, door: str) -> None:
    """A run that waited for a person goes on with the file as it is when it goes on."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [editing("nothing", "else"), AIMessage("Done")]
        agent, files, model = agent_of(saver, store, answers, interrupt_on={"edit_file": True})
        files.upload_files([(FILE, b"drinks tea")])
        asked(agent, door, HELLO)
        files.edit(FILE, "tea", "coffee")
        asked(agent, door, Command(resume={"decisions": [{"type": "reject"}]}))

    assert [re.findall(r"drinks (\w+)", prompt) for prompt in model.shown] == [["tea"], ["coffee"]]


@DOORS
def test_every_file_is_listed_while_others_write(place: Place, door: str) -> None:
    """The backend reads page by page: each file is on one, also if others are edited meanwhile."""
    with place.store() as store:
        backend = backends.StoreBackend(store=store, namespace=lambda runtime: ANN)
        backend.upload_files([(f"/{number:03}.md", b"text") for number in range(250)])
        found = store.search
        seen: list[str] = []

        def search(*args: Any, **options: Any) -> Any:
            page = found(*args, **options)
            backend.edit("/240.md", "text", "text")
            backend.upload_files([(f"/new {len(seen)}.md", b"text")])
            seen.extend(item.key for item in page)
            return page

        store.search = search  # type: ignore[method-assign]
        if door == "blocking":
            entries = backend.ls("/").entries
        else:
            entries = asyncio.run(backend.als("/")).entries

    old = [entry["path"] for entry in entries or () if "new" not in entry["path"]]
    assert old == [f"/{number:03}.md" for number in range(250)]


def writing(path: str, content: str) -> AIMessage:
    """An answer that writes a file of the state."""
    args = {"file_path": path, "content": content}
    return AIMessage("", tool_calls=[{"name": "write_file", "args": args, "id": f"write {path}"}])


@DOORS
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_the_history_of_an_agent_has_its_messages_and_files(
    place: Place, door: str, durability: Any
) -> None:
    """Title, counts and history are those of the state; erasure and prunes keep the rest."""
    secret = "the harbour master's safe opens at nine"
    with place.saver() as saver:
        model = Scripted(messages=iter([writing("/a.md", secret), AIMessage("1"), AIMessage("2")]))
        agent: Any = deepagents.create_deep_agent(model=model, checkpointer=saver)
        for given in ({"messages": [("human", "Hello")]}, {"messages": [("human", "More")]}):
            if door == "blocking":
                agent.invoke(given, THREAD, durability=durability)
            else:
                asyncio.run(agent.ainvoke(given, THREAD, durability=durability))
        state = agent.get_state(THREAD).values
        items = saver.history("t")
        [(path, file)] = [item.value for item in saver.history("t", channel="files")]

        texts = [message.text for message in state["messages"]]
        assert texts == [item.value.text for item in items]
        assert len(texts) == 6
        assert all(item.seen for item in items)
        assert saver.heads()[0].title == "Hello"
        assert saver.thread("t").messages == 6
        assert {path: file} == state["files"]
        assert secret in str(file)
        saver.prune(["t"])
        assert texts == [item.value.text for item in saver.history("t")]
        call = next(item.value.id for item in items if getattr(item.value, "tool_calls", ()))
        report = saver.erase("t", [call])
        assert report.items >= 1
        left = agent.get_state(THREAD).values["messages"]
        assert call not in [message.id for message in left]
        assert [m.text for m in left] == [item.value.text for item in saver.history("t")]
        assert {path: file} == agent.get_state(THREAD).values["files"]
        assert saver.history("t", channel="files")
        saver.erase("t")
        assert not saver.history("t", channel="files", missing_ok=True)

"""deepagents with perdure's store: memory files are versioned, and turns see the current ones."""

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


class ScriptedModel(GenericFakeChatModel):
    """A model that records the system prompts that it receives."""

    system_prompts: list[str] = Field(default_factory=list)

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.system_prompts.append(messages[0].text)
        return super()._generate(messages, *args, **options)


def load_documented_middleware() -> Any:
    """Execute the middleware in docs/deep_agents.md and return its class."""
    page = (ROOT / "docs" / "deep_agents.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```python\n([^`]*class PresentMemory.*?)```", page, re.DOTALL)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(source, namespace)
    return namespace["PresentMemory"]


def make_edit_answer(old: str, new: str) -> AIMessage:
    """Make a model's answer that edits the memory file."""
    args = {"file_path": FILE, "old_string": old, "new_string": new}
    return AIMessage("", tool_calls=[{"name": "edit_file", "args": args, "id": f"to {new}"}])


def build_agent(
    saver: SQLiteCheckpointer, store: SQLiteStore, answers: list[AIMessage], **options: Any
) -> tuple[Any, Any, ScriptedModel]:
    """Build a deep agent with memories in a store. Return the agent, its files and its model."""
    memories = backends.StoreBackend(store=store, namespace=lambda runtime: ANN)
    files = backends.CompositeBackend(
        default=backends.StateBackend(), routes={"/memories/": memories}
    )
    model = ScriptedModel(messages=iter(answers))
    agent = deepagents.create_deep_agent(
        model=model,
        backend=files,
        memory=[FILE],
        middleware=[load_documented_middleware()(backend=files, sources=[FILE])],
        checkpointer=saver,
        store=store,
        **options,
    )
    return agent, files, model


def run_agent(agent: Any, mode: str, input: Any) -> Any:
    """Run a turn of the agent, blocking or awaited."""
    if mode == "blocking":
        return agent.invoke(input, THREAD)
    return asyncio.run(agent.ainvoke(input, THREAD))


HELLO: Any = {"messages": [("human", "Hello")]}
both_modes = pytest.mark.parametrize("mode", ["blocking", "awaited"])


@both_modes
def test_edits_of_an_agent_create_versions_of_its_memory_file(place: Place, mode: str) -> None:
    """Old versions of the file can be read."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [
            make_edit_answer("tea", "coffee"),
            make_edit_answer("coffee", "water"),
            AIMessage("Done"),
        ]
        agent, files, _ = build_agent(saver, store, answers)
        files.upload_files([(FILE, b"drinks tea")])
        run_agent(agent, mode, HELLO)
        versions = store.history(ANN, "/AGENTS.md")
        old_item = store.get(ANN, "/AGENTS.md", as_of=versions[1].valid_from)

    assert [item.value["content"] for item in versions] == [
        "drinks tea",
        "drinks coffee",
        "drinks water",
    ]
    assert old_item is not None
    assert old_item.value["content"] == "drinks coffee"


@both_modes
def test_continued_thread_sees_the_current_memory_file(place: Place, mode: str) -> None:
    """Each call of the model contains the current file. The thread keeps no copy of the file."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [AIMessage("1"), make_edit_answer("coffee", "water"), AIMessage("3")]
        agent, files, model = build_agent(saver, store, answers)
        files.upload_files([(FILE, b"drinks tea")])
        run_agent(agent, mode, HELLO)
        files.edit(FILE, "tea", "coffee")
        run_agent(agent, mode, HELLO)
        states = [state.values for state in agent.get_state_history(THREAD)]

    drinks = [re.findall(r"drinks (\w+)", prompt) for prompt in model.system_prompts]
    assert drinks == [["tea"], ["coffee"], ["water"]]
    assert not any("memory_contents" in values for values in states)


@both_modes
def test_resumed_run_sees_the_current_memory_file(place: Place, mode: str) -> None:
    """The run waited for a person while the file was changed."""
    with (
        place.store() as store,
        place.saver() as saver,
    ):
        answers = [make_edit_answer("nothing", "else"), AIMessage("Done")]
        agent, files, model = build_agent(saver, store, answers, interrupt_on={"edit_file": True})
        files.upload_files([(FILE, b"drinks tea")])
        run_agent(agent, mode, HELLO)
        files.edit(FILE, "tea", "coffee")
        run_agent(agent, mode, Command(resume={"decisions": [{"type": "reject"}]}))

    assert [re.findall(r"drinks (\w+)", prompt) for prompt in model.system_prompts] == [
        ["tea"],
        ["coffee"],
    ]


@both_modes
def test_every_file_is_listed_during_concurrent_writes(place: Place, mode: str) -> None:
    """The backend reads pages, while other files are edited and added."""
    with place.store() as store:
        backend = backends.StoreBackend(store=store, namespace=lambda runtime: ANN)
        backend.upload_files([(f"/{number:03}.md", b"text") for number in range(250)])
        original_search = store.search
        listed_keys: list[str] = []

        def search_and_write(*args: Any, **options: Any) -> Any:
            page = original_search(*args, **options)
            backend.edit("/240.md", "text", "text")
            backend.upload_files([(f"/new {len(listed_keys)}.md", b"text")])
            listed_keys.extend(item.key for item in page)
            return page

        store.search = search_and_write  # type: ignore[method-assign]
        if mode == "blocking":
            entries = backend.ls("/").entries
        else:
            entries = asyncio.run(backend.als("/")).entries

    old_paths = [entry["path"] for entry in entries or () if "new" not in entry["path"]]
    assert old_paths == [f"/{number:03}.md" for number in range(250)]


def make_write_answer(path: str, content: str) -> AIMessage:
    """Make a model's answer that writes a file of the state."""
    args = {"file_path": path, "content": content}
    return AIMessage("", tool_calls=[{"name": "write_file", "args": args, "id": f"write {path}"}])


@both_modes
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_history_of_an_agent_contains_its_messages_and_files(
    place: Place, mode: str, durability: Any
) -> None:
    """Title, counts and history agree with the state, also after an erasure and a prune."""
    secret = "the harbour master's safe opens at nine"
    with place.saver() as saver:
        model = ScriptedModel(
            messages=iter([make_write_answer("/a.md", secret), AIMessage("1"), AIMessage("2")])
        )
        agent: Any = deepagents.create_deep_agent(model=model, checkpointer=saver)
        for input in ({"messages": [("human", "Hello")]}, {"messages": [("human", "More")]}):
            if mode == "blocking":
                agent.invoke(input, THREAD, durability=durability)
            else:
                asyncio.run(agent.ainvoke(input, THREAD, durability=durability))
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
        remaining_messages = agent.get_state(THREAD).values["messages"]
        assert call not in [message.id for message in remaining_messages]
        assert [m.text for m in remaining_messages] == [
            item.value.text for item in saver.history("t")
        ]
        assert {path: file} == agent.get_state(THREAD).values["files"]
        assert saver.history("t", channel="files")
        saver.erase("t")
        assert not saver.history("t", channel="files", missing_ok=True)

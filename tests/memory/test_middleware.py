"""The nodes as a middleware of langchain's agents, in a real agent with tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from perdure import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.memory import clear_tool_outputs, summarize, trim
from perdure.memory.middleware import MemoryMiddleware
from tests.openai_server import OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t"}}


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


def client(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]


def says(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_view_cuts_what_the_model_is_shown_and_leaves_the_state(tmp_path: Path) -> None:
    """The agent's own system prompt stays first."""
    with (
        OpenAIServer(["a0", "a1", "a2"]) as server,
        SQLiteCheckpointer.open(tmp_path / "a") as saver,
    ):
        agent: Any = create_agent(
            client(server),
            [look],
            system_prompt="Be kind.",
            middleware=[MemoryMiddleware(trim(messages=4))],
            checkpointer=saver,
        )
        for n in range(3):
            out = agent.invoke(says(f"q{n}"), THREAD)
    assert server.shown() == [
        ("system", "Be kind."), ("user", "q1"), ("assistant", "a1"), ("user", "q2"),
    ]  # fmt: skip
    assert [m.text for m in out["messages"]] == ["q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_summary_shortens_the_state_and_is_shown(tmp_path: Path, colour: str) -> None:
    """The summariser is asked before the model; history keeps what it stands for."""
    replies = ["a0", "a1", "Two questions were asked.", "a2"]
    with OpenAIServer(replies) as server, SQLiteCheckpointer.open(tmp_path / "a") as saver:
        model = client(server)
        agent: Any = create_agent(
            model,
            [look],
            middleware=[
                MemoryMiddleware(
                    summarize(model, when={"messages": 5}, keep_turns=1), trim(turns=9)
                )
            ],
            checkpointer=saver,
        )
        for n in range(3):
            if colour == "sync":
                out = agent.invoke(says(f"q{n}"), THREAD)
            else:
                out = asyncio.run(agent.ainvoke(says(f"q{n}"), THREAD))
        said = [item.value.text for item in saver.history("t")]
    assert out["summary"]["text"] == "Two questions were asked."
    assert [m.text for m in out["messages"]] == ["q2", "a2"]
    assert said == ["q0", "a0", "q1", "a1", "q2", "a2"]
    [(role, system), question] = server.shown()
    assert role == "system"
    assert system.endswith("Two questions were asked.")
    assert question == ("user", "q2")


def test_several_nodes_that_change_the_state_are_applied_one_upon_the_other() -> None:
    """The second sees what the first left."""
    with OpenAIServer([f"a{n}" for n in range(4)]) as server:
        agent: Any = create_agent(
            client(server),
            [look],
            middleware=[
                MemoryMiddleware(
                    clear_tool_outputs(mode="state"),
                    trim(turns=2, mode="state"),
                    trim(turns=1, mode="state"),
                )
            ],
        )
        talk = [{"role": "user", "content": f"q{n}"} for n in range(4)]
        out = agent.invoke({"messages": talk})
    assert [m.text for m in out["messages"]] == ["q3", "a0"]


def test_what_is_no_node_is_refused() -> None:
    """Before there is an agent."""
    for nodes in ((), (print,)):
        with pytest.raises(ConfigurationError, match="expected nodes like"):
            MemoryMiddleware(*nodes)

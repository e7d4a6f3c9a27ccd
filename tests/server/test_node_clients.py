"""JavaScript clients of other projects: LangGraph's SDK, CopilotKit's agent, MCP's inspector.

The packages are those of tests/node/package-lock.json. They are installed once for each version of
that file, under build/node.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph

from perdure.graphs import chat_graph
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.programs import NODE
from tests.server.running import run_server

pytestmark = [pytest.mark.node, pytest.mark.slow]
SCRIPTS = Path(__file__).parent.parent / "node"
BUILD = SCRIPTS.parent.parent / "build/node"
STEPS = 6


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder with the scripts and the packages that they import."""
    npm = NODE.path()
    lock = (SCRIPTS / "package-lock.json").read_bytes()
    folder = BUILD / hashlib.sha256(lock).hexdigest()[:16]
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        new_folder = Path(tempfile.mkdtemp(dir=BUILD))
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SCRIPTS / name, new_folder)
        # `npm ci` refuses the lock: vite names an optional package that no registry has
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(
            command, cwd=new_folder, check=True, capture_output=True, text=True, timeout=300
        )
        try:
            new_folder.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new_folder)
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


class Writer(GenericFakeChatModel):
    """A model that calls the tool to send a letter, and then repeats the tool's answer."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[Any], *args: Any, **kwargs: Any) -> ChatResult:
        call: Any = {"name": "send", "args": {"text": "a letter"}, "id": "c1"}
        reply = AIMessage("Let me send it.", tool_calls=[call])
        if isinstance(messages[-1], ToolMessage):
            reply = AIMessage(f"The tool said: {messages[-1].text}")
        return ChatResult(generations=[ChatGeneration(message=reply)])


@tool
def send(text: str) -> str:
    """Send a letter."""
    return f"sent {text}"


class State(TypedDict):
    """The names of the steps that were taken."""

    steps: Annotated[list[str], lambda old, new: old + new]


def take_steps() -> StateGraph[State]:
    """Return a graph of steps, each of which takes a moment."""
    graph, last = StateGraph(State), START
    for number in range(STEPS):
        name = f"step{number}"

        def step(state: State, name: str = name) -> dict[str, Any]:
            time.sleep(0.2)
            return {"steps": [name]}

        graph.add_node(name, step).add_edge(last, name)
        last = name
    return graph


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    """A server with a chat, an agent whose letters a person reviews, and a graph of steps."""
    review = HumanInTheLoopMiddleware({"send": True})
    model = Writer(messages=iter([]), disable_streaming=True)
    agent = create_agent(model, [send], middleware=[review])
    graphs = Graphs({"chat": chat_graph(), "review": agent, "steps": take_steps()})
    with run_server(create_app(settings, graphs=graphs)) as address:
        yield address


def run_node(folder: Path, *command: str, **environment: str) -> Any:
    """Run Node.js in a folder, and return the JSON that it printed."""
    done = subprocess.run(
        ["node", *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_langgraph_sdk_runs_turns_answers_questions_and_rejoins_stream(
    packages: Path, url: str
) -> None:
    """The SDK answers questions in each way or leaves them open, and joins a stream again."""
    did = run_node(packages, "sdk.mjs", url)

    assert did["turn"]["messages"] == ["human", "ai"]
    assert {"values", "messages", "updates"} <= {*did["turn"]["events"]}
    for decision, said in (
        ("approve", "sent a letter"),
        ("reject", "Not now"),
        ("edit", "sent an edited text"),
    ):
        answer = did[decision]
        assert (answer["asked"], answer["errors"], answer["next"]) == (1, [], []), decision
        assert said in answer["tools"][-1]
        assert answer["last"] == f"The tool said: {answer['tools'][-1]}"
    # LangGraph ignores a command to go to the end while a question waits
    assert did["left"] == {"next": ["HumanInTheLoopMiddleware.after_model"]}
    assert did["steps"] == [f"step{number}" for number in range(STEPS)]


def test_copilotkit_agent_answers_question_and_receives_tool_result(
    packages: Path, url: str
) -> None:
    """The agent sends the whole conversation together with the answer to a question."""
    did = run_node(packages, "agui.mjs", url)

    assert (did["questions"], did["finished"], did["errors"]) == (1, [1, 1], [])
    assert did["messages"] == ["user", "assistant", "tool", "assistant"]
    assert did["last"] == "The tool said: sent a letter"


INSPECTOR = "node_modules/.bin/mcp-inspector"


@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_mcp_inspector_lists_tools_remembers_and_recalls(
    packages: Path, url: str, settings: Settings, transport: str, tmp_path: Path
) -> None:
    """The inspector lists the tools, stores a memory, and recalls the memory."""
    # the inspector would take options of the program for its own
    environment = ["-e", f"PERDURE_DB={settings.db}", "-e", "PERDURE_USER=ann"]
    program = [str(Path(sys.executable).with_name("perdure")), "mcp", *environment]
    target = [f"{url}/mcp", "--transport", "http"] if transport == "http" else program

    def ask(*options: str) -> Any:
        return run_node(packages, INSPECTOR, "--cli", *target, *options, HOME=str(tmp_path))

    def call(name: str, argument: str) -> str:
        options = "--method", "tools/call", "--tool-name", name, "--tool-arg", argument
        return str(ask(*options)["content"][0]["text"])

    tools = {tool["name"] for tool in ask("--method", "tools/list")["tools"]}
    assert {"recall", "remember", "forget", "search_threads", "read_thread"} <= tools
    call("remember", "text=Ann keeps bees on her roof")
    assert "bees on her roof" in call("recall", "query=What does Ann keep on her roof?")

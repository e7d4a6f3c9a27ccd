"""Only the person of a thread, or a caller who may act for them, changes the thread's assistant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from langgraph_sdk.errors import PermissionDeniedError

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs, default_assistant_id
from perdure.server.http.access import ACT_PERMISSION
from perdure.server.http.auth_file import AuthFileAccess
from perdure.settings import Settings
from tests.cli.commands import run
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import run_server, wait_until
from tests.server.talking import build_input
from tests.server.test_person import TEAM_AUTH_FILE, YES_COMMAND, Desk, Model

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
# The command `perdure answer` sends the user's key in the header `x-api-key`. The user `act` may
# act for other users.
AUTH_FILE = TEAM_AUTH_FILE.replace(
    """authorization: str | None):
    return {"identity": (authorization or "").removeprefix("Bearer "), "org": "acme"}""",
    f"""authorization: str | None, headers: dict):
    user = (authorization or headers[b"x-api-key"].decode()).removeprefix("Bearer ")
    permissions = ["{ACT_PERMISSION}"] if user == "act" else []
    return {{"identity": user, "org": "acme", "permissions": permissions}}""",
)
QUESTION: Any = build_input("Ask me.")
GREETING: Any = build_input("Hello.")


def build_styled_graph(default_style: str) -> Any:
    """Build a graph whose answers start with the style in the config; it asks if told to."""

    def respond(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        answer = interrupt("Are you sure?") if state["messages"][-1].text == "Ask me." else "Hello"
        style = config["configurable"].get("style", default_style)
        return {"messages": [AIMessage(f"{style}: {answer}")]}

    return StateGraph(MessagesState).add_node(respond).add_edge(START, "respond").compile()


@pytest.fixture
def team(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A server with two graphs for the members of one organisation; commands use Mia's key."""
    monkeypatch.setenv("PERDURE_API_KEY", "mia")
    access = AuthFileAccess(write_auth_file(tmp_path, AUTH_FILE))
    graphs = Graphs({"desk": build_styled_graph("plain"), "other": build_styled_graph("other")})
    with (
        Model() as model,
        run_server(create_app(settings, graphs=graphs, access=access)) as url,
    ):
        desk = Desk(url, settings, model)
        with desk.clients:
            yield desk


def start_thread(desk: Desk, graph_input: Any) -> str:
    """Start a thread of Mia, and return its id."""
    mia = desk.client("mia")
    thread_id: str = mia.threads.create()["thread_id"]
    mia.runs.wait(thread_id, "desk", input=graph_input)
    return thread_id


def create_assistant(desk: Desk, user: str) -> str:
    """Create an assistant of the graph `desk` with a style that names the user; return its id."""
    config: Any = {"configurable": {"style": f"style of {user}"}}
    assistant_id: str = desk.client(user).assistants.create("desk", config=config)["assistant_id"]
    return assistant_id


def read_last_answer(desk: Desk, thread_id: str) -> str:
    state: Any = desk.client("mia").threads.get_state(thread_id)
    return str(state["values"]["messages"][-1]["content"])


def send_message_on_page(desk: Desk, thread_id: str) -> None:
    form = {"assistant": "desk", "text": "Hello again."}
    reply = desk.post("mia", f"/ui/say?id={thread_id}", data=form)
    assert reply.status_code == 303, reply.text


def answer_on_page(desk: Desk, thread_id: str) -> None:
    [[question]] = desk.client("mia").threads.get(thread_id)["interrupts"].values()
    form = {"assistant": "desk", "of": question["id"], "answer": "yes", "how": "text"}
    reply = desk.post("mia", f"/ui/answer?id={thread_id}", data=form)
    assert reply.status_code == 303, reply.text


def answer_by_input_respond(desk: Desk, thread_id: str) -> None:
    [[question]] = desk.client("mia").threads.get(thread_id)["interrupts"].values()
    params = {"namespace": [], "interrupt_id": question["id"], "response": "yes"}
    command = {"id": 1, "method": "input.respond", "params": params}
    reply = desk.post("mia", f"/threads/{thread_id}/commands", json=command)
    assert reply.json()["type"] == "success", reply.text


def answer_by_command_line(desk: Desk, thread_id: str) -> None:
    run("answer", thread_id, "respond", "yes", "--url", desk.url)


WAYS_TO_ANSWER = [answer_on_page, answer_by_input_respond, answer_by_command_line]


def wait_for_answer(desk: Desk, thread_id: str, message_count: int) -> None:
    def is_done() -> bool:
        thread: Any = desk.client("mia").threads.get(thread_id)
        return thread["status"] == "idle" and len(thread["values"]["messages"]) == message_count

    wait_until(is_done)


@pytest.mark.parametrize("answer", WAYS_TO_ANSWER)
def test_answer_keeps_assistant_after_refused_patch_of_colleague(
    team: Desk, answer: Callable[[Desk, str], None]
) -> None:
    thread_id, assistant_id = start_thread(team, QUESTION), create_assistant(team, "tom")
    with pytest.raises(PermissionDeniedError):
        team.client("tom").threads.update(thread_id, metadata={"assistant_id": assistant_id})
    answer(team, thread_id)
    wait_for_answer(team, thread_id, 2)
    assert read_last_answer(team, thread_id) == "plain: yes"


def test_message_on_page_keeps_assistant_after_refused_patch_of_colleague(team: Desk) -> None:
    thread_id, assistant_id = start_thread(team, GREETING), create_assistant(team, "tom")
    with pytest.raises(PermissionDeniedError):
        team.client("tom").threads.update(thread_id, metadata={"assistant_id": assistant_id})
    send_message_on_page(team, thread_id)
    wait_for_answer(team, thread_id, 4)
    assert read_last_answer(team, thread_id) == "plain: Hello"


@pytest.mark.parametrize("answer", WAYS_TO_ANSWER)
def test_answer_keeps_assistant_after_run_of_colleague(
    team: Desk, answer: Callable[[Desk, str], None]
) -> None:
    """The colleague's assistant answers the first question and asks a second one."""
    thread_id, assistant_id = start_thread(team, QUESTION), create_assistant(team, "tom")
    tom = team.client("tom")
    tom.runs.wait(thread_id, assistant_id, command=YES_COMMAND)
    assert read_last_answer(team, thread_id) == "style of tom: yes"
    tom.runs.wait(thread_id, assistant_id, input=QUESTION)
    answer(team, thread_id)
    wait_for_answer(team, thread_id, 4)
    assert read_last_answer(team, thread_id) == "plain: yes"


@pytest.mark.parametrize("target", ["assistant", "graph"])
def test_message_on_page_keeps_assistant_after_run_of_colleague(team: Desk, target: str) -> None:
    thread_id, tom = start_thread(team, GREETING), team.client("tom")
    assistant_id = create_assistant(team, "tom") if target == "assistant" else "other"
    run_id = tom.runs.create(thread_id, assistant_id, input=GREETING)["run_id"]
    tom.runs.join(thread_id, run_id)
    style = "style of tom" if target == "assistant" else "other"
    assert read_last_answer(team, thread_id) == f"{style}: Hello"
    default_id = default_assistant_id(assistant_id)
    sent_id = assistant_id if target == "assistant" else default_id
    assert tom.runs.get(thread_id, run_id)["assistant_id"] == sent_id
    graph_id = "desk" if target == "assistant" else "other"
    metadata: Any = tom.threads.get(thread_id)["metadata"]
    assert metadata["graph_id"] == graph_id
    assert metadata["assistant_id"] == default_assistant_id(graph_id)

    send_message_on_page(team, thread_id)
    wait_for_answer(team, thread_id, 6)
    assert read_last_answer(team, thread_id) == "plain: Hello"


def test_question_of_graph_that_colleague_chose_is_answered_with_this_graph(team: Desk) -> None:
    thread_id = start_thread(team, GREETING)
    team.client("tom").runs.wait(thread_id, "other", input=QUESTION)
    answer_by_input_respond(team, thread_id)
    wait_for_answer(team, thread_id, 4)
    assert read_last_answer(team, thread_id) == "other: yes"


@pytest.mark.parametrize("way", ["patch", "run"])
def test_copied_checkpoint_does_not_let_colleague_choose_the_assistant(
    team: Desk, way: str
) -> None:
    """langgraph stores such a copy without the metadata of the thread."""
    thread_id, assistant_id = start_thread(team, GREETING), create_assistant(team, "tom")
    tom = team.client("tom")
    tom.threads.update_state(thread_id, None, as_node="__copy__")
    metadata: Any = {"graph_id": "desk", "assistant_id": assistant_id}
    if way == "patch":
        with pytest.raises(PermissionDeniedError):
            tom.threads.update(thread_id, metadata=metadata)
    else:
        tom.runs.wait(thread_id, assistant_id, input=GREETING)
    count = 2 if way == "patch" else 4
    send_message_on_page(team, thread_id)
    wait_for_answer(team, thread_id, count + 2)
    assert read_last_answer(team, thread_id) == "plain: Hello"


@pytest.mark.parametrize(
    "metadata",
    [{"assistant_id": "unknown"}, {"assistant_id": None}, {"graph_id": "other"}],
    ids=["unknown assistant", "no assistant", "graph"],
)
def test_colleague_cannot_change_graph_or_assistant_of_thread(
    team: Desk, metadata: dict[str, Any]
) -> None:
    thread_id, tom = start_thread(team, GREETING), team.client("tom")
    before = tom.threads.get(thread_id)["metadata"]
    [name] = metadata
    with pytest.raises(PermissionDeniedError, match=f"'{name}' in the metadata.* cannot be change"):
        tom.threads.update(thread_id, metadata={**metadata, "topic": "refund"})
    assert tom.threads.get(thread_id)["metadata"] == before


def test_creation_copy_update_and_run_metadata_of_colleague_keep_assistant(team: Desk) -> None:
    thread_id, assistant_id = start_thread(team, GREETING), create_assistant(team, "tom")
    tom = team.client("tom")
    metadata: Any = {"graph_id": "other", "assistant_id": assistant_id}
    tom.threads.create(thread_id=thread_id, metadata=metadata, if_exists="do_nothing")
    tom.threads.update_state(thread_id, {"messages": []}, as_node="respond")
    config: Any = {"metadata": metadata}
    tom.runs.wait(thread_id, assistant_id, input=GREETING, metadata=metadata, config=config)
    copy_id = team.post("tom", f"/threads/{thread_id}/copy").json()["thread_id"]

    for each in (thread_id, copy_id):
        stored: Any = tom.threads.get(each)["metadata"]
        assert stored["user_id"] == "mia"
        assert stored["graph_id"] == "desk"
        assert stored["assistant_id"] == default_assistant_id("desk")


def test_colleague_may_send_unchanged_assistant_with_other_metadata(team: Desk) -> None:
    """The unchanged values are not stored, so the person's later runs can still replace them."""
    thread_id, assistant_id = start_thread(team, GREETING), create_assistant(team, "mia")
    tom, mia = team.client("tom"), team.client("mia")
    metadata: Any = tom.threads.get(thread_id)["metadata"]
    tom.threads.update(thread_id, metadata={**metadata, "topic": "refund"})
    assert tom.threads.get(thread_id)["metadata"] == {**metadata, "topic": "refund"}

    mia.runs.wait(thread_id, assistant_id, input=GREETING)
    changed: Any = mia.threads.get(thread_id)["metadata"]
    assert changed["assistant_id"] == assistant_id


@pytest.mark.parametrize("user", ["mia", "act"])
def test_person_and_caller_who_may_act_for_them_change_assistant(team: Desk, user: str) -> None:
    thread_id, client = start_thread(team, GREETING), team.client(user)
    assistant_id = create_assistant(team, "mia")
    client.runs.wait(thread_id, assistant_id, input=GREETING)
    metadata: Any = client.threads.get(thread_id)["metadata"]
    assert metadata["assistant_id"] == assistant_id

    other = {"graph_id": "other", "assistant_id": default_assistant_id("other")}
    updated: Any = client.threads.update(thread_id, metadata=other)
    assert updated["metadata"].items() >= other.items()


def test_thread_that_names_no_assistant_keeps_its_graph(team: Desk, settings: Settings) -> None:
    """Programs that use the library can store `graph_id` without `assistant_id`."""
    thread_id, assistant_id = "from-library", create_assistant(team, "tom")
    with open_checkpointer(settings.db) as saver:
        graph = build_styled_graph("plain").builder.compile(checkpointer=saver)
        metadata = {"graph_id": "desk", "owner": "acme"}
        config: Any = {"thread_id": thread_id, "user_id": "mia"}
        graph.invoke(GREETING, {"configurable": config, "metadata": metadata})
    tom = team.client("tom")
    with pytest.raises(PermissionDeniedError):
        tom.threads.update(thread_id, metadata={"assistant_id": assistant_id})
    tom.runs.wait(thread_id, assistant_id, input=GREETING)
    send_message_on_page(team, thread_id)
    wait_for_answer(team, thread_id, 6)
    assert read_last_answer(team, thread_id) == "plain: Hello"


@pytest.mark.parametrize("way", ["update", "create"])
def test_colleague_cannot_choose_assistant_before_first_run(team: Desk, way: str) -> None:
    tom, assistant_id = team.client("tom"), create_assistant(team, "tom")
    metadata: Any = {"graph_id": "desk", "assistant_id": assistant_id}
    if way == "update":
        thread_id = team.client("mia").threads.create()["thread_id"]
        tom.threads.update(thread_id, metadata=metadata)
    else:
        thread_id = tom.threads.create(metadata=metadata)["thread_id"]
    send_message_on_page(team, thread_id)
    wait_for_answer(team, thread_id, 2)
    assert read_last_answer(team, thread_id) == "plain: Hello"
    stored: Any = tom.threads.get(thread_id)["metadata"]
    assert stored["assistant_id"] == default_assistant_id("desk")

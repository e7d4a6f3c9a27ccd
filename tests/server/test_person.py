"""A run uses the memories of the thread's person, whoever starts, answers or continues the run."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.checkpointers import open_checkpointer
from perdure.graphs import chat_graph
from perdure.memory import Collection, remember_turns, use_memories
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import ADMIN_PERMISSION, Access
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.openai_server import Answer, Failure, Held, OpenAIServer, Reply
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.runs.test_crons import make_due
from tests.server.talking import build_input

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
TEAM_AUTH_FILE = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def authenticate(authorization: str | None):
    return {"identity": (authorization or "").removeprefix("Bearer "), "org": "acme"}

@auth.on
async def everything(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user["org"]
    return {"owner": ctx.user["org"]} if ctx.resource != "store" else None
"""
SECRETS = {
    "dora": "The refund of Dora goes to the account Heron.",
    "boss": "The refund limit of Boss is the number Walrus.",
    "mia": "The refund of Mia goes to the account Magpie.",
    "tom": "The refund of Tom goes to the account Toad.",
}
REFUND_REQUEST: Any = {"messages": [{"role": "user", "content": "Please refund my canoe."}]}
FOLLOW_UP: Any = {"messages": [{"role": "user", "content": "Is the refund on its way? Say Kayak."}]}
YES_COMMAND: Any = {"resume": "yes"}


def choose_reply(body: dict[str, Any]) -> Answer | str:
    """Return a tool call for a refund request, and a plain answer otherwise."""
    last = body["messages"][-1]
    if last["role"] == "tool" and "Walnut" in last["content"]:
        return f"You told me: {last['content']}"
    if last["role"] == "user" and str(last["content"]).startswith("Please refund"):
        what = "canoes" if "canoes" in str(last["content"]) else "canoe"
        call = {"name": "refund", "arguments": json.dumps({"what": what})}
        calls = [{"id": "c1", "type": "function", "function": call}]
        return Answer({"content": None, "tool_calls": calls}, "tool_calls")
    return "It is done."


class Model(OpenAIServer):
    """A scripted model, whose next reply can be held back, or be an error."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self._next: list[Callable[[Answer | str], Reply]] = []

    def hold(self, released: threading.Event) -> None:
        """Hold back the next reply."""
        self._next.append(lambda answer: Held(answer, released))

    def fail_next(self) -> None:
        """Refuse the next request."""
        self._next.append(lambda _: Failure())

    def _answer(self, body: dict[str, Any]) -> Reply:
        answer = choose_reply(body)
        return self._next.pop()(answer) if self._next else answer


@pytest.fixture
def model() -> Iterator[Model]:
    """A scripted model."""
    with Model() as server:
        yield server


@tool
def refund(what: str) -> str:
    """Refund something, if somebody approves that. For several canoes, ask twice."""
    answer = interrupt("May I refund it?")
    if what == "canoes":
        answer = f"{answer}, {interrupt('May I refund the other one, too?')}"
    return f"refund of {what}: {answer}"


def build_agent(model: Model) -> Any:
    """Return an agent that asks for approval, recalls memories and stores turns."""
    from langchain_openai import ChatOpenAI

    chosen = ChatOpenAI(model="gpt-5-mini", base_url=model.base_url, api_key="none")  # type: ignore[arg-type]
    parts: Any = [use_memories(min_score=0), remember_turns()]
    return chat_graph(chosen, [refund], memory=parts)


def call_mcp_tool(desk: Desk, user: str, name: str, person: str = "", **arguments: Any) -> str:
    """Call an MCP tool as `user`, on behalf of `person` if one is named, and return its text."""

    about = {"name": name, "arguments": arguments}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": about}
    headers = {"accept": "application/json, text/event-stream", "x-api-key": user}
    headers["authorization"] = f"Bearer {user}"
    headers |= {"x-perdure-user": person} if person else {}
    replied = httpx.post(f"{desk.url}/mcp", json=asked, headers=headers, timeout=60)
    return "\n".join(each["text"] for each in replied.json()["result"]["content"])


class Desk:
    """A served agent, and clients of its users."""

    def __init__(self, url: str, settings: Settings, model: Model) -> None:
        self.url, self.settings, self.model = url, settings, model
        self.clients = ExitStack()

    def client(self, user: str) -> SyncLangGraphClient:
        """Return a LangGraph client of a user, whose key or token is the user's name."""
        made = get_sync_client(
            url=self.url, api_key=user, headers={"authorization": f"Bearer {user}"}
        )
        return self.clients.enter_context(made)

    def post(self, user: str, path: str, **options: Any) -> httpx.Response:
        """Send the form of a page as a user, and return the response."""
        headers = {"authorization": f"Bearer {user}"}
        return httpx.post(f"{self.url}{path}", headers=headers, timeout=60, **options)

    def page(self, user: str, path: str) -> str:
        """Return a page as a user sees it."""
        headers = {"authorization": f"Bearer {user}"}
        shown = httpx.get(f"{self.url}{path}", headers=headers, timeout=60)
        assert shown.status_code == 200, shown.text
        return shown.text

    def memories(self, user: str) -> list[str]:
        """Return the texts of all memories of a user."""
        with open_store(self.settings.db) as store:
            found = Collection(store, ("memories", user)).list(limit=100)
        return [memory.text for memory in found]

    def head(self, thread_id: str) -> dict[str, Any]:
        """Return the metadata of a thread's newest checkpoint."""
        with open_checkpointer(self.settings.db) as saver:
            head = saver.head(thread_id)
        assert head is not None
        return dict(head.metadata)

    def prompts(self, since: int = 0) -> str:
        """Return the messages of the model's requests, from number `since` on, as JSON."""
        return json.dumps([each["messages"] for each in self.model.requests[since:]])


@contextmanager
def serve_desk(
    settings: Settings, access: Access, model: Model, make: Callable[[], Any] | None = None
) -> Iterator[Desk]:
    """Serve a desk whose users each have a secret among their memories."""
    with open_store(settings.db) as store:
        for user, secret in SECRETS.items():
            Collection(store, ("memories", user)).insert(secret)
    graphs = Graphs({"desk": make or build_agent(model)})
    with run_server(create_app(settings, graphs=graphs, access=access)) as url:
        desk = Desk(url, settings, model)
        with desk.clients:
            yield desk


def keys(folder: Path) -> KeysFileAccess:
    """Return access by keys of two users and of `boss`, who is an admin."""
    file = folder / "keys.toml"
    admin = f'permissions = ["{ADMIN_PERMISSION}"]'
    users = [render_key_entry(user, user) for user in ("dora", "kim")]
    file.write_text("".join([*users, render_key_entry("boss", "boss", admin)]))
    return KeysFileAccess(file)


@pytest.fixture
def desk(settings: Settings, tmp_path: Path, model: Model) -> Iterator[Desk]:
    """A desk with keys; see `keys`."""
    with serve_desk(settings, keys(tmp_path), model) as made:
        yield made


@pytest.fixture
def team(settings: Settings, tmp_path: Path, model: Model) -> Iterator[Desk]:
    """A desk with an Auth file that names the organisation as the owner of each thread."""
    with serve_desk(
        settings, AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE)), model
    ) as made:
        yield made


def start_thread_awaiting_approval(desk: Desk, user: str) -> str:
    """Start a thread of a user on which the agent waits for approval, and return its id."""
    client = desk.client(user)
    thread_id: str = client.threads.create()["thread_id"]
    client.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    return thread_id


def answer_by_sdk(desk: Desk, user: str, thread_id: str) -> None:
    desk.client(user).runs.wait(thread_id, "desk", command=YES_COMMAND)


def answer_in_the_background(desk: Desk, user: str, thread_id: str) -> None:
    client = desk.client(user)
    run = client.runs.create(thread_id, "desk", command=YES_COMMAND)
    client.runs.join(thread_id, run["run_id"])


def answer_by_stream(desk: Desk, user: str, thread_id: str) -> None:
    [*desk.client(user).runs.stream(thread_id, "desk", command=YES_COMMAND)]


def answer_by_batch(desk: Desk, user: str, thread_id: str) -> None:
    client = desk.client(user)
    one: Any = {"thread_id": thread_id, "assistant_id": "desk", "command": YES_COMMAND}
    [run] = client.runs.create_batch([one])
    client.runs.join(thread_id, run["run_id"])


def answer_on_the_page(desk: Desk, user: str, thread_id: str) -> None:
    client = desk.client(user)
    [[question]] = client.threads.get(thread_id)["interrupts"].values()
    form = {"assistant": "desk", "of": question["id"], "answer": "yes", "how": "text"}
    replied = desk.post(user, f"/ui/answer?id={thread_id}", data=form)
    assert replied.status_code == 303, replied.text
    wait_until(lambda: client.threads.get(thread_id)["status"] == "idle")


def send_respond_command(desk: Desk, user: str, thread_id: str) -> None:
    client = desk.client(user)
    [[question]] = client.threads.get(thread_id)["interrupts"].values()
    params = {"namespace": [], "interrupt_id": question["id"], "response": "yes"}
    params["assistant_id"] = "desk"
    sent = {"id": 1, "method": "input.respond", "params": params}
    replied = desk.post(user, f"/threads/{thread_id}/commands", json=sent)
    assert replied.json()["type"] == "success", replied.text


def answer_by_commands(desk: Desk, user: str, thread_id: str) -> None:
    send_respond_command(desk, user, thread_id)
    wait_until(lambda: desk.client(user).threads.get(thread_id)["status"] == "idle")


AnswerMethod = Callable[[Desk, str, str], None]
ANSWER_METHODS = [
    answer_by_sdk,
    answer_in_the_background,
    answer_by_stream,
    answer_by_batch,
    answer_on_the_page,
    answer_by_commands,
]


@pytest.mark.parametrize("answer", ANSWER_METHODS)
def test_thread_stays_with_its_person_when_admin_answers(desk: Desk, answer: AnswerMethod) -> None:
    """The turn is stored in Dora's memories, and the model is not shown the admin's memories."""
    thread_id = start_thread_awaiting_approval(desk, "dora")
    before = len(desk.model.requests)

    answer(desk, "boss", thread_id)

    shown = desk.prompts(before)
    head = desk.head(thread_id)
    assert ("Heron" in shown, "Walrus" in shown) == (True, False)
    assert (head["user_id"], head["owner"]) == ("dora", "dora")
    assert "user: Please refund my canoe." in desk.memories("dora")
    assert desk.memories("boss") == [SECRETS["boss"]]
    assert "answered by boss" in desk.page("dora", f"/ui/thread?id={thread_id}")


@pytest.mark.parametrize("answer", ANSWER_METHODS)
def test_thread_stays_with_its_person_when_colleague_answers(
    team: Desk, answer: AnswerMethod
) -> None:
    """The organisation of both colleagues owns the thread."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    before = len(team.model.requests)

    answer(team, "tom", thread_id)

    shown = team.prompts(before)
    head = team.head(thread_id)
    assert ("Magpie" in shown, "Toad" in shown) == (True, False)
    assert (head["user_id"], head["owner"]) == ("mia", "acme")
    assert "user: Please refund my canoe." in team.memories("mia")
    assert (team.memories("tom"), team.memories("acme")) == ([SECRETS["tom"]], [])
    assert "answered by tom" in team.page("mia", f"/ui/thread?id={thread_id}")


def test_message_of_colleague_neither_recalls_nor_stores_memories(team: Desk) -> None:
    """No memories of either are shown, and the message is stored for neither of them."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    answer_by_sdk(team, "mia", thread_id)
    before, known = len(team.model.requests), team.memories("mia")

    team.client("tom").runs.wait(thread_id, "desk", input=FOLLOW_UP)

    shown, head = team.prompts(before), team.head(thread_id)
    assert ("Magpie" in shown, "Toad" in shown) == (False, False)
    assert (head["user_id"], head["owner"]) == ("mia", "acme")
    assert team.memories("mia") == known
    assert team.memories("tom") == [SECRETS["tom"]]
    assert "said by tom" in team.page("mia", f"/ui/thread?id={thread_id}")

    # the person goes on as before, and the turn of the colleague is not remembered later
    team.client("mia").runs.wait(thread_id, "desk", input=build_input("Thank you, says Otter."))

    assert "Magpie" in team.prompts(before + 1)
    later = "\n".join(team.memories("mia"))
    assert ("Kayak" in later, "Otter" in later) == (False, True)


def test_message_of_admin_uses_memories_of_threads_person(desk: Desk) -> None:
    thread_id = start_thread_awaiting_approval(desk, "dora")
    answer_by_sdk(desk, "dora", thread_id)
    before = len(desk.model.requests)

    desk.client("boss").runs.wait(thread_id, "desk", input=FOLLOW_UP)

    shown = desk.prompts(before)
    assert ("Heron" in shown, "Walrus" in shown) == (True, False)
    assert desk.head(thread_id)["user_id"] == "dora"
    assert desk.memories("boss") == [SECRETS["boss"]]


def test_run_rows_store_caller_and_person(db: Settings, tmp_path: Path, model: Model) -> None:
    """The person is known only when the run starts, so the row is updated at that time."""
    with serve_desk(db, keys(tmp_path), model) as desk:
        dora, boss = desk.client("dora"), desk.client("boss")
        thread_id = dora.threads.create()["thread_id"]
        # the first run has not put a checkpoint yet when the others are accepted
        runs = [dora.runs.create(thread_id, "desk", input=REFUND_REQUEST)]
        runs += [boss.runs.create(thread_id, "desk", command=YES_COMMAND)]
        runs += [boss.runs.create(thread_id, "desk", input=FOLLOW_UP)]
        for run in runs:
            dora.runs.join(thread_id, run["run_id"])
        rows = json.loads(desk.page("boss", f"/ui/runs.json?id={thread_id}"))["runs"]

        assert [(each["caller"], each["person"], each["deed"]) for each in rows[::-1]] == [
            ("dora", "dora", None),
            ("boss", "dora", "answered by boss"),
            ("boss", "dora", "said by boss"),
        ]
        assert "Walrus" not in desk.prompts()
        assert desk.memories("boss") == [SECRETS["boss"]]
        assert "user: Please refund my canoe." in desk.memories("dora")
        assert desk.head(thread_id)["user_id"] == "dora"


def test_thread_without_turns_belongs_to_its_owner(desk: Desk) -> None:
    """An admin starts the first run, and the owner that the key set is the thread's person."""
    thread_id = desk.client("dora").threads.create()["thread_id"]

    desk.client("boss").runs.wait(thread_id, "desk", input=FOLLOW_UP)

    head = desk.head(thread_id)
    assert (head["user_id"], head["owner"]) == ("dora", "dora")
    assert ("Heron" in desk.prompts(), "Walrus" in desk.prompts()) == (True, False)


def test_metadata_of_client_does_not_choose_person_of_thread(desk: Desk) -> None:
    """A waiting run belongs to its caller, and the erasure of another person leaves the run."""
    client = desk.client("dora")
    thread_id = client.threads.create(metadata={"user_id": "kim"})["thread_id"]
    run = client.runs.create(thread_id, "desk", input=FOLLOW_UP, after_seconds=3600)
    headers = {"x-api-key": "boss"}
    with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
        http.put("/store/items", json={"namespace": ["memories", "kim"], "key": "k", "value": {}})
        report = http.delete("/people/kim").raise_for_status().json()

    assert "runs on threads of others" not in [part["what"] for part in report["kept"]]
    assert client.runs.get(thread_id, run["run_id"])["status"] == "pending"


def test_thread_without_turns_owned_by_organisation_belongs_to_first_caller(team: Desk) -> None:
    """The organisation that owns the thread is not a person."""
    thread_id = team.client("mia").threads.create()["thread_id"]

    team.client("tom").runs.wait(thread_id, "desk", input=FOLLOW_UP)

    head = team.head(thread_id)
    assert (head["user_id"], head["owner"]) == ("tom", "acme")
    assert ("Magpie" in team.prompts(), "Toad" in team.prompts()) == (False, True)


def test_user_id_in_context_of_run_does_not_change_person(desk: Desk) -> None:
    thread_id = start_thread_awaiting_approval(desk, "dora")
    before = len(desk.model.requests)
    context: Any = {"user_id": "boss"}

    desk.client("boss").runs.wait(thread_id, "desk", command=YES_COMMAND, context=context)

    assert ("Heron" in desk.prompts(before), "Walrus" in desk.prompts(before)) == (True, False)
    assert desk.head(thread_id)["user_id"] == "dora"
    assert desk.memories("boss") == [SECRETS["boss"]]


# Sam is a colleague with the permission to act for others.
ACTING_TEAM_AUTH_FILE = TEAM_AUTH_FILE.replace(
    """    return {"identity": (authorization or "").removeprefix("Bearer "), "org": "acme"}""",
    """    name = (authorization or "").removeprefix("Bearer ")
    permissions = ["perdure:act"] if name == "sam" else []
    return {"identity": name, "org": "acme", "permissions": permissions}""",
)


@pytest.mark.parametrize("author", ["boss", "sam"])
def test_cron_uses_memories_of_threads_person_if_its_author_may_act_for_person(
    author: str, db: Settings, tmp_path: Path, model: Model
) -> None:
    """The author is an admin with a key, or a colleague under an Auth file."""
    is_team = author == "sam"
    person = "mia" if is_team else "dora"
    access: Access = (
        AuthFileAccess(write_auth_file(tmp_path, ACTING_TEAM_AUTH_FILE))
        if is_team
        else keys(tmp_path)
    )
    with serve_desk(db, access, model) as desk:
        thread_id, before = run_cron_on_thread(desk, person, author)

        shown, head = desk.prompts(before), desk.head(thread_id)
        assert SECRETS[person].split()[-1] in shown
        assert "Walrus" not in shown
        assert head["user_id"] == person
        assert any("Kayak" in text for text in desk.memories(person))
        assert not any("Kayak" in text for text in desk.memories(author))
        assert f"scheduled by {author}" in desk.page(person, f"/ui/thread?id={thread_id}")


def test_cron_of_colleague_neither_recalls_nor_stores_memories(
    db: Settings, tmp_path: Path, model: Model
) -> None:
    """The message of a cron counts as a message of the cron's author, also in later runs."""
    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))
    with serve_desk(db, access, model) as team:
        thread_id, before = run_cron_on_thread(team, "mia", "tom")

        shown, head = team.prompts(before), team.head(thread_id)
        assert ("Magpie" in shown, "Toad" in shown) == (False, False)
        assert head["user_id"] == "mia"
        assert "scheduled by tom" in team.page("mia", f"/ui/thread?id={thread_id}")
        team.client("mia").runs.wait(thread_id, "desk", input=build_input("Thank you, says Otter."))

        assert "Magpie" in team.prompts(before + 1)
        later = "\n".join(team.memories("mia"))
        assert ("Kayak" in later, "Otter" in later) == (False, True)
        assert team.memories("tom") == [SECRETS["tom"]]


def test_persons_own_cron_that_colleague_changes_is_colleagues(team: Desk) -> None:
    """A cron has the rights of the user who last changed it."""
    thread_id, before = run_cron_on_thread(team, "mia", "mia", changed_by="tom")

    shown = team.prompts(before)
    assert ("Magpie" in shown, "Toad" in shown) == (False, False)
    assert not any("Kayak" in text for text in team.memories("mia"))
    assert "scheduled by tom" in team.page("mia", f"/ui/thread?id={thread_id}")


def run_cron_on_thread(
    desk: Desk, person: str, author: str, changed_by: str | None = None
) -> tuple[str, int]:
    """Run a cron on a thread of a person, and return the thread's id and the model's requests.

    The number of requests is that before the run of the cron.
    """
    thread_id = start_thread_awaiting_approval(desk, person)
    answer_by_sdk(desk, person, thread_id)
    before, client = len(desk.model.requests), desk.client(author)
    cron: Any = client.crons.create_for_thread(
        thread_id, "desk", schedule="0 0 1 1 *", input=FOLLOW_UP
    )
    if changed_by is not None:
        desk.client(changed_by).crons.update(cron["cron_id"], input=FOLLOW_UP)
    make_due(desk.settings, cron["cron_id"])
    wait_until(lambda: len(client.runs.list(thread_id)) == 3)
    wait_until(lambda: client.threads.get(thread_id)["status"] == "idle")
    return thread_id, before


@pytest.mark.parametrize(
    "sent", ["answer", "respond command", "message", "cron", "answer of admin"]
)
def test_run_keeps_its_person_when_another_server_takes_over(
    db: Settings, tmp_path: Path, model: Model, sent: str
) -> None:
    """A colleague or an admin sent the answer or the message with which the run started."""
    sends_message, is_of_admin = sent in ("message", "cron"), sent == "answer of admin"
    person, other = ("dora", "boss") if is_of_admin else ("mia", "tom")
    access: Access = (
        keys(tmp_path) if is_of_admin else AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))
    )
    held = threading.Event()
    with ExitStack() as stack:
        first = stack.enter_context(serve_desk(db, access, model))
        thread_id = start_thread_awaiting_approval(first, person)
        if sends_message:
            answer_by_sdk(first, person, thread_id)
        known, before = first.memories(person), len(model.requests)
        model.hold(held)
        client = first.client(other)
        what: Any = {"input": FOLLOW_UP} if sends_message else {"command": YES_COMMAND}
        if sent == "respond command":
            send_respond_command(first, other, thread_id)
        elif sent == "cron":
            cron: Any = client.crons.create_for_thread(
                thread_id, "desk", schedule="0 0 1 1 *", **what
            )
            make_due(db, cron["cron_id"])
        else:
            client.runs.create(thread_id, "desk", **what)
        wait_until(lambda: len(model.requests) > before)
        run = client.runs.list(thread_id)[0]
    held.set()
    app = create_app(db, graphs=Graphs({"desk": build_agent(model)}), access=access)
    with run_server(app) as url:
        second = Desk(url, db, model)
        with second.clients:
            second.client(person).runs.join(thread_id, run["run_id"])

            shown, head = second.prompts(before), second.head(thread_id)
            own, others = SECRETS[person].split()[-1], SECRETS[other].split()[-1]
            assert (own in shown, others in shown) == (not sends_message, False)
            assert (head["user_id"], head["perdure_caller"]) == (person, other)
            assert second.memories(other) == [SECRETS[other]]
            later = second.memories(person)
            assert later == known if sends_message else "user: Please refund my canoe." in later


def test_admin_who_continues_failed_run_uses_memories_of_person(desk: Desk) -> None:
    """The run failed at the model, and an admin presses the button that continues the run."""
    thread_id = start_thread_awaiting_approval(desk, "dora")
    answer_by_sdk(desk, "dora", thread_id)
    desk.model.fail_next()
    dora = desk.client("dora")
    with pytest.raises(Exception, match="refuses"):
        dora.runs.wait(thread_id, "desk", input=FOLLOW_UP)
    before = len(desk.model.requests)

    replied = desk.post("boss", f"/ui/again?id={thread_id}", data={"assistant": "desk"})

    assert replied.status_code == 303, replied.text
    wait_until(lambda: dora.threads.get(thread_id)["status"] == "idle")
    shown = desk.prompts(before)
    assert ("Heron" in shown, "Walrus" in shown) == (True, False)
    assert desk.memories("boss") == [SECRETS["boss"]]
    assert any("Kayak" in each for each in desk.memories("dora"))
    assert "continued by boss" in desk.page("dora", f"/ui/thread?id={thread_id}")


def test_message_of_colleague_on_page_neither_recalls_nor_stores_memories(team: Desk) -> None:
    thread_id = start_thread_awaiting_approval(team, "mia")
    answer_by_sdk(team, "mia", thread_id)
    before, known = len(team.model.requests), team.memories("mia")

    form = {"assistant": "desk", "text": "What goes on with the refund?"}
    replied = team.post("tom", f"/ui/say?id={thread_id}", data=form)

    assert replied.status_code == 303, replied.text
    wait_until(lambda: team.client("mia").threads.get(thread_id)["status"] == "idle")
    shown = team.prompts(before)
    assert ("Magpie" in shown, "Toad" in shown) == (False, False)
    assert (team.memories("mia"), team.memories("tom")) == (known, [SECRETS["tom"]])


def build_serialized_message(name: str, **fields: Any) -> dict[str, Any]:
    """Return a message in the form in which LangChain serializes objects."""
    kind = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": kind, "kwargs": fields}


MESSAGE_FORMS: list[Any] = [
    "Say Kayak.",
    ["user", "Say Kayak."],
    [["human", "Say Kayak."]],
    [build_serialized_message("HumanMessage", content="Say Kayak.")],
    [build_serialized_message("HumanMessageChunk", content="Say Kayak.", type="human")],
    [build_serialized_message("HumanMessage", content="Say Kayak.") | {"role": "ai"}],
    [
        build_serialized_message(
            "AIMessage", **build_serialized_message("HumanMessage", content="Say Kayak.")
        )
    ],
]


@pytest.mark.parametrize("messages", MESSAGE_FORMS)
def test_messages_of_colleague_in_any_form_are_not_stored_as_memories(
    team: Desk, messages: Any
) -> None:
    """The messages are sent as an input, as an update of the state, and by a command."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    answer_by_sdk(team, "mia", thread_id)
    tom = team.client("tom")
    tom.runs.wait(thread_id, "desk", input={"messages": messages})
    tom.threads.update_state(thread_id, {"messages": messages})
    tom.runs.wait(thread_id, "desk", command={"update": {"messages": messages}})
    team.client("mia").runs.wait(thread_id, "desk", input=build_input("Thank you, says Otter."))
    values: Any = tom.threads.get_state(thread_id)["values"]

    later = "\n".join(team.memories("mia"))
    assert [each["content"] for each in values["messages"]].count("Say Kayak.") == 3
    assert ("Kayak" in later, "Otter" in later) == (False, True)


def build_question_graph() -> Any:
    """Return a graph that builds a message from the text in the channel `question`."""

    class Question(MessagesState, total=False):
        question: str

    def ask(state: Question) -> dict[str, Any]:
        return {"messages": [HumanMessage(state["question"])]}

    def answer(state: Question) -> dict[str, Any]:
        return {"messages": [AIMessage("It is done.")]}

    builder = StateGraph(Question).add_node(ask).add_node(answer)
    builder.add_node("remember", remember_turns())
    builder.add_edge(START, "ask").add_edge("ask", "answer").add_edge("answer", "remember")
    return builder.compile()


def test_message_that_node_builds_from_colleagues_input_is_not_stored_as_memory(
    settings: Settings, tmp_path: Path, model: Model
) -> None:
    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))
    with serve_desk(settings, access, model, build_question_graph()) as team:
        thread_id = team.client("mia").threads.create()["thread_id"]
        for user in ("mia", "tom", "mia"):
            asked = {"question": f"Where is the canoe of {user}?"}
            team.client(user).runs.wait(thread_id, "desk", input=asked)

        remembered = [text for text in team.memories("mia") if "canoe" in text]
        assert remembered == ["user: Where is the canoe of mia?"] * 2
        assert [text for text in team.memories("tom") if "canoe" in text] == []


def test_colleague_cannot_read_memories_that_model_was_shown(team: Desk) -> None:
    """Pages and REST refuse the memories, although the thread itself can be read."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    link = re.search(r"/ui/seen[^\"]*", team.page("tom", f"/ui/thread?id={thread_id}"))
    assert link is not None
    views: Any = {"checkpoint_ns": "perdure:views"}
    gets = [
        unescape(link[0]),
        f"/ui/checkpoints?id={thread_id}&ns=perdure:views",
        f"/threads/{thread_id}/items?checkpoint_ns=perdure:views",
    ]
    posts = [f"/threads/{thread_id}/{path}" for path in ("history", "state/checkpoint")]

    for user, status in (("mia", 200), ("tom", 403)):
        headers = {"authorization": f"Bearer {user}"}
        with httpx.Client(base_url=team.url, headers=headers, timeout=60) as http:
            replies = [http.get(path) for path in gets]
            replies += [http.post(path, json={"checkpoint": views}) for path in posts]
        assert [reply.status_code for reply in replies] == [status] * len(replies)
        shown = "".join(reply.text for reply in replies)
        assert ("Magpie" in shown) == (user == "mia")


def test_messages_that_colleague_adds_to_state_are_not_stored_as_memories(team: Desk) -> None:
    thread_id = start_thread_awaiting_approval(team, "mia")
    answer_by_sdk(team, "mia", thread_id)
    added: Any = [
        {"role": "user", "content": "I am Mia, says Kayak."},
        {"role": "assistant", "content": "So you are Mia, of Kayak."},
    ]

    team.client("tom").threads.update_state(thread_id, {"messages": added})
    shown = team.page("mia", f"/ui/thread?id={thread_id}")
    team.client("mia").runs.wait(thread_id, "desk", input=build_input("Thank you, says Otter."))

    assert "changed by tom" in shown
    later = "\n".join(team.memories("mia"))
    assert ("Kayak" in later, "Otter" in later) == (False, True)
    assert "perdure_caller" not in team.head(thread_id)


@pytest.mark.parametrize(
    ("author", "other"), [("mia", "tom"), ("tom", "mia"), ("tom", "sam"), ("mia", "sam")]
)
def test_message_that_is_sent_again_belongs_to_its_author(
    settings: Settings, tmp_path: Path, model: Model, author: str, other: str
) -> None:
    """A message whose graph could not be built is not stored; another user sends it again.

    Sam may act for others, but Tom may not.
    """
    broken = threading.Event()

    def make() -> Any:
        if broken.is_set():
            raise ZeroDivisionError
        return build_agent(model)

    with serve_desk(
        settings, AuthFileAccess(write_auth_file(tmp_path, ACTING_TEAM_AUTH_FILE)), model, make
    ) as team:
        thread_id = start_thread_awaiting_approval(team, "mia")
        answer_by_sdk(team, "mia", thread_id)
        broken.set()
        with pytest.raises(Exception, match="ZeroDivisionError"):
            team.client(author).runs.wait(thread_id, "desk", input=FOLLOW_UP)
        broken.clear()
        before = len(model.requests)

        replied = team.post(other, f"/ui/again?id={thread_id}", data={"assistant": "desk"})

        assert replied.status_code == 303, replied.text
        wait_until(lambda: team.client("mia").threads.get(thread_id)["status"] == "idle")
        is_hers, shown = author == "mia", team.prompts(before)
        assert ("Magpie" in shown, "Toad" in shown) == (is_hers, False)
        assert any("Kayak" in each for each in team.memories("mia")) is is_hers
        assert team.memories("tom") == [SECRETS["tom"]]


def test_state_update_by_admin_does_not_change_threads_person(desk: Desk) -> None:
    thread_id = start_thread_awaiting_approval(desk, "dora")
    answer_by_sdk(desk, "dora", thread_id)

    desk.client("boss").threads.update_state(thread_id, {"messages": []})

    head = desk.head(thread_id)
    assert (head["user_id"], head["owner"]) == ("dora", "dora")


def test_mcp_tools_read_only_threads_of_the_person(team: Desk) -> None:
    """A thread that colleagues may reach belongs to the person in its newest checkpoint."""
    threads = {user: start_thread_awaiting_approval(team, user) for user in ("mia", "tom")}
    answer_by_sdk(team, "tom", threads["mia"])

    for user, other in (("mia", "tom"), ("tom", "mia")):
        found = json.loads(call_mcp_tool(team, user, "search_threads", text="canoe"))
        assert {each["thread_id"] for each in found["threads"]} == {threads[user]}
        assert "canoe" in call_mcp_tool(team, user, "read_thread", thread_id=threads[user])
        assert "there is no thread" in call_mcp_tool(
            team, user, "read_thread", thread_id=threads[other]
        )


def test_mcp_tools_of_admin_read_only_threads_of_the_person_acted_for(desk: Desk) -> None:
    """An admin has own threads, and reaches those of a person only on behalf of this person."""
    threads = {user: start_thread_awaiting_approval(desk, user) for user in ("dora", "boss")}
    answer_by_sdk(desk, "boss", threads["dora"])

    for person, user in (("", "boss"), ("dora", "dora")):
        found = json.loads(call_mcp_tool(desk, "boss", "search_threads", person, text="canoe"))
        assert {each["thread_id"] for each in found["threads"]} == {threads[user]}
        found = call_mcp_tool(desk, "boss", "recall", person, query="Where does the refund go?")
        assert ("Heron" in found, "Walrus" in found) == (user == "dora", user == "boss")

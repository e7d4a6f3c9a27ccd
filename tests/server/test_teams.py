"""Shared memory of teams on a server: who reaches it, which runs use it, and whom it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.memory import Collection, manage_memory, search_memory, use_memories
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import ACT_PERMISSION, ADMIN_PERMISSION, Access
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.teams import RunTeams
from perdure.server.thread_person import Person, Sender
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.runs.test_crons import make_due
from tests.server.talking import build_input
from tests.server.test_tenants import dsn  # noqa: F401 - a fixture

USER_AND_TEAM: Any = [("memories", "{user_id}"), ("teams", "{team}")]
TEXTS = {
    ("memories", "ann"): "Ann keeps her tea in the box Heron.",
    ("memories", "bob"): "Bob keeps his tea in the box Walrus.",
    ("memories", "red"): "The user Red keeps tea in the box Magpie.",
    ("teams", "red"): "The team keeps its tea in the box Toad.",
    ("teams", "blue"): "The team keeps its tea in the box Newt.",
    ("teams", "ann"): "The team keeps its tea in the box Stoat.",
}
SECRET_WORDS = ("Heron", "Walrus", "Magpie", "Toad", "Newt", "Stoat")
GLOBEX_TEXT = "Globex keeps its tea in the box Otter."


def build_graph() -> StateGraph[MessagesState]:
    """Return a graph that answers with the memories for its model, or stores a note by a tool."""
    shows, manage = (
        use_memories(namespaces=USER_AND_TEAM, min_score=0),
        manage_memory(team_namespace=("teams", "{team}")),
    )
    search = search_memory(namespaces=USER_AND_TEAM, min_score=0)

    def call(tool: Any, state: MessagesState, config: RunnableConfig, **arguments: Any) -> str:
        asked = ToolCall(name=tool.name, args=arguments, id="c", type="tool_call")
        messages = [*state["messages"], AIMessage("", tool_calls=[asked])]
        replies = ToolNode([tool]).invoke({"messages": messages}, config)
        return str(replies["messages"][-1].content)

    def answer(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        text = state["messages"][-1].text
        if text.startswith("ask"):
            interrupt("May I?")
        if text.startswith("note "):
            _, team, said = text.split(" ", 2)
            chosen = {} if team == "me" else {"team": team}
            reply = call(manage, state, config, action="create", text=said, **chosen)
        elif text.startswith("search "):
            reply = call(search, state, config, query=text)
        else:
            shown = shows(state, config)
            reply = "\n".join(each.text for each in shown if each.type == "system")
        return {"messages": [AIMessage(reply)]}

    return StateGraph(MessagesState).add_node(answer).add_edge(START, "answer")


class Office:
    """A server, and clients of its users, whose keys or tokens are their names."""

    def __init__(self, url: str, db: str, tenant: str | None, clients: ExitStack) -> None:
        self.url, self.db, self.tenant, self.clients = url, db, tenant, clients

    def client(self, user: str) -> SyncLangGraphClient:
        """Return a LangGraph client of a user."""
        made = get_sync_client(
            url=self.url, api_key=user, headers={"authorization": f"Bearer {user}"}
        )
        return self.clients.enter_context(made)

    def say(self, user: str, text: str, thread_id: str | None = None, **options: Any) -> str:
        """Send a message, on a new thread unless one is given; return the answer."""
        client = self.client(user)
        thread_id = thread_id or str(client.threads.create()["thread_id"])
        values: Any = client.runs.wait(thread_id, "office", input=build_input(text), **options)
        return str(values["messages"][-1]["content"])

    def send(self, user: str, path: str, body: Any, method: str = "POST") -> httpx.Response:
        """Send a request with a body of JSON."""
        headers = {"x-api-key": user, "authorization": f"Bearer {user}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def page(self, user: str, path: str, **query: Any) -> httpx.Response:
        """Read a page."""
        headers = {"authorization": f"Bearer {user}"}
        return httpx.get(f"{self.url}{path}", params=query, headers=headers, timeout=60)

    def put(self, user: str, namespace: list[str], key: str = "k") -> int:
        """Put an item by REST, and return the status code."""
        body = {"namespace": namespace, "key": key, "value": {"text": f"of {user}"}}
        return self.send(user, "/store/items", body, "PUT").status_code

    def items(self, *namespace: str) -> list[Any]:
        """Return all items under a namespace, without any check of access."""
        with open_store(self.db, **({"tenant": self.tenant} if self.tenant else {})) as store:
            return store.search(namespace, limit=100)

    def fill(self) -> None:
        """Store a text for each user and team."""
        options = {"tenant": self.tenant} if self.tenant else {}
        with open_store(self.db, **options) as store:
            for label in ("memories", "teams"):
                store.forget((label,))  # of another test
            for (label, name), text in TEXTS.items():
                Collection(store, (label, name)).insert(text)
        if self.tenant:
            with open_store(self.db, tenant="globex") as store:
                Collection(store, ("teams", "red")).insert(GLOBEX_TEXT)


def find_secret_words(text: str) -> list[str]:
    """Return the secret words that a text contains."""
    return [word for word in (*SECRET_WORDS, "Otter") if word in text]


def format_teams_line(*teams: str) -> str:
    """Return the line of a key's entry that lists teams."""
    return f"teams = {[*teams]}\n"


def write_keys(path: Path, tenant: str | None) -> KeysFileAccess:
    """Write keys of users of one tenant, and on Postgres of a second tenant too."""
    own = f'tenant = "{tenant}"\n' if tenant else ""
    entries = [
        render_key_entry("ann", "ann", own + format_teams_line("red", "blue")),
        render_key_entry("bob", "bob", own + format_teams_line("red")),
        render_key_entry("red", "red", own),
        render_key_entry("teams", "teams", own),
        render_key_entry("root", "root", f'{own}permissions = ["{ADMIN_PERMISSION}"]'),
        render_key_entry(
            "desk", "desk", f'{own}permissions = ["{ACT_PERMISSION}"]\n' + format_teams_line("ann")
        ),
    ]
    if tenant:
        entries.append(
            render_key_entry("other", "ann", 'tenant = "globex"\n' + format_teams_line("red"))
        )
    path.write_text("".join(entries))
    path.chmod(0o600)
    return KeysFileAccess(path)


@pytest.fixture(params=["file", "postgres"])
def office(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Office]:
    """A server with keys: on a file, and on Postgres with two tenants."""
    tenant, db = None, str(tmp_path / "memory.db")
    if request.param == "postgres":
        tenant, db = "acme", request.getfixturevalue("dsn")
    access = write_keys(tmp_path / "keys.toml", tenant)
    yield from serve_office(access, db, tenant)


def serve_office(access: Access, db: str, tenant: str | None = None) -> Iterator[Office]:
    """Serve the graph."""
    app = create_app(Settings(db=db), graphs=Graphs({"office": build_graph()}), access=access)
    with run_server(app) as url, ExitStack() as clients:
        made = Office(url, db, tenant, clients)
        made.fill()
        yield made


def test_run_uses_memories_of_person_and_of_their_teams(office: Office) -> None:
    """A user and a team with the same name share nothing, and neither do two tenants."""
    found = {
        user: find_secret_words(office.say(user, "Where is the tea?"))
        for user in ("ann", "bob", "red")
    }
    assert found == {
        "ann": ["Heron", "Toad", "Newt"],
        "bob": ["Walrus", "Toad"],
        "red": ["Magpie"],
    }
    assert find_secret_words(office.say("root", "Where is the tea?")) == []
    assert find_secret_words(
        office.say("ann", "Where is the tea?", config={"configurable": {"team": "blue"}})
    ) == ["Heron", "Newt"]
    assert find_secret_words(
        office.say("ann", "Where is the tea?", context={"teams": ["red"]})
    ) == [
        "Heron",
        "Toad",
    ]
    if office.tenant:
        assert find_secret_words(office.say("other", "Where is the tea?")) == ["Otter"]


TEAM_OVERRIDES: list[Any] = [
    {"config": {"configurable": {"team": "blue"}}},
    {"config": {"configurable": {"teams": ["red", "blue"]}}},
    {"context": {"team": "blue"}},
    {"context": {"teams": ["blue"]}},
    {"context": {"team": "red", "teams": ["blue", "red"]}},
    {"config": {"configurable": {"__perdure_teams": ["blue"]}}},
    {"config": {"configurable": {"__perdure_team": "blue"}}},
]


@pytest.mark.parametrize("override", TEAM_OVERRIDES)
def test_run_that_names_foreign_team_is_refused(office: Office, override: Any) -> None:
    """Neither the config nor the context adds a team."""
    thread_id = office.client("bob").threads.create()["thread_id"]
    body = {"assistant_id": "office", "input": build_input("Where is the tea?"), **override}
    for path in (f"/threads/{thread_id}/runs/wait", "/runs/wait", f"/threads/{thread_id}/runs"):
        replied = office.send("bob", path, body)
        assert replied.status_code in (400, 403, 422), replied.text
        assert find_secret_words(replied.text) == []
    cron = {**body, "schedule": "0 0 * * *"}
    assert office.send("bob", "/runs/crons", cron).status_code in (400, 403, 422)


def test_stream_commands_cannot_name_foreign_team(office: Office) -> None:
    """The commands start runs too."""
    client = office.client("bob")
    thread_id = client.threads.create()["thread_id"]
    for named in ({"configurable": {"team": "blue"}}, {"configurable": {"teams": ["ann"]}}):
        params = {
            "assistant_id": "office",
            "input": build_input("Where is the tea?"),
            "config": named,
        }
        sent = {"id": 1, "method": "run.start", "params": params}
        replied = office.send("bob", f"/threads/{thread_id}/commands", sent)
        assert "is not in the team" in replied.text
    assert client.runs.list(thread_id) == []


def test_header_cannot_name_team(office: Office) -> None:
    """Only the key determines the teams."""
    client = office.client("bob")
    body = {"assistant_id": "office", "input": build_input("Where is the tea?")}
    headers = {"x-api-key": "bob", "x-perdure-team": "blue", "x-perdure-teams": "blue"}
    replied = httpx.post(f"{office.url}/runs/wait", json=body, headers=headers, timeout=60)
    assert find_secret_words(replied.text) == ["Walrus", "Toad"]
    assert client is not None


def test_assistant_gives_no_access_to_team(office: Office) -> None:
    """An assistant that names a team is refused to users who are not members."""
    assistant: Any = office.client("ann").assistants.create(
        "office", config={"configurable": {"team": "blue"}}
    )
    body = {"assistant_id": assistant["assistant_id"], "input": build_input("Where is the tea?")}
    assert find_secret_words(office.send("ann", "/runs/wait", body).text) == ["Heron", "Newt"]
    shared: Any = office.client("root").assistants.create(
        "office", config={"configurable": {"team": "blue"}}, metadata={"owner": "bob"}
    )
    body["assistant_id"] = shared["assistant_id"]
    assert find_secret_words(office.send("bob", "/runs/wait", body).text) == []


def test_members_can_read_and_write_team_items_by_rest(office: Office) -> None:
    """Each item stores its author. An admin reaches the items of all teams."""
    assert office.put("bob", ["teams", "red"]) == 204
    assert office.put("ann", ["teams", "red", "plans"], "p") == 204
    assert office.put("root", ["teams", "ann"], "r") == 204
    authors = {
        item.key: item.provenance.author
        for item in office.items("teams")
        if item.provenance and item.provenance.author
    }
    assert authors == {"k": "bob", "p": "ann", "r": "root"}
    shown = office.client("ann").store.get_item(("teams", "red"), "k")
    assert shown is not None
    assert shown["value"] == {"text": "of bob"}
    found = office.client("ann").store.search_items(("teams", "red"))["items"]
    assert {item["key"] for item in found} > {"k", "p"}


FOREIGN_NAMESPACES: list[list[str]] = [
    ["teams", "red"],
    ["teams", "blue", "x"],
    ["teams", "teams"],
    ["teams"],
    ["teams", ""],
    ["teams", "*"],
    ["*", "red"],
    ["Teams", "red"],
]


@pytest.mark.parametrize(
    ("user", "namespace"),
    [
        (user, namespace)
        for user in ("red", "teams")
        for namespace in FOREIGN_NAMESPACES
        if (user, namespace) != ("red", ["*", "red"])  # which is the user's own
    ],
)
def test_non_members_cannot_reach_team_items(
    office: Office, user: str, namespace: list[str]
) -> None:
    """A user with the name of a team, or with the name `teams`, is not a member."""
    before = len(office.items("teams"))
    assert office.put(user, namespace) >= 400 or namespace[1:2] == [user]
    assert len(office.items("teams")) == before
    searched = office.send(user, "/store/items/search", {"namespace_prefix": namespace})
    assert find_secret_words(searched.text) == [], searched.text
    got = office.page(user, "/store/items", namespace=namespace, key="k")
    assert find_secret_words(got.text) == []
    deleted = office.send(user, "/store/items", {"namespace": namespace, "key": "k"}, "DELETE")
    assert deleted.status_code >= 400 or namespace[1:2] == [user]
    for path in ("/ui/store/items", "/ui/memory", "/ui/memories", "/ui/store"):
        shown = office.page(user, path, ns=namespace, key="k")
        assert find_secret_words(shown.text) in ([], [{"red": "Magpie"}.get(user, "")]), path


def test_member_cannot_put_item_into_other_team(office: Office) -> None:
    """Bob is a member of red, and not of blue or ann."""
    for name in ("blue", "ann", "bob", "RED", "red ", "*"):
        assert office.put("bob", ["teams", name]) == 403
    searched = office.send("bob", "/store/items/search", {"namespace_prefix": ["teams"]})
    assert searched.status_code == 403
    everything = office.send("bob", "/store/items/search", {"namespace_prefix": []})
    assert everything.status_code == 403


LISTINGS: list[tuple[Any, list[str]]] = [
    ({"prefix": ["teams"]}, ["red"]),
    ({"prefix": ["teams", "red"]}, ["red"]),
    ({"prefix": ["*", "*"]}, []),
    ({}, []),
    ({"prefix": ["teams"], "suffix": ["blue"]}, []),
    ({"prefix": ["teams"], "max_depth": 2}, ["red"]),
]


@pytest.mark.parametrize(("asked", "expected"), LISTINGS)
def test_namespace_list_has_only_teams_of_user(
    office: Office, asked: Any, expected: list[str]
) -> None:
    """A list under `teams` has the teams of the user, and that of an admin has all teams."""
    replied = office.send("bob", "/store/namespaces", asked)
    found = replied.json().get("namespaces", []) if replied.status_code == 200 else []
    assert [ns[1] for ns in found if ns[0] == "teams"] == expected
    assert office.send("red", "/store/namespaces", {"prefix": ["teams"]}).json() == {
        "namespaces": []
    }
    mine = office.send("red", "/store/namespaces", {}).json()["namespaces"]
    assert mine == [["memories", "red"]]
    every = office.send("root", "/store/namespaces", {"prefix": ["teams"]}).json()["namespaces"]
    assert [ns[1] for ns in every] == ["ann", "blue", "red"]


def test_memory_tool_writes_only_into_teams_of_person(office: Office) -> None:
    """The argument of the tool is checked, and the item has the author."""
    assert "Stored" in office.say("bob", "note red The kettle is Kayak")
    assert "is not in the team" in office.say("bob", "note blue The kettle is Kayak")
    assert "Stored" in office.say("bob", "note me The kettle of Bob is Canoe")
    [item] = [each for each in office.items("teams") if "Kayak" in each.value["text"]]
    assert (item.namespace, item.provenance.author) == (("teams", "red"), "bob")
    assert "Kayak" in office.say("ann", "search kettle")
    assert "Kayak" not in office.say("red", "search kettle")
    assert "Canoe" not in office.say("ann", "search kettle")
    shown = office.say("ann", "What of the kettle?")
    assert "bob" in shown


def test_item_page_shows_author_to_members_only(office: Office) -> None:
    """Members see who wrote an item; the page of others is refused."""
    assert office.put("bob", ["teams", "red"]) == 204
    page = office.page("ann", "/ui/memory", ns=["teams", "red"], key="k")
    assert "written by" in page.text
    assert ">bob<" in page.text
    form = {"ns": ["teams", "red"], "key": "k"}
    edited = httpx.post(
        f"{office.url}/ui/memory?ns=teams&ns=red&key=k",
        data={"value": '{"text": "of ann"}', "searched": "1", "version": "1"},
        headers={"authorization": "Bearer ann"},
        timeout=60,
    )
    assert edited.status_code == 303, edited.text
    [item] = [each for each in office.items("teams", "red") if each.key == "k"]
    assert (item.value, item.provenance.author) == ({"text": "of ann"}, "ann")
    assert office.page("red", "/ui/memory", **form).status_code == 403
    assert "ns=teams&amp;ns=red" in office.page("bob", "/ui/store").text
    assert "teams" not in office.page("red", "/ui/store").text


def answer_question(office: Office, user: str, thread_id: str) -> str:
    """Answer the question of a thread."""
    values: Any = office.client(user).runs.wait(thread_id, "office", command={"resume": "yes"})
    return str(values["messages"][-1]["content"])


def test_run_answered_by_admin_uses_teams_of_person(office: Office) -> None:
    """An admin who answers neither adds nor removes teams."""
    client = office.client("ann")
    thread_id = client.threads.create()["thread_id"]
    client.runs.wait(thread_id, "office", input=build_input("ask where the tea is"))
    assert find_secret_words(answer_question(office, "root", thread_id)) == [
        "Heron",
        "Toad",
        "Newt",
    ]


def test_next_run_does_not_use_team_removed_from_key(office: Office, tmp_path: Path) -> None:
    """The same holds for a cron, whose runs use the teams of its author."""
    client = office.client("bob")
    file = tmp_path / "keys.toml"
    assert find_secret_words(office.say("bob", "Where is the tea?")) == ["Walrus", "Toad"]
    cron: Any = client.crons.create(
        "office",
        schedule="0 0 * * *",
        input=build_input("Where is the tea?"),
        on_run_completed="keep",
    )
    file.write_text(file.read_text().replace("teams = ['red']\n", "", 1))
    wait_until(lambda: office.put("bob", ["teams", "red"]) == 403)
    assert find_secret_words(office.say("bob", "Where is the tea?")) == ["Walrus"]
    if office.tenant is None:
        threads: Any = client.threads.search(limit=20)
        known = {each["thread_id"] for each in threads}
        make_due(Settings(db=office.db), cron["cron_id"])

        def answers() -> list[str]:
            found: Any = client.threads.search(limit=20)
            made = [each for each in found if each["thread_id"] not in known]
            return [str(each["values"]) for each in made if "Walrus" in str(each["values"])]

        wait_until(lambda: bool(answers()))
        made = answers()
        assert [find_secret_words(each) for each in made] == [["Walrus"]]


def test_erasure_removes_or_hands_over_what_person_wrote_for_team(office: Office) -> None:
    """The words of other members and of another tenant stay."""
    for user, word in (("bob", "Kayak"), ("ann", "Skiff")):
        assert "Stored" in office.say(user, f"note red The kettle is {word}")
    archive = office.page("bob", "/people/bob/export").text
    assert ("Kayak" in archive, "Skiff" in archive) == (True, False)
    headers = {"x-api-key": "bob"}
    erased = httpx.delete(f"{office.url}/people/bob", headers=headers, timeout=60)
    assert erased.status_code == 200, erased.text
    left = str([item.value for item in office.items("teams")])
    assert ("Kayak" in left, "Skiff" in left, "Toad" in left) == (False, True, True)
    params, headers = {"hand_over": "true"}, {"x-api-key": "ann"}
    handed = httpx.delete(f"{office.url}/people/ann", headers=headers, params=params, timeout=60)
    assert handed.status_code == 200, handed.text
    [item] = [each for each in office.items("teams") if "Skiff" in each.value["text"]]
    assert (item.provenance.author, item.provenance.thread_id) == (None, None)
    if office.tenant:
        assert find_secret_words(office.say("other", "Where is the tea?")) == ["Otter"]


def test_backend_that_acts_for_person_uses_teams_of_person(office: Office) -> None:
    """The teams of the backend's own key are not used."""
    headers = {"x-api-key": "desk", "x-perdure-user": "ann"}
    body: dict[str, Any] = {"assistant_id": "office", "input": build_input("Where is the tea?")}

    def run(**more: Any) -> httpx.Response:
        asked = {**body, **more}
        return httpx.post(f"{office.url}/runs/wait", json=asked, headers=headers, timeout=60)

    assert find_secret_words(run().text) == ["Heron", "Toad", "Newt"]
    assert find_secret_words(run(context={"team": "blue"}).text) == ["Heron", "Newt"]
    assert run(context={"team": "ann"}).status_code == 403
    named = {**body, "context": {"user_id": "ann", "teams": ["red"]}}
    assert find_secret_words(office.send("desk", "/runs/wait", named).text) == ["Heron", "Toad"]
    named["context"] = {"user_id": "bob", "teams": ["blue"]}
    assert office.send("desk", "/runs/wait", named).status_code == 403
    for name, status in (("blue", 204), ("ann", 403)):
        item = {"namespace": ["teams", name], "key": "k", "value": {"text": "x"}}
        put = httpx.put(f"{office.url}/store/items", json=item, headers=headers, timeout=60)
        assert put.status_code == status
    [item] = [each for each in office.items("teams") if each.key == "k"]
    assert item.provenance.author == "ann"
    assert find_secret_words(office.say("desk", "Where is the tea?")) == ["Stoat"]


TEAM_CHOICES: list[tuple[Sender, Person, list[str]]] = [
    (Sender("ann", teams=["red", "blue"]), Person("ann", True, True), ["blue", "red"]),
    (Sender("ann", teams=["red", "gone"]), Person("ann", True, True), ["red"]),
    (Sender("bob", teams=["red"]), Person("ann", True, False), ["red"]),
    (Sender("bob", teams=["red"]), Person("ann", False, False), []),
    (Sender("red", teams=[]), Person("ann", True, False), []),
    (Sender("root", may_act=True), Person("ann", True, True), ["blue", "red"]),
    (
        Sender("desk", "ann", True, teams=["red", "blue"]),
        Person("ann", True, True),
        ["blue", "red"],
    ),
    (Sender("desk", "ann", True, teams=["red", "blue"]), Person("bob", True, False), ["red"]),
    (Sender("ann", teams=["red", "blue"]), Person("", False, True), []),
    (Sender("ann", teams=["red", "blue"]), Person("nobody", True, False), []),
]


@pytest.mark.parametrize(("sender", "person", "expected"), TEAM_CHOICES)
def test_teams_of_run_depend_on_sender_person_and_keys(
    tmp_path: Path, sender: Sender, person: Person, expected: list[str]
) -> None:
    """A run uses the teams of both, or of a person for whom the sender may act, by current keys."""
    access = write_keys(tmp_path / "keys.toml", None)
    assert RunTeams(access).find_teams_whose_memory_run_uses(None, sender, person) == expected
    assert RunTeams(access).find_teams_whose_memory_run_uses("globex", sender, person) == []


def use_tool(office: Office, user: str, name: str, **arguments: Any) -> str:
    """Call a tool by MCP, and return its answer."""
    about = {"name": name, "arguments": arguments}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": about}
    headers = {"accept": "application/json, text/event-stream", "x-api-key": user}
    replied = httpx.post(f"{office.url}/mcp", json=asked, headers=headers, timeout=60)
    return "\n".join(each["text"] for each in replied.json()["result"]["content"])


def test_mcp_tools_use_teams_of_user(office: Office) -> None:
    """The tools recall from person and teams, and write to the person unless a team is named."""
    found = find_secret_words(
        use_tool(office, "ann", "recall", query="Where is the tea box?", min_score=0)
    )
    assert found == ["Heron", "Toad", "Newt"]
    one = use_tool(office, "ann", "recall", query="tea box", min_score=0, team="red")
    assert find_secret_words(one) == ["Toad"]
    for name in ("blue", "ann", "teams", "*", "red/blue"):
        for user in ("bob", "red", "teams"):
            told = use_tool(office, user, "recall", query="tea box", min_score=0, team=name)
            assert find_secret_words(told) == []
            told = use_tool(office, user, "remember", text="The kettle is Kayak", team=name)
            assert "is not allowed to access" in told
            assert "is not allowed to access" in use_tool(
                office, user, "forget", key="k", team=name
            )
    kept = use_tool(office, "bob", "remember", text="The kettle is Kayak", team="red")
    key = kept.removeprefix("Stored. The memory's id is ").removesuffix(".")
    [item] = [each for each in office.items("teams") if each.key == key]
    assert (item.namespace, item.provenance.author) == (("teams", "red"), "bob")
    changed = use_tool(office, "ann", "remember", text="The kettle is Canoe", key=key, team="red")
    assert "was replaced" in changed
    [item] = [each for each in office.items("teams") if each.key == key]
    assert item.provenance.author == "ann"
    assert "Erased" in use_tool(office, "ann", "forget", key=key, team="red")
    assert find_secret_words(use_tool(office, "red", "recall", query="tea box", min_score=0)) == [
        "Magpie"
    ]


AUTH_FILE = """
from langgraph_sdk import Auth

auth = Auth()
TEAMS = {"ann": ["red", "blue"], "bob": ["red"], "odd": "red", "root": []}

@auth.authenticate
async def authenticate(authorization: str | None):
    name = (authorization or "").removeprefix("Bearer ")
    permissions = ["perdure:admin"] if name == "root" else []
    return {"identity": name, "teams": TEAMS.get(name), "org": "acme", "permissions": permissions}

@auth.on
async def everything(ctx, value):
    if ctx.resource == "store":
        return None
    value.setdefault("metadata", {})["owner"] = ctx.user["org"]
    return {"owner": ctx.user["org"]}
"""


@pytest.fixture
def organisation(tmp_path: Path) -> Iterator[Office]:
    """A server with an Auth file that allows all namespaces and lists the teams of each user."""
    yield from serve_office(
        AuthFileAccess(write_auth_file(tmp_path, AUTH_FILE)), str(tmp_path / "memory.db")
    )


def test_auth_handler_determines_teams_of_user(organisation: Office) -> None:
    """The rule for teams holds in addition to what the handlers allow."""
    asked = {
        user: find_secret_words(organisation.say(user, "Where is the tea?"))
        for user in ("ann", "bob")
    }
    assert asked == {"ann": ["Heron", "Toad", "Newt"], "bob": ["Walrus", "Toad"]}
    assert find_secret_words(organisation.say("odd", "Where is the tea?")) == []
    assert organisation.put("bob", ["teams", "red"]) == 204
    for user, name in (("bob", "blue"), ("odd", "red"), ("cleo", "cleo")):
        assert organisation.put(user, ["teams", name]) == 403
    everything = organisation.send("bob", "/store/items/search", {"namespace_prefix": []})
    assert "Newt" not in everything.text
    assert "Toad" in everything.text
    format_teams_line = organisation.send("bob", "/store/namespaces", {}).json()["namespaces"]
    assert [ns for ns in format_teams_line if ns[0] == "teams"] == [["teams", "red"]]
    wild = organisation.send("bob", "/store/namespaces", {"prefix": ["*", "blue"]})
    assert "teams" not in wild.text


def test_answer_by_colleague_uses_no_team_if_handler_lists_only_callers(
    organisation: Office,
) -> None:
    """A handler reports only the teams of the caller, not those of the thread's person."""
    client = organisation.client("ann")
    thread_id = client.threads.create()["thread_id"]
    client.runs.wait(thread_id, "office", input=build_input("ask where the tea is"))
    assert find_secret_words(answer_question(organisation, "bob", thread_id)) == ["Heron"]


def test_answer_by_colleague_uses_teams_that_both_belong_to(tmp_path: Path) -> None:
    """The keys file has the teams of both users, so the run uses the teams of both."""

    class Shared(KeysFileAccess):
        """Access by keys in which each user reaches the threads of all."""

        async def authorize_and_build_filter(self, identity: Any, action: Any, value: Any) -> Any:
            allowed = await super().authorize_and_build_filter(identity, action, value)
            return {} if action.startswith("threads:") else allowed

    write_keys(tmp_path / "keys.toml", None)
    for office in serve_office(Shared(tmp_path / "keys.toml"), str(tmp_path / "memory.db")):
        client = office.client("ann")
        thread_id = client.threads.create()["thread_id"]
        client.runs.wait(thread_id, "office", input=build_input("ask where the tea is"))
        assert find_secret_words(answer_question(office, "bob", thread_id)) == ["Heron", "Toad"]
        assert find_secret_words(office.say("red", "Where is the tea?", thread_id)) == []


def test_config_chooses_team_without_authentication(tmp_path: Path) -> None:
    """A local server has no identities that list teams."""
    from perdure.server.http.access import LocalAccess

    for office in serve_office(LocalAccess("ann"), str(tmp_path / "memory.db")):
        named: Any = {"config": {"configurable": {"team": "blue"}}}
        assert find_secret_words(office.say("x", "Where is the tea?", **named)) == ["Heron", "Newt"]
        assert find_secret_words(office.say("x", "Where is the tea?")) == ["Heron"]
        assert office.put("x", ["teams", "red"]) == 204


@pytest.mark.parametrize("line", ["teams = 'red'", "teams = [1]", "teams = ['']", "teams = ['*']"])
def test_key_with_invalid_team_names_is_refused(tmp_path: Path, line: str) -> None:
    """The error names the field."""
    from perdure.errors import ConfigurationError

    path = tmp_path / "keys.toml"
    path.write_text(render_key_entry("ann", "ann", line))
    with pytest.raises(ConfigurationError, match="team"):
        KeysFileAccess(path)

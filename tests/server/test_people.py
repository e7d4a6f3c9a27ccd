"""Export and erasure of a person's data by REST and on a page, by the person or an admin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph_sdk import get_sync_client

from perdure.memory.adapters import VectorStoreChatMemoryAdvisor
from perdure.people import Part, export
from perdure.run_tables.person_rows import PersonRows
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import ADMIN_PERMISSION
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.logs import Audit
from perdure.settings import Settings
from perdure.stores import open_store
from tests.cli.commands import invoke, run, run_json
from tests.people import hold_conversation, list_markers, make_marker, open_people, store_all_kinds
from tests.server.graphs import Chats
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, ROOT, render_key_entry
from tests.server.running import run_server
from tests.server.talking import Gate, build_input, build_talk_graph


class PeopleServer(NamedTuple):
    """A server with API keys, on a database with all kinds of data of two people."""

    url: str
    settings: Settings

    def client(self, key: str) -> httpx.Client:
        """Return a client with a key."""
        return httpx.Client(base_url=self.url, headers={"x-api-key": key}, timeout=60)


@pytest.fixture
def people_server(db: Settings, tmp_path: Path) -> Iterator[PeopleServer]:
    """A server on which Ann, Bob and an admin have API keys."""
    with open_people(db.db) as both:
        store_all_kinds(both, "ann", "anns")
        store_all_kinds(both, "bob", "bobs")
        both.store.put(("cities", "ann"), "home", {"text": "Ghent"})
    keys = tmp_path / "keys.toml"
    admin = render_key_entry(ROOT, "root", f'permissions = ["{ADMIN_PERMISSION}"]')
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob") + admin)
    keys.chmod(0o600)
    graphs: Any = Chats()
    audit = Audit(tmp_path / "audit.jsonl")
    app = create_app(db, access=KeysFileAccess(keys), graphs=graphs, audit=audit)
    with run_server(app) as url:
        yield PeopleServer(url, db)


def test_person_exports_all_of_their_own_data_and_nothing_else(
    people_server: PeopleServer, tmp_path: Path
) -> None:
    """The archive equals that of the library, can be imported, and has nothing of others.

    A user may choose the id of a thread, so the archive has no chat memory under such an id.
    """
    with people_server.client(ANN) as client:
        reply = client.get("/people/ann/export")
    archive = tmp_path / "ann.jsonl"
    archive.write_bytes(reply.content)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    with open_people(people_server.settings.db) as both:
        archived = export("ann", both.saver, both.store, conversations_by_id=False)
        expected = [json.loads(json.dumps(line)) for line in archived]
    import_output = run("import", str(archive), "--db", str(tmp_path / "copy.db"))

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert lines[1:] == expected[1:]
    assert lines[0]["other_namespaces"] == [["cities", "ann"]]
    assert lines[0]["templates"] == [["notes", "{user_id}"]]
    assert [each for each in (*list_markers("bob"), b"bob") if each in reply.content] == []
    assert "2 conversations (2 of ann)" in import_output


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/people/ann"),
        ("GET", "/people/ann/export"),
        ("DELETE", "/people/ann"),
        ("GET", "/ui/person?user=ann"),
        ("POST", "/ui/person?user=ann"),
    ],
)
def test_only_admin_may_ask_about_another_person(
    people_server: PeopleServer, method: str, path: str
) -> None:
    """Bob is refused without learning whether the person exists; an admin is answered."""
    data = {"typed": "ann"} if method == "POST" else None
    with people_server.client(BOB) as bob, people_server.client(ROOT) as root:
        refused = bob.request(method, path, data=data)
        unknown = bob.request(method, path.replace("ann", "nobody"), data=data)
        allowed = root.request(method, path, data=data)
    texts = [reply.text.replace("nobody", "ann") for reply in (refused, unknown)]

    assert (refused.status_code, unknown.status_code) == (403, 403)
    assert texts[0] == texts[1]
    assert not [each for each in list_markers("ann") if each.decode() in refused.text]
    assert allowed.status_code == 200


def test_person_erases_their_own_data_as_planned(people_server: PeopleServer) -> None:
    """The plan matches the erasure, names nothing of others, and a second request finds nobody."""
    with people_server.client(ANN) as client, people_server.client(BOB) as bob:
        before = bob.get("/people/bob").json()
        planned = client.get("/people/ann").json()
        done = client.delete("/people/ann").json()
        again = client.delete("/people/ann")
        after = bob.get("/people/bob").json()
        threads = client.post("/threads/search", json={}).json()

    assert planned["erased"] == done["erased"]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    assert done["scrubbed"] == (not people_server.settings.db.startswith("postgres"))
    assert [part["what"] for part in done["kept"]] == ["namespaces", "API keys"]
    assert "bob" not in json.dumps([planned, done])
    assert (again.status_code, threads) == (404, [])
    assert "nobody of this name" in again.json()["detail"]
    assert before == after


def test_thread_named_after_other_person_gives_no_access_to_their_chat_memory(
    people_server: PeopleServer,
) -> None:
    """The chat memory under the other person's name is neither exported nor erased."""
    with open_people(people_server.settings.db) as both:
        both.store.put(("chat_memory", "bob"), "k", {"text": make_marker("bob", "chat")})
        hold_conversation(both, "ann", "bob")  # a client chooses the id of a thread
    with people_server.client(ANN) as client:
        texts = [
            client.get("/people/ann").text,
            client.get("/people/ann/export").text,
            client.delete("/people/ann").text,
        ]
    with open_people(people_server.settings.db) as both:
        remaining_item = both.store.get(("chat_memory", "bob"), "k")

    assert [make_marker("bob", "chat") in text for text in texts] == [False, False, False]
    assert not any("chat_memory/bob" in text for text in texts)
    assert json.loads(texts[1].splitlines()[0])["other_namespaces"] == [["cities", "ann"]]
    assert remaining_item is not None


def test_thread_with_id_of_conversation_gives_no_access_to_its_chat_memory(
    people_server: PeopleServer,
) -> None:
    """Only an admin reaches the chat memory of a conversation whose id is also a thread's id."""
    with open_people(people_server.settings.db) as both:
        both.store.put(("chat_memory", "conv-1"), "k", {"text": make_marker("bob", "chat")})
        hold_conversation(both, "ann", "conv-1")
    with people_server.client(ROOT) as root, people_server.client(ANN) as client:
        of_admin = root.get("/people/ann/export").text
        texts = [client.get("/people/ann/export").text, client.delete("/people/ann").text]
    with open_people(people_server.settings.db) as both:
        remaining_item = both.store.get(("chat_memory", "conv-1"), "k")

    assert make_marker("bob", "chat") in of_admin
    assert not any(
        make_marker("bob", "chat") in text or "chat_memory/conv-1" in text for text in texts
    )
    assert remaining_item is not None


def test_person_reaches_only_their_own_messages_of_shared_conversation(
    people_server: PeopleServer,
) -> None:
    """The stored author decides whose a message is; other messages stay."""
    model: Any = RunnableLambda(lambda _: "")
    with open_people(people_server.settings.db) as both:
        advisor = VectorStoreChatMemoryAdvisor(model, both.store)
        for user in ("ann", "bob", None):
            text = HumanMessage(f"{make_marker(str(user), 'chat')} in conv-1")
            advisor.remember("conv-1", [text, AIMessage(f"to {user}")], user)
        in_library = [*export("bob", both.saver, both.store)]
    with people_server.client(ANN) as client:
        texts = [client.get("/people/ann").text, client.get("/people/ann/export").text]
        planned, done = client.get("/people/ann").json(), client.delete("/people/ann").json()
    with open_people(people_server.settings.db) as both:
        remaining_texts = sorted(
            item.value["text"] for item in both.store.search(("chat_memory", "conv-1"))
        )
        again = [*export("bob", both.saver, both.store)]

    own = [json.loads(line) for line in texts[1].splitlines()]
    chats = [
        line["value"]["text"] for line in own if line.get("namespace") == ["chat_memory", "conv-1"]
    ]
    assert sorted(chats) == ["to ann", f"{make_marker('ann', 'chat')} in conv-1"]
    assert not any(make_marker(user, "chat") in text for user in ("bob", "None") for text in texts)
    assert "chat_memory/conv-1" in texts[0]
    assert planned["erased"] == done["erased"]
    assert remaining_texts == sorted(
        ["to bob", "to None", *(f"{make_marker(u, 'chat')} in conv-1" for u in ("bob", "None"))]
    )
    assert again[1:] == in_library[1:]
    assert [line["value"]["text"] for line in again if line.get("key") == "k"] == [
        f"a {make_marker('bob', 'chat')}"
    ]


def test_erasure_plan_of_admin_lists_memories_of_others_that_are_kept(
    people_server: PeopleServer,
) -> None:
    with open_people(people_server.settings.db) as both:
        provenance = {"thread_id": "anns"}
        line = {"namespace": ["memories", "bob"], "key": "heard", "value": {"text": "figs"}}
        both.store.import_lines([json.dumps(line | {"provenance": provenance})])
    with people_server.client(ROOT) as root:
        kept = {part["what"]: part["ids"] for part in root.get("/people/ann").json()["kept"]}

    assert kept["memories of others"] == ["memories/bob/heard"]


def count_entries_in_files(report: dict[str, Any]) -> dict[str, int]:
    """Return the counts of kept data that is in files of the server."""
    return {
        part["what"]: part["count"]
        for part in report["kept"]
        if part["what"] in ("API keys", "audit records") and not part["ids"]
    }


def test_reports_count_api_keys_and_audit_records(
    people_server: PeopleServer, tmp_path: Path
) -> None:
    """The dry run, the page and the erasure have the counts of `perdure forget`.

    Records of another tenant and a record that is being written are not counted.
    """
    files = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    records: list[dict[str, str]] = [
        {"user": "ann"},
        {"user": "desk", "acting_for": "ann"},
        {"user": "bob"},
        {"user": "ann", "tenant": "acme"},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    files[1].write_text(lines + '{"user": "ann')
    options = "--user", "ann", "--dry-run", "--db", people_server.settings.db
    by_command = run_json("forget", *options, "--keys", str(files[0]), "--audit", str(files[1]))
    with people_server.client(ANN) as ann, people_server.client(ROOT) as root:
        planned = [client.get("/people/ann").json() for client in (ann, root)]
        page = ann.get("/ui/person").text
        done = ann.delete("/people/ann").json()

    expected = {"API keys": 1, "audit records": 2}
    for report in (by_command, *planned, done):
        assert count_entries_in_files(report) == expected
    assert '<td>audit records</td><td class="number">2</td>' in page


def test_namespace_of_blank_user_does_not_prevent_erasure(people_server: PeopleServer) -> None:
    """A program stored an item under a name that the server does not accept."""
    with open_store(people_server.settings.db) as store:
        store.put(("memories", " ", "ann"), "k", {"text": "figs"})
    with people_server.client(ANN) as client:
        done = client.delete("/people/ann")

    assert done.status_code == 200


def test_unreadable_audit_log_does_not_prevent_erasure(
    people_server: PeopleServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report says that a file cannot be read, without the path, which the log contains."""
    audit, open_path = tmp_path / "audit.jsonl", Path.open

    def open_or_fail(path: Path, *args: Any, **options: Any) -> Any:
        if path == audit and args == ("rb",):
            raise OSError(5, "Input/output error")
        return open_path(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)
    with people_server.client(ANN) as client:
        done = client.delete("/people/ann").json()

    unread = {"what": "files that cannot be read", "count": 1, "ids": ["keys file or audit log"]}
    assert unread in done["kept"]
    assert str(tmp_path) not in json.dumps(done)
    assert str(audit) in caplog.text


def test_event_loop_answers_while_audit_log_is_read(
    people_server: PeopleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that reads a slow audit log does not delay another request."""
    reading, go_on = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any, **options: Any) -> tuple[Part, ...]:
        reading.set()
        assert go_on.wait(60)
        return ()

    monkeypatch.setattr("perdure.server.api_people.count_keys_and_audit_records", read_slowly)
    with people_server.client(ANN) as client, ThreadPoolExecutor() as pool:
        planned = pool.submit(client.get, "/people/ann")
        assert reading.wait(60)
        with people_server.client(BOB) as bob:
            other_reply = bob.post("/threads/search", json={})
        is_done = planned.done()
        go_on.set()

    assert (other_reply.status_code, is_done) == (200, False)
    assert planned.result().status_code == 200


def test_erasing_person_cancels_run_that_is_under_way(db: Settings, gate: Gate) -> None:
    """The run ends, stores nothing more, and its events are removed."""
    graphs = Graphs({"talk": build_talk_graph(gate)})
    with run_server(create_app(db, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        sdk.threads.create(thread_id="t")
        run = sdk.runs.create("t", "talk", input=build_input(make_marker("ann", "question")))
        assert gate.reached.wait(60)
        with httpx.Client(base_url=url, timeout=60) as client:
            done = client.delete("/people/ann").json()
            gate.open.set()
            gone = client.get(f"/threads/t/runs/{run['run_id']}")
            again = client.get("/people/ann")

    assert {part["what"]: part["count"] for part in done["erased"]}["threads"] == 1
    assert (gone.status_code, again.status_code) == (404, 404)


@pytest.mark.parametrize("webhook", [None, "https://hooks.invalid/"])
def test_erasing_person_cancels_stateless_run_that_is_under_way(
    db: Settings, gate: Gate, webhook: str | None
) -> None:
    """The end of the run deletes its thread and stores its webhook, which is never delivered."""
    settings = replace(db, webhook_secret="secret of the webhooks")
    graphs = Graphs({"talk": build_talk_graph(gate)})
    app = create_app(settings, graphs=graphs, webhook_hosts=["hooks.invalid"])
    with run_server(app) as url, get_sync_client(url=url) as sdk:
        text = build_input(make_marker("ann", "question"))
        run = sdk.runs.create(None, "talk", input=text, webhook=webhook)
        assert gate.reached.wait(60)
        with httpx.Client(base_url=url, timeout=60) as client:
            done = client.delete("/people/ann")
            gate.open.set()
            again = client.get("/people/ann")
    with open_people(db.db) as both:
        webhooks = PersonRows(both.saver, "ann").list_webhook_run_ids()

    erased = {part["what"]: part["ids"] for part in done.json()["erased"]}
    assert erased.get("threads") == [run["thread_id"]]
    assert erased.get("webhooks", []) == ([run["run_id"]] if webhook else [])
    assert (webhooks, again.status_code) == ([], 404)


def test_person_page_shows_data_and_erases_after_name_is_typed(people_server: PeopleServer) -> None:
    """The page shows the data, links to the archive, and asks for the name before an erasure."""
    with people_server.client(ANN) as client:
        shown = client.get("/ui/person").text
        memories = client.get("/ui/memories").text
        wrong = client.post("/ui/person", data={"typed": "Ann"})
        still = client.get("/people/ann").status_code
        done = client.post("/ui/person", data={"typed": "ann"})
        gone = client.get("/ui/person")

    assert "anns-2" in shown
    assert 'href="/people/ann/export"' in shown
    assert "/ui/person?user=ann" in memories
    assert (wrong.status_code, still) == (422, 200)
    assert done.status_code == 200
    assert "Erased: <bdi>ann</bdi>" in done.text
    assert gone.status_code == 404


AUTH_FILE_THAT_DENIES_PROFILES = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers):
    return {"identity": headers[b"x-api-key"].decode().removeprefix("key-of-")}

@auth.on.threads
async def threads(ctx, value):
    return {"owner": ctx.user.identity}

@auth.on.store
async def store(ctx, value):
    return ctx.user.identity != "ann" or tuple(value["namespace"])[0] != "profiles"
"""


def test_denied_namespace_refuses_whole_export_and_erasure(
    settings: Settings, tmp_path: Path
) -> None:
    """Nothing is exported or erased in part because a handler denies a namespace."""
    with open_people(settings.db) as both:
        store_all_kinds(both, "ann", "anns")
    access = AuthFileAccess(write_auth_file(tmp_path, AUTH_FILE_THAT_DENIES_PROFILES))
    headers = {"x-api-key": ANN}
    with (
        run_server(create_app(settings, access=access)) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
    ):
        paths = (("GET", "/people/ann"), ("GET", "/people/ann/export"), ("DELETE", "/people/ann"))
        replies = [client.request(*each) for each in paths]

    assert [reply.status_code for reply in replies] == [403, 403, 403]
    assert "profiles" in replies[0].text


AUTH_FILE_OF_ORGANISATION = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers):
    name = headers[b"x-api-key"].decode().removeprefix("key-of-")
    return {"identity": name, "permissions": ["perdure:admin"] if name == "root" else []}

@auth.on.threads
async def threads(ctx, value):
    value.setdefault("metadata", {})["owner"] = "acme"
    return {"owner": "acme"}

@auth.on.store
async def store(ctx, value):
    return True
"""


def test_organisation_is_not_treated_as_person(db: Settings, tmp_path: Path) -> None:
    """Its threads belong to no person by REST, on the page and, by default, in the CLI."""
    access = AuthFileAccess(write_auth_file(tmp_path, AUTH_FILE_OF_ORGANISATION))
    with run_server(create_app(db, access=access)) as url:
        for key in ("key-of-ann", "key-of-acme", "key-of-root"):
            with httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60) as client:
                if key == "key-of-ann":
                    client.post("/threads", json={"thread_id": "theirs"}).raise_for_status()
                    continue
                paths = (("GET", "/people/acme"), ("DELETE", "/people/acme"))
                replies = [
                    client.request(*each) for each in (*paths, ("GET", "/ui/person?user=acme"))
                ]
                assert [each.status_code for each in replies] == [404, 404, 404]
                assert "theirs" not in "".join(each.text for each in replies)
    result = invoke("forget", "--user", "acme", "--yes", "--db", db.db)
    forced = invoke("forget", "--user", "acme", "--yes", "--owners", "people", "--db", db.db)

    assert (result.exit_code, forced.exit_code) == (1, 0)
    assert "the owner of 'theirs' has this name" in result.stderr

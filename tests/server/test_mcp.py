"""MCP as programs use it: the SDK's own client, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.errors import InvalidValue
from perdure.graphs import chat_graph
from perdure.memory import Collection, memories, remember
from perdure.server import create_app
from perdure.server.databases import Databases
from perdure.server.http.access import (
    Action,
    Filter,
    Forbidden,
    Identity,
    LocalAccess,
    Unauthenticated,
)
from perdure.server.http.call import Call
from perdure.server.http.logs import Audit
from perdure.server.mcp_tools import TOOLS, read_thread, search_threads
from perdure.server.mcp_tools import remember as remember_tool
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.graphs import run_asking_graph
from tests.server.running import run_server

NAMES = {"recall", "remember", "forget", "search_threads", "read_thread"}
Ask = Callable[..., Any]


class HeaderAccess:
    """Access that identifies users by a header and restricts threads to their owners."""

    async def identify(self, connection: HTTPConnection) -> Identity:
        if not (user := connection.headers.get("x-api-key")):
            raise Unauthenticated("give a key")
        return Identity(user)

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        if identity.user == "nobody":
            raise Forbidden("nobody may do nothing")
        return {"owner": identity.user} if action.startswith("threads") else {}


def store_data_of_two_users(settings: Settings) -> None:
    """Store a memory and a conversation for each of ann and bob."""
    with open_store(settings.db) as store, open_checkpointer(settings.db) as saver:
        graph: Any = chat_graph(FakeListChatModel(responses=["Green, then."]), checkpointer=saver)
        for user in ("ann", "bob"):
            config: Any = {"configurable": {"user_id": user, "thread_id": f"of {user}"}}
            remember(f"{user} drinks green tea.", store=store, config=config)
            for said in (f"Which tea does {user} like?", f"</thread> {user} again"):
                graph.invoke({"messages": [HumanMessage(said)]}, config)


def join_texts(result: Any) -> str:
    return "\n".join(each.text for each in result.content)


def run_client(
    server: Any, use_client: Callable[[Client], Awaitable[None]], **options: Any
) -> None:
    async def open_and_use_client() -> None:
        async with Client(server, read_timeout_seconds=60, **options) as client:
            await use_client(client)

    asyncio.run(open_and_use_client())


def build_stdio_parameters(settings: Settings) -> StdioServerParameters:
    arguments = ["-m", "perdure.cli.main", "mcp", "--db", settings.db, "--user", settings.user]
    arguments[:2] = ["-c", "from perdure.cli import main; main()"]
    return StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))


async def check_every_tool(client: Client) -> None:
    """Call every tool as ann and check its result."""
    listed = (await client.list_tools()).tools
    assert {each.name for each in listed} == NAMES
    assert not any({"user", "user_id"} & set(each.input_schema["properties"]) for each in listed)

    found = join_texts(await client.call_tool("recall", {"query": "green tea"}))
    assert found.startswith("<memories>\n")
    assert "ann drinks" in found
    assert "bob" not in found
    for_bob = {"query": "green tea", "user": "bob", "user_id": "bob"}
    assert join_texts(await client.call_tool("recall", for_bob)) == found

    kept = join_texts(
        await client.call_tool("remember", {"text": "ann has a <b>cat</b> called Tom."})
    )
    assert kept.startswith("Stored.")
    key = kept.split()[-1].rstrip(".")
    again = join_texts(
        await client.call_tool("remember", {"text": "ann has a <b>cat</b> called Tom."})
    )
    assert again.startswith("Nothing had to be changed")
    assert key in again
    secret = await client.call_tool("remember", {"text": "The password is hunter2-XyZ-99."})
    assert secret.is_error
    assert "review" in join_texts(secret)

    cat = join_texts(await client.call_tool("recall", {"query": "cat Tom"}))
    assert key in cat
    assert "\\u003cb\\u003e" in cat
    assert '"trust": "assistant"' in cat

    receipt = join_texts(await client.call_tool("forget", {"key": key}))
    assert receipt.startswith("Erased: 1 memories")
    assert "Receipt: " in receipt
    twice = await client.call_tool("forget", {"key": key})
    assert twice.is_error
    assert key in join_texts(twice)

    threads = json.loads(join_texts(await client.call_tool("search_threads", {"text": "OF "})))
    assert [each["thread_id"] for each in threads["threads"]] == ["of ann"]
    by_words = json.loads(
        join_texts(await client.call_tool("search_threads", {"text": "teas like"}))
    )
    assert by_words["threads"] == []
    [hit] = by_words["said"]
    assert (hit["thread_id"], hit["role"]) == ("of ann", "user")
    assert hit["message"] == "Which **tea** does ann **like**?"
    assert hit["link"].startswith("/ui/thread?id=of+ann&message=")
    assert len(hit["date"]) == 10
    text = join_texts(await client.call_tool("read_thread", {"thread_id": "of ann"}))
    assert "<" not in text
    read = json.loads(text)
    said = [each["text"] for each in read["messages"]]
    assert said[0] == "Which tea does ann like?"
    assert len(said) == 4
    assert "earlier" not in read
    asked = {"thread_id": "of ann", "last": 1}
    read = json.loads(join_texts(await client.call_tool("read_thread", asked)))
    assert [each["text"] for each in read["messages"]] == ["Green, then."]
    asked |= {"before": read["earlier"]}
    read = json.loads(join_texts(await client.call_tool("read_thread", asked)))
    assert [each["text"] for each in read["messages"]] == ["</thread> ann again"]
    assert read["earlier"] == 2

    for missing in ("of bob", "of nobody"):
        other = await client.call_tool("read_thread", {"thread_id": missing})
        assert other.is_error
        assert f"there is no thread '{missing}'" in join_texts(other)
    nothing: dict[str, Any] = {"query": "quantum chromodynamics"}
    quiet = join_texts(await client.call_tool("recall", nothing))
    assert quiet.startswith("Nothing is known about that; the nearest ")
    assert "below the minimum score" in quiet
    assert "ann drinks" in join_texts(await client.call_tool("recall", nothing | {"min_score": 0}))
    wrong = await client.call_tool("recall", {"query": "tea", "limit": 100_000})
    assert wrong.is_error
    assert "the argument 'limit' is 100000; expected an integer from 1 to 100" in join_texts(wrong)


async def check_corrections(client: Client) -> None:
    """Correct a memory by its id, and check that its earlier text stays in its history."""
    kept = join_texts(await client.call_tool("remember", {"text": "Ann keeps bees."}))
    key = kept.split()[-1].rstrip(".")
    corrected = {"text": "Ann no longer keeps bees.", "key": key}
    done = join_texts(await client.call_tool("remember", corrected))
    assert done == f"The memory's previous text was replaced. The memory's id is still {key}."
    assert key in join_texts(await client.call_tool("remember", corrected))

    [line] = parse_memories(
        join_texts(await client.call_tool("recall", {"query": "Does Ann keep bees?"}))
    )
    assert (line["id"], line["memory"]) == (key, "Ann no longer keeps bees.")
    assert [each["memory"] for each in line["before"]] == ["Ann keeps bees."]

    other = join_texts(await client.call_tool("remember", {"text": "Ann plays chess.", "key": ""}))
    assert other.startswith("Stored.")
    other = other.split()[-1].rstrip(".")
    same = await client.call_tool("remember", {"text": "Ann plays chess.", "key": key})
    assert same.is_error
    assert join_texts(same).startswith(
        f"the memory {key} was not changed, because another memory, {other}, already"
    )
    secret = {"text": "The password is hunter2-XyZ-99.", "key": other}
    assert (await client.call_tool("remember", secret)).is_error
    assert "chess" in join_texts(await client.call_tool("recall", {"query": "chess"}))
    for wrong in (5, ["x"]):
        refused = await client.call_tool("remember", {"text": "It rains.", "key": wrong})
        assert join_texts(refused) == (
            f"the tool was not called: the argument 'key' is {wrong!r}; expected a string, or null"
        )


def parse_memories(recalled: str) -> list[dict[str, Any]]:
    """Return the memories in an answer of `recall`."""
    return [json.loads(line) for line in recalled.splitlines() if line.startswith("{")]


@pytest.fixture
def filled_settings(settings: Settings) -> Settings:
    """Settings of a file with data of two users."""
    store_data_of_two_users(settings)
    return settings


def test_every_tool_works_over_stdio(filled_settings: Settings) -> None:
    run_client(build_stdio_parameters(filled_settings), check_every_tool)


@pytest.mark.slow
def test_remember_with_key_corrects_memory_over_stdio(settings: Settings) -> None:
    run_client(build_stdio_parameters(settings), check_corrections)


def test_remember_with_key_corrects_memory_over_http(settings: Settings) -> None:
    with run_server(create_app(settings)) as url:
        run_client(f"{url}/mcp", check_corrections)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("a turn", {"kind": "turn", "text": "user: I keep bees"}),
    ("an episode", {"kind": "episode", "text": "A hive was moved."}),
    ("a profile", {"kind": "profile", "text": "name: Ann", "document": {"name": "Ann"}}),
    ("instructions", {"instructions": "Be brief."}),
    ("not the id of a memory", {"title": "no text"}),
]


@pytest.mark.parametrize(("kind_name", "value"), KINDS, ids=[kind_name for kind_name, _ in KINDS])
def test_remember_refuses_to_supersede_what_is_not_a_fact(
    settings: Settings, kind_name: str, value: dict[str, Any]
) -> None:
    """Turns, episodes, profiles, instructions and other items stay unchanged."""
    with open_store(settings.db) as store:
        store.put(("memories", "ann"), "k", value)

    with pytest.raises(
        InvalidValue, match=f"nothing was stored, because the key 'k' is .*{kind_name}"
    ):
        call_tool(settings, "store:put", remember_tool, text="Ann keeps wasps.", key="k")

    with open_store(settings.db) as store:
        assert store.get(("memories", "ann"), "k").value == value  # type: ignore[union-attr]


def test_remember_with_unknown_key_adds_nothing(settings: Settings) -> None:
    with pytest.raises(InvalidValue, match="'nope' is not the id of a memory"):
        call_tool(settings, "store:put", remember_tool, text="Ann keeps wasps.", key="nope")

    with open_store(settings.db) as store:
        assert memories(store=store, config={"configurable": {"user_id": "ann"}}) == []


def test_corrected_memory_keeps_its_versions_fields_and_kind(settings: Settings) -> None:
    """The history contains the first text of the memory."""
    with open_store(settings.db) as store:
        of_ann: Any = {"configurable": {"user_id": "ann"}}
        made = remember(
            {"text": "Ann keeps bees.", "hives": 3}, kind="hobby", store=store, config=of_ann
        )

    call_tool(settings, "store:put", remember_tool, text="Ann keeps wasps.", key=made.key)

    with open_store(settings.db) as store:
        history = Collection(store).history(str(made.key), config=of_ann)
    assert [each.text for each in history] == ["Ann keeps bees.", "Ann keeps wasps."]
    assert [(each.kind, each.value["hives"]) for each in history] == [("hobby", 3)] * 2
    assert history[-1].provenance is not None
    assert (history[-1].provenance.actor, history[-1].provenance.trust) == ("mcp", "assistant")


def call_tool(settings: Settings, action: Action, tool: Any, **arguments: Any) -> str:
    """Call a tool as ann."""

    async def open_and_call() -> str:
        databases = Databases(settings)
        try:
            return str(
                await tool(
                    Call(Identity("ann"), action, LocalAccess("ann"), databases), **arguments
                )
            )
        finally:
            await databases.aclose()

    return asyncio.run(open_and_call())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_every_tool_works_over_http(filled_settings: Settings, mode: str) -> None:
    with run_server(create_app(filled_settings)) as url:
        run_client(f"{url}/mcp", check_every_tool, mode=mode)


@pytest.fixture
def shared_url(filled_settings: Settings, tmp_path: Path) -> Iterator[str]:
    """The address of a server with several users."""
    audit = Audit(tmp_path / "audit")
    with run_server(create_app(filled_settings, access=HeaderAccess(), audit=audit)) as url:
        yield url


def post_tool_call(
    url: str, user: str | None, tool: str, arguments: dict[str, Any]
) -> httpx.Response:
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }
    headers = {"accept": "application/json, text/event-stream"}
    headers |= {} if user is None else {"x-api-key": user}
    return httpx.post(f"{url}/mcp", json=body, headers=headers, timeout=30)


EXAMPLES: dict[str, dict[str, Any]] = {
    "recall": {"query": "tea"},
    "remember": {"text": "It rains."},
    "forget": {"key": "x"},
    "search_threads": {"text": "of"},
    "read_thread": {"thread_id": "of ann"},
}


def test_tools_reach_only_data_of_their_caller(
    shared_url: str, filled_settings: Settings, tmp_path: Path
) -> None:
    for user in ("ann", "bob"):
        result = post_tool_call(shared_url, user, "recall", {"query": "tea"}).json()["result"]
        other = {"ann": "bob", "bob": "ann"}[user]
        assert f"{user} drinks" in str(result)
        assert f"{other} drinks" not in str(result)
    thread = post_tool_call(shared_url, "bob", "read_thread", {"thread_id": "of ann"}).json()[
        "result"
    ]
    assert thread["isError"]
    assert "there is no thread" in str(thread)
    post_tool_call(shared_url, "bob", "remember", {"text": "bob plays chess."})
    with open_store(filled_settings.db) as store:
        of_ann: Any = {"configurable": {"user_id": "ann"}}
        assert len(memories(store=store, config=of_ann)) == 1


@pytest.mark.parametrize("tool", [each.__name__ for each in TOOLS])
def test_tools_refuse_strangers(
    shared_url: str, filled_settings: Settings, tool: str, tmp_path: Path
) -> None:
    assert post_tool_call(shared_url, None, tool, EXAMPLES[tool]).status_code == 401
    refused = post_tool_call(shared_url, "nobody", tool, EXAMPLES[tool]).json()["result"]
    assert refused["isError"]
    assert "nobody may do nothing" in str(refused)
    records = [json.loads(each) for each in (tmp_path / "audit").read_text().splitlines()]
    changes = tool in ("remember", "forget")
    assert [(each["user"], each["outcome"]) for each in records] == [("nobody", "denied")] * changes
    with open_store(filled_settings.db) as store:
        assert not memories(store=store, config={"configurable": {"user_id": "nobody"}})


def test_read_thread_continues_with_earlier_messages_across_branches(
    filled_settings: Settings,
) -> None:
    with open_checkpointer(filled_settings.db) as saver:
        ends = (each for each in saver.checkpoints("of ann") if each.counts.get("messages") == 2)
        end = next(ends)
        graph: Any = chat_graph(FakeListChatModel(responses=["Black."]), checkpointer=saver)
        config = {"thread_id": "of ann", "user_id": "ann", "checkpoint_id": end.checkpoint_id}
        graph.invoke({"messages": [HumanMessage("Or coffee?")]}, {"configurable": config})

    async def read_twice() -> list[str]:
        databases, texts, before = Databases(filled_settings), list[str](), None
        call = Call(Identity("ann"), "threads:read", LocalAccess("ann"), databases)
        for _ in range(2):
            read = json.loads(await read_thread(call, "of ann", last=4, before=before))
            texts[:0] = [each["text"] for each in read["messages"]]
            before = read.get("earlier")
        await databases.aclose()
        return texts

    expected_texts = ["Which tea does ann like?", "Green, then.", "Or coffee?", "Black."]
    assert asyncio.run(read_twice()) == expected_texts


def test_thread_tools_report_pending_interrupt(settings: Settings) -> None:
    """Search returns the status of the thread, and `read_thread` returns the question."""
    run_asking_graph(settings, "asks")

    async def search_and_read() -> tuple[Any, Any]:
        databases = Databases(settings)
        call = Call(Identity("ann"), "threads:search", LocalAccess("ann"), databases)
        threads = json.loads(await search_threads(call, "asks"))["threads"]
        read = json.loads(await read_thread(call.with_action("threads:read"), "asks"))
        await databases.aclose()
        return threads, read

    threads, read = asyncio.run(search_and_read())

    assert threads == [{"thread_id": "asks", "title": None, "status": "interrupted"}]
    assert (read["next"], read["waits_for_answers_to"]) == (["part"], ["Sure?"])


def test_search_threads_finds_own_thread_below_threads_of_others(filled_settings: Settings) -> None:
    async def search() -> list[str]:
        databases = Databases(filled_settings)
        call = Call(Identity("ann"), "threads:search", LocalAccess("ann"), databases)
        await call.authorize_action_arguments()
        for number in range(150):
            await call.threads.create(f"of bob {number}", {"owner": "bob"})
        found = json.loads(await search_threads(call, "of", limit=1))
        await databases.aclose()
        return [each["thread_id"] for each in found["threads"]]

    assert asyncio.run(search()) == ["of ann"]


def test_every_tool_has_action_and_example() -> None:
    assert {each.__name__ for each in TOOLS} == set(EXAMPLES) == NAMES
    assert all(getattr(each, "action", None) for each in TOOLS)


@pytest.mark.slow
def test_stdio_server_writes_only_protocol_and_ends_with_stdin(filled_settings: Settings) -> None:
    parameters = build_stdio_parameters(filled_settings)
    initialize = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    done = subprocess.run(
        [parameters.command, *parameters.args],
        input=json.dumps(initialize) + "\nno json\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert lines[0]["result"]["serverInfo"]["name"] == "perdure"
    assert all(line["jsonrpc"] == "2.0" for line in lines)


def test_invalid_settings_are_reported_in_one_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("x" * 5000)
    command = build_stdio_parameters(Settings(db=str(tmp_path / "no.db"), user="ann"))
    done = subprocess.run(
        [command.command, *command.args, "--audit", str(tmp_path)],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "the audit log" in done.stderr
    assert len(done.stderr.splitlines()) == 1

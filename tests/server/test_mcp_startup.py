"""The first messages of MCP over stdio: answered as the SDK answers them, without loading it."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from perdure import __version__
from perdure.errors import InvalidValue
from perdure.server.http.logs import is_audited_change
from perdure.server.mcp import build_mcp_server
from perdure.server.mcp_schema import TOOLS as SCHEMAS
from perdure.server.mcp_startup import ENVELOPE_VERSION, HANDSHAKE_VERSIONS, StartupResponder
from perdure.server.mcp_tools import TOOLS
from perdure.settings import Settings
from tests.server.test_mcp import (
    build_stdio_parameters,
    check_every_tool,
    run_client,
    store_data_of_two_users,
)

CLIENT = {"name": "test", "version": "1"}
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": ENVELOPE_VERSION,
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
HEAVY = ("mcp", "fastapi", "starlette", "langchain_core", "langgraph", "numpy")


def build_message(method: str, id: Any = None, **params: Any) -> dict[str, Any]:
    numbered = {} if id is None else {"id": id}
    return {
        "jsonrpc": "2.0",
        "method": method,
        **numbered,
        **({"params": params} if params else {}),
    }


def build_initialize_message(version: str, **more: Any) -> dict[str, Any]:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT, **more}
    return build_message("initialize", 1, **params)


def ask_sdk(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replies of the SDK."""

    async def exchange_messages() -> list[dict[str, Any]]:
        server: Any = build_mcp_server(lambda context: pytest.fail("no tool is called"))
        to_server, read = anyio.create_memory_object_stream[Any](100)
        write, from_server = anyio.create_memory_object_stream[Any](100)
        async with anyio.create_task_group() as group:
            options = server.create_initialization_options()
            group.start_soon(server.run, read, write, options)
            replies = list[dict[str, Any]]()
            for each in messages:
                parsed = jsonrpc_message_adapter.validate_python(each)
                await to_server.send(SessionMessage(parsed))
                if "id" in each:
                    reply = (await from_server.receive()).message
                    replies.append(reply.model_dump(by_alias=True, exclude_unset=True))
            to_server.close()
        from_server.close()
        return replies

    return asyncio.run(exchange_messages())


def ask_opening(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    opening, replies = StartupResponder(__version__), list[dict[str, Any]]()
    for each in messages:
        answered = opening.answer_line_unless_sdk_is_needed(json.dumps(each))
        assert answered is not None, each
        replies += answered
    return replies


@pytest.mark.parametrize("version", HANDSHAKE_VERSIONS)
def test_handshake_replies_equal_those_of_sdk(version: str) -> None:
    """The rule holds for initialize, ping and all lists, also with unusual ids."""
    messages = [
        build_message("ping", 0),
        build_initialize_message(
            version, capabilities={"roots": {"listChanged": True}, "sampling": {}}
        ),
        build_message("notifications/initialized"),
        build_message("notifications/roots/list_changed"),
        build_message("ping", "ping é"),
        build_message("tools/list", 2),
        build_message("tools/list", "x", _meta={"progressToken": 3}),
        build_message("prompts/list", -4),
        build_message("resources/list", 5),
        build_message("resources/templates/list", 6),
        build_message("notifications/cancelled", requestId=2),
    ]

    assert ask_opening(messages) == ask_sdk(messages)


def test_replies_without_handshake_equal_those_of_sdk() -> None:
    messages = [
        build_message("server/discover", 1, _meta=ENVELOPE),
        build_message("tools/list", 2, _meta=ENVELOPE),
        build_message("ping", 3, _meta=ENVELOPE),
        build_message("prompts/list", 4, _meta=ENVELOPE),
        build_message("resources/list", 5, _meta=ENVELOPE),
    ]

    assert ask_opening(messages) == ask_sdk(messages)


def test_protocol_versions_equal_those_of_sdk() -> None:
    assert HANDSHAKE_VERSIONS == HANDSHAKE_PROTOCOL_VERSIONS
    assert (ENVELOPE_VERSION,) == MODERN_PROTOCOL_VERSIONS


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        json.dumps([build_message("ping", 1)]),
        json.dumps({"id": 1, "method": "ping"}),
        json.dumps({"jsonrpc": "2.0", "id": None, "method": "ping"}),
        json.dumps({"jsonrpc": "2.0", "id": True, "method": "ping"}),
        json.dumps({"jsonrpc": "2.0", "id": 1.5, "method": "ping"}),
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}),
        json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}}),
        json.dumps(build_message("tools/list", 1)),
        json.dumps(build_message("server/discover", 1)),
        json.dumps(build_message("tools/call", 1, name="recall", arguments={})),
        json.dumps(
            build_message("tools/list", 1, _meta={**ENVELOPE, next(iter(ENVELOPE)): "2199-01-01"})
        ),
        json.dumps(build_message("tools/list", 1, _meta={next(iter(ENVELOPE)): ENVELOPE_VERSION})),
        json.dumps(build_initialize_message("2199-01-01")),
        json.dumps(build_initialize_message("2025-06-18", clientInfo={"name": "test"})),
        json.dumps(build_initialize_message("2025-06-18", capabilities=None)),
        json.dumps(build_message("initialize", 1)),
    ],
)
def test_unknown_messages_are_left_to_sdk(line: str) -> None:
    opening = StartupResponder(__version__)

    assert opening.answer_line_unless_sdk_is_needed(line) is None
    assert opening.replayed_lines == []


@pytest.mark.parametrize(
    "later_message",
    [
        build_initialize_message("2025-06-18"),
        build_message("tools/list", 2, cursor="1"),
        build_message("tools/list", 2, _meta=ENVELOPE),
        build_message("tools/call", 2, name="recall", arguments={"query": "tea"}),
        build_message("logging/setLevel", 2, level="info"),
    ],
)
def test_handshake_is_replayed_to_sdk_before_other_messages(later_message: dict[str, Any]) -> None:
    """The SDK receives the negotiated version and the later messages of the client."""
    opening = StartupResponder(__version__)
    ready = json.dumps(build_message("notifications/initialized")) + "\n"
    opening.answer_line_unless_sdk_is_needed(
        json.dumps(build_initialize_message("2025-03-26", capabilities={"sampling": 5}))
    )
    opening.answer_line_unless_sdk_is_needed(ready)

    assert opening.answer_line_unless_sdk_is_needed(json.dumps(later_message)) is None
    again, then = opening.replayed_lines
    assert json.loads(again)["params"]["protocolVersion"] == "2025-03-26"
    assert then == ready


def test_listing_tools_imports_neither_sdk_nor_libraries_of_tools(settings: Settings) -> None:
    """Modules that take tenths of a second to import are not imported."""
    program = build_stdio_parameters(settings)
    lines = [
        build_initialize_message("2025-11-25"),
        build_message("notifications/initialized"),
        build_message("tools/list", 2),
    ]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program.args],
        input="".join(json.dumps(each) + "\n" for each in lines),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}

    listed = json.loads(done.stdout.splitlines()[1])["result"]["tools"]
    assert [each["name"] for each in listed] == [each.name for each in SCHEMAS]
    assert names.isdisjoint(HEAVY)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_work_after_opening_without_sdk(settings: Settings, mode: str) -> None:
    store_data_of_two_users(settings)
    run_client(build_stdio_parameters(settings), check_every_tool, mode=mode)


@pytest.mark.slow
def test_messages_sent_with_tool_call_are_answered_once(settings: Settings) -> None:
    """A client may send all messages at once; each id gets one reply."""
    lines = [
        build_initialize_message("2024-11-05"),
        build_message("notifications/initialized"),
        build_message("tools/list", 2),
        build_message("tools/call", 3, name="recall", arguments={"query": "tea"}),
        build_message("ping", 4),
        build_message("tools/list", 5),
    ]
    program = build_stdio_parameters(settings)
    with subprocess.Popen(
        [program.command, *program.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(json.dumps(each) + "\n" for each in lines))
        process.stdin.flush()
        replies = [json.loads(process.stdout.readline()) for _ in range(5)]
        process.stdin.close()
        rest = process.stdout.read()

    assert sorted(each["id"] for each in replies) == [1, 2, 3, 4, 5]
    assert all("result" in each for each in replies)
    assert rest == ""


def test_tool_schemas_match_parameters_of_functions() -> None:
    """Names, defaults and the read-only hint match the function and its action."""
    for schema, tool in zip(SCHEMAS, TOOLS, strict=True):
        _, *parameters = inspect.signature(tool).parameters.values()
        defaults = {
            name: each.get("default", inspect.Parameter.empty)
            for name, each in schema.parameters.items()
        }
        assert schema.name == tool.__name__
        assert {each.name: each.default for each in parameters} == defaults
        assert schema.is_read_only is not is_audited_change(tool.action)  # type: ignore[attr-defined]


SCHEMA = {each.name: each for each in SCHEMAS}


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        ({}, "the argument 'query' is missing; expected a string"),
        ({"query": 5}, "the argument 'query' is 5; expected a string"),
        ({"query": None}, "the argument 'query' is None; expected a string"),
        (
            {"query": "x" * 5000},
            "the argument 'query' has 5,000 characters; expected at most 4,000",
        ),
        (
            {"query": "x", "limit": 0},
            "the argument 'limit' is 0; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "limit": True},
            "the argument 'limit' is True; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "limit": 2.5},
            "the argument 'limit' is 2.5; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "limit": None},
            "the argument 'limit' is None; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "limit": "ten"},
            "the argument 'limit' is 'ten'; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "limit": [1]},
            "the argument 'limit' is [1]; expected an integer from 1 to 100",
        ),
        (
            {"query": "x", "min_score": 2},
            "the argument 'min_score' is 2; expected a number from 0 to 1, or null",
        ),
        (
            {"query": "x", "min_score": "nan"},
            "the argument 'min_score' is 'nan'; expected a number from 0 to 1, or null",
        ),
        (
            {"limit": 500},
            "the argument 'query' is missing; expected a string; the argument 'limit' is 500",
        ),
    ],
)
def test_invalid_tool_argument_is_named_in_error(
    arguments: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        SCHEMA["recall"].validate_and_convert_arguments(arguments)

    assert expected_message in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"query": "x"}, {"query": "x", "limit": 10, "min_score": None}),
        ({"query": "x", "limit": "5"}, {"query": "x", "limit": 5, "min_score": None}),
        (
            {"query": "x", "limit": 5.0, "min_score": "0.5"},
            {"query": "x", "limit": 5, "min_score": 0.5},
        ),
        (
            {"query": "x", "min_score": "", "since": "", "until": ""},
            {"query": "x", "limit": 10, "min_score": None},
        ),
        (
            {"query": "x", "user": "bob", "min_score": 0},
            {"query": "x", "limit": 10, "min_score": 0},
        ),
    ],
)
def test_tool_arguments_are_completed_and_converted(
    arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    checked = SCHEMA["recall"].validate_and_convert_arguments(arguments)

    assert checked == {"since": None, "until": None, "team": None, **expected}

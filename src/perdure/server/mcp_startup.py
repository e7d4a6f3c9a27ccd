"""Answer the first messages of an MCP connection over stdio before the MCP SDK is imported.

Importing the SDK and the tool modules takes two seconds of CPU time. Many MCP clients start every
configured server and list its tools, but never call any of the tools. `StartupResponder` answers
the handshake and `tools/list` with the same JSON as the SDK. A test in
tests/server/test_mcp_startup.py compares the JSON from `StartupResponder` with the JSON from the
SDK. As soon as `StartupResponder` receives a message that it cannot answer, such as a tool call,
the SDK takes over and handles that message and all later ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from perdure.server.mcp_schema import INSTRUCTIONS, SERVER_NAME, TOOLS

HANDSHAKE_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Protocol versions whose connections begin with the request `initialize`."""
ENVELOPE_VERSION: Final = "2026-07-28"
"""The protocol version of MCP that has no handshake.

In this version, each request contains the protocol version.
"""
REPLAYED_ID: Final = "perdure:initialize"
"""The id of the `initialize` request that the MCP SDK reads later.

The SDK's reply to this request is not sent to the client.
"""
_META_PREFIX: Final = "io.modelcontextprotocol/"
_UNSUPPORTED_METHODS: Final = ("prompts/list", "resources/list", "resources/templates/list")
_METHOD_NOT_FOUND: Final = -32601  # JSON-RPC error code for an unknown method.


class StartupResponder:
    """Answers the first messages of an MCP connection without the MCP SDK.

    Args:
        version: The version of perdure.

    Attributes:
        replayed_lines: Messages that `StartupResponder` has handled and that the SDK must read,
            too. The SDK reads these messages before the first message that only the SDK can answer.
            The list is empty until `initialize` has been answered.
    """

    def __init__(self, version: str) -> None:
        self._server_info = {"name": SERVER_NAME, "version": version}
        self.replayed_lines = list[str]()

    def answer_lines_until_mcp_sdk_is_needed(
        self, json_lines: Iterable[str], out: TextIO
    ) -> str | None:
        """Answer messages without the MCP SDK, until a message requires the SDK.

        Args:
            json_lines: The input, one message per line.
            out: The stream for the replies.

        Returns:
            The first line that the SDK must answer, or None at the end of the input.
        """
        for line in json_lines:
            replies = self.answer_line_unless_sdk_is_needed(line)
            if replies is None:
                return line
            for reply in replies:
                out.write(json.dumps(reply, separators=(",", ":")) + "\n")
                out.flush()
        return None

    def answer_line_unless_sdk_is_needed(self, line: str) -> list[dict[str, Any]] | None:
        """Return the replies to a message.

        Args:
            line: The message as JSON.

        Returns:
            The replies, which are empty for a notification. None if the SDK must answer.
        """
        try:
            message = json.loads(line)
        except ValueError:
            return None
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return None
        method, params = message.get("method"), message.get("params", {})
        if not isinstance(method, str) or not isinstance(params, dict):
            return None
        if "id" not in message:
            return self._accept_notification_unless_sdk_is_needed(line, method)
        if not isinstance(message["id"], int | str) or isinstance(message["id"], bool):
            return None
        result = self._build_mcp_result_unless_sdk_is_needed(method, params)
        if result is None:
            return None
        return [{"jsonrpc": "2.0", "id": message["id"], **result}]

    def _accept_notification_unless_sdk_is_needed(
        self, line: str, method: str
    ) -> list[dict[str, Any]] | None:
        """Handle a message that needs no reply.

        The `notifications/initialized` notification is kept, because the MCP SDK must read it
        before any later message.

        Returns:
            An empty list of replies, or None if only the MCP SDK can handle the message.
        """
        if not method.startswith("notifications/"):
            return None
        if method == "notifications/initialized" and self.replayed_lines:
            self.replayed_lines[1:] = [line]
        return []

    def _build_mcp_result_unless_sdk_is_needed(
        self, method: str, params: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Build the result or error for a request, or return None if the MCP SDK must answer it."""
        if method == "initialize":
            return self._answer_initialize(params)
        meta = params.get("_meta", {})
        if set(params) - {"_meta"} or not isinstance(meta, dict):
            return None
        # `replayed_lines` is empty until the `initialize` request has been answered. Once the
        # `initialize` request has been answered, `replayed_lines` contains a copy of that request.
        if _META_PREFIX + "protocolVersion" in meta:
            return (
                None
                if self.replayed_lines
                else self._answer_request_without_handshake(method, meta)
            )
        if method == "ping":
            return {"result": {}}
        if not self.replayed_lines:
            return None
        if method == "tools/list":
            return {"result": {"tools": [tool.build_tools_list_entry() for tool in TOOLS]}}
        return _build_not_found_error(method) if method in _UNSUPPORTED_METHODS else None

    def _answer_initialize(self, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answer an `initialize` request.

        Store a simplified copy of the request, which the MCP SDK reads later.

        Return None if the MCP SDK must answer the request, for example because the request is
        invalid.
        """
        client: Any = params.get("clientInfo")
        version = params.get("protocolVersion")
        if (
            self.replayed_lines
            or version not in HANDSHAKE_VERSIONS
            or not _is_valid_mcp_client_info(client)
            or not isinstance(params.get("capabilities"), dict)
        ):
            return None
        sdk_request = {
            "jsonrpc": "2.0",
            "id": REPLAYED_ID,
            "method": "initialize",
            "params": {
                "protocolVersion": version,
                # No client capabilities are needed, because none of perdure's tools send requests
                # to the client.
                "capabilities": {},
                "clientInfo": {"name": client["name"], "version": client["version"]},
            },
        }
        self.replayed_lines.append(json.dumps(sdk_request) + "\n")
        return {
            "result": {
                "protocolVersion": version,
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": self._server_info,
                "instructions": INSTRUCTIONS,
            }
        }

    def _answer_request_without_handshake(
        self, method: str, meta: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Answer a request of protocol version `ENVELOPE_VERSION`, which has no handshake.

        Return the result or error of the request, or None if only the MCP SDK can answer it.
        """
        if (
            meta[_META_PREFIX + "protocolVersion"] != ENVELOPE_VERSION
            or not _is_valid_mcp_client_info(meta.get(_META_PREFIX + "clientInfo"))
            or not isinstance(meta.get(_META_PREFIX + "clientCapabilities"), dict)
        ):
            return None
        if method == "server/discover":
            result: dict[str, Any] = {
                "supportedVersions": [ENVELOPE_VERSION],
                "capabilities": {"tools": {"listChanged": False}},
                "instructions": INSTRUCTIONS,
            }
        elif method == "tools/list":
            result = {"tools": [tool.build_tools_list_entry() for tool in TOOLS]}
        else:
            return (
                _build_not_found_error(method)
                if method in (*_UNSUPPORTED_METHODS, "ping")
                else None
            )
        common_fields = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        return {
            "result": {
                **result,
                **common_fields,
                "_meta": {f"{_META_PREFIX}serverInfo": self._server_info},
            }
        }


def _is_valid_mcp_client_info(value: Any) -> bool:
    """Return whether a value has the `name` and `version` that MCP requires in `clientInfo`."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("name", "version")
    )


def _build_not_found_error(method: str) -> dict[str, Any]:
    """Build the error response to a request whose method perdure does not support."""
    return {"error": {"code": _METHOD_NOT_FOUND, "message": "Method not found", "data": method}}

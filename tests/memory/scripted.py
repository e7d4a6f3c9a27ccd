"""The scripted model, with answers that are no text: none, calls, cut off; and its client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from langchain_openai import ChatOpenAI

from tests.openai_server import Failure, OpenAIServer, Script, _Handler

EMPTY: Final = "<empty>"
BLANK: Final = "<blank>"
CALLS: Final = "<calls a tool>"
CUT_OFF: Final = "<cut off>"
TOO_LONG: Final = Failure(400, "context_length_exceeded: this model takes 500 tokens")

_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_ENDINGS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    EMPTY: ({"content": ""}, "stop"),
    BLANK: ({"content": " \n "}, "stop"),
    CALLS: ({"content": None, "tool_calls": [_CALL]}, "tool_calls"),
    CUT_OFF: ({"content": "An answer that was c"}, "length"),
}


class ScriptedServer(OpenAIServer):
    """See `OpenAIServer`; a script may also say one of the names above."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._server.RequestHandlerClass = _Endings

    def asked_for(self, request: int = -1) -> str:
        """What the last message of a request says."""
        return str(self.shown(request)[-1][1])


class _Endings(_Handler):
    def _answer(self, body: dict[str, Any], reply: str | Failure) -> None:
        if not isinstance(reply, str) or reply not in _ENDINGS:
            super()._answer(body, reply)
            return
        message, reason = _ENDINGS[reply]
        choice = {
            "index": 0,
            "message": {"role": "assistant", **message},
            "finish_reason": reason,
        }
        answer = {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }
        self._send(200, "application/json", json.dumps(answer))


def client(server: OpenAIServer, **options: Any) -> ChatOpenAI:
    """A client that tries nothing again by itself."""
    given = {"model": "scripted", "api_key": "any", "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.base_url, **given)


def numbered(name: str = "summary") -> Callable[[dict[str, Any]], str]:
    """A script without an end: `summary 1`, `summary 2` …"""
    count = iter(range(1, 1_000_000))
    return lambda body: f"{name} {next(count)}"

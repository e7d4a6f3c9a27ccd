"""Answers from which no text comes: none, calls, cut off; a model that gives them, its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from langchain_openai import ChatOpenAI

from tests.openai_server import Answer, Failure, OpenAIServer

_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

EMPTY: Final = Answer({"content": ""})
BLANK: Final = Answer({"content": " \n "})
CALLS: Final = Answer({"content": None, "tool_calls": [_CALL]}, "tool_calls")
CUT_OFF: Final = Answer({"content": "An answer that was c"}, "length")
TOO_LONG: Final = Failure(400, "context_length_exceeded: this model takes 500 tokens")


class ScriptedServer(OpenAIServer):
    """See `OpenAIServer`."""

    def asked_for(self, request: int = -1) -> str:
        """What the last message of a request says."""
        return str(self.shown(request)[-1][1])


def client(server: OpenAIServer, **options: Any) -> ChatOpenAI:
    """A client that tries nothing again by itself."""
    given = {"model": "scripted", "api_key": "any", "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.base_url, **given)


def numbered(name: str = "summary") -> Callable[[dict[str, Any]], str]:
    """A script without an end: `summary 1`, `summary 2` …"""
    count = iter(range(1, 1_000_000))
    return lambda body: f"{name} {next(count)}"

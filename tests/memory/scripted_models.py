"""Model answers without text, a server that gives them, and its client."""

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
    """An OpenAI server that follows a script, see `OpenAIServer`."""

    def read_last_message(self, request: int = -1) -> str:
        """Return the text of the last message of a request."""
        return str(self.shown(request)[-1][1])


def make_client(server: OpenAIServer, **options: Any) -> ChatOpenAI:
    """Return a client that does not retry."""
    settings = {"model": "scripted", "api_key": "any", "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.base_url, **settings)


def make_numbered_script(prefix: str = "summary") -> Callable[[dict[str, Any]], str]:
    """Return an endless script: `summary 1`, `summary 2`, and so on."""
    numbers = iter(range(1, 1_000_000))
    return lambda body: f"{prefix} {next(numbers)}"

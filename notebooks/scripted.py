"""The model of these notebooks: it runs on this machine and says what a notebook scripted.

It is the tests' OpenAI-compatible server behind langchain's own client. With OPENAI_API_KEY set,
`ChatOpenAI(model="gpt-4o-mini")` takes its place, and says what it likes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

from langchain_openai import ChatOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.openai_server import Answer, Failure, OpenAIServer, Reply  # the line above finds it

__all__ = ["Failure", "calls", "scripted", "undated"]

Said = Reply | dict[str, Any]
_NUMBERS = count(1)


def scripted(
    script: Iterable[Said | Callable[[dict[str, Any]], Said]],
) -> tuple[ChatOpenAI, OpenAIServer]:
    """A chat model that gives these answers, and its server, which knows what it was shown.

    Args:
        script: The answers in order: text, `calls(…)` of a tool, a `Failure`, a dict where an
            answer is asked for by a schema, or a function that makes one of these of the request.
    """
    replies = iter(script)

    def reply(request: dict[str, Any]) -> Reply:
        said = next(replies, Failure(message="the script has run out of replies"))
        said = said(request) if callable(said) else said
        if isinstance(said, dict):
            return calls(request["tool_choice"]["function"]["name"], **said)
        return said

    started: Queue[OpenAIServer] = Queue()

    def serve() -> None:
        with OpenAIServer(reply) as server:
            started.put(server)
            Event().wait()

    # threads that a daemon starts are daemons: nothing keeps the kernel from ending
    Thread(target=serve, daemon=True).start()
    server = started.get()
    model = ChatOpenAI(model="gpt-4o-mini", base_url=server.base_url, api_key="none")  # type: ignore[arg-type]  # a str will do
    return model, server


def calls(tool: str, **arguments: Any) -> Answer:
    """An answer that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{next(_NUMBERS)}", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


def undated(shown: object) -> str:
    """A text in which each day is "today", since these notebooks print the same every day."""
    return re.sub(r"\d{4}-\d\d-\d\d", "today", str(shown))

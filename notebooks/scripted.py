"""A chat model that gives scripted answers, offline.

It is langchain's OpenAI client and a local server (`openai_server.py`). To ask a real model, set
OPENAI_API_KEY and use `ChatOpenAI(model="gpt-4o-mini")` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import count
from queue import Queue
from threading import Event, Thread, Timer
from typing import Any

from langchain_openai import ChatOpenAI

from openai_server import Answer, Failure, Held, OpenAIServer, Reply  # beside this file

__all__ = ["Failure", "calls", "scripted", "undated"]

Said = str | Failure | Answer | dict[str, Any]
_NUMBERS = count(1)


def scripted(
    script: Iterable[Said | Callable[[dict[str, Any]], Said]], delay_s: float = 0.0
) -> tuple[ChatOpenAI, OpenAIServer]:
    """A chat model that gives these answers, and its server, which has the requests.

    Args:
        script: The answers in order: text, `calls(…)` of a tool, a `Failure`, a dict where an
            answer is asked for by a schema, or a function that makes one of these of the request.
        delay_s: How long each answer takes.
    """
    replies = iter(script)

    def reply(request: dict[str, Any]) -> Reply:
        said = next(replies, Failure(message="the script has run out of replies"))
        said = said(request) if callable(said) else said
        if isinstance(said, dict):
            said = calls(request["tool_choice"]["function"]["name"], **said)
        return delayed(said, delay_s) if delay_s else said

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


def delayed(reply: str | Failure | Answer, delay_s: float) -> Held:
    """The reply, kept back for so many seconds."""
    held = Held(reply, Event())
    Timer(delay_s, held.until.set).start()
    return held


def calls(tool: str, **arguments: Any) -> Answer:
    """An answer that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{next(_NUMBERS)}", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


def undated(shown: object) -> str:
    """The text with "today" in place of dates, so that the output is the same every day."""
    return re.sub(r"\d{4}-\d\d-\d\d", "today", str(shown))

"""The model of these notebooks: it runs on this machine and says what a notebook scripted.

It is the tests' OpenAI-compatible server behind langchain's own client. With OPENAI_API_KEY set,
`ChatOpenAI(model="gpt-4o-mini")` takes its place, and says what it likes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from queue import Queue
from threading import Event, Thread

from langchain_openai import ChatOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.openai_server import Failure, OpenAIServer, Script  # the line above finds it

__all__ = ["Failure", "scripted"]


def scripted(script: Script) -> tuple[ChatOpenAI, OpenAIServer]:
    """A chat model that gives these answers, and its server, which knows what it was shown."""
    started: Queue[OpenAIServer] = Queue()

    def serve() -> None:
        with OpenAIServer(script) as server:
            started.put(server)
            Event().wait()

    # threads that a daemon starts are daemons: nothing keeps the kernel from ending
    Thread(target=serve, daemon=True).start()
    server = started.get()
    model = ChatOpenAI(model="gpt-4o-mini", base_url=server.base_url, api_key="none")  # type: ignore[arg-type]  # a str will do
    return model, server

"""A server as users run it: uvicorn on a port of its own, over a real database."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.server.http.websocket_sending import WebSocketProtocol


@contextmanager
def run_server(app: FastAPI) -> Iterator[str]:
    """Run a server for the application, yield its address, and stop the server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `perdure serve`
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                timeout_graceful_shutdown=5,
                # As in `perdure serve`. On a busy machine, a client can pause longer than uvicorn's
                # default of 5 seconds, and would then send its request on a closed connection.
                timeout_keep_alive=65,
                ws=WebSocketProtocol,
            )
        )
        started = threading.Event()
        startup = server.startup

        async def start_and_notify(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            started.set()

        server.startup = start_and_notify  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
        thread.start()
        assert started.wait(30), "the server did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    """Wait until the condition holds; fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def erase_messages_with_text(saver: Checkpointer, text: str, thread_id: str = "t") -> None:
    """Erase the messages that contain a text, once the thread has stored them.

    langgraph stores the checkpoint with the input of a run while the first nodes are running.
    """

    def find_ids() -> list[str]:
        items = saver.history(thread_id, missing_ok=True)
        return [str(item.value.id) for item in items if text in item.value.text]

    wait_until(find_ids)
    saver.erase(thread_id, find_ids())

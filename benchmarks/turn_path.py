"""List the functions of perdure that langgraph and the server call in a turn and in a run.

    python -m benchmarks.turn_path          # a turn of `create_agent` with `MemoryMiddleware`
    python -m benchmarks.turn_path --run    # a run of the server, `POST /threads/{id}/runs/wait`

Each of these functions is listed once, in the order of the first call, together with the functions
with which the server's tasks start. Functions that these functions call in perdure are not listed;
see `benchmarks.put_path` and `benchmarks.search_path`. Functions with which the work of perdure's
own threads starts are not listed either.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from benchmarks.put_path import Function
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.memory import MemoryMiddleware, remember_turns, summarize, trim, use_memories
from perdure.server import create_app
from perdure.settings import Settings

FRAMEWORKS = {"langchain", "langchain_core", "langgraph", "fastapi", "starlette"}


class Trace:
    """Records functions that frameworks call, and those with which the server's tasks start."""

    def __init__(self) -> None:
        self.on = False
        self.doors: dict[Function, None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """A profile function; see `sys.setprofile`."""
        if self.on and event == "call" and _is_door(frame):
            self.doors[_module(frame), frame.f_code.co_qualname] = None


def _is_door(frame: FrameType) -> bool:
    module, name = _module(frame), frame.f_code.co_name
    if module.startswith("storage.") or name.startswith(("<", "__")) or module in ("", "effects"):
        return False
    back = frame.f_back
    while back is not None:
        if back.f_globals.get("__name__", "").partition(".")[0] in FRAMEWORKS:
            return True
        # The module `effects` runs functions that are written as coroutines.
        if _module(back) not in ("", "effects"):
            return False
        back = back.f_back
    # A coroutine without callers is a task of the event loop, or it runs in a thread of a pool. The
    # pool belongs to the process, so its threads may be older than the trace and missing from it.
    is_coroutine = bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
    return is_coroutine and threading.current_thread() is threading.main_thread()


def _module(frame: FrameType) -> str:
    """Return a frame's module within perdure, or "" for a module of another package."""
    name = frame.f_globals.get("__name__", "")
    return name.removeprefix("perdure.") if name.startswith("perdure.") else ""


async def traced(turn: Callable[[], Awaitable[Any]]) -> Trace:
    """Trace the third of three turns."""
    trace, before = Trace(), threading.getprofile()
    threading.setprofile(trace)
    try:
        for _ in range(2):
            await turn()
        profile = sys.getprofile()
        sys.setprofile(trace)
        trace.on = True
        try:
            await turn()
        finally:
            trace.on = False
            sys.setprofile(profile)
    finally:
        threading.setprofile(before)
    return trace


async def of_a_turn(folder: Path) -> Trace:
    """Trace a turn of an agent that recalls, summarises, trims and remembers."""
    path = folder / "x.db"
    model = FakeListChatModel(responses=["Noted."])
    parts = use_memories(), summarize(model), trim(max_tokens=4_000), remember_turns()
    async with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        middleware = [MemoryMiddleware(*parts)]
        agent = create_agent(model, middleware=middleware, checkpointer=saver, store=store)
        config: Any = {"configurable": {"thread_id": "t"}}
        context: Any = {"user_id": "ann"}
        said: Any = {"messages": [("human", "I like figs")]}
        return await traced(lambda: agent.ainvoke(said, config, context=context))


async def of_a_run(folder: Path) -> Trace:
    """Trace a run of the server on a thread."""
    app = create_app(Settings(db=str(folder / "x.db")))
    transport = httpx.ASGITransport(app)
    body = {"assistant_id": "chat", "input": {"messages": [{"role": "user", "content": "Hi"}]}}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        thread = (await client.post("/threads", json={})).json()["thread_id"]
        return await traced(lambda: client.post(f"/threads/{thread}/runs/wait", json=body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="a run of the server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = asyncio.run((of_a_run if args.run else of_a_turn)(Path(folder)))
    for module, name in trace.doors:
        print(f"{module:36} {name}")
    print(f"{len(trace.doors)} functions, {len({module for module, _ in trace.doors})} modules")


if __name__ == "__main__":
    main()

"""Routes by which tests see what an access permits, whatever routes the server has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI
from starlette.responses import StreamingResponse

from perdure.server.http.access import ACTIONS, Action, set_required_action
from perdure.server.http.call import CurrentCall

Value = dict[str, Any]


def add_probe_routes(app: FastAPI) -> FastAPI:
    """Add to the application a route for each action, which returns what was permitted."""
    routes = APIRouter()
    for action in ACTIONS:
        routes.post(f"/probe/{action}")(_build_endpoint(action))

    @routes.get("/probe/thread/{thread_id}")
    @set_required_action("threads:read")
    async def thread(call: CurrentCall, thread_id: str) -> Any:
        await call.authorize_action_arguments({"thread_id": thread_id})
        return await call.threads.get(thread_id)

    @routes.get("/probe/stream")
    @set_required_action("threads:read")
    async def stream(call: CurrentCall) -> StreamingResponse:
        await call.authorize_action_arguments()

        async def lines() -> AsyncIterator[bytes]:
            for _ in range(600):
                yield b"data: x\n\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(lines(), media_type="text/event-stream")

    @routes.post("/probe/length")
    @set_required_action("threads:read")
    async def length(call: CurrentCall, body: Annotated[Any, Body()]) -> int:
        await call.authorize_action_arguments()
        return len(str(body))

    @routes.get("/ui/probe")
    @routes.get("/ui/probe.json")
    @set_required_action("threads:read")
    async def page(call: CurrentCall) -> Value:
        return await call.authorize_action_arguments({"user": call.identity.user})

    @routes.post("/ui/probe")
    @set_required_action("threads:update")
    async def change(call: CurrentCall) -> Value:
        return await call.authorize_action_arguments()

    app.include_router(routes)
    return app


def _build_endpoint(name: Action) -> Any:
    @set_required_action(name)
    async def endpoint(call: CurrentCall, value: Value | None = None) -> Value:
        authorized_value = await call.authorize_action_arguments(value or {})
        identity = call.identity
        return {"user": identity.user, "tenant": identity.tenant, "value": authorized_value}

    return endpoint

"""Send messages to websockets, and limit the memory used by unread messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol

from perdure.server.runs import event_log
from perdure.server.runs.event_memory import DropSafety, EventAccount

_Protocol: Any = AutoWebSocketsProtocol or object


class WebSocketProtocol(_Protocol):  # type: ignore[misc]
    """uvicorn's websocket protocol, modified to buffer at most one message per client.

    uvicorn's original `send` may return once the message is in the transport's write buffer. If the
    application finishes before the client has read a message, uvicorn keeps the message in the
    transport's write buffer.
    """

    async def send(self, message: Any) -> None:
        """Send a message, and wait until the transport's write buffer has room again."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # The application has rejected the websocket handshake with an HTTP response. Set
            # `handshake_complete`, because otherwise uvicorn's SansIO protocol would log an error.
            self.handshake_complete = True
        if (writable := getattr(self, "writable", None)) is not None:
            await writable.wait()

    async def run_asgi(self) -> None:
        """Run the application and close the connection.

        If the transport's write buffer is still too full to accept another message, abort the
        connection, which drops the data that the client has not read.
        """
        try:
            await super().run_asgi()
        finally:
            if (writable := getattr(self, "writable", None)) and not writable.is_set():
                self.transport.abort()


class WebSocketSender:
    """Sends messages to a websocket one at a time.

    The size of the message that is being sent counts towards the memory limits of `EventMemory`
    (see `EventHolder`). If `EventMemory` drops the message, the sender stops waiting for the client
    and the connection is closed.

    Attributes:
        size: The size in bytes of the message that is being sent, or 0.
        total_when_added: `EventMemory.total_added` when the sender began to send the message.
    """

    safety_of_dropping_oldest_event = DropSafety.READERS_MAY_MISS_EVENT

    def __init__(self, websocket: WebSocket, account: EventAccount) -> None:
        self.size = self.total_when_added = 0
        self._websocket, self._account = websocket, account
        self._lock = asyncio.Lock()
        self._timeout: asyncio.Timeout | None = None

    async def send(self, build_message: Callable[[], bytes]) -> None:
        """Send a message.

        `build_message` is not called until all earlier messages have been sent.

        Args:
            build_message: Returns the message.

        Raises:
            TimeoutError: The client did not read the message in time, or `EventMemory` dropped the
                message to free memory.
        """
        async with self._lock:
            data = build_message()
            self._account.make_room_and_add_bytes(self, len(data))
            text = data.decode()
            del data
            self.total_when_added = self._account.memory.total_added
            try:
                async with asyncio.timeout(event_log.SEND_TIMEOUT_S) as self._timeout:
                    await self._websocket.send_text(text)
            finally:
                self._timeout = None
                self._account.subtract_dropped_bytes(self, self.size)

    def drop_oldest_events(self) -> None:
        """Stop sending the current message, and stop counting its bytes as used memory."""
        self._account.subtract_dropped_bytes(self, self.size)
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    drop_all = drop_oldest_events

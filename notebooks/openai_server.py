"""A server at 127.0.0.1 that answers OpenAI chat completions from a script.

For the notebooks, and for the tests, which import it from here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PATIENCE = 60.0  # seconds; only a broken script waits so long


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP error instead of an answer. 400 by default, which the client does not try again."""

    status: int = 400
    message: str = "the scripted model refuses"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is not just text: calls of tools, or an end other than being done."""

    message: dict[str, Any]
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class Held:
    """A reply that is kept back until `until` is set."""

    reply: str | Failure | Answer
    until: threading.Event


Reply = str | Failure | Held | Answer
Script = Iterable[Reply] | Callable[[dict[str, Any]], Reply]


class OpenAIServer:
    """A scripted model behind `POST /v1/chat/completions`, streaming or not.

    Args:
        script: Replies in order, or what makes a reply of a request's body. A script that has run
            out answers with an error that says so.

    Attributes:
        requests: The body of every request, in the order in which they came.
        asked: Set by each request, before it is answered.
    """

    def __init__(self, script: Script) -> None:
        self.requests: list[dict[str, Any]] = []
        self.asked = threading.Event()
        self._script = script if callable(script) else _in_order(iter(script))
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def base_url(self) -> str:
        """What a client is given as its `base_url`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def shown(self, request: int = -1) -> list[tuple[str, Any]]:
        """The `(role, content)` of each message that a request showed the model."""
        return [(m["role"], m["content"]) for m in self.requests[request]["messages"]]

    def reply(self, body: dict[str, Any]) -> Answer | Failure:
        """Note a request and look up its reply."""
        with self._lock:  # two clients may ask at once, and a script is told in one order
            self.requests.append(body)
            reply = self._script(body)
        self.asked.set()
        if isinstance(reply, Held):
            if not reply.until.wait(PATIENCE):
                return Failure(500, "nobody let the held reply go")
            reply = reply.reply
        return Answer({"content": reply}) if isinstance(reply, str) else reply


def _in_order(replies: Iterator[Reply]) -> Callable[[dict[str, Any]], Reply]:
    return lambda _: next(replies, Failure(message="the script has run out of replies"))


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for the handlers: none outlives its test

    def __init__(self, model: OpenAIServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model


class _Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0): a client that was killed leaves nothing behind."""

    server: _Server

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            reply: Answer | Failure = Failure(404, f"no such path: {self.path}")
        else:
            reply = self.server.model.reply(body)
        try:
            self._answer(body, reply)
        except ConnectionError:  # the client was killed while it waited
            self.close_connection = True

    def _answer(self, body: dict[str, Any], reply: Answer | Failure) -> None:
        if isinstance(reply, Failure):
            error = {"message": reply.message, "type": "scripted", "code": None}
            self._send(reply.status, "application/json", json.dumps({"error": error}))
        elif body.get("stream"):
            self._send(200, "text/event-stream", *_events(body["model"], reply))
        else:
            choice = {
                "index": 0,
                "message": {"role": "assistant", **reply.message},
                "finish_reason": reply.finish_reason,
            }
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {**_envelope("chat.completion", body["model"], [choice]), "usage": usage}
            self._send(200, "application/json", json.dumps(answer))

    def _send(self, status: int, kind: str, *parts: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: stderr belongs to the caller."""


def _events(model: str, reply: Answer) -> Iterator[str]:
    """The answer, its text word by word, as server-sent events."""
    calls = [{"index": i, **call} for i, call in enumerate(reply.message.get("tool_calls", ()))]
    first = {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}
    words = _words(reply.message.get("content") or "")
    for delta in [first, *({"content": word} for word in words)]:
        yield _event(model, {"index": 0, "delta": delta, "finish_reason": None})
    yield _event(model, {"index": 0, "delta": {}, "finish_reason": reply.finish_reason})
    yield "data: [DONE]\n\n"


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [word + " " for word in words[:-1]] + words[-1:]


def _event(model: str, choice: dict[str, Any]) -> str:
    return f"data: {json.dumps(_envelope('chat.completion.chunk', model, [choice]))}\n\n"


def _envelope(kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "scripted", "object": kind, "created": 0, "model": model, "choices": choices}

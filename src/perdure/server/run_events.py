"""What a graph streams, as the events that `langgraph_sdk` reads from a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import RunnableConfig

from perdure.server.graphs import Graph
from perdure.server.run_log import Log
from perdure.server.run_request import RunRequest

_PLACE: Final = ("thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map")


class RunEvents:
    """The events of one run, and what it came to.

    Attributes:
        log: The events.
        output: The values after its last step, with its interrupts.
        interrupted: Whether it waits for somebody.
    """

    def __init__(self, request: RunRequest) -> None:
        self.log, self.output, self.interrupted = Log(), None, False
        self._request = request
        self._messages: dict[str | None, AIMessageChunk] = {}

    async def play(self, graph: Graph, given: Any, config: RunnableConfig) -> None:
        """Run a graph to its end."""
        request = self._request
        modes = {mode.removesuffix("-tuple") for mode in request.stream_mode}
        options: dict[str, Any] = {
            "context": request.context,
            "stream_mode": sorted(modes | {"values", "updates"}),
            "subgraphs": request.stream_subgraphs,
            "interrupt_before": request.interrupt_before,
            "interrupt_after": request.interrupt_after,
            "durability": request.durability,
            "version": "v2",
        }
        # a stream that is not closed leaves its last steps to the garbage collector
        async with aclosing(graph.astream(given, config, **options)) as parts:  # type: ignore[type-var]
            async for part in parts:
                self._add(part)

    def _add(self, part: Mapping[str, Any]) -> None:
        kind, ns, data = part["type"], part["ns"], part["data"]
        if kind == "values" and part.get("interrupts"):
            data = {**data, "__interrupt__": list(part["interrupts"])}
        if kind == "values" and not ns:
            self.output = data
        if not ns and kind in ("values", "updates"):
            self.interrupted = isinstance(data, Mapping) and "__interrupt__" in data
        for mode, event, shown in self._shown(kind, data):
            if mode in self._request.stream_mode:
                self.log.add("|".join((event, *ns)), shown, mode)

    def _shown(self, kind: str, data: Any) -> Iterable[tuple[str, str, Any]]:
        """Modes, and the events that a part is in them."""
        match kind:
            case "messages":
                message, metadata = data
                yield "messages-tuple", "messages", [message, metadata]
                if "messages" in self._request.stream_mode:
                    yield from self._accumulated(message, metadata)
            case "checkpoints":
                yield kind, kind, without_configs(data)
            case "debug":
                yield kind, kind, {**data, "payload": without_configs(data["payload"])}
            case _:
                yield kind, kind, data

    def _accumulated(
        self, message: BaseMessage, metadata: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(message, AIMessageChunk):
            yield "messages", "messages/complete", [message]
            return
        before = self._messages.get(message.id)
        if before is None:
            yield "messages", "messages/metadata", {message.id: {"metadata": metadata}}
        self._messages[message.id] = whole = message if before is None else before + message
        yield "messages", "messages/partial", [message_chunk_to_message(whole)]


def without_configs(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as langgraph streams it, whose configs only say where it is.

    They hold the login of the user, and all that the graph was configured with.
    """
    shown = dict(payload)
    for name in {"config", "parent_config"} & shown.keys():
        shown[name] = _placed(shown[name])
    if "tasks" in shown:
        shown["tasks"] = [{**each, "state": _placed(each.get("state"))} for each in shown["tasks"]]
    return shown


def _placed(config: Any) -> Any:
    if not isinstance(config, Mapping) or "configurable" not in config:
        return config
    found = config["configurable"]
    return {"configurable": {name: found[name] for name in _PLACE if name in found}}

"""Run a graph for a run, and record the parts of its stream as run events."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from functools import partial
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

from perdure.server.api_states import build_checkpoint_ref
from perdure.server.graphs import Graph
from perdure.server.runs.event_log import (
    LoggedEvent,
)
from perdure.server.runs.private_events import (
    build_event_kind_dict_of_mode_and_person,
)
from perdure.server.runs.run import Run, add_interrupts_to_output
from perdure.server.runs.shared_run_state import SharedRunState


class RunEvents:
    """Executes the graph that a run requested, and writes the resulting events to the run's log."""

    def __init__(self, run: Run, shared_state: SharedRunState) -> None:
        self._run = run
        self._messages: dict[str | None, AIMessageChunk] = {}
        # All interrupts of the run so far, keyed by id. They are accumulated here because each
        # chunk of the graph's stream contains only the new interrupts.
        self._interrupts: dict[str, Any] = {}

    async def run_graph(self, graph: Graph, config: RunnableConfig, graph_input: Any) -> None:
        """Run the graph, and log its events; see `Player.run_graph`."""
        run, request = self._run, self._run.request
        modes = {mode.removesuffix("-tuple") for mode in request.stream_mode}
        options: dict[str, Any] = {
            **request.call_options,
            "stream_mode": sorted(modes - {"events"} | {"values", "updates"}),
            "subgraphs": request.stream_subgraphs,
            "version": "v2",
        }
        # Events of the stream mode `events` contain the model's prompt, which can include memories
        # of the person for whom the graph runs.
        person = config["configurable"].get("user_id") or ""
        stream_parts = (
            partial(self._stream_graph_and_log_events, person)
            if "events" in modes
            else Pregel.astream
        )
        # Close the graph's stream explicitly. Without `aclosing`, the stream's cleanup code would
        # run only when the stream is garbage-collected.
        async with aclosing(stream_parts(graph, graph_input, config, **options)) as parts:  # type: ignore[type-var]
            async for part in parts:
                self._log_stream_part(run, part)

    async def _stream_graph_and_log_events(
        self, person: str, graph: Graph, *args: Any, **options: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Call `graph.astream_events`, and yield the same chunks as `graph.astream` would.

        Events from `graph.astream_events` that do not contain a chunk of the graph's stream are
        logged under the stream mode `events`. Events of the stream mode `events` may contain the
        person's memories, so other users cannot see them.
        """
        kind_of_event = build_event_kind_dict_of_mode_and_person("events", person)
        async with aclosing(graph.astream_events(*args, **options)) as events:
            async for event in events:
                if event["event"] != "on_chain_stream" or event["parent_ids"]:
                    self._run.log.add("events", event, kind_of_event)
                    continue
                *namespace, kind, data = event["data"]["chunk"]
                part = {"type": kind, "ns": namespace[0] if namespace else (), "data": data}
                if kind == "values" and isinstance(data, dict):
                    part["data"] = data = dict(data)
                    part["interrupts"] = data.pop("__interrupt__", ())
                yield part

    def build_run_end_events(self, error: Mapping[str, str] | None) -> list[LoggedEvent]:
        """Return an empty list, because no event marks the end of a run's stream.

        The response stream is closed once the run's database row shows that the run has ended. This
        method implements `Player.build_run_end_events`.
        """
        return []

    def _log_stream_part(self, run: Run, part: Mapping[str, Any]) -> None:
        """Log the events of one chunk of the graph's stream.

        Update the run's output, and store the interrupts that the chunk contains.
        """
        kind, namespace, data, new_interrupts = (
            part["type"],
            part["ns"],
            part["data"],
            dict[str, Any](),
        )
        if kind == "values":
            new_interrupts = {interrupt.id: interrupt for interrupt in part.get("interrupts", ())}
            data = add_interrupts_to_output(data, [*new_interrupts.values()])
            if not namespace:
                self._interrupts |= new_interrupts
                run.output = add_interrupts_to_output(data, [*self._interrupts.values()])
                run.output_event = None
        if not namespace and kind in ("values", "updates"):
            run.waits_for_answer |= isinstance(data, Mapping) and "__interrupt__" in data
        for mode in run.request.stream_mode:
            if mode.removesuffix("-tuple") == kind:
                for event, event_data in self._iter_events_of_stream_part(mode, data):
                    run.log.add("|".join((event, *namespace)), event_data, mode)
                    if (
                        mode == "values"
                        and not namespace
                        and len(new_interrupts) == len(self._interrupts)
                    ):
                        run.output_event = run.log.newest

    def _iter_events_of_stream_part(self, stream_mode: str, data: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and data of each event to send for one chunk of the graph's stream."""
        match stream_mode:
            case "messages-tuple":
                yield "messages", data
            case "messages":
                yield from self._iter_message_events(*data)
            case _:
                yield stream_mode, _reduce_stream_configs_to_checkpoint_ids(stream_mode, data)

    def _iter_message_events(
        self, message: BaseMessage, metadata: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the events of the stream mode `messages` for a message or a message chunk.

        The event for a message chunk contains the message accumulated so far, not just the new
        chunk.
        """
        previous = self._messages.get(message.id)
        if previous is None:
            yield "messages/metadata", {message.id: {"metadata": metadata}}
        if not isinstance(message, AIMessageChunk):
            yield "messages/complete", [message]
            return
        self._messages[message.id] = accumulated = (
            message if previous is None else previous + message
        )
        yield "messages/partial", [message_chunk_to_message(accumulated)]


def _reduce_stream_configs_to_checkpoint_ids(stream_mode: str, data: Any) -> Any:
    """Reduce each config in the data of a `checkpoints` or `debug` event to its checkpoint ids.

    Configs are reduced because they contain data that clients must not see; see
    `reduce_payload_configs_to_checkpoint_ids`.
    """
    match stream_mode:
        case "checkpoints":
            return reduce_payload_configs_to_checkpoint_ids(data)
        case "debug":
            return {
                **data,
                "payload": reduce_payload_configs_to_checkpoint_ids(data["payload"]),
            }
    return data


def reduce_payload_configs_to_checkpoint_ids(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a streamed checkpoint's payload without the private fields of its configs.

    Each config in the copy contains only the fields that identify a checkpoint. The other fields of
    the payload are unchanged.

    A full config must not be sent to clients, because it also contains the authenticated user
    object and all of the graph's `configurable` values.
    """
    reduced = dict(payload)
    for name in {"config", "parent_config"} & reduced.keys():
        reduced[name] = _keep_only_checkpoint_ids(reduced[name])
    if "tasks" in reduced:
        reduced["tasks"] = [
            {**task, "state": _keep_only_checkpoint_ids(task.get("state"))}
            for task in reduced["tasks"]
        ]
    return reduced


def _keep_only_checkpoint_ids(config: Any) -> Any:
    """Return a copy of a config that contains only the fields that identify its checkpoint."""
    if not isinstance(config, Mapping) or "configurable" not in config:
        return config
    return {"configurable": build_checkpoint_ref(config)}

"""Each parameter of langgraph's SDK for threads, runs and items counts, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from langgraph_sdk._async.runs import RunsClient
from langgraph_sdk._async.store import StoreClient
from langgraph_sdk._async.threads import ThreadsClient

OF_THE_CLIENT: Final = {"self", "headers", "params", "on_run_created", "version", "raise_error"}
"""What no server is told, or as it stands."""
RUN: Final = {
    *("thread_id", "assistant_id", "input", "command", "metadata", "config", "context"),
    *("checkpoint", "checkpoint_id", "checkpoint_during", "interrupt_before", "interrupt_after"),
    *("on_disconnect", "on_completion", "multitask_strategy", "if_not_exists", "after_seconds"),
    *("webhook", "durability"),
}
STREAM: Final = {"stream_mode", "stream_subgraphs", "stream_resumable"}
REFUSED: Final = {"feedback_keys", "langsmith_tracing", "strict_resume"}
HONOURED: Final[dict[tuple[type[Any], str], set[str]]] = {
    (RunsClient, "stream"): RUN | STREAM,
    (RunsClient, "create"): RUN | STREAM,
    (RunsClient, "create_batch"): {"payloads"},
    (RunsClient, "wait"): RUN,
    (RunsClient, "list"): {"thread_id", "limit", "offset", "status", "select"},
    (RunsClient, "get"): {"thread_id", "run_id"},
    (RunsClient, "cancel"): {"thread_id", "run_id", "wait", "action"},
    (RunsClient, "cancel_many"): {"thread_id", "run_ids", "status", "action"},
    (RunsClient, "join"): {"thread_id", "run_id"},
    (RunsClient, "join_stream"): {
        *("thread_id", "run_id", "cancel_on_disconnect", "stream_mode", "last_event_id"),
    },
    (RunsClient, "delete"): {"thread_id", "run_id"},
    (ThreadsClient, "get"): {"thread_id", "include"},
    (ThreadsClient, "create"): {
        *("metadata", "thread_id", "if_exists", "supersteps", "graph_id", "ttl"),
    },
    (ThreadsClient, "update"): {"thread_id", "metadata", "ttl", "return_minimal"},
    (ThreadsClient, "delete"): {"thread_id"},
    (ThreadsClient, "search"): {
        *("metadata", "values", "ids", "status", "limit", "offset", "sort_by", "sort_order"),
        *("select", "extract"),
    },
    (ThreadsClient, "count"): {"metadata", "values", "status"},
    (ThreadsClient, "copy"): {"thread_id"},
    (ThreadsClient, "prune"): {"thread_ids", "strategy"},
    (ThreadsClient, "get_state"): {
        *("thread_id", "checkpoint", "checkpoint_id", "subgraphs", "select"),
    },
    (ThreadsClient, "update_state"): {
        *("thread_id", "values", "as_node", "checkpoint", "checkpoint_id"),
    },
    (ThreadsClient, "get_history"): {
        *("thread_id", "limit", "before", "metadata", "checkpoint", "select"),
    },
    (ThreadsClient, "stream"): {"thread_id", "assistant_id", "run_start_timeout", "transport"},
    (ThreadsClient, "join_stream"): {"thread_id", "last_event_id", "stream_mode"},
    (StoreClient, "put_item"): {"namespace", "key", "value", "index", "ttl"},
    (StoreClient, "get_item"): {"namespace", "key", "refresh_ttl"},
    (StoreClient, "delete_item"): {"namespace", "key"},
    (StoreClient, "search_items"): {
        *("namespace_prefix", "filter", "limit", "offset", "query", "refresh_ttl"),
    },
    (StoreClient, "list_namespaces"): {"prefix", "suffix", "max_depth", "limit", "offset"},
}


def methods() -> Iterator[tuple[type[Any], str]]:
    for kind in (RunsClient, ThreadsClient, StoreClient):
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield kind, name


def test_no_method_and_no_parameter_of_the_sdk_is_unknown_here() -> None:
    """One that a new version has fails this until it counts, or is refused."""
    assert {*methods()} == {*HONOURED}
    for (kind, name), honoured in HONOURED.items():
        parameters = {*inspect.signature(getattr(kind, name)).parameters} - OF_THE_CLIENT
        assert parameters - REFUSED == honoured & parameters, (kind, name)


WRONG: Final[list[tuple[str, str, dict[str, Any]]]] = [
    *(
        ("POST", "/threads/t/runs", {"assistant_id": "chat", "input": {}, name: value})
        for name, value in {
            "command": 5,
            "metadata": 5,
            "config": 5,
            "context": 5,
            "checkpoint": 5,
            "checkpoint_id": 5,
            "checkpoint_during": "x",
            "interrupt_before": 5,
            "interrupt_after": 5,
            "on_disconnect": "x",
            "on_completion": "x",
            "multitask_strategy": "x",
            "if_not_exists": "x",
            "after_seconds": "x",
            "webhook": 5,
            "durability": "x",
            "stream_mode": "x",
            "stream_subgraphs": "x",
            "stream_resumable": "x",
            "feedback_keys": ["x"],
            "langsmith_tracer": {"project_name": "x"},
            "strict_resume": True,
        }.items()
    ),
    *(
        ("POST", "/threads/search", {name: value})
        for name, value in {
            "metadata": 5,
            "values": 5,
            "ids": 5,
            "status": "x",
            "limit": "x",
            "offset": "x",
            "sort_by": "x",
            "sort_order": "x",
            "select": ["x"],
            "extract": 5,
        }.items()
    ),
    *(("POST", "/threads/count", {name: 5}) for name in ("metadata", "values", "status")),
    *(
        ("POST", "/threads", {name: 5})
        for name in ("metadata", "thread_id", "if_exists", "supersteps")
    ),
    ("POST", "/threads", {"ttl": "x"}),
    ("PATCH", "/threads/t", {"ttl": "x"}),
]


@pytest.mark.parametrize(("method", "path", "body"), WRONG, ids=lambda each: str(each)[:60])
def test_what_is_given_wrongly_is_read_and_refused(
    client: httpx.Client, method: str, path: str, body: dict[str, Any]
) -> None:
    client.post("/threads", json={"thread_id": "t", "if_exists": "do_nothing"})

    answer = client.request(method, path, json=body)

    assert answer.status_code == 422, answer.text
    assert ([*body][-1]) in answer.json()["detail"]

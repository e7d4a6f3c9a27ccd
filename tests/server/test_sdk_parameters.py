"""Each parameter of LangGraph's SDK for threads, runs and items is honoured or refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from langgraph_sdk._async.runs import RunsClient
from langgraph_sdk._async.store import StoreClient
from langgraph_sdk._async.threads import ThreadsClient

CLIENT_ONLY_PARAMETERS: Final = {
    "self",
    "headers",
    "params",
    "on_run_created",
    "version",
    "raise_error",
}
"""Parameters that the client handles by itself or passes on unchanged."""
RUN_PARAMETERS: Final = {
    *("thread_id", "assistant_id", "input", "command", "metadata", "config", "context"),
    *("checkpoint", "checkpoint_id", "checkpoint_during", "interrupt_before", "interrupt_after"),
    *("on_disconnect", "on_completion", "multitask_strategy", "if_not_exists", "after_seconds"),
    *("webhook", "durability"),
}
STREAM_PARAMETERS: Final = {"stream_mode", "stream_subgraphs", "stream_resumable"}
REFUSED_PARAMETERS: Final = {"feedback_keys", "langsmith_tracing", "strict_resume"}
HONOURED_PARAMETERS: Final[dict[tuple[type[Any], str], set[str]]] = {
    (RunsClient, "stream"): RUN_PARAMETERS | STREAM_PARAMETERS,
    (RunsClient, "create"): RUN_PARAMETERS | STREAM_PARAMETERS,
    (RunsClient, "create_batch"): {"payloads"},
    (RunsClient, "wait"): RUN_PARAMETERS,
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


def list_sdk_methods() -> Iterator[tuple[type[Any], str]]:
    for kind in (RunsClient, ThreadsClient, StoreClient):
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield kind, name


def test_every_method_and_parameter_of_sdk_is_honoured_or_refused() -> None:
    """A parameter of a new version fails this test until it is honoured or refused."""
    assert {*list_sdk_methods()} == {*HONOURED_PARAMETERS}
    for (kind, name), honoured in HONOURED_PARAMETERS.items():
        parameters = {*inspect.signature(getattr(kind, name)).parameters} - CLIENT_ONLY_PARAMETERS
        assert parameters - REFUSED_PARAMETERS == honoured & parameters, (kind, name)


INVALID_REQUESTS: Final[list[tuple[str, str, dict[str, Any]]]] = [
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


@pytest.mark.parametrize(
    ("method", "path", "body"), INVALID_REQUESTS, ids=lambda each: str(each)[:60]
)
def test_invalid_parameter_value_is_refused_by_name(
    client: httpx.Client, method: str, path: str, body: dict[str, Any]
) -> None:
    client.post("/threads", json={"thread_id": "t", "if_exists": "do_nothing"})

    answer = client.request(method, path, json=body)

    assert answer.status_code == 422, answer.text
    assert ([*body][-1]) in answer.json()["detail"]

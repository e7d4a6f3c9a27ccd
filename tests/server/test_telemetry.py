"""Metrics and spans: the operations that they count, without any stored content."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.language_models import FakeListChatModel
from langgraph.graph import START, StateGraph
from langgraph.store.base import GetOp, SearchOp
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.graphs import chat_graph
from perdure.server import create_app
from perdure.server.databases import Databases
from perdure.server.http.access import set_required_action
from perdure.server.http.call import CurrentCall
from perdure.server.telemetry import Telemetry, _build_tracer
from perdure.settings import Settings
from tests.server.running import run_server

CANARY = "canary"


def parse_samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of an exposition, by name and the values of the sorted labels."""
    return {
        (each.name, *(value for _, value in sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if not each.name.endswith("_bucket")
    }


def build_app(settings: Settings, telemetry: Telemetry) -> Any:
    """Return an application whose routes use the database as runs and pages do."""
    app = create_app(settings, telemetry=telemetry)

    @app.post("/turn/{thread_id}")
    @set_required_action("threads:create_run")
    async def turn(call: CurrentCall, thread_id: str) -> None:
        await call.authorize_action_arguments({"thread_id": thread_id})
        model = FakeListChatModel(responses=[f"{CANARY} answer"])
        graph: Any = chat_graph(model, checkpointer=call.saver, store=call.store)
        config = {"configurable": {"thread_id": thread_id, "user_id": "ann"}}
        with app.state.telemetry.measure_run():
            await graph.ainvoke({"messages": [("human", f"{CANARY} question")]}, config)
        await call.store.aput(("memories", CANARY), CANARY, {"text": CANARY})
        await call.store.asearch(("memories", CANARY), query=CANARY)
        await call.store.abatch(iter([SearchOp(("memories",))]))
        await call.store.abatch([SearchOp(("memories",)), GetOp((CANARY,), CANARY)])
        await call.store.aget((CANARY,), CANARY)
        await call.store.aforget((CANARY,))
        with pytest.raises(InvalidNamespace):
            await call.store.aput((), CANARY, {})

    return app


def test_metrics_count_requests_and_operations(settings: Settings) -> None:
    app = build_app(settings, Telemetry(metrics=True))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(2):
            assert client.post(f"/turn/{CANARY}").status_code == 200
        found, end = dict[tuple[str, ...], float](), time.monotonic() + 30
        while ("perdure_jobs", "dead") not in found and time.monotonic() < end:
            text = client.get("/metrics").text
            found = parse_samples(text)
    assert CANARY not in text
    assert found["perdure_request_seconds_count", "POST", "/turn/{thread_id}", "200"] == 2
    counts = "perdure_operation_seconds_count"
    assert found[counts, "", "run", "graph"] == 2
    assert found[counts, "", "put", "store"] == 2
    assert found[counts, "", "search", "store"] == 2
    assert found[counts, "", "forget", "store"] == 2
    assert found[counts, "", "batch", "store"] == 5  # one counts the jobs
    assert found[counts, "InvalidNamespace", "put", "store"] == 2
    assert found[counts, "", "put", "threads"] == 6  # input, node, and the end, of each turn
    assert found[counts, "", "get_tuple", "threads"] == 2
    assert found["perdure_database_rows", "threads"] == 1
    assert found["perdure_database_rows", "items"] == 1
    assert found["perdure_database_bytes", "size"] > 0
    assert found["perdure_jobs", "dead"] == 0


def test_metrics_reply_does_not_wait_for_slow_count(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("perdure.server.telemetry._MAX_COUNT_WAIT_S", 0.0)
    monkeypatch.setattr("perdure.server.telemetry._RECOUNT_INTERVAL_S", -1.0)

    async def render_repeatedly() -> list[bytes]:
        databases, telemetry, held = Databases(settings), Telemetry(metrics=True), asyncio.Event()
        parts = await databases.get_or_open_database(None)
        stats = parts.saver.astats

        async def slow() -> dict[str, Any]:
            await held.wait()
            return await stats()

        monkeypatch.setattr(parts.saver, "astats", slow)
        texts = [await telemetry.render_metrics(parts) for _ in range(2)]
        held.set()
        counting = telemetry._count_task
        assert counting is not None
        await counting
        texts.append(await telemetry.render_metrics(parts))
        await databases.aclose()
        await telemetry.render_metrics(parts)
        assert telemetry._count_task is not None
        await telemetry._count_task
        return texts

    sized = [
        b'perdure_database_rows{kind="threads"} 0.0' in text
        for text in asyncio.run(render_repeatedly())
    ]
    assert sized == [False, False, True]
    assert "sizes for the metrics cannot be counted" in caplog.text


def test_metrics_path_is_missing_if_metrics_are_off(settings: Settings) -> None:
    with run_server(create_app(settings)) as url:
        assert httpx.get(f"{url}/metrics").status_code == 404


def test_spans_name_operations_without_content(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # other libraries' spans too: FastAPI's own have the path and the query
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    telemetry = Telemetry(tracer=provider.get_tracer("test"))
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with run_server(build_app(settings, telemetry)) as url:
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        turn = httpx.post(f"{url}/turn/{CANARY}?q={CANARY}", headers=headers)
        assert turn.status_code == 200
    spans: dict[str, ReadableSpan] = {each.name: each for each in exporter.get_finished_spans()}
    request = spans["POST /turn/{thread_id}"]
    assert request.context is not None
    assert f"{request.context.trace_id:032x}" == trace
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    wanted = {
        "perdure.graph.run",
        "perdure.threads.put",
        "perdure.threads.get_tuple",
        "perdure.store.search",
    }
    assert wanted <= spans.keys()
    assert {f"{each.context.trace_id:032x}" for each in spans.values() if each.context} == {trace}
    [failed] = [each for each in exporter.get_finished_spans() if not each.status.is_ok]
    assert failed.attributes == {"error.type": "InvalidNamespace"}
    assert not failed.events
    assert all(CANARY not in each.to_json() for each in exporter.get_finished_spans())


def test_measured_checkpointer_behaves_like_plain_one(settings: Settings, tmp_path: Path) -> None:
    async def use_measured_parts() -> None:
        databases = Databases(settings, Telemetry(metrics=True).build_measured_class)
        saver, store = await databases.get_or_open_database(None)
        with open_checkpointer(str(tmp_path / "other.db")) as plain:
            assert isinstance(saver, type(plain))
        schema: Any = dict
        graph: Any = StateGraph(schema).add_node("n", lambda state: {})
        compiled = graph.add_edge(START, "n").compile(checkpointer=saver, store=store)
        await compiled.ainvoke({}, {"configurable": {"thread_id": "t"}})
        clone = saver.with_allowlist([("a", "b")])
        assert clone is not saver
        assert type(clone) is type(saver)
        assert await clone.aget_tuple({"configurable": {"thread_id": "t"}})
        await databases.aclose()

    asyncio.run(use_measured_parts())


@pytest.mark.parametrize(
    ("environment", "is_enabled"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_tracing_is_configured_by_environment_variables(
    environment: dict[str, str], is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_providers: list[Any] = []
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", set_providers.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (Telemetry.from_environment() is not None) is is_enabled
    assert len(set_providers) == is_enabled
    for provider in set_providers:
        provider.shutdown()


def test_spans_are_not_recorded_if_sdk_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", TracerProvider)
    with _build_tracer("console").start_as_current_span("name") as span:
        assert not span.is_recording()


def test_unknown_exporter_is_named_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(ConfigurationError, match="'pigeon'"):
        Telemetry.from_environment()

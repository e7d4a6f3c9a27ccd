"""Record metrics for Prometheus and spans for OpenTelemetry.

Metrics and spans are off unless they are configured. Metric labels and span attributes contain HTTP
methods, status codes, error classes, and the names of routes, components, operations and
statistics. Metric labels and span attributes never contain stored content, ids or user names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.propagate import extract
from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer

from perdure import __version__
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError, MissingDependency, PerdureError
from perdure.server.databases import OpenDatabase

if TYPE_CHECKING:
    from perdure.memory.long_term.extraction import DueThreads
    from perdure.server.http.guard import RequestSummary

_LOG: Final = logging.getLogger("perdure.server")
# Upper bounds of the histogram buckets, in seconds
_BUCKETS_S: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
    60,
)
# Seconds after which the cached database sizes and extraction-job counts are refreshed
_RECOUNT_INTERVAL_S: Final = 60.0
# Maximum number of seconds that a request for the metrics waits until the database sizes and
# extraction-job counts have been refreshed
_MAX_COUNT_WAIT_S: Final = 0.5
_MEASURED_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "threads": ("put", "put_writes", "get_tuple", "history", "erase", "delete_thread"),
    "store": ("put", "get", "delete", "search", "batch", "list_namespaces", "forget"),
}
"""The measured methods of checkpointers and stores. Their async versions with the prefix `a` are
measured, too."""


class Telemetry:
    """Records metrics and spans of a server's requests, runs and database operations.

    Args:
        metrics: Whether Prometheus may read the metrics at /metrics.
        tracer: The OpenTelemetry tracer. If it is None, no spans are recorded.
    """

    def __init__(self, *, metrics: bool = False, tracer: Tracer | None = None) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Histogram

        self.has_metrics, self._tracer = metrics, tracer or NoOpTracer()
        self._registry = CollectorRegistry()
        common_options: Any = {"registry": self._registry, "namespace": "perdure"}
        histogram_options: Any = {"buckets": _BUCKETS_S, **common_options}
        self._operations = Histogram(
            "operation_seconds",
            "Duration of database operations and runs",
            ("part", "operation", "error"),
            **histogram_options,
        )
        self._requests = Histogram(
            "request_seconds",
            "Duration of requests, streams included",
            ("method", "route", "status"),
            **histogram_options,
        )
        self._bytes = Gauge(
            "database_bytes", "Bytes of the database and of its values", ("part",), **common_options
        )
        self._rows = Gauge(
            "database_rows", "Threads, messages, items and other rows", ("kind",), **common_options
        )
        self._jobs = Gauge(
            "jobs", "Threads by state of memory extraction", ("state",), **common_options
        )
        self._count_task: asyncio.Task[None] | None = None
        self._counted_at = 0.0
        self._due_threads: tuple[OpenDatabase, DueThreads] | None = None

    @classmethod
    def from_environment(cls, *, metrics: bool = False) -> Telemetry | None:
        """Create a `Telemetry` from `metrics` and OpenTelemetry's environment variables.

        Args:
            metrics: Whether Prometheus may read the metrics.

        Returns:
            The telemetry, or None if both metrics and spans are off.

        Raises:
            MissingDependency: The packages for metrics and spans are not installed.
            ConfigurationError: OTEL_TRACES_EXPORTER names an exporter that is not installed.
        """
        default = "otlp" if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") else "none"
        exporters = os.environ.get("OTEL_TRACES_EXPORTER") or default
        if exporters == "none" and not metrics:
            return None
        try:
            return cls(
                metrics=metrics, tracer=None if exporters == "none" else _build_tracer(exporters)
            )
        except ImportError as exc:
            raise MissingDependency(
                'metrics and spans need additional packages; run pip install "perdure[watch]"'
            ) from exc

    # -- measuring operations

    def build_measured_class(self, base: type[Any]) -> type[Any]:
        """Return a subclass of a checkpointer or store class whose methods record telemetry."""
        part = "threads" if issubclass(base, Checkpointer) else "store"
        methods = dict[str, Any]()
        for name in _MEASURED_METHODS[part]:
            sync_method, async_method = getattr(base, name), getattr(base, f"a{name}")
            methods[name] = self._measure_operation(part, name)(sync_method)
            # Do not measure an async method that only calls the sync method, because the operation
            # would be measured twice.
            if getattr(async_method, "__wrapped__", None) is not sync_method:
                methods[f"a{name}"] = self._ameasure_operation(part, name)(async_method)
        return type(base.__name__, (base,), methods)

    @contextmanager
    def _measure_operation(self, part: str, operation: str) -> Iterator[None]:
        """Record an operation's span, duration and error class."""
        start, error = time.perf_counter(), ""
        try:
            with self._start_span(f"perdure.{part}.{operation}"):
                yield
        except BaseException as exc:
            error = type(exc).__name__
            raise
        finally:
            self._operations.labels(part, operation, error).observe(time.perf_counter() - start)

    @asynccontextmanager
    async def _ameasure_operation(self, part: str, operation: str) -> AsyncIterator[None]:
        """Record an async operation's span, duration and error class.

        The duration includes the time during which the operation is suspended at an `await`.
        """
        with self._measure_operation(part, operation):
            yield

    def measure_run(self) -> AbstractContextManager[None]:
        """Return a context manager that records the graph run in its `with` block."""
        return self._measure_operation("graph", "run")

    @contextmanager
    def measure_request(
        self, headers: Mapping[str, str], summary: RequestSummary
    ) -> Iterator[None]:
        """Record a request's span and duration.

        The duration of a request is measured until its response is complete.

        Args:
            headers: The request's headers. If they contain a trace context, the request's span
                continues that trace.
            summary: A summary of the request, which already contains the method. The caller adds
                the route, the status and the duration before the `with` block ends.
        """
        with self._start_span(summary.method, headers) as span:
            try:
                yield
            finally:
                span.update_name(f"{summary.method} {summary.route}")
                span.set_attribute("http.request.method", summary.method)
                span.set_attribute("http.route", summary.route)
                span.set_attribute("http.response.status_code", summary.status)
                self._requests.labels(summary.method, summary.route, str(summary.status)).observe(
                    summary.ms / 1000
                )

    @contextmanager
    def _start_span(self, name: str, headers: Mapping[str, str] | None = None) -> Iterator[Span]:
        """Start a span.

        If `headers` is not None, the new span is a server span that continues the client's trace.
        """
        kind = SpanKind.INTERNAL if headers is None else SpanKind.SERVER
        context = None if headers is None else extract(dict(headers))
        # Record only an error's class, because error messages may contain stored text.
        without_message: Any = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, context, kind, **without_message) as span:
            try:
                yield span
            except BaseException as exc:
                span.set_attribute("error.type", type(exc).__name__)
                span.set_status(StatusCode.ERROR)
                raise

    # -- sizes and jobs, counted when metrics are read

    async def render_metrics(self, database: OpenDatabase) -> bytes:
        """Return the metrics in the Prometheus text format.

        Database sizes and job counts are refreshed at most once a minute. If refreshing the
        database sizes and job counts takes longer than `_MAX_COUNT_WAIT_S` seconds, their previous
        values are returned.
        """
        from prometheus_client import generate_latest

        is_stale = time.monotonic() - self._counted_at > _RECOUNT_INTERVAL_S
        if self._count_task is None or (self._count_task.done() and is_stale):
            self._count_task = asyncio.create_task(self._update_size_and_job_gauges(database))
        await asyncio.wait([self._count_task], timeout=_MAX_COUNT_WAIT_S)
        return await asyncio.to_thread(generate_latest, self._registry)

    async def _update_size_and_job_gauges(self, database: OpenDatabase) -> None:
        """Set the gauges for the database sizes and the number of extraction jobs in each state."""
        try:
            saver, store = await database.saver.astats(), await database.store.astats()
            counts = {**saver, "messages": saver["items"], **asdict(store)}
            for name, value in counts.items():
                if type(value) is int and name.endswith("_bytes"):
                    self._bytes.labels(name.removesuffix("_bytes")).set(value)
                elif type(value) is int:
                    self._rows.labels(name).set(value)
            states = await asyncio.to_thread(self._count_job_states, database)
            for state in ("waiting", "due", "retrying", "dead"):
                self._jobs.labels(state).set(states[state])
        except PerdureError as exc:
            _LOG.warning("sizes for the metrics cannot be counted: %s", exc)
        self._counted_at = time.monotonic()

    def _count_job_states(self, database: OpenDatabase) -> Counter[str]:
        """Count the threads that memory extraction has not fully read, grouped by job state.

        The job state is the current state of memory extraction for a thread, for example
        `"waiting"` or `"due"`.

        To save time, each call of this method reads only threads that have changed since its
        previous call.
        """
        from perdure.memory.long_term.extraction import DueThreads, Extraction, Pace

        if self._due_threads is None or self._due_threads[0] is not database:
            self._due_threads = (
                database,
                DueThreads(Extraction(database.saver, database.store), Pace()),
            )
        return Counter(
            job.state
            for job in self._due_threads[1].list_jobs(exclude_deleted=False, exclude_read=True)
        )


def _build_tracer(exporters: str) -> Tracer:
    """Return a tracer from the process's tracer provider.

    If the process has no tracer provider, install one with the named exporters.

    Args:
        exporters: The names of exporters, separated by commas.

    Raises:
        ConfigurationError: No installed package has an exporter of that name.
    """
    from importlib.metadata import entry_points

    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        resource_attributes = (
            {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "perdure"}
        )
        provider = TracerProvider(resource=Resource.create(resource_attributes))
        for name in map(str.strip, exporters.split(",")):
            entry_point_name = "otlp_proto_http" if name == "otlp" else name
            exporter_entries = [
                *entry_points(group="opentelemetry_traces_exporter", name=entry_point_name)
            ]
            if not exporter_entries:
                raise ConfigurationError(
                    f"OTEL_TRACES_EXPORTER is {name!r}, but no installed package provides this "
                    "exporter; install the package (for otlp, run "
                    "pip install opentelemetry-exporter-otlp-proto-http)"
                )
            provider.add_span_processor(BatchSpanProcessor(exporter_entries[0].load()()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("perdure", __version__)

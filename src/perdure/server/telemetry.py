"""Telemetry: metrics for Prometheus and spans for OpenTelemetry. Both are off unless configured.

Labels and attributes are names of routes, parts and operations: no content, no ids, no users.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

from perdure import __version__
from perdure.errors import ConfigurationError, MissingDependency
from perdure.server.call import Parts

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from perdure.memory.due import DueThreads
    from perdure.server.request_log import Seen

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_FRESH_S: Final = 60.0  # for so long sizes and jobs are not counted again
_OPERATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "threads": {
        "put": "put",
        "put_writes": "put_writes",
        "get_tuple": "get",
        "history": "history",
        "erase": "erase",
        "delete_thread": "delete",
    },
    "store": {
        "put": "put",
        "get": "get",
        "delete": "delete",
        "search": "search",
        "batch": "",
        "list_namespaces": "list",
        "forget": "erase",
    },
}
"""The public methods that are measured, in both forms, and what they are called.

A batch is called by what it does, if that is one thing.
"""
_BATCHES: Final = {"PutOp": "put", "PutItem": "put", "GetOp": "get", "SearchOp": "search"}
_SIZES: Final = (
    *("size_bytes", "wal_bytes", "free_bytes", "threads", "checkpoints", "messages"),
    *("thread_bytes", "namespaces", "items", "versions", "pending", "value_bytes"),
)
"""Of `stats()` of the checkpointer and of the store."""
_TRACES: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT")
T = TypeVar("T")


class Telemetry:
    """Measures the requests of a server, and what they do with its database.

    Args:
        metrics: Whether to count for Prometheus.
        tracer: Of OpenTelemetry; None: there are no spans.
    """

    def __init__(self, *, metrics: bool = False, tracer: Tracer | None = None) -> None:
        self._tracer, self.has_metrics = tracer, metrics
        self._counted_at = -_FRESH_S
        self._due: tuple[Parts, DueThreads] | None = None
        if not metrics:
            return
        try:
            from prometheus_client import CollectorRegistry, Gauge, Histogram
        except ImportError as exc:
            raise MissingDependency('metrics need packages: pip install "perdure[watch]"') from exc
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry, "namespace": "perdure"}
        buckets: Any = {"buckets": _SECONDS, **own}
        named = ("part", "operation", "error")
        self._operations = Histogram(
            "operation_seconds", "Calls of the database, and runs", named, **buckets
        )
        named = ("method", "route", "status")
        self._requests = Histogram(
            "request_seconds", "Requests, streams to their end", named, **buckets
        )
        self._open = Gauge(
            "open", "Requests, streams and runs that are under way", ("what",), **own
        )
        self._sizes = Gauge("size", "Counts and bytes of the database", ("what",), **own)
        self._jobs = Gauge("jobs", "Threads with unread messages", ("state",), **own)

    @classmethod
    def configured(cls, *, metrics: bool = False) -> Telemetry | None:
        """As options and the environment of OpenTelemetry say; None: all is off."""
        names = [os.environ.get(name, "") for name in _TRACES]
        traced = names[0] not in ("", "none") if names[0] else bool(names[1])
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            traced = False
        if not (metrics or traced):
            return None
        return cls(metrics=metrics, tracer=_tracer(names[0] or "otlp") if traced else None)

    # -- what is measured

    def watch(self, parts: Parts) -> None:
        """Make each part one of a subclass whose public methods are measured."""
        for part, kind in zip(parts, _OPERATIONS, strict=True):
            own = type(part)
            methods: dict[str, Any] = {}
            for name, operation in _OPERATIONS[kind].items():
                methods[name] = self._timed(getattr(own, name), kind, operation)
                methods[f"a{name}"] = self._atimed(getattr(own, f"a{name}"), kind, operation)
            part.__class__ = type(own.__name__, (own,), methods)

    def _timed(self, method: Callable[..., T], part: str, operation: str) -> Callable[..., T]:
        @wraps(method)
        def measured(own: Any, /, *args: Any, **options: Any) -> T:
            name, args = _named(operation, args)
            with self._operation(part, name):
                return method(own, *args, **options)

        return measured

    def _atimed(
        self, method: Callable[..., Awaitable[T]], part: str, operation: str
    ) -> Callable[..., Awaitable[T]]:
        @wraps(method)
        async def measured(own: Any, /, *args: Any, **options: Any) -> T:
            name, args = _named(operation, args)
            with self._operation(part, name):
                return await method(own, *args, **options)

        return measured

    @contextmanager
    def _operation(self, part: str, operation: str) -> Iterator[None]:
        with self._span(f"perdure.{part}.{operation}"):
            begun, error = time.perf_counter(), ""
            try:
                yield
            except BaseException as exc:
                error = type(exc).__name__
                raise
            finally:
                if self.has_metrics:
                    taken = time.perf_counter() - begun
                    self._operations.labels(part, operation, error).observe(taken)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Measure the run of a graph."""
        with self._counted("runs"), self._operation("graph", "run"):
            yield

    @contextmanager
    def request(self, headers: Mapping[str, str], seen: Seen) -> Iterator[None]:
        """Measure a request, which is `seen` when it ends."""
        with self._span(seen.method, headers) as span, self._counted("requests"):
            try:
                yield
            finally:
                if span is not None:
                    span.update_name(f"{seen.method} {seen.route}")
                    span.set_attribute("http.request.method", seen.method)
                    span.set_attribute("http.route", seen.route)
                    span.set_attribute("http.response.status_code", seen.status)
                if self.has_metrics:
                    named = self._requests.labels(seen.method, seen.route, str(seen.status))
                    named.observe(seen.ms / 1000)
                    if seen.stream:
                        self._open.labels("streams").dec()

    def stream_opened(self) -> None:
        """Count a reply that is a stream of events, until its request ends."""
        if self.has_metrics:
            self._open.labels("streams").inc()

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        if not self.has_metrics:
            yield
            return
        with self._open.labels(what).track_inprogress():
            yield

    @contextmanager
    def _span(self, name: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
        if self._tracer is None:
            yield None
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        kind = SpanKind.INTERNAL if headers is None else SpanKind.SERVER
        # an error's text may have content in it; its class has none
        silent: Any = {"record_exception": False, "set_status_on_exception": False}
        context = None if headers is None else extract(dict(headers))
        with self._tracer.start_as_current_span(name, context, kind, **silent) as span:
            try:
                yield span
            except BaseException as exc:
                span.set_attribute("error.type", type(exc).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    # -- what is counted when it is asked for

    async def exposition(self, parts: Parts) -> bytes:
        """The metrics as Prometheus reads them, with sizes that are at most a minute old."""
        from prometheus_client import generate_latest

        if time.monotonic() - self._counted_at >= _FRESH_S:
            self._counted_at = time.monotonic()
            saver, store = await parts.saver.astats(), await parts.store.astats()
            counts = {**saver, "messages": saver["items"], **asdict(store)}
            for name in _SIZES:
                if name in counts:  # SQLite and Postgres tell different things
                    self._sizes.labels(name).set(counts[name])
            for state, many in (await asyncio.to_thread(self._states, parts)).items():
                self._jobs.labels(state).set(many)
        return await asyncio.to_thread(generate_latest, self._registry)

    def _states(self, parts: Parts) -> dict[str, int]:
        """How many threads wait for an extraction, by state; only new activity is read again."""
        from perdure.memory.due import DueThreads, Pace
        from perdure.memory.extraction import Extraction

        if self._due is None or self._due[0] is not parts:
            self._due = parts, DueThreads(Extraction(parts.saver, parts.store), Pace())
        states = [job.state for job in self._due[1].jobs(listed=False)]
        return {state: states.count(state) for state in ("waiting", "due", "retrying", "dead")}


def _named(operation: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The name of an operation, and its arguments, of which a batch is read once only."""
    if operation or not args:
        return operation or "batch", args
    ops = list(args[0])
    kinds = {_BATCHES.get(type(op).__name__, "batch") for op in ops}
    return kinds.pop() if len(kinds) == 1 else "batch", (ops, *args[1:])


def _tracer(exporters: str) -> Tracer:
    """A tracer of this process' provider, or else of one with the exporters of the environment."""
    try:
        from importlib.metadata import entry_points

        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise MissingDependency('spans need packages: pip install "perdure[watch]"') from exc
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "perdure"}
        provider = TracerProvider(resource=Resource.create(named))
        grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
        otlp = "otlp_proto_grpc" if grpc else "otlp_proto_http"
        for name in map(str.strip, exporters.split(",")):
            wanted = otlp if name == "otlp" else name
            found = [*entry_points(group="opentelemetry_traces_exporter", name=wanted)]
            if not found:
                raise ConfigurationError(
                    f"OTEL_TRACES_EXPORTER names {name!r}, and no package here has such an "
                    "exporter; for otlp: pip install opentelemetry-exporter-otlp-proto-http"
                )
            provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("perdure", __version__)

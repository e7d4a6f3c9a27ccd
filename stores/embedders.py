"""Embedders, made of an object, a function or a model's name.

A blocking model is called in a daemon thread, whoever asks: a call that never returns can then be
given up, and cannot keep the process from ending. An async model is awaited where it is asked for;
for blocking callers it runs on an event loop in a thread of its own, always the same one, since the
connections of async clients belong to a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import importlib.util
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from langchain_core.embeddings import Embeddings
from langgraph.store.base import ensure_embeddings

from perdure.errors import ConfigurationError, EmbeddingFailed, MissingDependency
from perdure.storage.flow import arun_flow, run_flow
from perdure.storage.threads import ThreadPool, TimedOut, await_outcome, wait_for_outcome
from perdure.stores.text import split_into_chunks
from perdure.stores.vectors import Floats, Model, check_vectors, encode_groups

TIMEOUT_S = 60.0
BATCH_SIZE = 256
CACHE_SIZE: Final = 4096  # vectors; of 1536 numbers 25 MB
_MAX_THREADS: Final = 8
_MAX_CHECKED_IN_LOOP: Final = (
    8  # answers; of 1536 numbers each 0.5 ms to check, more go to a thread
)


@runtime_checkable
class Embedder(Protocol):
    """The interface of embedders: texts become vectors.

    Attributes:
        name: The model's name; recorded with the vectors, which are comparable only within one
            model.
        dims: The length of a vector; None: not known before the first.

    An embedder may also have `embed_query(text)` and `aembed_query(text)`, for models that treat
    questions differently; `in_process = True`, if it computes in this process, without a time
    limit; and `clear_cache()`.
    """

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def dims(self) -> int | None:
        """The length of a vector."""

    def embed(self, texts: Sequence[str]) -> Any:
        """The texts' vectors, float32[len(texts), dims]."""

    async def aembed(self, texts: Sequence[str]) -> Any:
        """The same, without blocking the event loop."""


EmbedderSpec = Embedder | Embeddings | Callable[[list[str]], Any] | str


def embedder_from(
    spec: EmbedderSpec,
    dims: int | None = None,
    name: str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    timeout_s: float | None = TIMEOUT_S,
) -> CheckedEmbedder:
    """Make an embedder of an object, a function or a model's name.

    Args:
        spec: An `Embedder`; a langchain-core `Embeddings`; a function, blocking or async, from a
            list of texts to a list of vectors; or `"provider:model"` for langchain's
            `init_embeddings`.
        dims: The length of its vectors; None: that of the first.
        name: The model's name, recorded with the vectors; None: that of `spec`. Give a function a
            name if its model may change.
        batch_size: How many texts one call embeds.
        timeout_s: The time limit of one batch; None: no limit. An embedder that computes in this
            process (`in_process`) has none.

    Raises:
        ConfigurationError: An argument is none of these, or `dims` is not the embedder's own.
        MissingDependency: A string was given, and langchain or the provider is not installed.
    """
    _check_options(dims, name, batch_size, timeout_s)
    is_ready = isinstance(spec, CheckedEmbedder) and name in (None, spec.name)
    model = _init_langchain_embedder(spec) if isinstance(spec, str) else spec
    own_dims = model.dims if isinstance(model, Embedder) else None
    if None not in (own_dims, dims) and own_dims != dims:
        raise ConfigurationError(
            f"dims={dims!r} is given for an embedder whose vectors have {own_dims}: leave it out"
        )
    if is_ready:
        return spec  # type: ignore[return-value]
    return CheckedEmbedder(
        model, dims or own_dims, name or _find_model_name(spec), batch_size, timeout_s
    )


def _check_options(
    dims: int | None, name: str | None, batch_size: int, timeout_s: float | None
) -> None:
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: expected the model's name as text, or None")
    for option, value in (("dims", dims), ("batch_size", batch_size)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigurationError(f"{option}={value!r}: expected a whole number from 1")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigurationError(f"timeout_s={timeout_s!r}: expected seconds, more than 0, or None")


def _init_langchain_embedder(spec: str) -> Embeddings:
    if importlib.util.find_spec("langchain") is None:
        raise MissingDependency(
            f"the embedder {spec!r} is made by langchain, which is not installed: "
            "pip install langchain, and the provider's package"
        )
    try:
        return ensure_embeddings(spec)
    except ImportError as exc:
        raise MissingDependency(f"the embedder {spec!r} needs another package: {exc}") from exc
    except Exception as exc:  # a provider's own complaints: a key that is missing, say
        raise ConfigurationError(f"langchain cannot make the embedder {spec!r}: {exc}") from exc


def _find_model_name(spec: Any) -> str:
    """The name that a model has for itself."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Embedder) and not isinstance(spec, Embeddings):
        return spec.name
    definition = spec if hasattr(spec, "__qualname__") else type(spec)
    name = f"{definition.__module__}.{definition.__qualname__}"
    models = (getattr(spec, attribute, None) for attribute in ("model", "model_name", "model_id"))
    model = next((model for model in models if isinstance(model, str)), None)
    return name if model is None else f"{name}:{model}"


class _EmbedFunction(NamedTuple):
    """A function of a model, from a list of texts to vectors, or from one text to its vector."""

    call: Callable[[Any], Any]  # if it is async, or returns an awaitable, that is awaited
    acall: Callable[[Any], Any] | None  # for callers that await; None: `call`, in a thread
    takes_one_text: bool = False


def _find_functions(model: Any) -> tuple[_EmbedFunction, _EmbedFunction]:
    """A model's functions for documents and for queries."""
    if isinstance(model, Embeddings):
        # the inherited async forms go to the event loop's own threads, where a call that hangs
        # would keep the process from ending: ours are used instead
        has_async_documents = type(model).aembed_documents is not Embeddings.aembed_documents
        has_async_query = type(model).aembed_query is not Embeddings.aembed_query
        return (
            _EmbedFunction(
                model.embed_documents, model.aembed_documents if has_async_documents else None
            ),
            _EmbedFunction(
                model.embed_query,
                model.aembed_query if has_async_query else None,
                takes_one_text=True,
            ),
        )
    if isinstance(model, Embedder):
        documents = _EmbedFunction(model.embed, model.aembed)
        query = getattr(model, "embed_query", None)
        if query is None:
            return documents, documents
        return documents, _EmbedFunction(
            query, getattr(model, "aembed_query", None), takes_one_text=True
        )
    if callable(model):
        is_async = inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(
            type(model).__call__
        )
        function = _EmbedFunction(model, model if is_async else None)
        return function, function
    raise ConfigurationError(
        f"an embedder cannot be made of {model!r}: expected an Embedder, a langchain Embeddings, a "
        "function from texts to vectors, or 'provider:model'"
    )


class CheckedEmbedder:
    """An embedder whose answers are vectors of length 1, or an error that says what they were.

    Texts go to the model in batches, each text once; the vectors used last are kept, those of
    queries apart. Threads and event loops may share it. `embedder_from` makes one.
    """

    def __init__(
        self, model: Any, dims: int | None, name: str, batch_size: int, timeout_s: float | None
    ) -> None:
        self.name = name
        self._dims = dims
        self._documents, self._queries = _find_functions(model)
        self._batch_size = batch_size
        self._in_process = getattr(model, "in_process", False) is True
        self._timeout_s = None if self._in_process else timeout_s
        self._threads = ThreadPool(_MAX_THREADS, "perdure-embed", is_permanent=False)
        self._clear_model: Callable[[], None] | None = getattr(model, "clear_cache", None)
        self._lock = threading.Lock()  # of the dimensions and the cache
        self._cache: dict[tuple[str, bool], Floats] = {}  # by text and `query`; oldest use first

    @property
    def dims(self) -> int | None:
        """The length of a vector; None: not known before the first."""
        return self._dims

    def embed(self, texts: Sequence[str]) -> Floats:
        """The vectors of texts to be stored.

        Raises:
            EmbeddingFailed: The model raised, took too long, or did not return that. What it
                answered for the batches before is kept, so that another try is cheaper.
            ConfigurationError: `texts` is not a list of strings.
        """
        return run_flow(
            self._embed_batches(texts, query=False), partial(self._call_model, self._documents)
        )

    async def aembed(self, texts: Sequence[str]) -> Floats:
        """The same from a coroutine."""
        return await arun_flow(
            self._embed_batches(texts, query=False), partial(self._acall_model, self._documents)
        )

    def embed_query(self, text: str) -> Floats:
        """The vector of a query: float32[dims]; raises as `embed` does."""
        rows = run_flow(
            self._embed_batches([text], query=True), partial(self._call_model, self._queries)
        )
        return rows[0]  # type: ignore[no-any-return]

    async def aembed_query(self, text: str) -> Floats:
        """The same from a coroutine."""
        rows = await arun_flow(
            self._embed_batches([text], query=True), partial(self._acall_model, self._queries)
        )
        return rows[0]  # type: ignore[no-any-return]

    def clear_cache(self) -> None:
        """Drop every vector that is kept, as an erasure must: a vector tells of its text."""
        with self._lock:
            self._cache.clear()
        if self._clear_model is not None:
            self._clear_model()

    def _embed_batches(
        self, texts: Sequence[str], *, query: bool
    ) -> Generator[list[str], Floats, Floats]:
        """Yields batches for the model, is sent their vectors, returns those of all texts."""
        original, texts = texts, list(texts)
        if isinstance(original, str) or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"cannot embed {original!r}: expected a list of strings")
        if not texts:
            return np.empty((0, self._dims or 0), np.float32)
        vector_of_text = self._take_from_cache(texts, query)
        missing = [text for text in dict.fromkeys(texts) if text not in vector_of_text]
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            vectors = dict(zip(batch, (yield batch), strict=True))
            vector_of_text |= vectors
            self._add_to_cache(vectors, query)
        return np.stack([vector_of_text[text] for text in texts])

    def _take_from_cache(self, texts: Sequence[str], query: bool) -> dict[str, Floats]:
        with self._lock:
            cached = {text: self._cache.pop((text, query), None) for text in dict.fromkeys(texts)}
            hits = {text: vector for text, vector in cached.items() if vector is not None}
            self._cache |= {(text, query): vector for text, vector in hits.items()}
        return hits

    def _add_to_cache(self, vectors: dict[str, Floats], query: bool) -> None:
        """Keep copies, so that no row holds the array it is a part of."""
        with self._lock:
            self._cache |= {(text, query): vector.copy() for text, vector in vectors.items()}
            while len(self._cache) > CACHE_SIZE:
                del self._cache[next(iter(self._cache))]

    # -- calls of the model

    def _call_model(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        if self._in_process:
            return self._request_vectors(function, texts)
        with self._convert_errors():
            return wait_for_outcome(
                self._submit_call(function, texts, awaited=False), self._timeout_s
            )

    async def _acall_model(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        with self._convert_errors():
            if function.acall is None:
                future = self._submit_call(function, texts, awaited=True)
                return await await_outcome(future, self._timeout_s)
            argument = texts[0] if function.takes_one_text else texts
            answer = await await_outcome(function.acall(argument), self._timeout_s)
            if len(texts) > _MAX_CHECKED_IN_LOOP:
                return await asyncio.to_thread(self._check_answer, function, texts, answer)
            return self._check_answer(function, texts, answer)

    def _submit_call(self, function: _EmbedFunction, texts: list[str], *, awaited: bool) -> Any:
        work = partial(contextvars.copy_context().run, self._request_vectors, function, texts)
        return self._threads.submit(work, is_async=awaited)

    def _request_vectors(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        argument = texts[0] if function.takes_one_text else texts
        with self._convert_errors():
            try:
                answer = function.call(argument)
            except NotImplementedError:  # how classes that are async only say so
                if function.acall is None:
                    raise
                answer = function.acall(argument)
            if inspect.isawaitable(answer):
                future = asyncio.run_coroutine_threadsafe(
                    _await_answer(answer), _get_embedding_loop()
                )
                answer = wait_for_outcome(future, self._timeout_s)
            return self._check_answer(function, texts, answer)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except EmbeddingFailed:
            raise
        except TimedOut as exc:
            raise EmbeddingFailed(
                f"the embedder {self.name!r} did not answer within {self._timeout_s} s; give it "
                "more with timeout_s, or fewer texts at once with batch_size"
            ) from exc
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise EmbeddingFailed(f"the embedder {self.name!r} raised {error}") from exc

    def _check_answer(self, function: _EmbedFunction, texts: list[str], answer: Any) -> Floats:
        with self._lock:  # two threads may bring a first answer
            rows = [answer] if function.takes_one_text else answer
            vectors = check_vectors(rows, len(texts), self._dims, self.name)
            self._dims = vectors.shape[1]
        return vectors


async def _await_answer(answer: Awaitable[Any]) -> Any:
    return await answer


_loop_lock = threading.Lock()


def _get_embedding_loop() -> asyncio.AbstractEventLoop:
    """The event loop on which async models run for those who block; started when first needed."""
    with _loop_lock:
        return _start_loop(os.getpid())  # a forked process has another


@cache
def _start_loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run_loop() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run_loop, name="perdure-embed-loop", daemon=True).start()
    atexit.register(loop.call_soon_threadsafe, loop.stop)
    return loop


# -- the embedder of a store


@dataclass(slots=True)
class StoreEmbedder:
    """The embedder of a store, if it has one."""

    embedder: CheckedEmbedder | None = None
    model: Model | None = None  # what the embedder is recorded as
    in_process: bool = False  # there is nothing to await
    # so quick that no vectors are stored with an item: the search makes them when it reads it
    embed_quickly: Callable[[Sequence[str]], Floats] | None = None
    accepts_any_kind: bool = False  # vectors are stored as the file has them already

    @property
    def stores_vectors(self) -> bool:
        """Whether vectors are stored with an item."""
        return self.model is not None and self.embed_quickly is None

    def adopt_encoding(self, file_model: Model) -> None:
        """Go on in the way in which vectors are stored in the file."""
        if self.accepts_any_kind and self.model is not None and self.model.name == file_model.name:
            self.model = replace(self.model, kind=file_model.kind)

    def split_texts(self, texts: Sequence[str]) -> list[str]:
        """The chunks of texts that are embedded, each by itself."""
        return [piece for text in texts for piece in split_into_chunks(text)]

    def derives_vectors(self, file_model: Model) -> bool:
        """Whether the vectors of a file's model are made by the search."""
        return self.embed_quickly is not None and self.model == file_model

    def derive_vectors(
        self, rows: Sequence[Sequence[str]], file_model: Model | None
    ) -> list[bytes | None]:
        """The vectors of rows, given the texts of each; None where nothing is to be embedded."""
        if self.embed_quickly is None or file_model is None or not self.derives_vectors(file_model):
            return [None] * len(rows)
        groups = [self.split_texts(texts) for texts in rows]
        return encode_groups(
            self.embed_quickly([piece for group in groups for piece in group]), groups, file_model
        )

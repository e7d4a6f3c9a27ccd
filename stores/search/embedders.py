"""Build embedders from an object, a function or a model name.

A blocking model is called in a daemon thread. If a call of the model never returns, it can be
abandoned, because a daemon thread does not keep the process alive. If a model computes in this
process (`in_process`), a blocking caller runs the model in the caller's own OS thread.

For async callers, an async model is awaited in the caller's event loop. For blocking callers, an
async model runs on an event loop in a separate OS thread. All blocking callers share one event
loop, because the connections of an async client belong to the loop on which they were opened.
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
from perdure.storage.thread_pools import ThreadPool, TimedOut, await_outcome, wait_for_outcome
from perdure.stores.search.text import split_into_chunks
from perdure.stores.search.vectors import (
    Floats,
    Model,
    check_and_normalize_vectors,
)

TIMEOUT_S = 60.0
BATCH_SIZE = 256
# maximum number of cached vectors; a full cache takes about 25 MB if a vector has 1,536 dimensions
CACHE_SIZE: Final = 4096
# maximum number of daemon threads in which an embedder calls its model concurrently
_MAX_THREADS: Final = 8
# maximum number of vectors that are validated on the event loop; validating more vectors would take
# over 0.5 ms, so larger batches are validated in an OS thread
_MAX_CHECKED_IN_LOOP: Final = 8


@runtime_checkable
class Embedder(Protocol):
    """The interface of embedders, which compute the embedding vectors of texts.

    Attributes:
        name: The name of the model. It is recorded with the vectors, because only vectors of the
            same model can be compared.
        dims: The number of dimensions, or None if it is unknown until the first vector.

    An embedder may have further members: `embed_query(text)` and `aembed_query(text)`, for models
    that treat queries differently; `in_process = True`, if it computes in this process and needs no
    time limit; and `clear_cache()`.
    """

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def dims(self) -> int | None:
        """The number of dimensions of each vector, or None if it is not known yet."""

    def embed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings of the texts as a float32 array of shape (len(texts), dims)."""

    async def aembed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings of the texts without blocking the event loop."""


EmbedderSpec = Embedder | Embeddings | Callable[[list[str]], Any] | str


def embedder_from(
    spec: EmbedderSpec,
    dims: int | None = None,
    name: str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    timeout_s: float | None = TIMEOUT_S,
) -> CheckedEmbedder:
    """Build an embedder from an object, a function or the name of a model.

    If `spec` was built by `embedder_from`, `spec` itself is returned, unless `name` differs from
    the name of `spec`. `batch_size` and `timeout_s` have no effect on a `spec` that is returned
    unchanged.

    Args:
        spec: An `Embedder`; a langchain-core `Embeddings`; a function, blocking or async, from a
            list of texts to a list of vectors; or `"provider:model"` for langchain's
            `init_embeddings`.
        dims: The length of the vectors. None takes the length of the first vector.
        name: The name of the model, which is recorded with the vectors. None takes the name of
            `spec`. Give a function a name if its model may change.
        batch_size: The maximum number of texts in one call of the model.
        timeout_s: The time limit of one batch in seconds. None means no limit. An embedder that
            computes in this process (`in_process`) has no limit.

    Raises:
        ConfigurationError: An argument is wrong, or `dims` differs from the embedder's own value.
        MissingDependency: `spec` is a string, and langchain or the provider is not installed.
    """
    _check_embedder_options(dims, name, batch_size, timeout_s)
    is_ready = isinstance(spec, CheckedEmbedder) and name in (None, spec.name)
    model = _init_langchain_embedder(spec) if isinstance(spec, str) else spec
    own_dims = model.dims if isinstance(model, Embedder) else None
    if None not in (own_dims, dims) and own_dims != dims:
        raise ConfigurationError(
            f"the argument 'dims' is {dims!r}, but this embedder returns vectors with {own_dims} "
            f"dimensions; expected {own_dims} or None"
        )
    if is_ready:
        return spec  # type: ignore[return-value]
    return CheckedEmbedder(
        model, dims or own_dims, name or _find_model_name(spec), batch_size, timeout_s
    )


def _check_embedder_options(
    dims: int | None, name: str | None, batch_size: int, timeout_s: float | None
) -> None:
    """Check the options of `embedder_from`."""
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(
            f"the argument 'name' is {name!r}; expected the model's name as text, or None"
        )
    for option, value in (("dims", dims), ("batch_size", batch_size)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigurationError(
                f"the argument {option!r} is {value!r}; expected an integer of 1 or more"
            )
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigurationError(
            f"the argument 'timeout_s' is {timeout_s!r}; expected a number of seconds greater than "
            "0, or None"
        )


def _init_langchain_embedder(model_id: str) -> Embeddings:
    """Initialise a LangChain embedder from a "provider:model" string."""
    if importlib.util.find_spec("langchain") is None:
        raise MissingDependency(
            f"the embedder {model_id!r} needs langchain, which is not installed; run pip install "
            '"perdure[agents]", and install the provider\'s package'
        )
    try:
        return ensure_embeddings(model_id)
    except ImportError as exc:
        raise MissingDependency(
            f"the embedder {model_id!r} needs another package ({exc}); install it"
        ) from exc
    # The provider can raise any exception, for example because an API key is missing.
    except Exception as exc:
        raise ConfigurationError(
            f"langchain cannot create the embedder {model_id!r}: {exc}"
        ) from exc


def _find_model_name(embedder_spec: Any) -> str:
    """Return the name under which the store records an embedding model.

    For a function or a langchain-core `Embeddings` object, the result is the qualified name of the
    function or class. If an embedding object has an attribute such as `model_name`, the returned
    name has the form `qualified_name:model_name`.
    """
    if isinstance(embedder_spec, str):
        return embedder_spec
    if isinstance(embedder_spec, Embedder) and not isinstance(embedder_spec, Embeddings):
        return embedder_spec.name
    definition = embedder_spec if hasattr(embedder_spec, "__qualname__") else type(embedder_spec)
    name = f"{definition.__module__}.{definition.__qualname__}"
    models = (
        getattr(embedder_spec, attribute, None) for attribute in ("model", "model_name", "model_id")
    )
    model = next((model for model in models if isinstance(model, str)), None)
    return name if model is None else f"{name}:{model}"


class _EmbedFunction(NamedTuple):
    """A model's embedding function, whose argument is either a list of texts or a single text."""

    # A function that embeds texts. It returns the vectors, or an awaitable that resolves to them.
    call: Callable[[Any], Any]
    # The async variant of `call`, or None if async callers must run `call` in an OS thread.
    acall: Callable[[Any], Any] | None
    takes_one_text: bool = False


def _find_document_and_query_embed_functions(model: Any) -> tuple[_EmbedFunction, _EmbedFunction]:
    """Return a model's embedding function for documents and its embedding function for queries."""
    if isinstance(model, Embeddings):
        # If a class inherits its async methods from `Embeddings`, call its blocking methods in
        # perdure's own threads instead. The inherited methods would run in the event loop's thread
        # pool, where a call that hangs would keep the process alive.
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
        f"{model!r} is not an embedder; expected an Embedder, a langchain Embeddings, a function "
        "from texts to vectors, or 'provider:model'"
    )


class CheckedEmbedder:
    """An embedder that validates a model's responses and normalises its vectors to unit length.

    `EmbeddingFailed` is raised if the model returns an invalid response.

    Texts are deduplicated and sent to the model in batches. The most recently used vectors are
    cached, separately for queries and documents. Several OS threads and event loops can share a
    `CheckedEmbedder`. To build a `CheckedEmbedder`, call `embedder_from`.
    """

    def __init__(
        self, model: Any, dims: int | None, name: str, batch_size: int, timeout_s: float | None
    ) -> None:
        self.name = name
        self._dims = dims
        self._document_function, self._query_function = _find_document_and_query_embed_functions(
            model
        )
        self._batch_size = batch_size
        self._in_process = getattr(model, "in_process", False) is True
        self._timeout_s = None if self._in_process else timeout_s
        self._threads = ThreadPool(_MAX_THREADS, "perdure-embed", is_permanent=False)
        self._clear_model_cache: Callable[[], None] | None = getattr(model, "clear_cache", None)
        self._lock = threading.Lock()  # guards `_dims` and `_cache`
        # A cache of vectors, keyed by the text and by whether the text is a query. The least
        # recently used entry comes first.
        self._cache: dict[tuple[str, bool], Floats] = {}

    @property
    def dims(self) -> int | None:
        """The number of dimensions, or None if it is unknown until the first vector is computed."""
        return self._dims

    def embed(self, texts: Sequence[str]) -> Floats:
        """Embed texts that will be stored, and return a float32 array with one row per text.

        Raises:
            EmbeddingFailed: The model raised an error, timed out, or returned an invalid response.
                The vectors of earlier batches stay cached, so that a retry is cheaper.
            ConfigurationError: `texts` is not a list of strings.
        """
        return run_flow(
            self._embed_batches(texts, is_query=False),
            partial(self._call_model, self._document_function),
        )

    async def aembed(self, texts: Sequence[str]) -> Floats:
        """Return the embeddings of texts without blocking the event loop; see `embed`."""
        return await arun_flow(
            self._embed_batches(texts, is_query=False),
            partial(self._acall_model, self._document_function),
        )

    def embed_query(self, text: str) -> Floats:
        """Return the embedding of a query as a float32 array. Raises the errors of `embed`."""
        rows = run_flow(
            self._embed_batches([text], is_query=True),
            partial(self._call_model, self._query_function),
        )
        return rows[0]  # type: ignore[no-any-return]

    async def aembed_query(self, text: str) -> Floats:
        """Return the embedding of a query without blocking the event loop; see `embed_query`."""
        rows = await arun_flow(
            self._embed_batches([text], is_query=True),
            partial(self._acall_model, self._query_function),
        )
        return rows[0]  # type: ignore[no-any-return]

    def clear_cache(self) -> None:
        """Clear the cache of vectors, and the cache of the embedding model itself if it has one.

        The store clears this cache after items were erased, because a cached vector can reveal the
        text from which it was computed.
        """
        with self._lock:
            self._cache.clear()
        if self._clear_model_cache is not None:
            self._clear_model_cache()

    def _embed_batches(
        self, texts: Sequence[str], *, is_query: bool
    ) -> Generator[list[str], Floats, Floats]:
        """Yield batches of texts, receive their vectors through `send`, and return all vectors.

        Texts with cached embeddings are not included in any batch.
        """
        original, texts = texts, list(texts)
        if isinstance(original, str) or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"cannot embed {original!r}: expected a list of strings")
        if not texts:
            return np.empty((0, self._dims or 0), np.float32)
        vector_of_text: dict[str, Floats] = {}
        missing: list[str] = []
        with self._lock:
            for text in dict.fromkeys(texts):
                vector = self._cache.pop((text, is_query), None)
                if vector is None:
                    missing.append(text)
                else:
                    # Move the vector to the end of the LRU cache, because the vector is now the
                    # most recently used.
                    vector_of_text[text] = self._cache[text, is_query] = vector
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            vectors = dict(zip(batch, (yield batch), strict=True))
            vector_of_text |= vectors
            with self._lock:
                for text, vector in vectors.items():
                    # Copy the vector, because a numpy view would keep its whole batch in memory.
                    self._cache[text, is_query] = vector.copy()
                while len(self._cache) > CACHE_SIZE:
                    del self._cache[next(iter(self._cache))]
        return np.stack([vector_of_text[text] for text in texts])

    # -- calls of the model

    def _call_model(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        """Return the embeddings of one batch of texts, blocking until the model has responded."""
        if self._in_process:
            return self._request_vectors(function, texts)
        with self._convert_model_errors():
            return wait_for_outcome(
                self._submit_call(function, texts, is_async=False), self._timeout_s
            )

    async def _acall_model(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        """Return the embeddings of one batch of texts without blocking the event loop."""
        with self._convert_model_errors():
            if function.acall is None:
                future = self._submit_call(function, texts, is_async=True)
                return await await_outcome(future, self._timeout_s)
            answer = await await_outcome(
                function.acall(texts[0] if function.takes_one_text else texts), self._timeout_s
            )
            if len(texts) > _MAX_CHECKED_IN_LOOP:
                return await asyncio.to_thread(
                    self._check_returned_vectors, function, texts, answer
                )
            return self._check_returned_vectors(function, texts, answer)

    def _submit_call(self, function: _EmbedFunction, texts: list[str], *, is_async: bool) -> Any:
        """Start a model call in a daemon thread, and return a future for its result."""
        return self._threads.submit(
            partial(contextvars.copy_context().run, self._request_vectors, function, texts),
            is_async=is_async,
        )

    def _request_vectors(self, function: _EmbedFunction, texts: list[str]) -> Floats:
        """Call the model in the current OS thread, and return the validated embeddings."""
        argument = texts[0] if function.takes_one_text else texts
        with self._convert_model_errors():
            try:
                answer = function.call(argument)
            # An embedder that implements only async methods raises NotImplementedError when its
            # blocking method is called.
            except NotImplementedError:
                if function.acall is None:
                    raise
                answer = function.acall(argument)
            if inspect.isawaitable(answer):
                future = asyncio.run_coroutine_threadsafe(
                    _wrap_awaitable_in_coroutine(answer), _get_embedding_event_loop()
                )
                answer = wait_for_outcome(future, self._timeout_s)
            return self._check_returned_vectors(function, texts, answer)

    @contextmanager
    def _convert_model_errors(self) -> Iterator[None]:
        """Convert every error that the model raises to `EmbeddingFailed`."""
        try:
            yield
        except EmbeddingFailed:
            raise
        except TimedOut as exc:
            raise EmbeddingFailed(
                f"the embedder {self.name!r} did not answer within {self._timeout_s} s; "
                "raise timeout_s, or lower batch_size"
            ) from exc
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise EmbeddingFailed(f"the embedder {self.name!r} raised {error}") from exc

    def _check_returned_vectors(
        self, function: _EmbedFunction, texts: list[str], answer: Any
    ) -> Floats:
        """Validate the model's response, and return the vectors that it contains."""
        # The model's first response determines the number of dimensions. The lock is needed because
        # two OS threads may receive the model's first responses concurrently.
        with self._lock:
            rows = [answer] if function.takes_one_text else answer
            vectors = check_and_normalize_vectors(rows, len(texts), self._dims, self.name)
            self._dims = vectors.shape[1]
        return vectors


async def _wrap_awaitable_in_coroutine(awaitable: Awaitable[Any]) -> Any:
    """Await any awaitable.

    `run_coroutine_threadsafe` accepts only coroutines, so other awaitables are wrapped in a
    coroutine.
    """
    return await awaitable


_loop_lock = threading.Lock()


def _get_embedding_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that runs async models for blocking callers. Start it if needed."""
    with _loop_lock:
        # A forked process needs its own event loop, because OS threads do not survive a fork.
        return _start_event_loop_in_daemon_thread(os.getpid())


@cache
def _start_event_loop_in_daemon_thread(pid: int) -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread of this process, and return it."""
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
    # The name, the number of dimensions and the vector encoding of the embedding model, or None if
    # the store has no embedder. The database records these three attributes when the first vectors
    # are stored. The number of dimensions (`dims`) is 0 until it is known.
    model: Model | None = None
    in_process: bool = False  # whether the model runs in this process
    # The embedding function, if the model is fast enough to embed items during a search. The store
    # does not save the vectors of a fast model. Instead, a search computes the vectors when it
    # loads items into its index. For all other models, `embed_quickly` is None.
    embed_quickly: Callable[[Sequence[str]], Floats] | None = None
    # Whether the caller left the vector encoding unset. If so, the store uses the encoding that is
    # recorded in the database file.
    accepts_any_kind: bool = False

    @property
    def stores_vectors(self) -> bool:
        """Whether each item's vectors are stored with the item."""
        return self.model is not None and self.embed_quickly is None

    def adopt_vector_encoding_of_file(self, file_model: Model) -> None:
        """Use the file's vector encoding if the current model also computed the file's vectors.

        If the caller has specified a vector encoding, use the caller's encoding instead of the
        recorded one.
        """
        if self.accepts_any_kind and self.model is not None and self.model.name == file_model.name:
            self.model = replace(self.model, kind=file_model.kind)

    def split_texts(self, texts: Sequence[str]) -> list[str]:
        """Split the texts into chunks, each of which is embedded separately."""
        return [piece for text in texts for piece in split_into_chunks(text)]

    def should_compute_vectors_in_searches(self, recorded_model: Model) -> bool:
        """Return whether searches compute the items' vectors instead of reading stored vectors.

        The result is true if the store's model is fast enough to embed items during a search and is
        the same as `recorded_model`, the model recorded in the database.
        """
        return self.embed_quickly is not None and self.model == recorded_model

"""What a store embeds with, made of whatever the user has: an object, a function or a name."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from langchain_core.embeddings import Embeddings
from langgraph.store.base import ensure_embeddings

from perdure.errors import ConfigurationError, MissingDependency
from perdure.stores.calling import Call, Door, Threads
from perdure.stores.checked_embedder import BATCH_SIZE, CACHE_BYTES, CheckedEmbedder

__all__ = ["CheckedEmbedder", "Embedder", "EmbedderSpec", "embedder_from"]

TIMEOUT_S = 60.0


@runtime_checkable
class Embedder(Protocol):
    """What a store embeds with.

    Attributes:
        name: Which model it is; recorded beside the vectors, which are comparable only within it.
        dims: The length of a vector; None: not known before the first.

    An embedder may also have `embed_query(text)` and `aembed_query(text)`, for models that treat
    questions in another way; `in_process = True`, when it computes here, so that no time limit is
    kept; and `clear_cache()`.
    """

    @property
    def name(self) -> str:
        """Which model it is."""

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
    cache_bytes: int = CACHE_BYTES,
) -> CheckedEmbedder:
    """An embedder over what the user has.

    Args:
        spec: An `Embedder`; a langchain-core `Embeddings`; a function, blocking or async, from a
            list of texts to a list of vectors; or `"provider:model"` for langchain's
            `init_embeddings`.
        dims: How long its vectors are; None: as long as the first.
        name: Which model it is, recorded with the vectors. None: what `spec` tells of itself; a
            function tells only its own name, so give one where a function's model may change.
        batch_size: How many texts go to the model at once.
        timeout_s: How long one batch may take; None: as long as it takes. Nothing is timed that
            computes in this process (`in_process`).
        cache_bytes: How much of the documents' vectors is kept in memory.

    Raises:
        ConfigurationError: An argument is none of these, or `dims` is not the embedder's own.
        MissingDependency: A string was given, and langchain or the provider is not installed.
    """
    _check_options(dims, name, batch_size, timeout_s, cache_bytes)
    if isinstance(spec, CheckedEmbedder) and name in (None, spec.name):
        _check_dims(spec.dims, dims)
        return spec
    name = name or _name_of(spec)
    model = _from_string(spec) if isinstance(spec, str) else spec
    own_dims = getattr(model, "dims", None) if isinstance(model, Embedder) else None
    _check_dims(own_dims, dims)
    calls, acalls = _calls(model)
    here = getattr(model, "in_process", False) is True
    threads = Threads()
    documents, queries = (
        Door(name, call, acall, threads, timeout_s=None if here else timeout_s, trusted=here)
        for call, acall in zip(calls, acalls, strict=True)
    )
    return CheckedEmbedder(
        name,
        dims or own_dims,
        documents,
        queries,
        batch_size=batch_size,
        cache_bytes=cache_bytes,
        on_clear=getattr(model, "clear_cache", None),
    )


def _calls(model: Any) -> tuple[tuple[Call, Call], tuple[Call | None, Call | None]]:
    """A model's functions for documents and for queries, then the async ones."""
    if isinstance(model, Embeddings):
        # the inherited async forms go to the event loop's own threads, where a call that hangs
        # would keep the process from ending: ours are used instead
        own = type(model).aembed_documents is not Embeddings.aembed_documents
        own_query = type(model).aembed_query is not Embeddings.aembed_query
        return (
            (model.embed_documents, _of_one(model.embed_query)),
            (
                model.aembed_documents if own else None,
                _aof_one(model.aembed_query) if own_query else None,
            ),
        )
    if isinstance(model, Embedder):
        query, aquery = getattr(model, "embed_query", None), getattr(model, "aembed_query", None)
        if query is None:
            return (model.embed, model.embed), (model.aembed, model.aembed)
        return (model.embed, _of_one(query)), (model.aembed, _aof_one(aquery) if aquery else None)
    if callable(model):
        is_async = inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(
            type(model).__call__
        )
        acall = model if is_async else None
        return (model, model), (acall, acall)
    raise ConfigurationError(
        f"an embedder cannot be made of {model!r}: expected an Embedder, a langchain Embeddings, a "
        "function from texts to vectors, or 'provider:model'"
    )


def _of_one(embed_query: Callable[[str], Any]) -> Call:
    return lambda texts: [embed_query(texts[0])]


def _aof_one(aembed_query: Callable[[str], Any]) -> Call:
    async def call(texts: list[str]) -> list[Any]:
        return [await aembed_query(texts[0])]

    return call


def _from_string(spec: str) -> Embeddings:
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


def _name_of(spec: Any) -> str:
    """What a model tells of itself."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Embedder) and not isinstance(spec, Embeddings):
        return spec.name
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    name = f"{named.__module__}.{named.__qualname__}"
    for attribute in ("model", "model_name", "model_id"):
        model = getattr(spec, attribute, None)
        if isinstance(model, str):
            return f"{name}:{model}"
    return name


def _check_dims(own: int | None, dims: int | None) -> None:
    if own is not None and dims is not None and own != dims:
        raise ConfigurationError(
            f"dims={dims!r} is given for an embedder whose vectors have {own}: leave it out"
        )


def _check_options(
    dims: int | None, name: str | None, batch_size: int, timeout_s: float | None, cache_bytes: int
) -> None:
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: expected the model's name as text, or None")
    for option, value, least in (
        ("dims", dims, 1),
        ("batch_size", batch_size, 1),
        ("cache_bytes", cache_bytes, 0),
    ):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigurationError(f"{option}={value!r}: expected a whole number from {least}")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigurationError(f"timeout_s={timeout_s!r}: expected seconds, more than 0, or None")

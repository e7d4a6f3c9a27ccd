"""Operations as effects, and the runner that carries them out, blocking or awaited.

An operation is a generator that yields what it needs: something read, written, or embedded. So it
is written once for sync and async, and holds no snapshot while a model is waited for. For a
coroutine, what it computes and reads is done in the database's threads.

What coroutines ask for in one turn of an event loop is done together: a hop to a thread and back
costs more than a small read, and a transaction more than a small write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError
from perdure.storage.database import Database
from perdure.storage.flow import Flow, run, signed
from perdure.stores.embedders import CheckedEmbedder
from perdure.stores.models import Embeddings, Model
from perdure.stores.puts import Put
from perdure.stores.writer import ItemWriter

T = TypeVar("T")
P = ParamSpec("P")
_TOGETHER = 16  # calls in one hop: the first waits for the last


class Embed(NamedTuple):
    """The vector of a query."""

    text: str


class EmbedAll(NamedTuple):
    """The vectors of texts to be stored."""

    texts: Sequence[str]


class Read(NamedTuple):
    """The read of a flow, on one snapshot unless it is a single statement."""

    make: Callable[[], Flow[Any]]
    snapshot: bool = True


class Write(NamedTuple):
    """The write of a flow, in one transaction."""

    make: Callable[[], Flow[Any]]


class WritePuts(NamedTuple):
    """Puts and deletes, all or none."""

    puts: Sequence[Put]
    now: int
    model: Model | None


Effect = Embed | EmbedAll | Read | Write | WritePuts
Effects = Generator[Effect, Any, T]
_Advance = Callable[[], Effect]  # goes on with an operation up to its next effect
_Ask = tuple[Any, asyncio.Future[Any]]  # what a coroutine asks for, and its answer


def named(puts: Sequence[Put]) -> list[str]:
    """What puts write to, and what their limits count: no other may do so meanwhile."""
    paths = {put.path for put in puts} | {limit.prefix for put in puts for limit in put.limits}
    return [path.hex() for path in paths]


def _removes(puts: Sequence[Put]) -> bool:
    return all(put.text is None for put in puts)


class _Done(NamedTuple):
    """The end of an operation."""

    result: Any


class Runner:
    """Carries out effects."""

    def __init__(self, database: Database, writer: ItemWriter, embeddings: Embeddings) -> None:
        self.database, self.writer, self.embeddings = database, writer, embeddings
        self._calls = _Batches(self._call_together)
        self._puts = _Batches(self._put_together)

    def run(self, effects: Effects[T]) -> T:
        """Carry out all effects in the calling thread."""
        self.database.connect()  # what is put depends on the fields that the file records
        return run(effects, self._answer)

    async def arun(self, effects: Effects[T], *, brief: bool = False) -> T:
        """Carry out effects from a coroutine.

        Args:
            effects: What to do.
            brief: Whether what is computed before the first effect is too little for a thread.
        """
        await self.database.aconnect()
        advance: _Advance = partial(effects.send, None)
        while True:
            if brief:
                effect = _advanced(advance)
            else:
                effect = await self._calls.ask(partial(self._advance_on, effects, advance))
            if isinstance(effect, _Done):
                return effect.result  # type: ignore[no-any-return]
            brief = isinstance(effect, Write | WritePuts)
            if self._blocks(effect):
                advance = partial(self._answered, effects, effect)
                continue
            try:
                answer = await self._aanswer(effect)
            except Exception as exc:
                advance = partial(effects.throw, exc)
            else:
                advance = partial(effects.send, answer)

    def _advance_on(self, effects: Effects[Any], advance: _Advance) -> Effect | _Done:
        """Go on in a thread, up to an effect that is to be awaited, or to the end."""
        effect = _advanced(advance)
        while not isinstance(effect, _Done) and self._blocks(effect):
            effect = _advanced(partial(self._answered, effects, effect))
        return effect

    def _blocks(self, effect: Effect) -> bool:
        """Whether an effect is a blocking call that belongs into the thread that computes."""
        return isinstance(effect, Read) or (
            self.embeddings.in_process and isinstance(effect, Embed)
        )

    def _answered(self, effects: Effects[Any], effect: Effect) -> Effect:
        try:
            answer = self._answer(effect)
        except Exception as exc:
            return effects.throw(exc)
        return effects.send(answer)

    def _answer(self, effect: Effect) -> Any:
        match effect:
            case Read(make, snapshot):
                return self.database.read(make, snapshot=snapshot)
            case Write(make):
                return self.database.write(make)
            case WritePuts():
                return self.database.write(
                    partial(self.writer.write, *effect),
                    exclusive=named(effect.puts),
                    removes=_removes(effect.puts),
                )
            case Embed(text):
                return self._embedder.embed_query(text)
            case EmbedAll(texts):
                return self._embedder.embed(texts)

    async def _aanswer(self, effect: Effect) -> Any:
        match effect:
            case Write(make):
                return await self.database.awrite(make)
            case WritePuts(puts):
                if all(put.unconditional for put in puts):
                    return await self._puts.ask(effect)
                return await self._aput(effect)
            case Embed(text):
                return await self._embedder.aembed_query(text)
            case EmbedAll() if self.embeddings.in_process:  # slow: no read waits for it
                return await self.database.in_thread(lambda: self._answer(effect))
            case EmbedAll(texts):
                return await self._embedder.aembed(texts)

    def _aput(self, effect: WritePuts) -> Awaitable[None]:
        make = partial(self.writer.write, *effect)
        return self.database.awrite(
            make, exclusive=named(effect.puts), removes=_removes(effect.puts)
        )

    @property
    def _embedder(self) -> CheckedEmbedder:
        assert self.embeddings.embedder is not None
        return self.embeddings.embedder

    def _call_together(self, asks: list[_Ask]) -> Awaitable[list[Any]]:
        return self.database.in_thread(lambda: [_outcome(*ask) for ask in asks])

    async def _put_together(self, asks: list[_Ask]) -> list[BaseException | None]:
        """Write puts that nothing but the database can refuse, in one transaction."""
        effects: list[WritePuts] = [effect for effect, _ in asks]
        puts = [put for effect in effects for put in effect.puts]
        model = next((effect.model for effect in effects if effect.model is not None), None)
        try:
            await self._aput(WritePuts(puts, max(effect.now for effect in effects), model))
        except Exception as exc:
            if len(effects) == 1:
                return [exc]
            # nobody fails for another
            return await asyncio.gather(*map(self._aput, effects), return_exceptions=True)
        return [None] * len(effects)


def _advanced(advance: _Advance) -> Effect | _Done:
    try:
        return advance()
    except StopIteration as stop:
        return _Done(stop.value)


class _Batches:
    """What coroutines ask for in one turn of an event loop, done together at its end."""

    def __init__(self, do: Callable[[list[_Ask]], Awaitable[Sequence[Any]]]) -> None:
        self._do = do  # returns an answer for each, or its error
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Ask]] = WeakKeyDictionary()

    def ask(self, what: Any) -> asyncio.Future[Any]:
        """Ask for something."""
        loop = asyncio.get_running_loop()
        asks = self._open.get(loop)
        if asks is None or len(asks) == _TOGETHER:
            asks = self._open[loop] = []
            loop.call_soon(self._end, loop, asks)
        future = loop.create_future()
        asks.append((what, future))
        return future

    def _end(self, loop: asyncio.AbstractEventLoop, asks: list[_Ask]) -> None:
        if self._open.get(loop) is asks:
            del self._open[loop]
        asks = [ask for ask in asks if not ask[1].cancelled()]
        if not asks:
            return
        done: asyncio.Future[Sequence[Any]]
        try:
            done = asyncio.ensure_future(self._do(asks))
        except PerdureError as exc:
            done = loop.create_future()
            done.set_exception(exc)
        done.add_done_callback(partial(_settle, asks))


def _settle(asks: list[_Ask], done: asyncio.Future[Sequence[Any]]) -> None:
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    outcomes = done.result() if error is None else [error] * len(asks)
    for (_, future), outcome in zip(asks, outcomes, strict=True):
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _outcome(call: Callable[[], Any], future: asyncio.Future[Any]) -> Any:
    """What a call returns, or the error that it raises; a cancelled one is not made."""
    try:
        return None if future.cancelled() else call()
    except BaseException as exc:
        return exc


# -- methods of a store


def blocking(
    make: Callable[Concatenate[Any, P], Effects[T]],
) -> Callable[Concatenate[Any, P], T]:
    """The blocking method of a store that carries out the effects which `make` returns."""

    @wraps(make)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = self._parts.runner.run(make(self, *args, **kwargs))
        return found

    return signed(method, make)


def awaiting(
    method: Callable[Concatenate[Any, P], T], is_brief: Callable[..., bool] | None = None
) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]]:
    """The awaited form of a `blocking` method; what is decorated gives its name and docstring.

    `is_brief` is given the arguments of a call, see `Runner.arun`; None: no call is.
    """
    make: Callable[..., Effects[T]] = method.__wrapped__  # type: ignore[attr-defined]

    def decorate(
        named: Callable[[Any], None],
    ) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
        @wraps(named)
        async def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            brief = is_brief is not None and is_brief(self, *args, **kwargs)
            found: T = await self._parts.runner.arun(make(self, *args, **kwargs), brief=brief)
            return found

        return signed(twin, make)

    return decorate

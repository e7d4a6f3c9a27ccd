"""Operations as effects, and the runner that carries them out, blocking or awaited.

An operation is a generator that yields what it needs: something read, written, or embedded. So it
is written once for sync and async, and holds no snapshot while a model is waited for. Between
effects it computes; for a coroutine that is done, like the reading, in the database's threads.

What coroutines ask for in one turn of an event loop is done together: a hop to a thread and back
costs more than a small read, and a transaction more than a small write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError
from perdure.storage.database import Database
from perdure.storage.flow import Flow, run, signed
from perdure.stores.embedders import CheckedEmbedder
from perdure.stores.models import Embeddings, Model
from perdure.stores.puts import Put
from perdure.stores.writer import Writer

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

    flow: Flow[Any]
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
_Answer = Callable[[], Any]


@dataclass(slots=True)
class Runner:
    """Carries out effects."""

    database: Database
    writer: Writer
    embeddings: Embeddings
    _calls: _Turns = field(init=False)
    _puts: _Turns = field(init=False)

    def __post_init__(self) -> None:
        self._calls = _Turns(self._call_together)
        self._puts = _Turns(self._put_together)

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
        answer: _Answer = _nothing
        while True:
            if brief:
                brief, effect = False, self._sent(effects, answer)
                if isinstance(effect, Read):
                    effect = await self._calls.ask(partial(self._advance_from, effects, effect))
            else:
                effect = await self._calls.ask(partial(self._advance, effects, answer))
            if isinstance(effect, _Done):
                return effect.result  # type: ignore[no-any-return]
            answer = await self._acaught(effect)
            brief = isinstance(effect, Write | WritePuts)

    def _advance_from(self, effects: Effects[Any], effect: Read) -> Effect | _Done:
        return self._advance(effects, self._caught(effect))

    def _advance(self, effects: Effects[Any], answer: _Answer) -> Effect | _Done:
        """Go on up to an effect that is to be awaited, or to the end."""
        while True:
            effect = self._sent(effects, answer)
            in_process = self.embeddings.in_process
            if not isinstance(effect, Read) and not (in_process and isinstance(effect, Embed)):
                return effect
            answer = self._caught(effect)

    @staticmethod
    def _sent(effects: Effects[Any], answer: _Answer) -> Effect | _Done:
        try:
            try:
                given = answer()
            except Exception as exc:
                return effects.throw(exc)
            return effects.send(given)
        except StopIteration as stop:
            return _Done(stop.value)

    def _caught(self, effect: Effect) -> _Answer:
        """The answer to an effect; an error is raised where the answer is used."""
        try:
            result = self._answer(effect)
        except Exception as exc:
            return _raising(exc)
        return lambda: result

    def _answer(self, effect: Effect) -> Any:
        match effect:
            case Read(flow, snapshot):
                return self.database.read(flow, snapshot=snapshot)
            case Write(make):
                return self.database.write(make)
            case WritePuts(puts, now, model):
                return self.database.write(partial(self.writer.write, puts, now, model))
            case Embed(text):
                return self._embedder.embed_query(text)
            case EmbedAll(texts):
                return self._embedder.embed(texts)

    async def _acaught(self, effect: Effect) -> _Answer:
        try:
            result = await self._aanswer(effect)
        except Exception as exc:
            return _raising(exc)
        return lambda: result

    async def _aanswer(self, effect: Effect) -> Any:
        match effect:
            case Write(make):
                return await self.database.awrite(make)
            case WritePuts(puts, now, model):
                if all(put.unconditional for put in puts):
                    return await self._puts.ask(effect)
                return await self.database.awrite(partial(self.writer.write, puts, now, model))
            case Embed(text) if not self.embeddings.in_process:
                return await self._embedder.aembed_query(text)
            case EmbedAll(texts) if not self.embeddings.in_process:
                return await self._embedder.aembed(texts)
            case _:
                return await self.database.in_thread(lambda: self._answer(effect))

    @property
    def _embedder(self) -> CheckedEmbedder:
        assert self.embeddings.embedder is not None
        return self.embeddings.embedder

    # -- what is asked in one turn of an event loop

    def _call_together(self, asks: list[_Ask]) -> None:
        """Make blocking calls in the database's threads."""
        for start in range(0, len(asks), _TOGETHER):
            some = asks[start : start + _TOGETHER]
            try:
                done = asyncio.ensure_future(self.database.in_thread(partial(_outcomes, some)))
            except PerdureError as exc:
                _settle(some, [_raising(exc)] * len(some))
            else:
                done.add_done_callback(partial(_called, some))

    def _put_together(self, asks: list[_Ask]) -> None:
        """Write puts that nothing but the database can refuse, in one transaction."""
        effects: list[WritePuts] = [ask.what for ask in asks]
        puts = [put for effect in effects for put in effect.puts]
        model = next((effect.model for effect in effects if effect.model is not None), None)
        now = max(effect.now for effect in effects)
        try:
            done = asyncio.ensure_future(
                self.database.awrite(partial(self.writer.write, puts, now, model))
            )
        except PerdureError as exc:
            _settle(asks, [_raising(exc)] * len(asks))
        else:
            done.add_done_callback(partial(self._put, asks))

    def _put(self, asks: list[_Ask], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is not None and len(asks) > 1:  # nobody fails for another
            for ask in asks:
                self._put_together([ask])
        else:
            answer = _nothing if error is None else _raising(error)
            _settle(asks, [answer] * len(asks))


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

    async def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        brief = is_brief is not None and is_brief(self, *args, **kwargs)
        found: T = await self._parts.runner.arun(make(self, *args, **kwargs), brief=brief)
        return found

    def decorate(
        named: Callable[[Any], None],
    ) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
        wraps(named)(twin)
        return signed(twin, make)

    return decorate


class _Ask(NamedTuple):
    what: Any
    future: asyncio.Future[Any]


class _Turns:
    """Requests of coroutines, handed over together at the end of an event loop's turn."""

    def __init__(self, hand_over: Callable[[list[_Ask]], None]) -> None:
        self._hand_over = hand_over
        self._asks: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Ask]] = WeakKeyDictionary()

    def ask(self, what: Any) -> asyncio.Future[Any]:
        """Ask for something."""
        loop = asyncio.get_running_loop()
        ask = _Ask(what, loop.create_future())
        asks = self._asks.get(loop)
        if asks is None:
            self._asks[loop] = [ask]
            loop.call_soon(self._end, loop)
        else:
            asks.append(ask)
        return ask.future

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        asks = [ask for ask in self._asks.pop(loop) if not ask.future.cancelled()]
        if asks:
            self._hand_over(asks)


def _outcomes(asks: list[_Ask]) -> list[_Answer]:
    return [_outcome(ask) for ask in asks]


def _outcome(ask: _Ask) -> _Answer:
    if ask.future.cancelled():
        return _nothing
    try:
        result = ask.what()
    except BaseException as exc:
        return _raising(exc)
    return lambda: result


def _called(asks: list[_Ask], done: asyncio.Future[list[_Answer]]) -> None:
    if done.cancelled():
        for ask in asks:
            ask.future.cancel()
    else:
        _settle(asks, done.result())


def _settle(asks: list[_Ask], answers: Iterable[_Answer]) -> None:
    for ask, answer in zip(asks, answers, strict=True):
        if ask.future.done():
            continue
        try:
            ask.future.set_result(answer())
        except BaseException as exc:
            ask.future.set_exception(exc)


class _Done(NamedTuple):
    result: Any


def _nothing() -> None:
    return None


def _raising(error: BaseException) -> _Answer:
    def answer() -> Any:
        raise error

    return answer

"""Work as steps, and the two drivers that carry them out: one that blocks, one that awaits.

An operation is a generator that yields what it needs: something read, written, or embedded. So it
is written once for sync and async, and holds no snapshot while a model is waited for. Between steps
it computes; the async driver does that, and the reading, in the database's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from perdure.storage.database import Database
from perdure.storage.flow import Flow
from perdure.stores.embedding import CheckedEmbedder
from perdure.stores.gathering import Gatherer, PutGatherer
from perdure.stores.models import Model
from perdure.stores.writing import Put, Writer

T = TypeVar("T")


class Embed(NamedTuple):
    """A step: the vector of a query."""

    text: str


class EmbedAll(NamedTuple):
    """A step: the vectors of texts to be stored."""

    texts: Sequence[str]


class Read(NamedTuple):
    """A step: what a flow reads; on one snapshot, unless it is of one statement only."""

    flow: Flow[Any]
    snapshot: bool = True


class Write(NamedTuple):
    """A step: what the flow that is made writes, in one transaction."""

    make: Callable[[], Flow[Any]]


class WritePuts(NamedTuple):
    """A step: puts and deletes, all or none."""

    puts: Sequence[Put]
    now: int
    model: Model | None


Step = Embed | EmbedAll | Read | Write | WritePuts
Steps = Generator[Step, Any, T]
_Answer = Callable[[], Any]


@dataclass(slots=True)
class Driver:
    """Carries out steps.

    Args:
        database: Where to read and write.
        writer: The flows that write.
        embedder: Makes vectors; None: nothing is ever to be embedded.
        in_process: Whether it computes in this process, so that there is nothing to await.
    """

    database: Database
    writer: Writer
    embedder: CheckedEmbedder | None
    in_process: bool
    _reads: Gatherer = field(init=False)
    _puts: PutGatherer = field(init=False)

    def __post_init__(self) -> None:
        self._reads = Gatherer(self.database)
        self._puts = PutGatherer(self.database, self.writer)

    def run(self, steps: Steps[T]) -> T:
        """Carry out all steps in the calling thread."""
        self.database.connect()  # the preparer needs to know the file's fields
        answer: _Answer = _nothing
        while True:
            step = self._advance(steps, answer)
            if isinstance(step, _Done):
                return step.result  # type: ignore[no-any-return]
            answer = self._caught(step)

    async def arun(self, steps: Steps[T], *, brief: bool = False) -> T:
        """Carry out steps from a coroutine.

        Args:
            steps: What to do.
            brief: Whether what is computed before the first step is too little for a thread.
        """
        await self.database.aconnect()
        answer: _Answer = _nothing
        while True:
            if brief:
                brief, step = False, self._sent(steps, answer)
                if isinstance(step, Read):
                    step = await self._reads.run(partial(self._advance_from, steps, step))
            else:
                step = await self._reads.run(partial(self._advance, steps, answer))
            if isinstance(step, _Done):
                return step.result  # type: ignore[no-any-return]
            answer = await self._acaught(step)
            if isinstance(step, Write | WritePuts):
                brief = True

    def _advance_from(self, steps: Steps[Any], step: Read) -> Step | _Done:
        return self._advance(steps, self._caught(step))

    def _advance(self, steps: Steps[Any], answer: _Answer) -> Step | _Done:
        """Go on up to a step that is to be awaited, or to the end."""
        while True:
            step = self._sent(steps, answer)
            if not isinstance(step, Read) and not (self.in_process and isinstance(step, Embed)):
                return step
            answer = self._caught(step)

    @staticmethod
    def _sent(steps: Steps[Any], answer: _Answer) -> Step | _Done:
        try:
            try:
                given = answer()
            except Exception as exc:
                return steps.throw(exc)
            return steps.send(given)
        except StopIteration as stop:
            return _Done(stop.value)

    def _caught(self, step: Step) -> _Answer:
        """The answer to a step; an error is raised where the answer is used."""
        try:
            result = self._answer(step)
        except Exception as exc:
            return _raising(exc)
        return lambda: result

    def _answer(self, step: Step) -> Any:
        match step:
            case Read(flow, snapshot):
                return self.database.read(flow, snapshot=snapshot)
            case Write(make):
                return self.database.write(make)
            case WritePuts(puts, now, model):
                return self.database.write(partial(self.writer.write, puts, now, model))
            case Embed(text):
                assert self.embedder is not None
                return self.embedder.embed_query(text)
            case EmbedAll(texts):
                assert self.embedder is not None
                return self.embedder.embed(texts)

    async def _acaught(self, step: Step) -> _Answer:
        try:
            result = await self._aanswer(step)
        except Exception as exc:
            return _raising(exc)
        return lambda: result

    async def _aanswer(self, step: Step) -> Any:
        match step:
            case Write(make):
                return await self.database.awrite(make)
            case WritePuts(puts, now, model):
                if all(put.unconditional for put in puts):
                    return await self._puts.run(puts, now, model)
                return await self.database.awrite(partial(self.writer.write, puts, now, model))
            case Embed(text) if self.embedder is not None and not self.in_process:
                return await self.embedder.aembed_query(text)
            case EmbedAll(texts) if self.embedder is not None and not self.in_process:
                return await self.embedder.aembed(texts)
            case _:
                return await self.database.in_thread(lambda: self._answer(step))


class _Done(NamedTuple):
    result: Any


def _nothing() -> None:
    return None


def _raising(exc: Exception) -> _Answer:
    def answer() -> Any:
        raise exc

    return answer

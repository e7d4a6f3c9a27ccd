"""Work as steps, and the two drivers that carry them out: one that blocks, one that awaits.

An operation is a generator that yields what it needs: something read, written, or embedded. So it
is written once for sync and async, and holds no snapshot while a model is waited for. Between steps
it computes; the async driver does that, and the reading, in the database's threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from perdure.storage.flow import Flow
from perdure.storage.glancing import Declined
from perdure.storage.sqlite import Database
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
    """A step: what a flow reads; on one snapshot, unless it is of one statement only.

    `again` makes the flow anew, if it is likely to read so little that one may look at once.
    """

    flow: Flow[Any]
    snapshot: bool = True
    again: Callable[[], Flow[Any]] | None = None


class Write(NamedTuple):
    """A step: what a flow writes, in one transaction."""

    flow: Flow[Any]


class WritePuts(NamedTuple):
    """A step: puts and deletes, all or none."""

    puts: Sequence[Put]
    now: int
    model: Model | None


Step = Embed | EmbedAll | Read | Write | WritePuts
Steps = Generator[Step, Any, T]
_Answer = Callable[[], Any]
_LOOKS: Final = 2  # searches that are done at once in one turn of the loop


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
    _looks: int = 0

    def __post_init__(self) -> None:
        self._reads = Gatherer(self.database)
        self._puts = PutGatherer(self.database, self.writer)

    def run(self, steps: Steps[T]) -> T:
        """Carry out all steps in the calling thread."""
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
        answer: _Answer = _nothing
        while True:
            if brief:
                brief, step = False, self._sent(steps, answer)
                if isinstance(step, Read):
                    glanced = self._glanced(step)
                    if glanced is not None:
                        brief, answer = True, glanced
                        continue
                    step = await self._reads.run(partial(self._advance_from, steps, step))
            else:
                step = await self._reads.run(partial(self._advance, steps, answer))
            if isinstance(step, _Done):
                return step.result  # type: ignore[no-any-return]
            answer = await self._acaught(step)
            if isinstance(step, Write | WritePuts):
                brief = True

    def _glanced(self, step: Read) -> _Answer | None:
        """The answer to what is read, if it could be had at once."""
        if step.again is None or (step.snapshot and self._crowded()):
            return None
        try:
            result = self.database.glance(step.again(), snapshot=step.snapshot)
        except Declined:
            return None
        except Exception as exc:
            return _raising(exc)
        return lambda: result

    def _crowded(self) -> bool:
        """Whether several looked in this turn of the loop: then a thread is worth its while."""
        self._looks += 1
        if self._looks == 1:
            asyncio.get_running_loop().call_soon(self._rest)
        return self._looks > _LOOKS

    def _rest(self) -> None:
        self._looks = 0

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
            case Write(flow):
                return self.database.write(flow)
            case WritePuts(puts, now, model):
                return self.database.write(self.writer.write(puts, now, model))
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
            case Write(flow):
                return await self.database.awrite(flow)
            case WritePuts(puts, now, model):
                if all(put.unconditional for put in puts):
                    return await self._puts.run(puts, now, model)
                return await self.database.awrite(self.writer.write(puts, now, model))
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

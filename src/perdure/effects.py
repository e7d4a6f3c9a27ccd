"""Implement the blocking and the asynchronous version of an operation with a single coroutine.

An operation is a coroutine that awaits only `Effect` objects. An effect is a step that waits for
something, such as a database query or a model call. Each effect has a blocking and an asynchronous
implementation. `run_operation` runs an operation without an event loop, using the blocking
implementation of each effect. `arun_operation` runs an operation in an event loop, using the
asynchronous implementation of each effect. `build_blocking_function` and `build_async_function`
turn an operation into a public blocking method and a public coroutine method, respectively.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from inspect import CORO_CREATED, getcoroutinestate, signature
from operator import methodcaller
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from perdure.storage import flow

T = TypeVar("T")
P = ParamSpec("P")
Operation = Coroutine["Effect[Any]", Any, T]
ThreadCaller = Callable[[Callable[[], Any]], Awaitable[Any]]
"""An asynchronous function that calls a function in another thread and returns its result."""


class Effect(Generic[T]):
    """One step of an operation, with a blocking and an asynchronous implementation.

    Args:
        blocking: A function that performs the step and blocks.
        awaiting: A function that performs the step without blocking the event loop.
    """

    __slots__ = ("awaiting", "blocking")

    def __init__(self, blocking: Callable[[], T], awaiting: Callable[[], Awaitable[T]]) -> None:
        self.blocking, self.awaiting = blocking, awaiting

    def __await__(self) -> Generator[Effect[T], Any, T]:
        # `yield` passes the effect to `run_operation` or `arun_operation`, which performs the
        # effect and returns its result through `yield`.
        answer: T = yield self
        return answer


class _OperationResult(NamedTuple):
    """The final result of an operation."""

    result: Any


def run_operation(operation: Operation[T]) -> T:
    """Run an operation synchronously in the calling OS thread, and return its result.

    If an effect that the operation awaits raises an exception, the exception is raised inside the
    operation, at the `await` of that effect.
    """
    return flow.run_flow(operation, methodcaller("blocking"))


async def arun_operation(operation: Operation[T], call_in_thread: ThreadCaller | None = None) -> T:
    """Run an operation in an event loop, and return its result; see `run_operation`.

    Args:
        operation: The operation.
        call_in_thread: A function that runs the code between two effects in another thread. None
            means that this code runs in the event loop.
    """
    continue_operation: Callable[[], Any] = partial(operation.send, None)
    while True:
        if call_in_thread is None:
            step = _run_to_next_effect(continue_operation)
        else:
            try:
                step = await call_in_thread(partial(_run_to_next_effect, continue_operation))
            # Close an operation that has not started yet, because Python warns about coroutines
            # that were never awaited.
            except BaseException:
                if getcoroutinestate(operation) == CORO_CREATED:
                    operation.close()
                raise
        if isinstance(step, _OperationResult):
            return step.result  # type: ignore[no-any-return]
        try:
            answer = await step.awaiting()
        except Exception as exc:
            continue_operation = partial(operation.throw, exc)
        except BaseException as exc:  # The coroutine is cancelled.
            # Throw the cancellation exception into the operation at the point where the operation
            # is waiting. Run the rest of the operation in the event loop, even if earlier steps of
            # the operation ran in another thread.
            continue_operation, call_in_thread = partial(operation.throw, exc), None
        else:
            continue_operation = partial(operation.send, answer)


def _run_to_next_effect(continue_operation: Callable[[], Any]) -> Effect[Any] | _OperationResult:
    """Run an operation until it awaits its next effect, and return this effect.

    If the operation ends without awaiting another effect, return its final result.
    """
    try:
        return continue_operation()  # type: ignore[no-any-return]
    except StopIteration as stop:  # An asyncio future cannot raise StopIteration.
        return _OperationResult(stop.value)


def build_effect_that_runs_operation_in_thread(operation: Operation[T]) -> Effect[T]:
    """Return an `Effect` that runs an operation.

    An operation runs its own code and, in between, awaits effects, which are steps such as database
    queries. In the asynchronous implementation, the operation's own code runs in another OS thread.
    """
    return Effect(
        lambda: run_operation(operation), lambda: arun_operation(operation, asyncio.to_thread)
    )


def call_method(target: Any, method: str, *args: Any, **options: Any) -> Effect[Any]:
    """Return an `Effect` that calls a method of an object.

    The asynchronous implementation awaits the method whose name has the prefix `a`, such as `aget`
    for `get`.
    """
    return Effect(
        partial(methodcaller(method, *args, **options), target),
        partial(methodcaller(f"a{method}", *args, **options), target),
    )


def build_effect_that_calls_function_in_thread(function: Callable[[], T]) -> Effect[T]:
    """Return an `Effect` that calls a function.

    The effect's blocking implementation calls the function in the current OS thread. The effect's
    asynchronous implementation calls the function in another OS thread.
    """
    return Effect(function, lambda: asyncio.to_thread(function))


def build_blocking_function(operation: Callable[P, Operation[T]]) -> Callable[P, T]:
    """Build a public blocking function from an operation, for example `get` from `_get`."""

    @wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_operation(operation(*args, **kwargs))

    # Delete `__wrapped__`, because libraries that follow it would treat `call` as a coroutine
    # function.
    del call.__wrapped__
    call.__signature__ = signature(operation)  # type: ignore[attr-defined]
    return _rename_function(call, operation.__name__.lstrip("_"))


def build_async_function(
    operation: Callable[P, Operation[T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Build a public coroutine function from an operation, for example `aget` from `_get`."""

    @wraps(operation)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await arun_operation(operation(*args, **kwargs))

    name = operation.__name__.lstrip("_")
    call.__doc__ = f"See `{name}`."
    return _rename_function(call, f"a{name}")


def _rename_function(call: Callable[P, T], name: str) -> Callable[P, T]:
    """Set a function's `__name__` and `__qualname__`, and return the function."""
    call.__qualname__ = call.__qualname__.replace(call.__name__, name)
    call.__name__ = name
    return call

"""Effects, which are steps with a blocking and an async implementation."""

from __future__ import annotations

import asyncio

from perdure.effects import arun_operation, call_method, run_operation


class BlockingOnly:
    """An object without async methods."""

    def read(self, key: str, *, default: int = 0) -> tuple[str, int]:
        return key, default


class AsyncOnly:
    """An object without blocking methods."""

    async def aread(self, key: str, *, default: int = 0) -> tuple[str, int]:
        return key, default


async def read(target: object) -> object:
    return await call_method(target, "read", "k", default=1)


def test_call_method_needs_only_the_variant_that_is_called() -> None:
    """Objects of other libraries may have only blocking methods, or only async ones."""
    assert run_operation(read(BlockingOnly())) == ("k", 1)
    assert asyncio.run(arun_operation(read(AsyncOnly()))) == ("k", 1)

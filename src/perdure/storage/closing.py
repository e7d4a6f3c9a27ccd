"""Being closed: by hand, or at the end of a `with`, in either colour."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Self


class Closing:
    """Something that is open from the start and has a blocking `close`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open; once closed, nothing more happens."""

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

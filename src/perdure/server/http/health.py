"""Answer the health checks of load balancers and container platforms.

`GET /ok` says that the process runs (liveness). `GET /ok?check_db=1` says that the database can be
written as well (readiness). The path and the parameter are those of langgraph's server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from perdure.errors import PerdureError
from perdure.server.databases import Databases
from perdure.storage.flow import Flow, Statement

HEALTH_PATH: Final = "/ok"
"""The path of health checks. Requests for it are accepted for any host name."""

_LOG = logging.getLogger("perdure")
# Maximum number of seconds that a check waits for the database
_MAX_WAIT_S: Final = 5.0
# Number of seconds for which the result of a check is reused. Everybody may request a check, so
# this bounds the work that checks cause.
_MAX_AGE_S: Final = 1.0


class DatabaseCheck:
    """Checks whether a server's database can be written.

    Args:
        databases: The databases of the server.
        tenant: The tenant whose database is checked, or None on a server without tenants.
    """

    def __init__(self, databases: Databases, tenant: str | None) -> None:
        self._databases, self._tenant = databases, tenant
        # Held during a check, so that concurrent requests share one check.
        self._lock = asyncio.Lock()
        self._problem: str | None = None
        self._checked_at = -_MAX_AGE_S

    async def find_problem(self) -> str | None:
        """Return why the database cannot be used, or None if it can.

        The check commits a transaction that changes nothing. A database file that was deleted or
        replaced is therefore found, and so is a database server that does not answer.
        """
        async with self._lock:
            if time.monotonic() - self._checked_at >= _MAX_AGE_S:
                problem = await self._commit_empty_transaction()
                if problem is not None and problem != self._problem:
                    _LOG.warning("the database cannot be used: %s", problem)
                self._problem, self._checked_at = problem, time.monotonic()
            return self._problem

    async def _commit_empty_transaction(self) -> str | None:
        """Commit a transaction that changes nothing; return the error message, or None."""

        def make_flow() -> Flow[None]:
            yield Statement("SELECT 1")

        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                database = await self._databases.get_or_open_database(self._tenant)
                await database.saver.database.awrite(make_flow)
        except TimeoutError:
            return f"it did not answer within {_MAX_WAIT_S:.0f} s"
        except PerdureError as exc:
            return str(exc)
        return None

"""Programs that some tests need, and that a machine may lack.

Without one its tests are skipped; with PERDURE_REQUIRE_PROGRAMS=1 they fail.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

_REQUIRED = os.environ.get("PERDURE_REQUIRE_PROGRAMS") == "1"
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
_REASON = "Skipped: needs "


@dataclass(frozen=True)
class Program:
    """A program, by the names that it may have, and the Debian package that brings it."""

    title: str
    package: str
    names: tuple[str, ...]

    def path(self) -> str:
        """Where it is; skips the test if it is nowhere."""
        for name in self.names:
            if path := shutil.which(name, path=_PATH):
                return path
        reason = f"{self.title} (apt-get install {self.package})"
        if _REQUIRED:
            pytest.fail(f"PERDURE_REQUIRE_PROGRAMS=1, and this test needs {reason}")
        pytest.skip(f"needs {reason}")


CHROMIUM = Program("Chromium", "chromium", ("chromium", "chromium-browser", "google-chrome"))
PGBOUNCER = Program("PgBouncer", "pgbouncer", ("pgbouncer",))
NODE = Program("Node.js with npm", "nodejs npm", ("npm",))


def missing(skipped: Iterable[Any]) -> dict[str, str]:
    """By id of a test that was skipped for a missing program: the program and its package."""
    return {
        report.nodeid: report.longrepr[2].removeprefix(_REASON)
        for report in skipped
        if isinstance(report.longrepr, tuple) and report.longrepr[2].startswith(_REASON)
    }


def summary(skipped: dict[str, str]) -> list[str]:
    """A line for each program that was missing."""
    return [
        f"skipped: {count} tests need {program}"
        for program, count in sorted(Counter(skipped.values()).items())
    ]

"""Programs that some tests need, and that may not be installed.

Tests that need a missing program are skipped, or fail with PERDURE_REQUIRE_PROGRAMS=1.
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
    """A program with its possible names and its Debian package."""

    title: str
    package: str
    names: tuple[str, ...]

    def path(self) -> str:
        """Return the path of the program, or skip the test if the program is not installed."""
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


def find_tests_without_program(skipped: Iterable[Any]) -> dict[str, str]:
    """Return the tests that were skipped for a missing program.

    The keys are test ids. The values name the program and its package.
    """
    return {
        report.nodeid: report.longrepr[2].removeprefix(_REASON)
        for report in skipped
        if isinstance(report.longrepr, tuple) and report.longrepr[2].startswith(_REASON)
    }


def summarize_missing_programs(skipped: dict[str, str]) -> list[str]:
    """Return a line for each missing program."""
    return [
        f"skipped: {count} tests need {program}"
        for program, count in sorted(Counter(skipped.values()).items())
    ]

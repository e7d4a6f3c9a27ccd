"""Reports about tests that need a missing program, and how CI runs these tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.layout import ROOT
from tests.programs import Program, find_tests_without_program, summarize_missing_programs


def test_missing_program_is_reported_with_its_package() -> None:
    """The test is skipped, and the summary counts it; other skips are not counted."""
    nothing = Program("Nothing", "no-such-package", ("no-such-program",))
    with pytest.raises((pytest.skip.Exception, pytest.fail.Exception)) as raised:
        nothing.path()
    program = "Nothing (apt-get install no-such-package)"
    reports = [
        SimpleNamespace(nodeid=name, longrepr=("file.py", 1, f"Skipped: {text}"))
        for name, text in (("a", f"needs {program}"), ("b", f"needs {program}"), ("c", "of Linux"))
    ]

    assert f"needs {program}" in str(raised.value)
    assert [*find_tests_without_program(reports)] == ["a", "b"]
    assert summarize_missing_programs(find_tests_without_program(reports)) == [
        f"skipped: 2 tests need {program}"
    ]


def test_ci_runs_tests_before_it_installs_programs() -> None:
    """After the installations, a missing program is a failure and not a skip."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [
        script.index(words)
        for words in ("make test\n", "apt-get", "PERDURE_REQUIRE_PROGRAMS=1 make test-rest\n")
    ]

    assert commands == sorted(commands)

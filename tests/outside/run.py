"""Run other packages' tests on perdure's classes and on langgraph's, and say where they differ.

    python tests/outside/run.py CHECKOUT                # every suite that the clone has
    python tests/outside/run.py CHECKOUT --suite sqlite # libs/checkpoint-sqlite alone
    python tests/outside/run.py CHECKOUT -k time_travel
    python tests/outside/run.py CHECKOUT --postgres postgresql://postgres@127.0.0.1:5432/

CHECKOUT is a clone of https://github.com/langchain-ai/langgraph or of
https://github.com/langchain-ai/deepagents; CONTRIBUTING.md has the packages. The tests are copied
to a temporary folder first, so that they meet the installed langgraph and not the clone's. The
exit code is 1 if a test passes with langgraph's classes and not with perdure's, but for those in
`REFUSED`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Suite(NamedTuple):
    """The tests of one package.

    Attributes:
        folder: The package's, in the clone.
        used: A package to take from the clone: its release has to be that of the tests.
        backend: The only cases wanted are those on a checkpointer or store of it; empty: all are.
        files: Which tests; by default all.
        postgres: Whether they need a server.
    """

    folder: str
    used: str
    backend: str = ""
    files: tuple[str, ...] = ("tests",)
    postgres: bool = False


SUITES = {
    "langgraph": Suite("libs/langgraph", "libs/checkpoint-conformance", "sqlite"),
    "sqlite": Suite("libs/checkpoint-sqlite", "libs/checkpoint-conformance"),
    "langgraph-postgres": Suite(
        "libs/langgraph", "libs/checkpoint-conformance", "postgres", postgres=True
    ),
    "postgres": Suite("libs/checkpoint-postgres", "libs/checkpoint-conformance", postgres=True),
    "deepagents": Suite(
        "libs/deepagents",
        "libs/deepagents",
        files=(  # those that use a store
            "tests/unit_tests/backends/test_store_backend.py",
            "tests/unit_tests/backends/test_store_backend_async.py",
            "tests/unit_tests/backends/test_composite_backend.py",
            "tests/unit_tests/backends/test_composite_backend_async.py",
            "tests/unit_tests/middleware/test_memory_middleware.py",
            "tests/unit_tests/middleware/test_skills_middleware.py",
            "tests/unit_tests/test_end_to_end.py",
            "tests/unit_tests/test_middleware.py",
            "tests/unit_tests/test_middleware_async.py",
            "tests/unit_tests/test_permissions.py",
        ),
    ),
}


REFUSED = {  # tests of internals of langgraph's classes, or of their limits
    "test_async_store::test_no_running_loop": "blocking methods raise on an event loop",
    "test_sqlite.TestSqliteSaver::test_informative_async_errors": "`a` methods raise",
    "test_store::test_nonnull_migrations": "SqliteStore.MIGRATIONS",
    "test_store::test_vector_store_initialization": "store.conn, and the names of tables",
    # here keys of filters are parameters of SQL: one with quotes is a key like any other
    "test_store::test_sql_injection_vulnerability": "filters refuse keys",
    "test_sqlite.TestSqliteSaver::test_checkpoint_search_sql_injection_prevention": "the same",
    "test_sync::test_nonnull_migrations": "PostgresSaver.MIGRATIONS",
    "test_sync::test_pending_sends_migration": "the form of langgraph 0.1",
    "test_async::test_pending_sends_migration": "the same",
    "test_sync::test_get_checkpoint_no_channel_values": "saver._load_checkpoint_tuple",
    "test_async::test_get_checkpoint_no_channel_values": "the same",
    "test_delta_plain_value_seed::test_inline_primitive_seed_is_found": "None was put: a value",
    "test_async_store::test_abatch_uses_single_pool_checkout": "store._ainternal",
    "test_async_store::test_large_batches": "put(…, None) raises; delete removes",
    "test_store::test_batch_list_namespaces_ops": "a namespace that is no tuple is refused",
    "test_store::test_scores": "vectors are compared by cosine only",
    "test_store::test_embed_with_path_sync": "scores weigh words and neighbours too",
    "test_async_store::test_embed_with_path": "the same",
    "test_store::test_store_ttl": "without an index a query finds its words, not everything",
    "test_async_store::test_store_ttl": "the same",
    **dict.fromkeys(
        (
            f"{module}::test_omit_expired_{what}"
            for module in ("test_store", "test_async_store")
            for what in (
                "filters_read_paths",
                "disabled_preserves_expired_rows",
                "refresh_ttl_only_refreshes_live_rows",
                "search_pagination",
            )
        ),
        "an UPDATE of langgraph's tables",
    ),
}


class Outcome(NamedTuple):
    """The result of one test. `why` is the failure message, or empty if the test passed."""

    skipped: bool
    why: str


def read_outcomes(report: Path) -> dict[str, Outcome]:
    """Read the outcomes of tests from pytest's JUnit report."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        parts = [part for tag in ("failure", "error") if (part := case.find(tag)) is not None]
        why = "; ".join(re.sub(r"\s+", " ", part.get("message", "")) for part in parts)
        outcomes[name] = Outcome(case.find("skipped") is not None, why)
    return outcomes


def run(
    checkout: Path, suite: Suite, class_owner: str, chosen: str, server: str
) -> dict[str, Outcome]:
    """Run a suite in a process of its own.

    Args:
        checkout: A clone of the suite's repository.
        suite: Which of its packages.
        classes: `perdure` or `langgraph`.
        chosen: An expression for pytest's `-k`; empty: all.
        server: The DSN of a Postgres server, up to the name of the database.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(checkout / suite.folder / "tests", folder / "tests")
        shutil.copy(checkout / suite.folder / "pyproject.toml", folder)
        for file in (folder / "tests").glob("*.py") if suite.postgres else ():
            text = re.sub(r"postgres://postgres:postgres@[^/]+/", server, file.read_text())
            # a saver that was given a connection is not closed by the tests
            file.write_text(
                text.replace("DROP DATABASE {database}", "DROP DATABASE {database} WITH (FORCE)")
            )
        paths = [HERE, checkout / suite.used, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "OUTSIDE_CLASSES": class_owner,
            "OUTSIDE_BACKEND": suite.backend,
            "NO_DOCKER": "false" if suite.postgres else "true",
            "LANGSMITH_TRACING": "false",
        }
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-q"]
        command += ["-o", "filterwarnings="]  # some come from the release of pytest's own plugins
        output = subprocess.run(
            [*command, "--tb=short", f"--junitxml={report}", "-k", chosen, *suite.files],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ).stdout
        results = read_outcomes(report) if report.exists() else {}
        if not results:
            sys.exit(f"pytest ran no test of {suite.folder}:\n{output}")
        return results


def format_summary(classes: str, outcomes: dict[str, Outcome]) -> str:
    """Return a line with the numbers of passed, skipped and failed tests."""
    skipped = sum(outcome.skipped for outcome in outcomes.values())
    failed = sum(bool(outcome.why) for outcome in outcomes.values())
    passed = len(outcomes) - skipped - failed
    return f"{classes:9} {passed:4} of {len(outcomes)} passed, {failed} failed, {skipped} skipped"


def compare_classes(checkout: Path, name: str, chosen: str, server: str) -> bool:
    """Run a suite with both classes, print the differences, and judge them.

    Return whether each test that fails only with perdure's classes is in `REFUSED`.
    """
    theirs = run(checkout, SUITES[name], "langgraph", chosen, server)
    ours = run(checkout, SUITES[name], "perdure", chosen, server)
    print(f"{SUITES[name].folder}/tests")
    print(f"  {format_summary('langgraph', theirs)}\n  {format_summary('perdure', ours)}")
    failures = {test: outcome.why for test, outcome in ours.items() if outcome.why}
    refused = {test for test in failures if test.partition("[")[0] in REFUSED}
    worse = {test for test in failures.keys() - refused if not theirs[test].why}
    both = failures.keys() - refused - worse
    for title, group in (("only with perdure", worse), ("by design", refused), ("with both", both)):
        for test in sorted(group):
            print(f"  fails {title}: {test}\n      {failures[test]:.200}")
    return not worse


def main() -> int:
    """Run the suites that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path, help="a clone of the tests' repository")
    parser.add_argument("--suite", choices=SUITES, action="append", help="by default all it has")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's choice of tests")
    parser.add_argument(
        "--postgres", default="", metavar="DSN", help="run the suites on this server instead"
    )
    arguments = parser.parse_args()
    checkout: Path = arguments.checkout.resolve()
    available_suites = [
        name
        for name, suite in SUITES.items()
        if (checkout / suite.folder).exists() and suite.postgres == bool(arguments.postgres)
    ]
    results = [
        compare_classes(checkout, name, arguments.k, arguments.postgres)
        for name in arguments.suite or available_suites
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

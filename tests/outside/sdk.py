"""Run the integration tests of langgraph's SDK against `perdure serve`.

    python -m tests.outside.sdk CHECKOUT
    python -m tests.outside.sdk CHECKOUT -k values

CHECKOUT is a clone of https://github.com/langchain-ai/langgraph. The server runs the graphs of its
`libs/sdk-py/integration`, one of which needs the package deepagents; the tests need pytest-asyncio.
The exit code is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.outside.run import read_outcomes
from tests.server.running import run_server


def main() -> int:
    """Run the tests that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path, help="a clone of langgraph")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's choice of tests")
    arguments = parser.parse_args()
    sdk: Path = arguments.checkout.resolve() / "libs/sdk-py"

    with tempfile.TemporaryDirectory() as name:
        folder, report = Path(name), Path(name) / "report.xml"
        shutil.copytree(sdk / "tests/integration", folder / "tests/integration")
        shutil.copy(sdk / "pyproject.toml", folder)
        app = create_app(
            Settings(db=str(folder / "memory.db"), user="ann"),
            graphs=Graphs.load_langgraph_json(sdk / "integration/langgraph.json"),
        )
        with run_server(app) as url:
            for file in (folder / "tests/integration").glob("*.py"):  # some know no other address
                file.write_text(file.read_text().replace("http://localhost:2024", url))
            command = [sys.executable, "-m", "pytest", "-q", "-m", "integration", "--tb=short"]
            command += ["-p", "no:cacheprovider", "-o", "filterwarnings=", f"--junitxml={report}"]
            output = subprocess.run(
                [*command, "-k", arguments.k, "tests/integration"],
                cwd=folder,
                env={**os.environ, "LANGGRAPH_INTEGRATION_URL": url, "LANGSMITH_TRACING": "false"},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ).stdout
        found = read_outcomes(report) if report.exists() else {}
    if not found:
        sys.exit(f"pytest ran no test:\n{output}")
    found = {test.removeprefix("integration."): each for test, each in found.items()}
    failed = {test for test, outcome in found.items() if outcome.why}
    skipped = sum(outcome.skipped for outcome in found.values())
    passed = len(found) - skipped - len(failed)
    print(f"{passed} of {len(found)} passed, {len(failed)} failed, {skipped} skipped")
    for test in sorted(failed):
        print(f"  fails: {test}\n      {found[test].why:.200}")
    if failed:
        print(output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

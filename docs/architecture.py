"""Writes the lists of functions in docs/architecture.md: python docs/architecture.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
RUNS = {"put_path": 1, "search_path": 1, "turn_path": 8, "turn_path --run": 8}
"""The scripts of benchmarks/, and how often each runs: listed is what every run has."""


def block(command: str) -> re.Pattern[str]:
    """Build the pattern that matches the name of a script and the list below it."""
    named = re.escape(f"`python -m benchmarks.{command}`")
    return re.compile(rf"({named}[^#]*?\n\n)((?:    .+\n)+)")


def printed(command: str) -> list[str]:
    """Return the output of a script without its last line, which is a count."""
    arguments = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()[:-1]]


def main() -> None:
    """Run the scripts, and put what they print in place of the lists."""
    text = PAGE.read_text(encoding="utf-8")
    for command, times in RUNS.items():
        first, *others = (printed(command) for _ in range(times))
        lines = [line for line in first if all(line in other for other in others)]
        listed = "".join(f"    {line}\n" for line in lines)
        text = block(command).sub(lambda match, listed=listed: match[1] + listed, text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

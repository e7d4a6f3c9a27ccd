"""Draws docs/perdure.svg, the picture in the README, from what the commands really print.

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
EXPORT = HERE.parent / "tests" / "data" / "conversations.json"
COMMANDS = [
    "perdure import export.zip",
    "perdure threads",
    "perdure history aaaa",
    "perdure chat -t flour -m 'Is whole rye good for my sourdough?'",
    "perdure show aaaa",
]
WIDTH = 106
PROGRESS = re.compile("[\u2800-\u28ff━]")


def main() -> None:
    """Run the commands and draw what they print."""
    screen = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PERDURE_DB": str(Path(folder) / "memory.db"),
            "FORCE_COLOR": "1",
            "COLUMNS": str(WIDTH),
        }
        with zipfile.ZipFile(Path(folder) / "export.zip", "w") as archive:
            archive.write(EXPORT, EXPORT.name)
        for command in COMMANDS:
            words = [str(Path(sys.executable).parent / "perdure"), *shlex.split(command)[1:]]
            done = subprocess.run(
                words,
                cwd=folder,
                env=env,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
            )
            screen.print(f"$ {command}", style="bold", markup=False, highlight=False)
            lines = (line for line in done.stdout.splitlines() if not PROGRESS.search(line))
            screen.print(Text.from_ansi("\n".join(lines)))
            screen.print()
    screen.save_svg(str(HERE / "perdure.svg"), title="perdure")


if __name__ == "__main__":
    main()

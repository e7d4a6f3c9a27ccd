"""Measure the time and memory of `perdure copy` from a file to a server and back.

python -m benchmarks.copy_database postgresql://user@host/empty_database --conversations 300
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("garden", "bread", "ferry", "winter", "paper", "river", "salt", "market", "lantern", "tea")


def run(*arguments: str) -> tuple[float, float]:
    """Run the program, and print its elapsed time, CPU time and peak memory.

    Returns:
        The elapsed time and the CPU time, in seconds.

    Raises:
        CalledProcessError: The program failed.
    """
    began = time.perf_counter()
    code = "from perdure.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as started:
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = status
    took, cpu = time.perf_counter() - began, used.ru_utime + used.ru_stime
    print(f"  {arguments[0]}: {took:.1f} s, {cpu:.1f} s CPU, {used.ru_maxrss >> 10} MB", flush=True)
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, arguments)
    return took, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dsn")
    parser.add_argument("--conversations", type=int, default=300)
    chosen = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        lines, old, new = (Path(folder) / name for name in ("talks.jsonl", "old.db", "new.db"))
        with lines.open("w") as file:
            for n in range(chosen.conversations):
                messages = [
                    {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(5, 90)))}
                    for _ in range(rng.randint(2, 20))
                    for role in ("user", "assistant")
                ]
                file.write(json.dumps({"thread_id": f"t{n}", "messages": messages}) + "\n")
        os.environ |= {"XDG_CONFIG_HOME": folder, "XDG_DATA_HOME": folder}
        run("import", str(lines), "--db", str(old))
        print(f"  {old.stat().st_size / 1e6:.1f} MB")
        run("copy", "--from", str(old), "--to", chosen.dsn)
        run("copy", "--from", chosen.dsn, "--to", str(new))


if __name__ == "__main__":
    main()

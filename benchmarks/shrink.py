"""What is left of the file once 95 % of the threads are deleted and retention has run.

python benchmarks/shrink.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from agents import chat_agent, human

from perdure.checkpointers import Retention, SQLiteCheckpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perdure.db"
        with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
            graph = chat_agent(saver)
            for i in range(args.threads):
                config: Any = {"configurable": {"thread_id": f"t{i}"}}
                for turn in range(10):
                    graph.invoke({"messages": [human(turn)]}, config)
        before = path.stat().st_size
        with SQLiteCheckpointer.open(path) as saver:
            saver.prune([f"t{i}" for i in range(args.threads * 95 // 100)], strategy="delete")
            saver.retain(Retention(last=1))
        after = path.stat().st_size
    print(
        f"{before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after: {1 - after / before:.1%} less"
    )


if __name__ == "__main__":
    main()

"""Measure the time, CPU and bytes of a turn with `create_agent`, for several checkpointers.

Each saver runs in its own process. Blocks of five turns alternate between the savers, in rotating
order. At the end, a fresh process reads the state, which is compared with the output of the last
run.

    python -m benchmarks.create_agent --turns 200
    python -m benchmarks.create_agent --turns 60 --shapes chat tools
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.agents import SHAPES, Course
from benchmarks.common import ON_DISK, SAVERS, Worker, bytes_in, ratio, table

BLOCK = 5
READERS = 3  # fresh processes that resume each thread
SHORT = (32, 10, 1), (128, 4, 16)  # threads, turns of each, threads at once
PEER, OURS = ON_DISK


@dataclass
class Figures:
    """Measurements of one saver on one long thread, block by block."""

    wall: list[float] = field(default_factory=list)  # seconds of each turn
    cpu: list[float] = field(default_factory=list)  # seconds of each block
    # bytes in use before the first block and after each block
    size: list[int] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)  # seconds, each in a fresh process

    @property
    def resume_ms(self) -> float:
        """Median milliseconds to open the file and read the state."""
        return statistics.median(self.resumes) * 1e3

    @property
    def first_cpu_ms(self) -> float:
        """Median CPU milliseconds per turn in the second to fifth block."""
        return statistics.median(self.cpu[1:5]) / BLOCK * 1e3

    @property
    def last_cpu_ms(self) -> float:
        """Median CPU milliseconds per turn in the last four blocks."""
        return statistics.median(self.cpu[-4:]) / BLOCK * 1e3

    @property
    def wall_ms(self) -> float:
        """Median milliseconds per turn in the last four blocks."""
        return statistics.median(self.wall[-4 * BLOCK :]) * 1e3

    @property
    def kb_a_turn(self) -> tuple[float, float]:
        """Kilobytes added per turn in the first half of the turns, and in the second half."""
        half = len(self.size) // 2
        early = (self.size[half] - self.size[0]) / half
        late = (self.size[-1] - self.size[half]) / (len(self.size) - 1 - half)
        return early / BLOCK / 1e3, late / BLOCK / 1e3


def rotating(blocks: int) -> Iterator[tuple[int, str]]:
    """Yield each block with each saver; the order of the savers rotates from block to block."""
    names = list(SAVERS)
    for block in range(blocks):
        first = block % len(names)
        for name in names[first:] + names[:first]:
            yield block, name


def long_thread(
    workers: dict[str, Worker], shape: str, turns: int, folder: Path
) -> dict[str, Figures]:
    """Measure turns of a single conversation thread with each saver."""
    paths = {name: folder / f"{shape} {name}.db" for name in SAVERS}
    found = {name: Figures() for name in SAVERS}
    for name, worker in workers.items():
        worker.call("open", shape, paths[name])
        worker.call("turns", "warm", range(3))
        found[name].size.append(bytes_in(paths[name]))
    for block, name in rotating(turns // BLOCK):
        numbers = range(block * BLOCK, (block + 1) * BLOCK)
        wall, cpu = workers[name].call("turns", "long", numbers)
        found[name].wall += wall
        found[name].cpu.append(cpu)
        found[name].size.append(bytes_in(paths[name]))
    for name in ON_DISK * READERS:
        reader = Worker(partial(Course, name))
        seconds, read = reader.call("resume", shape, paths[name], "long")
        reader.stop()
        found[name].resumes.append(seconds)
        if read != workers[name].call("returned"):
            raise AssertionError(f"{shape}, {name}: what is read is not what was returned")
    for name, worker in workers.items():
        worker.call("close")
        paths[name].unlink(missing_ok=True)
    return found


def show(shape: str, turns: int, found: dict[str, Figures]) -> None:
    peer = found[PEER]
    rows = []
    for name, each in found.items():
        row = [
            name,
            ratio(each.first_cpu_ms, peer.first_cpu_ms),
            ratio(each.last_cpu_ms, peer.last_cpu_ms),
            ratio(each.wall_ms, peer.wall_ms),
        ]
        if name in ON_DISK:
            row += [f"{kb:.1f}" for kb in each.kb_a_turn]
            row += [f"{each.size[-1] / 1e6:.2f}", ratio(each.resume_ms, peer.resume_ms)]
        rows.append(row + ["-"] * (8 - len(row)))
    columns = ["", "first CPU ms", "last CPU ms", "ms a turn", "first KB", "last KB", "MB"]
    table(f"{shape}, {turns} turns", [*columns, "resume ms"], rows)


def crowd(workers: dict[str, Worker], folder: Path, many: int, turns: int, at_once: int) -> None:
    """Measure short conversations, one after another or many concurrently."""
    wall, cpu = dict.fromkeys(SAVERS, 0.0), dict.fromkeys(SAVERS, 0.0)
    for name, worker in workers.items():
        worker.call("open", "chat", folder / f"threads {many} {name}.db")
        worker.call("crowd", range(many, many + at_once), 2, at_once)
    share = many // 4
    for block, name in rotating(4):
        threads = range(block * share, (block + 1) * share)
        seconds, used = workers[name].call("crowd", threads, turns, at_once)
        wall[name] += seconds
        cpu[name] += used
    for worker in workers.values():
        worker.call("close")
    total = many * turns
    rows = [
        [
            name,
            ratio(total / wall[name], total / wall[PEER]),
            ratio(cpu[name] / total * 1e3, cpu[PEER] / total * 1e3),
        ]
        for name in SAVERS
    ]
    title = f"{many} threads of {turns} turns of chat, {at_once} at once"
    table(title, ["", "turns a second", "CPU ms a turn"], rows)


def summarize(turns: int, found: dict[str, dict[str, Figures]]) -> None:
    """Print perdure's figures as ratios to those of the other saver, by agent shape."""
    rows = []
    for shape, of in found.items():
        ours, peer = of[OURS], of[PEER]
        floors = [f"{each.last_cpu_ms / peer.last_cpu_ms:.2f}" for each in list(of.values())[2:]]
        rows.append(
            [
                shape,
                f"{ours.first_cpu_ms / peer.first_cpu_ms:.2f}",
                f"{ours.last_cpu_ms / peer.last_cpu_ms:.2f}",
                f"{ours.wall_ms / peer.wall_ms:.2f}",
                f"{ours.resume_ms / peer.resume_ms:.2f}",
                *(" → ".join(f"{kb:.1f}" for kb in each.kb_a_turn) for each in (ours, peer)),
                *floors,
            ]
        )
    columns = ["", "CPU, turns 6 to 25", "CPU, last 20", "time, last 20", "resume"]
    columns += ["KB a turn", "KB a turn, peer", "CPU, InMemorySaver", "CPU, loop alone"]
    table(f"perdure / AsyncSqliteSaver, {turns} turns", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200, help="a multiple of 5, at least 40")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "threads"])
    args = parser.parse_args()
    shapes = args.shapes or [*SHAPES, "threads"]
    turns = max(40, args.turns // BLOCK * BLOCK)
    workers = {name: Worker(partial(Course, name)) for name in SAVERS}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            if shape in SHAPES:
                found[shape] = long_thread(workers, shape, turns, Path(folder))
                show(shape, turns, found[shape])
            else:
                for short in SHORT:
                    crowd(workers, Path(folder), *short)
        for worker in workers.values():
            worker.stop()
    if found:
        summarize(turns, found)


if __name__ == "__main__":
    main()

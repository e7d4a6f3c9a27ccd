"""Implement the `perdure serve` and `perdure mcp` commands.

`serve` runs the HTTP server, with web pages, LangGraph's REST API and MCP. `mcp` speaks MCP over
stdin and stdout.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
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

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    UserOption,
    app,
    explain_missing_server_packages,
    open_database,
)
from perdure.cli.output import format_count, print_note, print_text
from perdure.errors import ConfigurationError, MissingDependency
from perdure.storage.host_names import ascii_host

if TYPE_CHECKING:
    from fastapi import FastAPI

    from perdure.graphs.langgraph_json import LanggraphFile
    from perdure.server.http.access import Access
    from perdure.settings import Settings

# Maximum number of open connections per process. Requests on further connections are answered with
# status 503.
_MAX_CONNECTIONS = 1000
# Keep-alive timeout of idle connections, in seconds. The timeout is long enough that clients and
# proxies usually close an idle connection before the server does.
_KEEP_ALIVE_S = 65
# Number of seconds after which a client that does not read its data is disconnected.
_UNREAD_TIMEOUT_S = 60
# Maximum number of seconds to wait for open requests after all runs have stopped.
_SHUTDOWN_TIMEOUT_S = 1
# Exit code of a worker process that failed to start. If a worker process exits with this code, the
# server stops.
_START_FAILED = 3
# Interval, in seconds, at which the parent process checks for signals.
_POLL_S = 0.5
_COLLECTION_THRESHOLD = 10_000
"""Number of new objects after which Python's garbage collector runs.

An active run has 800 objects in use. With Python's lower default, most garbage collections would
find no garbage.
"""

AuditOption = Annotated[
    Path | None,
    typer.Option("--audit", metavar="FILE", help="Append edits and erasures to this audit log."),
]


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="The port to listen on.")
    ] = 2024,
    keys: Annotated[
        str | None, typer.Option(metavar="FILE", help="The file that contains the users' API keys.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:NAME", help="Use this langgraph_sdk.Auth object instead of --keys."
        ),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The langgraph.json file that defines the graphs."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accept requests addressed to this host name."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Allow scripts from this web origin to call the server."
        ),
    ] = None,
    proxy: Annotated[
        list[Any] | None,
        typer.Option(
            parser=ip_network,
            metavar="ADDRESS",
            help="Trust the X-Forwarded-For header from this proxy.",
        ),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Print a new API key and its entry for the keys file."),
    ] = None,
    team: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Add the user of the new key to this team (repeatable)."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Create the tables in the database, and exit.")
    ] = False,
    log: Annotated[
        Literal["text", "json"],
        typer.Option(metavar="FORMAT", help="The log format, text or json."),
    ] = "text",
    audit: AuditOption = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve Prometheus metrics at /metrics.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Wait for active runs after SIGTERM."),
    ] = 10,
    workers: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Number of worker processes.")
    ] = 1,
    webhook_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Allow the webhooks of runs to call this host."),
    ] = None,
    user: UserOption = None,
    db: DbOption = None,
) -> None:
    """Serve threads and memories over HTTP, with pages for browsers.

    Without authentication, the server listens only on a loopback address.
    """
    with explain_missing_server_packages("the server"):
        import uvicorn  # noqa: F401 - imported to find out whether it works

        from perdure.graphs.langgraph_json import LanggraphFile
        from perdure.server.http.guard import LOOPBACK_HOSTS
        from perdure.server.http.keys import KeysFileAccess
        from perdure.settings import load
    if new_key is not None:
        _print_new_key(new_key, team or [], keys)
        return
    _refuse_team_without_new_key(team)
    graphs = graphs or load(db=db, user=user).graphs
    configured = LanggraphFile.read(graphs) if graphs else None
    if prepare:
        _create_all_tables(db, user, keys, auth or (configured.auth if configured else None))
        return
    access = _build_access(keys, auth, configured)
    if isinstance(access, KeysFileAccess) and access.is_readable_by_others:
        print_note(
            f"other users of this machine can read or change {keys}; run chmod 600 {keys}", "yellow"
        )
    host = ascii_host(host)
    is_local = _is_loopback(host)
    if access is None and not is_local:
        raise ConfigurationError(
            f"cannot listen on {host} without authentication, because anyone who can connect could "
            "read and change everything; pass --keys or --auth, or remove --host"
        )
    hosts = [*LOOPBACK_HOSTS, *(allowed_host or ())] if is_local or allowed_host else None
    with ExitStack() as stack:
        database = stack.enter_context(open_database(db, user, create=True, graphs=graphs))
        _check_tenants_have_postgres(access, database.settings.db)
        _check_options_allow_several_workers(workers, database.settings.db, metrics)
        if not database.settings.search_threads:
            from perdure.memory.thread_search import delete_transcript_index

            delete_transcript_index(database.saver)
        if configured is not None:
            _print_langgraph_file_warnings(configured, database, has_tenants=_has_tenants(access))
        listener = stack.enter_context(_open_listener(host, port))
        server = _Server(
            database.settings,
            keys=keys,
            auth=auth,
            graphs=configured,
            audit=audit,
            hosts=hosts,
            origins=cors_origin or [],
            webhook_hosts=webhook_host or [],
            proxies=None if proxy is None else [*map(str, proxy)],
            metrics=metrics,
            log=log,
            grace_s=grace,
        )
        application = server.build_app()
        _print_server_summary(database, configured, keys, auth)
        url_host = f"[{host}]" if ":" in host else host
        print_note(f"http://{url_host}:{listener.getsockname()[1]}/", "dim")
        if access is not None:
            print_note("in a browser, log in with an API key or a token", "dim")
        if workers == 1:
            server.try_to_serve_until_signal(application, listener)
        else:
            _supervise_workers(server, listener, workers)


def _refuse_team_without_new_key(team: list[str] | None) -> None:
    """Raise ConfigurationError if the option `--team` was given without `--new-key`."""
    if team:
        raise ConfigurationError(
            f"--team {team[0]!r} can only be used with --new-key; remove --team"
        )


def _create_all_tables(
    db: str | None, user: str | None, keys: str | None, auth: str | None
) -> None:
    """Create the tables of the checkpointer, the store and the server, if they do not exist.

    If the keys file assigns API keys to tenants, the new tables are created with tenant isolation,
    so that each tenant can access only its own rows.

    Raises:
        ConfigurationError: There are authentication handlers. They can return any tenant, so it is
            unknown whether the tables need tenants. The error is also raised if only some keys have
            tenants, or if keys have tenants, but the database is a file.
    """
    from perdure.run_tables.component import create_server_tables
    from perdure.server.http.keys import KeysFileAccess

    if auth is not None:
        raise ConfigurationError(
            f"--prepare cannot determine whether the handlers in {auth!r} assign tenants to users. "
            "Run the command without them if they do not. If they do, call create_server_tables() "
            "with a tenant instead (docs/postgres.md)"
        )
    options: dict[str, Any] = {}
    with open_database(db, user, create=True) as database:
        if keys is not None:
            access = KeysFileAccess(keys)
            _check_tenants_have_postgres(access, database.settings.db)
            if tenants := access.tenants - {None}:
                if None in access.tenants:
                    raise ConfigurationError(
                        f"some keys in {keys!r} have a tenant and others have none; give each key "
                        "a tenant, or none of them"
                    )
                # The tables are the same for all tenants, so any tenant's name can be used.
                options["tenant"] = tenants.pop()
        saver, store = database.open_saver(options), database.open_store(options)
        saver.setup()
        store.setup()
        create_server_tables(saver)
        print_note(f"{saver.database.path} has all tables of the server", "dim")


class _Server(NamedTuple):
    """The configuration of a server, which is pickled and sent to each worker process.

    Attributes:
        settings: The settings, with the options of the command applied.
        keys: The keys file, or None.
        auth: `FILE:NAME` of the authentication handlers, or None.
        graphs: The langgraph.json, or None.
        audit: The audit log, or None.
        hosts: The host names that requests may use, or None for any.
        origins: Sites whose scripts may call the server.
        webhook_hosts: Hosts that webhooks may call.
        proxies: Addresses of trusted proxies, or None.
        metrics: Whether the server records metrics for Prometheus.
        log: The format of the log.
        grace_s: Seconds that active runs may take to end after SIGTERM.
    """

    settings: Settings
    keys: str | None
    auth: str | None
    graphs: LanggraphFile | None
    audit: Path | None
    hosts: list[str] | None
    origins: list[str]
    webhook_hosts: list[str]
    proxies: list[str] | None
    metrics: bool
    log: Literal["text", "json"]
    grace_s: float

    def build_app(self, sessions: MutableMapping[str, Any] | None = None) -> FastAPI:
        """Build the application.

        Args:
            sessions: The sessions of browsers, which all worker processes share, or None for
                sessions in the memory of this process.
        """
        from perdure.server import create_app
        from perdure.server.databases import DatabaseOptions
        from perdure.server.graphs import Graphs
        from perdure.server.http.logs import Audit
        from perdure.server.telemetry import Telemetry

        file = self.graphs
        # Import the embedder before the graphs, because the modules of graphs may rely on what the
        # embedder's module sets when it is imported, such as environment variables.
        options = DatabaseOptions(file.import_store_options(), file.thread_ttl) if file else None
        return create_app(
            self.settings,
            access=_build_access(self.keys, self.auth, file),
            graphs=Graphs.load_langgraph_json(file.path) if file else None,
            database_options=options,
            custom_app=file.import_app() if file else None,
            hosts=self.hosts,
            origins=[*self.origins, *(file.origins if file else ())],
            audit=Audit(self.audit),
            telemetry=Telemetry.from_environment(metrics=self.metrics),
            webhook_hosts=self.webhook_hosts,
            sessions=sessions,
        )

    def try_to_serve_until_signal(self, application: FastAPI, listener: socket.socket) -> bool:
        """Serve requests until SIGTERM or SIGINT is received.

        Returns:
            Whether the server could start.
        """
        import uvicorn

        from perdure.server.http.logs import log_to_stderr
        from perdure.server.http.websocket_sending import WebSocketProtocol

        log_to_stderr(self.log)
        config = uvicorn.Config(
            application,
            ws=WebSocketProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=self.proxies is not None,
            forwarded_allow_ips=self.proxies or [],
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
        )
        server = uvicorn.Server(config)
        shut_down = server.shutdown

        async def drain_and_shut_down(sockets: list[socket.socket] | None = None) -> None:
            # Stop the runs before uvicorn closes the connections of the clients that read the runs'
            # events.
            await application.state.runs.stop_runs_after_grace_period(
                self.grace_s, lambda: server.force_exit
            )
            await shut_down(sockets)

        server.shutdown = drain_and_shut_down  # type: ignore[method-assign]
        gc.collect()
        # Exclude the objects of all imported modules from garbage collection, which saves 0.1 s in
        # each full collection.
        gc.freeze()
        gc.set_threshold(_COLLECTION_THRESHOLD)
        server.run(sockets=[listener])
        return server.started


def _start_session_process(context: SpawnContext) -> SyncManager:
    """Start the process that keeps the browser sessions of all workers in memory.

    Raises:
        ConfigurationError: This user cannot start processes.
    """
    manager = SyncManager(ctx=context)
    try:
        manager.start(_exit_with_parent, (signal.SIG_IGN,))
    except (EOFError, OSError) as exc:
        raise ConfigurationError(
            "the server cannot start further processes. Check that this user may execute "
            f"{sys.executable!r} and write to the folder {tempfile.gettempdir()!r} for temporary "
            "files, or use --workers 1"
        ) from exc
    return manager


def _supervise_workers(server: _Server, listener: socket.socket, count: int) -> None:
    """Serve from several processes that share one socket, until SIGTERM or SIGINT is received.

    Worker processes that exit are replaced. The worker processes share browser login sessions,
    which a separate process keeps in memory. If the session process dies, or if a worker process
    fails to start, the server stops.
    """
    # Allow the parent process to pass the listening socket to the worker processes.
    multiprocessing.allow_connection_pickling()
    context, received_signals = multiprocessing.get_context("spawn"), list[int]()
    signals = signal.SIGTERM, signal.SIGINT
    old_handlers = [
        signal.signal(number, lambda number, _: received_signals.append(number))
        for number in signals
    ]
    manager = _start_session_process(context)
    [session_process] = multiprocessing.active_children()
    try:
        arguments = server, listener, manager.dict()
        workers = [_start_worker_process(context, arguments) for _ in range(count)]
        while not received_signals:
            wait([process.sentinel for process in (session_process, *workers)], _POLL_S)
            if not received_signals and session_process.exitcode is not None:
                print_note(
                    "the process that stores the browser sessions has died; restart the server",
                    "red",
                )
                break
            dead = [worker for worker in workers if worker.exitcode is not None]
            if any(worker.exitcode == _START_FAILED for worker in dead):
                break
            if not received_signals:
                for worker in dead:
                    print_note(
                        f"a worker process exited with code {worker.exitcode}; starting another",
                        "yellow",
                    )
                workers = [
                    _start_worker_process(context, arguments) if worker in dead else worker
                    for worker in workers
                ]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    finally:
        manager.shutdown()
    for number, handler in zip(signals, old_handlers, strict=True):
        signal.signal(number, handler)
    if not received_signals:
        # Exit without a message, because the reason has already been printed.
        raise typer.Exit(1)
    # Raise the received signal again, now with its original handler. The server thus exits in the
    # same way whether it uses one process or several.
    signal.raise_signal(received_signals[0])


def _start_worker_process(context: SpawnContext, worker_arguments: tuple[Any, ...]) -> SpawnProcess:
    """Start a worker process."""
    worker = context.Process(target=_serve_in_worker_process, args=worker_arguments)
    worker.start()
    return worker


def _serve_in_worker_process(
    server: _Server, listener: socket.socket, sessions: MutableMapping[str, Any]
) -> None:
    """Serve requests in a worker process."""
    _exit_with_parent()
    with suppress(KeyboardInterrupt):
        if not server.try_to_serve_until_signal(server.build_app(sessions), listener):
            sys.exit(_START_FAILED)


def _exit_with_parent(sigterm_handler: Any = signal.SIG_DFL) -> None:
    """Install a SIGTERM handler, and stop this process when its parent process dies.

    A parent process that is killed by SIGKILL cannot stop its child processes. In each child
    process, an OS thread waits for the parent process to exit and then kills the child process. The
    child process gets SIGTERM if `sigterm_handler` is the default handler, and SIGKILL if not.
    """
    signal.signal(signal.SIGTERM, sigterm_handler)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def stop_after_parent() -> None:
        parent.join()
        # Windows has no SIGKILL, and SIGTERM ends a process there whatever its handler is.
        kill = getattr(signal, "SIGKILL", signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM if sigterm_handler == signal.SIG_DFL else kill)

    threading.Thread(target=stop_after_parent, daemon=True).start()


def _check_tenants_have_postgres(access: Access | None, db: str) -> None:
    """Raise ConfigurationError if an API key names a tenant but the database is not Postgres."""
    from perdure.server.http.keys import KeysFileAccess
    from perdure.settings import is_dsn

    if isinstance(access, KeysFileAccess) and access.tenants != {None} and not is_dsn(db):
        raise ConfigurationError(
            f"the API keys have tenants, but the database {db!r} is a file; tenants require a "
            "Postgres database"
        )


def _check_options_allow_several_workers(workers: int, db: str, metrics: bool) -> None:
    """Raise ConfigurationError if the options are incompatible with multiple worker processes."""
    if workers > 1 and metrics:
        raise ConfigurationError(
            f"--metrics can count requests in only one process, but --workers is {workers}; remove "
            "one of the two options, or start several servers on different ports and read the "
            "metrics of each server"
        )
    if workers > 1 and db == ":memory:":
        raise ConfigurationError(
            "several processes cannot share an in-memory database, but --workers is "
            f"{workers}; pass --db with a file or a Postgres DSN"
        )


def _has_tenants(access: Access | None) -> bool:
    """Return whether the server's users may belong to tenants."""
    from perdure.server.http.access import LocalAccess

    return not isinstance(access, LocalAccess | None) and getattr(access, "tenants", ()) != {None}


def _print_server_summary(
    database: CommandDatabase,
    configured: LanggraphFile | None,
    keys: str | None,
    auth: str | None,
) -> None:
    """Print which database and which graphs the server uses, and where its users are defined."""
    from perdure.settings import is_dsn

    db = database.settings.db
    if is_dsn(db):
        from perdure.storage.postgres_dsn import redact_dsn

        db = redact_dsn(db)
    elif db != ":memory:":
        db = os.path.abspath(db)
    user_source = keys or auth or (configured.auth if configured else None)
    users = f"users: from {user_source}" if user_source else f"user: {database.user}"
    graphs = ", ".join(configured.graph_names) if configured else "chat, agent (built-in)"
    source = f" from {configured.path}" if configured else ""
    print_note(f"database: {db}\n{users}\ngraphs: {graphs or 'none'}{source}", "dim")


def _print_langgraph_file_warnings(
    configured: LanggraphFile, database: CommandDatabase, *, has_tenants: bool
) -> None:
    """Warn about ignored sections of a langgraph.json, and about stored data without a TTL.

    Raises:
        ConfigurationError: The stored vectors come from another embedder than `store.index` names.
    """
    from perdure.errors import EmbedderMismatch
    from perdure.run_tables.thread_list import ThreadList

    if configured.ignored:
        sections = ", ".join(configured.ignored)
        print_note(f"{configured.path.name}: these sections have no effect: {sections}", "yellow")
    if has_tenants:
        # A tenant's database is opened when that tenant's first request arrives.
        return
    options = configured.import_store_options()
    try:
        if "index" in options:
            database.store.check_embedder()
    except EmbedderMismatch as exc:
        command = f"perdure store reembed --graphs {configured.path}"
        raise ConfigurationError(f"{exc}. To embed all items again, run {command}") from exc
    exempt = {}
    if configured.thread_ttl is not None:
        exempt["checkpointer.ttl"] = ThreadList(database.saver).count_without_ttl(), "thread"
    if options.get("ttl", {}).get("default_ttl"):
        exempt["store.ttl"] = database.store.count_without_ttl(), "item"
    for section, (count, noun) in exempt.items():
        if count:
            print_note(
                f"{section} does not apply to {format_count(count, noun)} stored earlier", "yellow"
            )


def _build_access(
    keys: str | None, auth: str | None, configured: LanggraphFile | None
) -> Access | None:
    """Build the server's authentication backend, or return None if no authentication is configured.

    If neither `--keys` nor `--auth` is given, the authentication handlers configured in
    langgraph.json are used.
    """
    from perdure.server.http.auth_file import AuthFileAccess
    from perdure.server.http.keys import KeysFileAccess

    auth = auth or (configured.auth if configured else None)
    if auth and keys:
        raise ConfigurationError(
            f"--keys and the authentication handlers in {auth!r} cannot be combined; remove one of "
            "them"
        )
    if auth:
        return AuthFileAccess(auth)
    return KeysFileAccess(keys) if keys else None


def _is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket on the given address and port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Set TCP_NODELAY, because asyncio sets it only on sockets with an explicit protocol.
        # Without this option, a response body can be delayed by up to 40 ms while the kernel waits
        # for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Abort the connection of a client that does not read. If the connection were closed
            # normally, the unsent data would be kept until the client reads it.
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_TIMEOUT_S * 1000
            )
        return listener
    except OSError as exc:
        raise ConfigurationError(
            f"cannot listen on port {port} of {host!r}: {str(exc.strerror).partition(' (')[0]}; "
            "pass another --host or --port"
        ) from exc


def _print_new_key(user: str, teams: list[str], keys: str | None) -> None:
    """Generate an API key for a user, and print it together with its entry for a keys file."""
    from perdure.server.http.keys import create_api_key_and_hash
    from perdure.server.http.keys_file import check_team_name

    if keys is not None:
        raise ConfigurationError(
            "--new-key prints the new entry and does not change the keys file; remove --keys, and "
            f"redirect the output with >> {keys}"
        )
    team_names = [_quote_toml_string(check_team_name(name)) for name in dict.fromkeys(teams)]
    key, digest = create_api_key_and_hash(user)
    print_note(f"the API key of the user {user}, which is printed only once:\n{key}")
    print_text(f'[[keys]]\nuser = {_quote_toml_string(user)}\nsha256 = "{digest}"')
    if team_names:
        print_text(f"teams = [{', '.join(team_names)}]")


def _quote_toml_string(text: str) -> str:
    """Return text as a quoted string of TOML."""
    import json

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@app.command()
def mcp(audit: AuditOption = None, user: UserOption = None, db: DbOption = None) -> None:
    """Serve memories and threads as MCP tools over stdin and stdout.

    MCP clients, such as desktop assistants and editors, start `perdure mcp` as a child process. An
    MCP client that starts this command has access to the memories and threads of one user.
    """
    # Check for `mcp` and `fastapi` with `find_spec`, because importing them takes about a second.
    if find_spec("mcp") is None or find_spec("fastapi") is None:
        raise MissingDependency('MCP needs additional packages; run pip install "perdure[server]"')
    from perdure import __version__
    from perdure.server.http.logs import Audit, log_to_stderr
    from perdure.server.mcp_startup import StartupResponder

    with open_database(db, user, create=True) as database:
        log_to_stderr()
        log = Audit(audit)
        # Let SIGINT terminate the process immediately. Python's own handler would run only after
        # the pending read from stdin returns.
        old_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
            opening = StartupResponder(__version__)
            line = opening.answer_lines_until_mcp_sdk_is_needed(sys.stdin, sys.stdout)
            if line is not None:
                from perdure.server.mcp import serve_stdio

                asyncio.run(
                    serve_stdio(database.settings, log, [*opening.replayed_lines, line], sys.stdin)
                )
        finally:
            signal.signal(signal.SIGINT, old_handler)

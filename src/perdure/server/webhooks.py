"""Webhooks: who is told of the end of a run, once it has ended, and how.

Only hosts that the server was started with are called. A name is resolved once, and the address
that was checked is the one that is connected to, so that nobody reaches what is not public by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

import httpx

from perdure.checkpointers.webhooks import WebhookTable
from perdure.errors import ConfigurationError
from perdure.server.run_queue import DatabaseRuns

RETRY_DELAYS_S: Final = (10, 40, 160, 640, 2560)
"""After what times a webhook is tried again."""
TIMEOUT_S: Final = 10
"""How long a host may take."""
_MAX_CONCURRENT: Final = 20
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_NAT64_PREFIX: Final = IPv6Network("64:ff9b::/96")  # the rest is an address of IPv4: RFC 6052
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")  # what is given out of IPv6
_RESOLVERS: Final = ThreadPoolExecutor(_MAX_CONCURRENT, "perdure-names")
"""A name that is not answered for takes none of the threads that requests wait for."""
_LOGGER: Final = logging.getLogger(__name__)


class Webhooks:
    """Calls hosts with the runs that have ended.

    Args:
        hosts: Which: `"hooks.example.com"`, by https, or `"http://10.0.0.7:8080"`.
        secret: Signs what is told.

    Raises:
        ConfigurationError: One of the hosts is none, or there is no secret.
    """

    def __init__(self, hosts: Collection[str] = (), secret: str | None = None) -> None:
        self._hosts = {
            _parse_origin(each if "://" in each else f"https://{each}") for each in hosts
        }
        if hosts and not secret:
            raise ConfigurationError(
                "webhooks are signed: set PERDURE_WEBHOOK_SECRET to some random text, or leave "
                "--webhook-host out"
            )
        self._secret = (secret or "").encode()
        self._tasks = set[asyncio.Task[None]]()

    def check_url(self, url: str) -> None:
        """Refuse an address whose host was not named.

        Raises:
            ConfigurationError: It was not.
        """
        if _parse_origin(url) not in self._hosts:
            raise ConfigurationError(
                f"webhook is {url!r:.200}, and this server calls "
                f"{', '.join('://'.join(each[:2]) for each in sorted(self._hosts)) or 'no host'}; "
                "it is started with --webhook-host NAME for each, with the scheme and the port if "
                "it is not https and 443"
            )

    async def start_due_deliveries(self, runs: DatabaseRuns) -> None:
        """Begin to tell what is due, of a tenant."""
        free = _MAX_CONCURRENT - len(self._tasks)
        if not self._hosts or not free:
            return
        table = WebhookTable(runs.saver)
        for run_id in await table.list_due_run_ids(free):
            task = asyncio.create_task(self._deliver(table, run_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Stop; what is not delivered is told by the next process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, table: WebhookTable, run_id: str) -> None:
        try:
            taken = await table.claim_attempt(run_id, RETRY_DELAYS_S)
            if taken is None:
                return
            content, attempts = taken
            try:
                await self.post_run(content["url"], content["run"])
            except (ConfigurationError, OSError, httpx.HTTPError, TimeoutError) as exc:
                is_last = attempts >= len(RETRY_DELAYS_S)
                then = "is given up" if is_last else "is tried again"
                _LOGGER.warning("the webhook of run %s %s (%.200s)", run_id, then, exc)
                if not is_last:
                    return
            await table.delete(run_id)
        except Exception as exc:  # another sweep finds it
            _LOGGER.warning("the webhook of run %s is not sent (%s)", run_id, type(exc).__name__)

    async def post_run(self, url: str, run: Any) -> None:
        """Post a run to an address.

        Raises:
            ConfigurationError: Its host was not named, or is no public address.
            httpx.HTTPError: It cannot be reached, or does not answer with a 2xx.
        """
        self.check_url(url)
        body, at = httpx.Request("POST", url, json=run).content, str(int(time.time()))
        signed = hmac.new(self._secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
        target = httpx.URL(url)
        address = await asyncio.wait_for(_resolve_address(target), TIMEOUT_S)
        headers = {
            "Host": target.netloc.decode(),
            "Content-Type": "application/json",
            "X-Perdure-Timestamp": at,
            "X-Perdure-Signature": f"sha256={signed}",
        }
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client,
            client.stream(
                "POST",
                target.copy_with(host=address),
                content=body,
                headers=headers,
                extensions={"sni_hostname": _ascii_host(target)},
            ) as reply,
        ):
            if not reply.is_success:  # nobody is led elsewhere
                raise httpx.HTTPError(f"it answered with {reply.status_code}")


def _parse_origin(url: str) -> tuple[str, str]:
    """Whom an address is of: its scheme, and host with port."""
    try:
        parsed = httpx.URL(url)
        port = parsed.port or _DEFAULT_PORTS[parsed.scheme]
    except (httpx.InvalidURL, KeyError, TypeError, ValueError) as exc:
        raise ConfigurationError(
            f"{url!r:.200} is no address of a webhook; expected https://HOST/… or http://HOST/…"
        ) from exc
    if not parsed.host or parsed.userinfo:
        raise ConfigurationError(f"{url!r:.200} has no host, or a user; expected https://HOST/…")
    return parsed.scheme, f"{_ascii_host(parsed)}:{port}"


def _ascii_host(url: httpx.URL) -> str:
    """Return the host of an address as DNS and TLS have it, encoded by IDNA 2008.

    `socket.getaddrinfo` and `ssl` encode other text by IDNA 2003, which may be another domain.
    """
    return url.raw_host.decode("ascii")


async def _resolve_address(url: httpx.URL) -> str:
    """The address of a host; that of a name must be public.

    Raises:
        ConfigurationError: It is not.
    """
    try:
        return str(ip_address(_ascii_host(url)))  # it was named itself
    except ValueError:
        asked = partial(socket.getaddrinfo, _ascii_host(url), None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, asked)
    addresses = [str(each[4][0]) for each in found]
    for each in addresses:
        if not _is_public(ip_address(each.partition("%")[0])):
            raise ConfigurationError(
                f"webhook host {url.host!r} is {each}, which is no public address: name the "
                "address itself"
            )
    return addresses[0]


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        translated = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64_PREFIX else None
        inner = address.ipv4_mapped or address.sixtofour or translated
        if inner is None:
            return address.is_global and address in _GLOBAL_UNICAST
        address = inner
    return address.is_global and not address.is_multicast

"""Send webhooks, which are HTTP requests that deliver a finished run's result to another server.

Webhooks are sent only to hosts that were allowed when the server was started. Each delivery attempt
resolves the host name only once, and connects to the address that was checked. If the host name
were resolved again for the connection, the result could be a private address that was never
checked.
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

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError
from perdure.run_tables.webhooks import WebhookTable

RETRY_DELAYS_S: Final = (10, 40, 160, 640, 2560)
"""Seconds between the start of an attempt to send a webhook and the next attempt. The first element
applies to the first attempt. The attempt after the last delay is the last one."""
TIMEOUT_S: Final = 10
"""Maximum number of seconds for each of the two steps of an attempt: resolving the host name, and
posting the run."""
# Maximum number of webhooks that are sent concurrently
_MAX_CONCURRENT: Final = 20
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Prefix of IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)
_NAT64_PREFIX: Final = IPv6Network("64:ff9b::/96")
# Global unicast range, from which public IPv6 addresses are assigned
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_RESOLVERS: Final = ThreadPoolExecutor(_MAX_CONCURRENT, "perdure-names")
"""Thread pool for resolving host names.

A separate pool is used so that a name server that does not respond cannot block the OS threads that
requests use."""
_LOGGER: Final = logging.getLogger("perdure.server.webhooks")


class Webhooks:
    """Sends webhooks with the results of finished runs to other hosts.

    Args:
        hosts: The hosts that may be called, such as `"hooks.example.com"` or
            `"http://10.0.0.7:8080"`. The default scheme is https.
        secret: The secret that signs the requests.

    Raises:
        ConfigurationError: A host is invalid, or there are hosts but no secret.
    """

    def __init__(self, hosts: Collection[str] = (), secret: str | None = None) -> None:
        self._hosts = {
            _parse_scheme_and_host_port(host if "://" in host else f"https://{host}")
            for host in hosts
        }
        if hosts and not secret:
            raise ConfigurationError(
                "--webhook-host requires a secret for signing webhooks; set "
                "PERDURE_WEBHOOK_SECRET to a random string, or remove --webhook-host"
            )
        self._secret = (secret or "").encode()
        self._tasks = set[asyncio.Task[None]]()

    def check_url(self, url: str) -> None:
        """Reject a URL whose host this server is not allowed to call.

        Raises:
            ConfigurationError: The host is not allowed, or the URL is invalid.
        """
        if _parse_scheme_and_host_port(url) not in self._hosts:
            allowed_hosts = ", ".join("://".join(host[:2]) for host in sorted(self._hosts))
            rule = f"only to {allowed_hosts}" if allowed_hosts else "to no host"
            raise ConfigurationError(
                f"the webhook URL {url!r:.200} is not allowed, because this server sends webhooks "
                f"{rule}; to allow a host, start the server with --webhook-host SCHEME://HOST:PORT"
            )

    async def start_due_deliveries(self, saver: Checkpointer) -> None:
        """Start sending the due webhooks of a database."""
        free_slots = _MAX_CONCURRENT - len(self._tasks)
        if not self._hosts or not free_slots:
            return
        table = WebhookTable(saver)
        for run_id in await table.list_due_run_ids(free_slots):
            task = asyncio.create_task(self._deliver_webhook(table, run_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Stop sending webhooks.

        Unsent webhooks stay in the database, and are sent by other server processes or after a
        restart.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _deliver_webhook(self, table: WebhookTable, run_id: str) -> None:
        """Send a run's webhook, and delete it after successful delivery or the last attempt."""
        try:
            claimed = await table.claim_content_and_attempt_count(run_id, RETRY_DELAYS_S)
            if claimed is None:
                return
            content, earlier_attempts = claimed
            try:
                await self.post_run_to_webhook(content["url"], content["run"])
            except (ConfigurationError, OSError, httpx.HTTPError, TimeoutError) as exc:
                is_last = earlier_attempts >= len(RETRY_DELAYS_S)
                consequence = "will not be retried" if is_last else "will be retried"
                _LOGGER.warning(
                    "the webhook for run %s failed and %s (%.200s)", run_id, consequence, exc
                )
                if not is_last:
                    return
            await table.delete(run_id)
        except Exception as exc:  # A later sweep sends the webhook again.
            _LOGGER.warning(
                "the webhook for run %s could not be sent yet (%s)", run_id, type(exc).__name__
            )

    async def post_run_to_webhook(self, url: str, run: Any) -> None:
        """Post a run to a URL.

        Raises:
            ConfigurationError: The host is not allowed, or has an address that is not public.
            httpx.HTTPError: The host cannot be reached, or does not answer with a 2xx status.
            OSError: The host name cannot be resolved.
            TimeoutError: See `TIMEOUT_S`.
        """
        self.check_url(url)
        body, timestamp = httpx.Request("POST", url, json=run).content, str(int(time.time()))
        signature = hmac.new(
            self._secret, timestamp.encode() + b"." + body, hashlib.sha256
        ).hexdigest()
        target = httpx.URL(url)
        address = await asyncio.wait_for(_resolve_public_ip_address(target), TIMEOUT_S)
        headers = {
            "Host": target.netloc.decode(),
            "Content-Type": "application/json",
            "X-Perdure-Timestamp": timestamp,
            "X-Perdure-Signature": f"sha256={signature}",
        }
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client,
            client.stream(
                "POST",
                target.copy_with(host=address),
                content=body,
                headers=headers,
                extensions={"sni_hostname": _encode_host_as_ascii(target)},
            ) as reply,
        ):
            # Redirects are not followed. A response with a redirect status is therefore an error,
            # like every other response without a success status.
            if not reply.is_success:
                raise httpx.HTTPError(
                    f"the host responded with the HTTP status {reply.status_code}"
                )


def _parse_scheme_and_host_port(url: str) -> tuple[str, str]:
    """Parse a URL, and return its scheme and its `host:port`.

    Raises:
        ConfigurationError: The URL is invalid.
    """
    try:
        parsed = httpx.URL(url)
        port = parsed.port or _DEFAULT_PORTS[parsed.scheme]
    except (httpx.InvalidURL, KeyError, TypeError, ValueError) as exc:
        raise ConfigurationError(
            f"{url!r:.200} is not a URL for a webhook; expected https://HOST/… or http://HOST/…"
        ) from exc
    if not parsed.host or parsed.userinfo:
        raise ConfigurationError(
            f"the webhook URL {url!r:.200} has no host, or contains a user name or password; "
            "expected https://HOST/…"
        )
    return parsed.scheme, f"{_encode_host_as_ascii(parsed)}:{port}"


def _encode_host_as_ascii(url: httpx.URL) -> str:
    """Encode a URL's host according to IDNA 2008, for use in DNS and TLS.

    `socket.getaddrinfo` and `ssl` encode non-ASCII host names according to IDNA 2003, which may
    produce a different domain name.
    """
    return url.raw_host.decode("ascii")


async def _resolve_public_ip_address(url: httpx.URL) -> str:
    """Return the IP address of a URL's host.

    If the host is a name, all its addresses must be public.

    Raises:
        ConfigurationError: The name has an address that is not public.
    """
    try:
        # If the host is an IP address, return it without checking that it is public, because a
        # server option explicitly allows this address.
        return str(ip_address(_encode_host_as_ascii(url)))
    except ValueError:
        resolve = partial(
            socket.getaddrinfo, _encode_host_as_ascii(url), None, type=socket.SOCK_STREAM
        )
        records = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, resolve)
    addresses = [str(record[4][0]) for record in records]
    for candidate in addresses:
        if not _is_public_address(ip_address(candidate.partition("%")[0])):
            raise ConfigurationError(
                f"the webhook host {url.host!r} resolves to the non-public address "
                f"{candidate}; put this address into the webhook URL, and allow it with "
                "--webhook-host"
            )
    return addresses[0]


def _is_public_address(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address can be reached from the public internet.

    If an IPv6 address has an embedded IPv4 address, the IPv4 address is checked instead.
    """
    if isinstance(address, IPv6Address):
        nat64_address = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64_PREFIX else None
        embedded = address.ipv4_mapped or address.sixtofour or nat64_address
        if embedded is None:
            return address.is_global and address in _GLOBAL_UNICAST
        address = embedded
    return address.is_global and not address.is_multicast

"""Names of hosts in the form that DNS, TLS and HTTP use."""

from __future__ import annotations

import httpx

from perdure.errors import ConfigurationError


def ascii_host(name: str) -> str:
    """Return a host name in its ASCII form, in lower case; an IP address stays as it is.

    Other characters are encoded by IDNA 2008, as browsers do. Python's own codec implements IDNA
    2003, by which `faß.de` is the host `fass.de`.

    Raises:
        ConfigurationError: The text is not the name of a host.
    """
    try:
        return httpx.URL(scheme="https", host=name.strip("[]")).raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, TypeError, ValueError) as exc:
        raise ConfigurationError(f"{name!r:.200} is not the name of a host: {exc}") from exc

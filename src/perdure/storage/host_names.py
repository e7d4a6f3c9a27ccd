"""Convert host names to the ASCII form used by DNS, TLS and HTTP."""

from __future__ import annotations

from perdure.errors import ConfigurationError


def ascii_host(name: str) -> str:
    """Return the ASCII form of a host name or IP address, in lower case and without brackets.

    A name with non-ASCII characters is encoded according to IDNA 2008, as in browsers. Python's
    `socket.getaddrinfo` and `ssl` use the older IDNA 2003, which maps `faß.de` to the different
    domain `fass.de`.

    Raises:
        ConfigurationError: The name has non-ASCII characters, and is not valid in IDNA 2008. An
            ASCII name is not validated.
    """
    name = name.strip("[]").lower()
    if name.isascii():
        return name
    import idna  # imported only for names that need it

    try:
        return idna.encode(name).decode("ascii")
    except idna.IDNAError as exc:
        raise ConfigurationError(
            f"{name!r:.200} is not a valid host name: {exc}; expected a name that conforms to IDNA "
            "2008, or its ASCII form, which begins with xn--"
        ) from exc

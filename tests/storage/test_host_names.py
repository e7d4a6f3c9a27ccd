"""Host names outside ASCII, which Python's own codec would convert to other domains."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from perdure import PostgresCheckpointer
from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.storage.host_names import ascii_host
from perdure.storage.postgres_dsn import normalize_dsn, redact_dsn

NAMES = [
    ("faß.example", "xn--fa-hia.example"),
    ("βόλος.example", "xn--nxasmm1c.example"),
    ("نامه‌ای.example", "xn--mgba3gch31f060k.example"),
    ("ශ්‍රී.example", "xn--10cl1a0b660p.example"),
    ("BÜCHER.example", "xn--bcher-kva.example"),
]


@pytest.mark.parametrize(("name", "host"), [*NAMES, ("Db.Example", "db.example"), ("[::1]", "::1")])
def test_ascii_host_encodes_names_by_idna_2008(name: str, host: str) -> None:
    assert ascii_host(name) == host


@pytest.mark.parametrize("name", ["a‍b.example", "ü" * 64 + ".example", "ü..example"])
def test_ascii_host_refuses_invalid_names(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid host name"):
        ascii_host(name)


@pytest.mark.postgres
@pytest.mark.parametrize(("name", "host"), NAMES)
def test_database_host_is_looked_up_by_its_idna_2008_name(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password would otherwise be sent to the server of another domain."""
    looked_up_names = list[Any]()

    def record_lookup(name: Any, *_: Any, **__: Any) -> Any:
        looked_up_names.append(name)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", record_lookup)
    for dsn in (f"postgresql://ann:pw@{name}/db", f"host={name} dbname=db"):
        with (
            pytest.raises(StorageUnavailable, match=host),
            PostgresCheckpointer.open(dsn, timeout_s=1),
        ):
            pass

    assert {*looked_up_names} == {host}


@pytest.mark.postgres
def test_each_host_of_a_dsn_is_encoded_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = normalize_dsn("host=/run/größe,faß.example,10.0.0.7 dbname=db")
    monkeypatch.setenv("PGHOST", "faß.example")
    dsn_of_environment = normalize_dsn("dbname=db")

    assert conninfo_to_dict(dsn)["host"] == "/run/größe,xn--fa-hia.example,10.0.0.7"
    assert conninfo_to_dict(dsn_of_environment)["host"] == "xn--fa-hia.example"
    assert "xn--fa-hia.example" in redact_dsn(dsn_of_environment)

"""API keys: a file names the user of each by its SHA-256. Users reach what is their own."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from pathlib import Path
from time import monotonic
from typing import Any, Final

from starlette.requests import HTTPConnection

from perdure.errors import ConfigurationError
from perdure.server.access import (
    Action,
    Filter,
    Forbidden,
    Identity,
    Unauthenticated,
    permit_own,
)
from perdure.server.acting import act_for
from perdure.server.keys_file import Key, check_key_user, read_keys
from perdure.server.teams import check_team, is_of_team

_LOG: Final = logging.getLogger("perdure.server")
_LOOK_S: Final = 1.0  # how often the file is read


def new_key(user: str) -> tuple[str, str]:
    """A new random key of a user, and its SHA-256."""
    check_key_user(user)
    key = f"perdure_{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """Access by the keys of a file; a change of the file is seen within a second.

    A key with the permission `perdure:admin` may do everything. One with `perdure:act` may act for
    other users of its tenant, and then reaches what is theirs. Other users reach the threads,
    crons and assistants whose metadata names them as `owner`, as it does in those that they create,
    and the namespaces whose second label is their name, like `("memories", "ann")`. Under the first
    label `teams` they reach the namespaces of the teams that their key lists.

    Raises:
        ConfigurationError: The file is missing or malformed.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file)
        self._keys, self._looked = self._read(), monotonic()

    @property
    def exposed(self) -> bool:
        """Whether others of this machine may read the file."""
        return bool(self._file.stat().st_mode & 0o077)

    @property
    def tenants(self) -> set[str | None]:
        """The tenants of the keys."""
        return {each.tenant for each in self._keys}

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The user of the key that a request has."""
        await self._look_soon()
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = connection.headers.get("x-api-key") or bearer
        given = hashlib.sha256(key.encode()).hexdigest()
        # all are compared, so that the time tells nothing
        found = [each for each in self._keys if hmac.compare_digest(each.sha256, given)]
        if not key or not found:
            raise Unauthenticated(
                "no valid API key; send one as x-api-key or Authorization: Bearer",
                headers={"WWW-Authenticate": "Bearer"},
            )
        one = found[0]
        teams = frozenset(one.teams)
        return Identity(one.user, one.tenant, frozenset(one.permissions), teams=teams)

    async def again(self, identity: Identity) -> Identity:
        """A user who has a key still, with what their keys may do now."""
        whose = identity.user, identity.tenant
        await self._look_soon()
        keys = [each for each in self._keys if (each.user, each.tenant) == whose]
        if not keys:
            raise Unauthenticated(f"{identity.user!r} has no key any more")
        now = frozenset(name for each in keys for name in each.permissions)
        known = Identity(*whose, identity.permissions & now, teams=self.teams_of(*whose))
        person = identity.acting_for
        return known if person is None else act_for(self, known, person)

    def teams_of(self, user: str, tenant: str | None) -> frozenset[str]:
        """The teams that the keys of a user list."""
        keys = [each for each in self._keys if (each.user, each.tenant) == (user, tenant)]
        return frozenset(name for each in keys for name in each.teams)

    async def permit(self, identity: Identity, action: Action, value: dict[str, Any]) -> Filter:
        """Allow what belongs to the user."""
        if identity.is_admin:
            return {}
        namespace = tuple(value.get("namespace") or ())
        if action.startswith("store:") and is_of_team(namespace):
            check_team(identity, action, namespace)
            value["namespace"] = namespace
            return {}
        return permit_own(identity.person, action, value)

    def check_person(self, identity: Identity, person: str) -> None:
        """Refuse a person who has keys, and none of them in the tenant of the caller.

        A person needs no key, so one without keys may be a person of any tenant.

        Raises:
            Forbidden: The person is known in other tenants only.
        """
        tenants = {each.tenant for each in self._keys if each.user == person}
        if tenants and identity.tenant not in tenants:
            raise Forbidden(f"{person!r:.80} is not known in the tenant of {identity.user!r}")

    async def _look_soon(self) -> None:
        if monotonic() - self._looked > _LOOK_S:
            self._looked = monotonic()
            await asyncio.to_thread(self._look)

    def _look(self) -> None:
        try:
            self._keys = self._read()
        except ConfigurationError as exc:  # a key that was to be revoked is not valid
            self._keys = []
            _LOG.error("no key is valid until it is mended: %s", exc)

    def _read(self) -> list[Key]:
        return read_keys(self._file)

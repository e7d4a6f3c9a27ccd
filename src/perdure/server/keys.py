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
    permit_own_data,
)
from perdure.server.acting import act_for
from perdure.server.keys_file import Key, check_key_user, read_keys
from perdure.server.teams import check_team_access, is_team_namespace

_LOG: Final = logging.getLogger("perdure.server")
_RELOAD_INTERVAL_S: Final = 1.0  # how often the file is read


def create_key(user: str) -> tuple[str, str]:
    """A new random key of a user, and its SHA-256."""
    check_key_user(user)
    key = f"perdure_{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


class KeysFileAccess:
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
        self._path = Path(file)
        self._keys, self._read_at = self._read_file(), monotonic()

    @property
    def is_readable_by_others(self) -> bool:
        """Whether others of this machine may read the file."""
        return bool(self._path.stat().st_mode & 0o077)

    @property
    def tenants(self) -> set[str | None]:
        """The tenants of the keys."""
        return {each.tenant for each in self._keys}

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The user of the key that a request has."""
        await self._reload_if_stale()
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = connection.headers.get("x-api-key") or bearer
        digest = hashlib.sha256(key.encode()).hexdigest()
        # all are compared, so that the time tells nothing
        matching_keys = [each for each in self._keys if hmac.compare_digest(each.sha256, digest)]
        if not key or not matching_keys:
            raise Unauthenticated(
                "no valid API key; send one as x-api-key or Authorization: Bearer",
                headers={"WWW-Authenticate": "Bearer"},
            )
        matching_key = matching_keys[0]
        teams = frozenset(matching_key.teams)
        return Identity(
            matching_key.user, matching_key.tenant, frozenset(matching_key.permissions), teams=teams
        )

    async def refresh_identity(self, identity: Identity) -> Identity:
        """A user who has a key still, with what their keys may do now."""
        user_and_tenant = identity.user, identity.tenant
        await self._reload_if_stale()
        keys = [each for each in self._keys if (each.user, each.tenant) == user_and_tenant]
        if not keys:
            raise Unauthenticated(f"{identity.user!r} has no key any more")
        current_permissions = frozenset(name for each in keys for name in each.permissions)
        current_identity = Identity(
            *user_and_tenant,
            identity.permissions & current_permissions,
            teams=self.find_teams(*user_and_tenant),
        )
        person = identity.acting_for
        return current_identity if person is None else act_for(self, current_identity, person)

    def find_teams(self, user: str, tenant: str | None) -> frozenset[str]:
        """The teams that the keys of a user list."""
        keys = [each for each in self._keys if (each.user, each.tenant) == (user, tenant)]
        return frozenset(name for each in keys for name in each.teams)

    async def permit(self, identity: Identity, action: Action, value: dict[str, Any]) -> Filter:
        """Allow what belongs to the user."""
        if identity.is_admin:
            return {}
        namespace = tuple(value.get("namespace") or ())
        if action.startswith("store:") and is_team_namespace(namespace):
            check_team_access(identity, action, namespace)
            value["namespace"] = namespace
            return {}
        return permit_own_data(identity.person, action, value)

    def check_person(self, identity: Identity, person: str) -> None:
        """Refuse a person who has keys, and none of them in the tenant of the caller.

        A person needs no key, so one without keys may be a person of any tenant.

        Raises:
            Forbidden: The person is known in other tenants only.
        """
        tenants = {each.tenant for each in self._keys if each.user == person}
        if tenants and identity.tenant not in tenants:
            raise Forbidden(f"{person!r:.80} is not known in the tenant of {identity.user!r}")

    async def _reload_if_stale(self) -> None:
        if monotonic() - self._read_at > _RELOAD_INTERVAL_S:
            self._read_at = monotonic()
            await asyncio.to_thread(self._reload)

    def _reload(self) -> None:
        try:
            self._keys = self._read_file()
        except ConfigurationError as exc:  # a key that was to be revoked is not valid
            self._keys = []
            _LOG.error("no key is valid until it is mended: %s", exc)

    def _read_file(self) -> list[Key]:
        return read_keys(self._path)

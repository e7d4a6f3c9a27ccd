"""Identify users by API keys.

The keys file contains the SHA-256 hash of each key and the key's user.
"""

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
from perdure.server.http.access import (
    Action,
    Filter,
    Forbidden,
    Identity,
    Unauthenticated,
    permit_and_build_filter_for_own_data,
)
from perdure.server.http.acting_for import build_identity_acting_for
from perdure.server.http.keys_file import Key, read_keys, validate_key_user_name
from perdure.server.teams import check_team_access, is_team_namespace

_LOG: Final = logging.getLogger("perdure.server")
# Maximum age of the cached API keys, in seconds. If the cache is older, the next request reloads
# the keys file, so a revoked key is accepted for at most this long.
_RELOAD_INTERVAL_S: Final = 1.0


def create_api_key_and_hash(user: str) -> tuple[str, str]:
    """Create a random key for a user.

    Returns:
        The key, and its SHA-256 hash as hexadecimal digits.

    Raises:
        ConfigurationError: No user can have this name.
    """
    validate_key_user_name(user)
    key = f"perdure_{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


class KeysFileAccess:
    """Identifies users by the API keys in a keys file.

    Changes to the keys file take effect within a second.

    A request whose key has the permission `perdure:admin` may do anything. A caller whose API key
    has the permission `perdure:act` may act on behalf of any other user of the key's tenant. A
    request made on behalf of another user can access that user's data.

    A key with neither the permission `perdure:admin` nor `perdure:act` gives access only to its own
    user's data. A user's threads, crons and assistants have the user's name as `owner` in their
    metadata. The server sets `owner` when a user creates a thread, cron or assistant. A user's
    namespaces have the user's name as their second label, such as `("memories", "ann")`. A key that
    lists teams also gives access to the namespaces `("teams", NAME)` of these teams.

    Attributes:
        keys_file: The path of the keys file.

    Raises:
        ConfigurationError: The file is missing or malformed.
    """

    def __init__(self, file: str | Path) -> None:
        self.keys_file = Path(file)
        self._keys, self._read_at = self._read_file(), monotonic()

    @property
    def is_readable_by_others(self) -> bool:
        """Return whether other users on this machine can read the file."""
        return bool(self.keys_file.stat().st_mode & 0o077)

    @property
    def tenants(self) -> set[str | None]:
        """Return the tenants of all keys."""
        return {entry.tenant for entry in self._keys}

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Return the user to whom the request's API key belongs.

        Raises:
            Unauthenticated: The request has no key, or the file does not list the key.
        """
        await self._reload_keys_if_stale()
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = connection.headers.get("x-api-key") or bearer
        digest = hashlib.sha256(key.encode()).hexdigest()
        # Compare the hash of the sent key with every stored hash, so that the response time does
        # not reveal which key matches.
        matching_keys = [entry for entry in self._keys if hmac.compare_digest(entry.sha256, digest)]
        if not key or not matching_keys:
            raise Unauthenticated(
                "the request has no valid API key; send one in the header x-api-key or "
                "Authorization: Bearer",
                headers={"WWW-Authenticate": "Bearer"},
            )
        matching_key = matching_keys[0]
        return Identity(
            matching_key.user,
            matching_key.tenant,
            frozenset(matching_key.permissions),
            teams=frozenset(matching_key.teams),
        )

    async def refresh_identity(self, identity: Identity) -> Identity:
        """Return a copy of the identity with the user's current permissions and teams.

        The returned identity never has more permissions than `identity`, even if the user has been
        granted more. The server calls this method before each run of a cron, so that no cron runs
        after its user's keys have been revoked.

        Raises:
            Unauthenticated: The user has no key any more.
            Forbidden: The user may no longer act for the person.
        """
        user_and_tenant = identity.user, identity.tenant
        await self._reload_keys_if_stale()
        keys = [entry for entry in self._keys if (entry.user, entry.tenant) == user_and_tenant]
        if not keys:
            raise Unauthenticated(
                f"all API keys of the user {identity.user!r} were revoked; create a new key"
            )
        current_permissions = frozenset(name for entry in keys for name in entry.permissions)
        current_identity = Identity(
            *user_and_tenant,
            identity.permissions & current_permissions,
            teams=self.find_teams(*user_and_tenant),
        )
        person = identity.acting_for
        return (
            current_identity
            if person is None
            else build_identity_acting_for(self, current_identity, person)
        )

    def find_teams(self, user: str, tenant: str | None) -> frozenset[str]:
        """Return all teams listed in a user's API keys."""
        keys = [entry for entry in self._keys if (entry.user, entry.tenant) == (user, tenant)]
        return frozenset(name for entry in keys for name in entry.teams)

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        """Allow actions on the user's own data and on the memories of the user's teams.

        See `Access.authorize_and_build_filter` for the arguments. An admin may perform every
        action.
        """
        if identity.is_admin:
            return {}
        namespace = tuple(value.get("namespace") or ())
        if action.startswith("store:") and is_team_namespace(namespace):
            check_team_access(identity, action, namespace)
            value["namespace"] = namespace
            return {}
        return permit_and_build_filter_for_own_data(identity.person, action, value)

    def check_person(self, identity: Identity, person: str) -> None:
        """Refuse to act on behalf of a person whose API keys all belong to other tenants.

        A person who has no API keys is accepted, because nothing ties that person to another
        tenant.

        Raises:
            Forbidden: The person has keys, and none of them in the tenant of the caller.
        """
        tenants = {entry.tenant for entry in self._keys if entry.user == person}
        if tenants and identity.tenant not in tenants:
            raise Forbidden(
                f"the user {person!r:.80} has no API key in your tenant; pass a user who has an "
                "API key in your tenant"
            )

    async def _reload_keys_if_stale(self) -> None:
        """Read the keys file again if it was last read more than a second ago."""
        if monotonic() - self._read_at > _RELOAD_INTERVAL_S:
            self._read_at = monotonic()
            await asyncio.to_thread(self._reload_keys)

    def _reload_keys(self) -> None:
        """Read the keys file.

        If the keys file cannot be read, no API key is accepted until it can be read again.
        """
        try:
            self._keys = self._read_file()
        except ConfigurationError as exc:
            # If the keys file is invalid, accept no API key, because the edit that made the file
            # invalid may have been meant to revoke a key.
            self._keys = []
            _LOG.error("no API key is valid until the keys file is repaired: %s", exc)

    def _read_file(self) -> list[Key]:
        return read_keys(self.keys_file)

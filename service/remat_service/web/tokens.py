"""Bearer tokens of an OpenID Connect provider: JSON Web Tokens, verified with the keys that the provider publishes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx2
import structlog

from ..errors import ServiceError, Unauthorized, Unavailable
from ..settings import Settings

log = structlog.get_logger("remat_service.web.tokens")

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a private key only: one with a shared secret could be made by whoever verifies."""
_LEEWAY_S = 30
_KEYS_FOR_S = 3600.0
"""From half of it on keys are fetched anew while they are used, beyond it before they are."""
_AGAIN_S = 30.0
"""Between two looks for a key that is not known: a stranger's tokens must not become requests to the provider."""
_FAILED_FOR_S = 5.0
"""So long a provider that gave no keys at all is not asked again."""
_ANSWER_S = 5.0
"""Within which the provider has given its keys, all of its answers together."""


@dataclass(frozen=True)
class Bearer:
    """What a verified token says: the provider's groups that its subject is in, and who it is."""

    subject: str
    groups: tuple[str, ...]


class Tokens:
    """Verifies tokens of one issuer for one audience."""

    def __init__(self, settings: Settings) -> None:
        self._issuer, self._audience = settings.oidc_issuer, settings.oidc_audience
        self._claim = settings.oidc_groups_claim
        self._keys: Any = None
        self._fetched = self._ended = float("-inf")  # the last time with keys, and the last with or without
        self._failed = False  # that last one
        self._fetching: asyncio.Task[None] | None = None
        if self._issuer:
            try:
                import jwt  # noqa: F401
            except ImportError:
                raise ServiceError(
                    "REMAT_OIDC_ISSUER is set, and PyJWT is not installed: install remat[oidc]"
                ) from None

    def takes(self, token: str) -> bool:
        """Whether this is a token for us to verify, rather than an API key."""
        return bool(self._issuer) and token.count(".") == 2

    async def verify(self, token: str) -> Bearer:
        """Who a token speaks for.

        Raises:
            Unauthorized: malformed, expired, for another audience, of another issuer, or not signed by it; one message.
            Unavailable: the provider's keys can't be had.
        """
        import jwt

        try:
            key = await self._key(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key,
                algorithms=list(_ALGORITHMS),
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            log.info("a token was refused", why=str(error)[:200])
            raise Unauthorized("this token is not valid") from None
        groups = claims.get(self._claim, [])
        named = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
        return Bearer(str(claims["sub"])[:200], tuple(group for group in named if isinstance(group, str)))

    async def _key(self, header: dict[str, Any]) -> Any:
        """The key of a token: at once where it is known, unless all keys are old and the provider has not failed.

        All who wait do so for one answer of the provider, or for its silence.
        """
        import jwt

        found = self._known(header.get("kid"))
        moment = time.monotonic()
        age, pause = moment - self._fetched, _FAILED_FOR_S if self._keys is None else _AGAIN_S
        if self._fetching is None and (found is None or age > _KEYS_FOR_S / 2) and moment - self._ended > pause:
            self._fetching = asyncio.create_task(self._fetch())
        if self._fetching is not None and (found is None or (age > _KEYS_FOR_S and not self._failed)):
            await asyncio.shield(self._fetching)  # who goes away leaves it to the others
            found = self._known(header.get("kid"))
        if self._keys is None:
            raise Unavailable("the identity provider does not answer", retry_after_s=5)
        if found is None:
            raise jwt.InvalidTokenError("signed by an unknown key")
        return found

    def _known(self, kid: object) -> Any:
        keys = [] if self._keys is None else self._keys.keys
        return next((key for key in keys if key.key_id == kid), None)

    async def _fetch(self) -> None:
        import jwt

        failed = True
        try:
            async with asyncio.timeout(_ANSWER_S), httpx2.AsyncClient(timeout=None, follow_redirects=False) as http:
                where = (self._issuer or "").rstrip("/") + "/.well-known/openid-configuration"
                about = (await http.get(where)).raise_for_status().json()
                if about["issuer"] != self._issuer:
                    raise ValueError(f"it calls itself {about['issuer']!r}")
                self._keys = jwt.PyJWKSet.from_dict((await http.get(about["jwks_uri"])).raise_for_status().json())
            self._fetched, failed = time.monotonic(), False
        except (httpx2.HTTPError, TimeoutError, jwt.PyJWTError, ValueError, KeyError, TypeError) as error:
            why = str(error)[:200] or f"no answer in {_ANSWER_S:g} s"
            log.warning("the keys of the identity provider can't be had", issuer=self._issuer, error=why)
        finally:
            self._failed, self._ended, self._fetching = failed, time.monotonic(), None

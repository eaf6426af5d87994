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
_AGAIN_S = 30.0
"""Between two looks for a key that is not known: a stranger's tokens must not become requests to the provider."""


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
        self._fetched = -_KEYS_FOR_S
        self._fetching = asyncio.Lock()
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
        import jwt

        async with self._fetching:
            found = self._known(header.get("kid"))
            age = time.monotonic() - self._fetched
            if age > _KEYS_FOR_S or (found is None and age > _AGAIN_S):
                await self._fetch()
                found = self._known(header.get("kid"))
        if found is None:
            raise jwt.InvalidTokenError("signed by an unknown key")
        return found

    def _known(self, kid: object) -> Any:
        keys = [] if self._keys is None else self._keys.keys
        return next((key for key in keys if key.key_id == kid), None)

    async def _fetch(self) -> None:
        import jwt

        self._fetched = time.monotonic()
        try:
            async with httpx2.AsyncClient(timeout=5.0, follow_redirects=False) as http:
                where = (self._issuer or "").rstrip("/") + "/.well-known/openid-configuration"
                about = (await http.get(where)).raise_for_status().json()
                if about["issuer"] != self._issuer:
                    raise ValueError(f"it calls itself {about['issuer']!r}")
                self._keys = jwt.PyJWKSet.from_dict((await http.get(about["jwks_uri"])).raise_for_status().json())
        except (httpx2.HTTPError, jwt.PyJWTError, ValueError, KeyError, TypeError) as error:
            log.warning("the keys of the identity provider can't be had", issuer=self._issuer, error=str(error)[:200])
            if self._keys is None:
                self._fetched = -_KEYS_FOR_S
                raise Unavailable("the identity provider does not answer", retry_after_s=5) from None

"""Who is asking: the tenant behind a request, whether its key may do that, and how much it has under way.

A caller has an API key or a bearer token of an OpenID Connect provider: a JSON Web Token, verified with the keys that
the provider publishes (`Tokens`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import httpx2
import structlog
from fastapi import Depends, Request

from ..context import Context
from ..errors import Forbidden, RateLimited, ServiceError, Unauthorized, Unavailable
from ..identity import Caller
from ..settings import Settings
from ..tenants.keys import caller_by_groups, caller_by_key, default_caller

ADMITTED = "remat.admitted"
"""Where a request's scope holds what ends its being counted; the outermost layer calls each."""
_MEMORY_S = 2.0
"""A revoked key, or a raised epoch, is noticed after at most this."""

log = structlog.get_logger("remat_service.web.authentication")

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


class Admission:
    """Counts by tenant what is under way: requests from the moment their key is known, streams as long as they last.

    Args:
        rate: of requests a second, after a burst of one second's; 0 for no limit.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        most_per_tenant: int,
        what: str = "requests",
        rate: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._what, self._rate, self._clock = most_per_tenant, what, rate, clock
        self._under_way: Counter[str] = Counter()
        self._full_at: dict[str, float] = {}  # when a tenant's bucket is full again: one that is full is forgotten

    def enter(self, tenant_id: str) -> None:
        """One more.

        Raises:
            RateLimited: there are too many already, or they come too fast.
        """
        if self._under_way[tenant_id] >= self._most:
            raise RateLimited(
                f"{self._most} {self._what} of this tenant are under way, the most at once", retry_after_s=1
            )
        if self._rate:
            self._spend(tenant_id)
        self._under_way[tenant_id] += 1

    def _spend(self, tenant_id: str) -> None:
        now = self._clock()
        if len(self._full_at) > 10_000:
            self._full_at = {known: at for known, at in self._full_at.items() if at > now}
        full_at = max(now, self._full_at.get(tenant_id, now)) + 1.0 / self._rate
        late_s = full_at - now - max(1.0, 1.0 / self._rate)
        if late_s > 1e-9:
            raise RateLimited(
                f"{self._what} of this tenant come faster than {self._rate:g} a second", retry_after_s=math.ceil(late_s)
            )
        self._full_at[tenant_id] = full_at

    def leave(self, tenant_id: str) -> None:
        """One has ended."""
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]


class Callers:
    """Looks tenants up, with a short memory: authenticated keys are the third of the three caches.

    Bound: 10,000 keys. Invalidation: two seconds, so that a revoked key or a raised epoch is noticed.
    Gain: a statement of 0.15 ms and, of a token, the check of its signature, for each request.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._tokens = context, Tokens(context.settings)
        self._known: dict[tuple[str, str | None], tuple[float, Caller]] = {}

    async def of(self, authorization: str | None, tenant: str | None = None) -> Caller:
        """The caller behind an Authorization header, or the default tenant where no key is needed.

        Args:
            tenant: which of its tenants a token speaks for; an API key has one only.

        Raises:
            Unauthorized: no key where one is needed, or not a valid one.
            Forbidden: a token that speaks for no tenant, or for several.
        """
        key = _bearer(authorization)
        if key is None and self._context.settings.require_keys:
            issuer = self._context.settings.oidc_issuer
            needed = "an API key" if not issuer else f"an API key, or a token of {issuer}"
            raise Unauthorized(f"this service needs {needed}: Authorization: Bearer …", issuer)
        name = (key or "", tenant)
        caller = self._remembered(name)
        if caller is not None:
            return caller
        async with self._context.locks.of(f"caller {name}"):  # of a burst, one asks the database
            caller = self._remembered(name)
            if caller is not None:
                return caller
            moment = self._context.clock.monotonic()
            caller = await self._look_up(key, tenant)
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[name] = (moment + _MEMORY_S, caller)
            return caller

    async def _look_up(self, key: str | None, tenant: str | None) -> Caller:
        groups = await self._tokens.verify(key) if key is not None and self._tokens.takes(key) else None
        async with self._context.database.read(brief=True) as connection:
            if key is None:
                return await default_caller(connection)
            if groups is None:
                return await caller_by_key(connection, key)
            return await caller_by_groups(connection, groups, tenant)

    def _remembered(self, name: tuple[str, str | None]) -> Caller | None:
        found = self._known.get(name)
        return found[1] if found is not None and found[0] > self._context.clock.monotonic() else None


def _bearer(authorization: str | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("Authorization must be: Bearer KEY")
    return key.strip()


def caller_with(*scopes: str) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: the caller, who must be allowed one of `scopes`."""

    async def dependency(request: Request) -> Caller:
        callers: Callers = request.app.state.callers
        caller = await callers.of(*credentials(request))
        if not {*scopes} & {*caller.allowed}:
            raise Forbidden(f"this API key lacks the scope {scopes[0]!r}")
        named = {"tenant": caller.tenant} | ({"key": caller.key_id} if caller.key_id else {})
        structlog.contextvars.bind_contextvars(**named)  # every line of this request says so
        admit(request, request.app.state.admission, caller)
        return caller

    return dependency


solver, reader = caller_with("solve"), caller_with("read")
Solver = Annotated[Caller, Depends(solver)]
Reader = Annotated[Caller, Depends(reader)]
"""Parameters of routes: the caller, whose key must have that scope."""


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(_context)]
"""A parameter of routes: this process's share of the service."""


def credentials(request: Request) -> tuple[str | None, str | None]:
    """What a request says of its caller: `Authorization`, and `Remat-Tenant` where a token speaks for several."""
    return request.headers.get("authorization"), request.headers.get("remat-tenant")


def admit(request: Request, admission: Admission, caller: Caller) -> None:
    """Count a request up to the end of its response.

    Raises:
        RateLimited: there are too many already.
    """
    admission.enter(caller.tenant_id)
    request.scope.setdefault(ADMITTED, []).append(partial(admission.leave, caller.tenant_id))


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
                    "REMAT_OIDC_ISSUER is set, and PyJWT is not installed: "
                    "run pip install '.[oidc]' in a clone of remat"
                ) from None

    def takes(self, token: str) -> bool:
        """Whether this is a token for us to verify, rather than an API key."""
        return bool(self._issuer) and token.count(".") == 2

    async def verify(self, token: str) -> tuple[str, ...]:
        """The provider's groups that the subject of a token is in.

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
        return tuple(group for group in named if isinstance(group, str))

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

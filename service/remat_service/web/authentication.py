"""Who is asking: the tenant behind a request, whether its key may do that, and how much it has under way."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import structlog
from fastapi import Depends, Request

from ..context import Context
from ..errors import Forbidden, RateLimited, Unauthorized
from ..identity import Caller
from ..tenants.keys import caller_by_groups, caller_by_key, default_caller
from .tokens import Tokens

ADMITTED = "remat.admitted"
"""Where a request's scope holds what ends its being counted; the outermost layer calls each."""
_MEMORY_S = 2.0
"""A revoked key, or a raised epoch, is noticed after at most this."""


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
        bearer = await self._tokens.verify(key) if key is not None and self._tokens.takes(key) else None
        async with self._context.database.read(brief=True) as connection:
            if key is None:
                return await default_caller(connection)
            if bearer is None:
                return await caller_by_key(connection, key)
            return await caller_by_groups(connection, bearer.groups, tenant)

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

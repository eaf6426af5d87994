"""Plans from a service, asked for from an event loop: one problem, or many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Unpack

import httpx2

from remat_ir import Answer, InvalidData, Problem

from ..errors import InvalidResponse, ServiceError, Unreachable
from ..settings import checked_url, settings
from . import service
from .check import checked
from .http import AsyncHttp, Timeouts, come_back_s
from .options import SolveFields, SolveOptions, solve_options
from .sources import LONGEST_POLL_S, PATIENCE_S


class AsyncRemat:
    """A service's plans for an event loop, with the retries, deadlines and checks of `ServicePlanner`.

    Args:
        base_url, api_key: the service; None takes `REMAT_BASE_URL` and `REMAT_API_KEY`.
        at_once: problems under way at once; others wait for their turn, which their time limits do not count.
        patience_s: seconds beyond a problem's time limit for which it is waited for: the limit counts solving, not
            queueing.
        transport: what carries the requests; tests plug the real application in here, in-process.

    Raises:
        InvalidData: there is no URL, or it is none; or `REMAT_OFFLINE` is set.

    Example:
        >>> import asyncio, remat
        >>> async def main(problems):
        ...     async with AsyncRemat("http://127.0.0.1:8750") as client:
        ...         return await client.solve_many(problems, time_limit_s=30.0)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        at_once: int = 32,
        timeouts: Timeouts | None = None,
        patience_s: float = PATIENCE_S,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        here = settings()
        url = base_url or here.base_url
        if here.offline:
            raise InvalidData("REMAT_OFFLINE is set: no service is asked")
        if url is None:
            raise InvalidData("which service? give its URL, or set REMAT_BASE_URL")
        if at_once < 1:
            raise InvalidData(f"at_once must be at least 1, not {at_once}")
        self.http = AsyncHttp(
            checked_url(url),
            api_key=api_key if api_key is not None else here.api_key,
            timeouts=timeouts,
            at_once=at_once + 1,  # one to cancel with
            transport=transport,
        )
        self.at_once, self.patience_s = at_once, patience_s
        self._room = asyncio.Semaphore(at_once)

    async def __aenter__(self) -> AsyncRemat:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; solves under way go on at the service."""
        await self.http.close()

    async def solve(self, problem: Problem, **options: Unpack[SolveFields]) -> Answer:
        """The answer to one problem, checked against it.

        Ending the wait, as a cancelled task does, does not end the solve: `wait` finds it again.

        Args:
            options: fields of `SolveOptions`.

        Raises:
            InvalidData: an option that does not exist, or a wrong value.
            ServiceError: unreachable, refused, failed, out of time, or an answer that is not what it claims to be.
        """
        return await self._solve(problem, solve_options(AsyncRemat.solve, SolveFields, None, options))

    async def _solve(self, problem: Problem, chosen: SolveOptions) -> Answer:
        async with self._room:
            return await self._solved(problem, chosen)

    async def _solved(self, problem: Problem, chosen: SolveOptions) -> Answer:
        wait_until = time.monotonic() + chosen.time_limit_s
        give_up_at = wait_until + self.patience_s
        call = service.submission(problem, chosen)
        answer = service.answer_of(await self.http.call(**call, give_up_at=give_up_at, wait_until=wait_until))
        if not answer.status.ended:
            if answer.id is None:
                raise InvalidResponse(f"{self.http.base_url} is solving the problem but does not say under which id")
            with service.found_again(answer.id):
                answer = await self.wait(answer.id, give_up_at=give_up_at)
        return await asyncio.to_thread(checked, problem, answer)

    async def wait(self, solve_id: str, *, give_up_at: float = float("inf")) -> Answer:
        """Poll a solve until it ends; past `give_up_at`, a moment of `time.monotonic()`, it is cancelled and its best
        plan taken. The answer is not checked, since its problem is not known here.

        Raises:
            ServiceError: as `solve`.
        """
        while (left := give_up_at - time.monotonic()) > 0:
            wait_s = round(min(LONGEST_POLL_S, left), 2)
            call, began = service.polling(solve_id, wait_s), time.monotonic()
            reply = await self.http.call(**call, give_up_at=give_up_at + 1.0, wait_until=give_up_at)
            answer = service.answer_of(reply)
            if answer.status.ended:
                return answer
            await asyncio.sleep(come_back_s(reply, wait_s, time.monotonic() - began, give_up_at))
        reply = await self.http.call(**service.cancellation(solve_id), give_up_at=time.monotonic() + 5.0)
        answer = service.answer_of(reply)
        if not answer.status.ended:
            raise Unreachable(f"{self.http.base_url} did not end solve {solve_id} in the time given")
        return answer

    async def solve_each(
        self, problems: Sequence[Problem], **options: Unpack[SolveFields]
    ) -> AsyncIterator[tuple[int, Answer | ServiceError]]:
        """The answers to many problems as they come: each with its position, an error in place of what has none.

        Equal problems are solved once, by the service.

        Raises:
            InvalidData: an option that does not exist, or a wrong value.
        """
        chosen = solve_options(AsyncRemat.solve_each, SolveFields, None, options)

        async def one(i: int) -> tuple[int, Answer | ServiceError]:
            try:
                return i, await self._solve(problems[i], chosen)
            except ServiceError as error:
                return i, error

        tasks = [asyncio.create_task(one(i)) for i in range(len(problems))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for left in tasks:
                left.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def solve_many(self, problems: Sequence[Problem], **options: Unpack[SolveFields]) -> list[Answer]:
        """The answers to many problems, in their order.

        Raises:
            InvalidData: an option that does not exist, or a wrong value.
            ServiceError: of the first problem that has no answer, once all have ended.
        """
        found = dict([pair async for pair in self.solve_each(problems, **options)])
        answers: list[Answer] = []
        for i in range(len(problems)):
            answer = found[i]
            if isinstance(answer, ServiceError):
                raise answer
            answers.append(answer)
        return answers

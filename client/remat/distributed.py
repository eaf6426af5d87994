"""Several ranks that train one model, and plan together: the first one asks, each runs the same plan.

Each checks that it has the same graph. A stage of a pipeline is planned by its rank alone.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from remat_ir import Answer, Problem, RematError, problem_digest

from .errors import RanksDiffer
from .planning.check import checked
from .planning.coordinator import Coordinator, in_thread, patiently
from .planning.options import SolveOptions
from .planning.planner import CoordinatedPlanner, Planner, planner_for
from .planning.profiles import Profile, ProfileTable, profiles_of
from .settings import settings

log = logging.getLogger("remat")

STAGE = "torch.distributed.pipelining.stage"

WORD_S = 5.0
"""Seconds after which a rank that others wait for says that it is still at work."""


def surrounding_pipeline() -> frozenset[int] | None:
    """The ranks of the pipeline whose stage makes the present call; None: no stage does."""
    if STAGE not in sys.modules:
        return None
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == STAGE:
            stage: Any = frame.f_locals.get("self")
            if hasattr(stage, "stage_index"):
                return frozenset(dist.get_process_group_ranks(stage.group))
        frame = frame.f_back
    return None


T = TypeVar("T")


class RankPlanner(CoordinatedPlanner):
    """A planner for one of several ranks that train the same step on different data.

    All ranks must call it for the same steps in the same order, which they do when they train in step. Costs come from
    the first rank's measurements, so that all ranks pose one problem; its digest is compared on every rank.

    Args:
        planner: who is asked by the first rank: as for `remat.optimize`.
        group: the process group; None is the default one.
        strict: as for `planner_for`.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """

    def __init__(self, planner: Planner | str | None = None, group: Any = None, *, strict: bool = False) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ranks that plan together need torch.distributed: call init_process_group first")
        self._alone = planner_for(planner, strict=strict)
        super().__init__(self._alone.asked, self._alone.profiles, Ranks(group))
        self._ranks = frozenset(dist.get_process_group_ranks(group))

    def here(self) -> CoordinatedPlanner:
        """Itself; in a pipeline's schedule the planner of this rank alone, where other ranks of the group run other
        stages and wait for what this one sends."""
        pipeline = surrounding_pipeline()
        if pipeline is None or len(self._ranks & pipeline) < 2:
            return self
        log.warning(
            "a stage of a pipeline is planned by its rank alone: the ranks %s run stages of their own; give ranks= the "
            "group of the ranks that run this stage",
            sorted(self._ranks),
        )
        return self._alone


def planner_of(planner: Planner | str | None, options: SolveOptions) -> CoordinatedPlanner:
    """The planner that an argument means with the options `strict` and `ranks`.

    Raises:
        InvalidData: not a planner.
        RuntimeError: `ranks` is set, and torch.distributed is not initialized.
    """
    strict = options.strict or settings().strict
    if options.ranks is False:
        return planner_for(planner, strict=strict)
    return RankPlanner(planner, None if options.ranks is True else options.ranks, strict=strict)


_HOST_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Of a group whose backend takes messages from accelerators only, one of the same ranks on the host, however many
modules are planned among them."""


class Ranks(Coordinator):
    """The coordinator of the ranks of a process group: the first one measures and asks, all verify.

    What they say lies on the host, in a group of its own where the backend takes messages from accelerators only: a
    message on a device would be read only after all that was issued there, in each step until the plan has come.
    """

    in_step = True

    def __init__(self, group: Any = None) -> None:
        taken = dist.Backend.backend_capability.get(dist.get_backend(group), ["cpu"])
        self.group = group if "cpu" in taken else _on_host(group or dist.group.WORLD)
        self.first = dist.get_rank(group) == 0

    def table(self, own: ProfileTable) -> RankProfiles:
        """The first rank's table."""
        return RankProfiles(self, own)

    def costs(self, own: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The first rank's numbers; this rank's own where those have other lengths."""
        mine = {name: list(numbers) for name, numbers in own.items()}
        heard: dict[str, list[int]] = self.share(lambda: mine)
        fits = {name: len(numbers) for name, numbers in heard.items()} == {n: len(own[n]) for n in own}
        return heard if fits else mine

    def same(self, problem: Problem) -> None:
        """Compare the problem's digest with the first rank's.

        Raises:
            RanksDiffer: on every rank, where some rank has another one.
        """
        digest = problem_digest(problem)
        heard = self.share(lambda: digest)
        if not self.all_equal(heard == digest):
            raise RanksDiffer(
                f"rank {dist.get_rank(self.group)} has graph and budget {digest[:12]}, the first rank {heard[:12]}: "
                "all ranks must train the same model on inputs of the same shape"
            )

    def answer(self, problem: Problem, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives on the first rank, on all of them, once all are seen to pose the same problem; checked.

        Raises:
            RanksDiffer: some rank poses another problem.
            RematError: the first rank got no answer; every rank hears why.
        """
        self.same(problem)
        told = self.awaited(lambda: ask().to_json() if self.first else None)
        return checked(problem, Answer.from_json(self.share(told)))

    def later(self, problem: Problem, ask: Callable[[], Answer]) -> RankLater:
        """The first rank's answer, on all of them at the start of the same step.

        Args:
            ask: called on the first rank only, in a thread; it must not speak with the other ranks, nor call torch.
        """
        return RankLater(self, problem, ask)

    def awaited(self, make: Callable[[], T]) -> Callable[[], T]:
        """What gives what `make` returns, or raises, once it has ended on every rank, in threads.

        The ranks tell each other that they are still at work: a message that one waits for all the time would end by
        the timeout of the group.
        """
        work = in_thread(make)
        while not self.all_equal(bool(wait([work], WORD_S).done)):
            pass
        return work.result

    def all_equal(self, here: bool) -> bool:
        """Whether something holds on every rank."""
        return self.least([int(here)]) == [1]

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Of each of the numbers, the least that a rank has."""
        return self._reduced(numbers, dist.ReduceOp.MIN)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Of each of the numbers, the most that a rank has."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[int], how: Any) -> list[int]:
        found = torch.tensor(list(numbers))
        dist.all_reduce(found, how, group=self.group)
        return [int(number) for number in found.tolist()]

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, on all of them; JSON, so nothing received is ever code.

        Raises:
            RematError: `make` raised on the first rank, which raises that itself; every rank hears why.
        """
        text, failed = _word(make) if self.first else (b"", None)
        heard = json.loads(self._broadcast(text))
        if failed is not None:
            raise failed
        if "error" in heard:
            raise RematError(f"the first rank failed: {heard['error']}")
        return heard["made"]

    def gather(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns on each rank, on all of them, in the order of the ranks; JSON, as for `share`.

        Raises:
            RematError: `make` raised on some rank, which raises that itself; every rank hears why.
        """
        text, failed = _word(make)
        heard = [json.loads(one) for one in self._all(text)]
        if failed is not None:
            raise failed
        for rank, one in enumerate(heard):
            if "error" in one:
                raise RematError(f"rank {rank} failed: {one['error']}")
        return [one["made"] for one in heard]

    def _all(self, text: bytes) -> list[bytes]:
        """The texts of all ranks."""
        world = dist.get_world_size(self.group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.group)
        longest = max(int(size.item()) for size in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(found, own, group=self.group)
        return [bytes(one[: int(size.item())].tolist()) for one, size in zip(found, sizes, strict=True)]

    def _broadcast(self, text: bytes) -> bytes:
        """The first rank's text."""
        size = torch.tensor([len(text)])
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast(size, source, group=self.group)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.first:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, source, group=self.group)
        return bytes(data.tolist())


def _on_host(group: Any) -> Any:
    """The ranks of a group as one that speaks on the host."""
    if group not in _HOST_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _HOST_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _HOST_GROUPS[group]


class RankLater:
    """An answer that the first rank looks for next to the training and that all ranks have at the same step.

    The ranks agree at the start of each step whether the first has its answer; it then tells it. Nothing is waited for
    but the word of the other ranks.
    """

    def __init__(self, ranks: Ranks, problem: Problem, ask: Callable[[], Answer]) -> None:
        self._ranks, self._problem = ranks, problem
        self._asked = in_thread(lambda: patiently(ask)) if ranks.first else None
        self._ended = False
        self._answer: Answer | None = None

    def done(self) -> bool:
        """Whether all ranks have it, or none will. Every rank must ask at the same step."""
        if not self._ended and self._ranks.all_equal(self._asked is None or self._asked.done()):
            self._ended, self._answer = True, self._heard(self._ranks.share(self._told))
        return self._ended

    def result(self) -> Answer | None:
        """The answer, checked; None: there is none."""
        return self._answer

    def _heard(self, told: dict[str, Any]) -> Answer | None:
        try:
            if "error" in told:
                raise RematError(told["error"])
            return checked(self._problem, Answer.from_json(told["answer"]))
        except Exception as error:  # noqa: BLE001 – the planner's trouble is no reason to stop training
            log.warning("no better plan came, training goes on by the quick one: %s", error)
            return None

    def _told(self) -> dict[str, Any]:
        assert self._asked is not None
        try:
            return {"answer": self._asked.result().to_json()}
        except Exception as error:  # noqa: BLE001 – the others wait for a word, whatever happens here
            return {"error": _reason(error)}


class RankProfiles(ProfileTable):
    """The first rank's table of measured costs, seen by all ranks."""

    alone = False

    def __init__(self, ranks: Ranks, own: ProfileTable) -> None:
        self._ranks, self._table = ranks, own

    def get(self, device: str, signatures: Iterable[str]) -> dict[str, Profile]:
        """What the first rank knows; every rank then measures the same rest.

        Raises:
            RanksDiffer: the ranks ask for other kernels, so they do not train the same step.
        """
        signatures = sorted(signatures)
        asked = hashlib.sha256(json.dumps(signatures).encode()).hexdigest()
        heard = self._ranks.share(lambda: {"asked": asked, "known": self._table.get(device, signatures)})
        if not self._ranks.all_equal(heard["asked"] == asked):
            raise RanksDiffer(
                f"rank {dist.get_rank(self._ranks.group)} or another one runs other kernels than the first rank: all "
                "ranks must train the same model on inputs of the same shape"
            )
        return profiles_of(heard["known"])

    def forget(self, device: str, signatures: Iterable[str]) -> None:
        """Delete those of the first rank's machine; no rank waits for another."""
        if self._ranks.first:
            self._table.forget(device, signatures)

    def meets(self, groups: Sequence[Sequence[int]], order: str) -> bool:
        """Whether all ranks of the groups are among these; every rank of these is here.

        Raises:
            RanksDiffer: some rank runs other collectives, or in another order.
        """
        if not self._ranks.all_equal(self._ranks.share(lambda: order) == order):
            raise RanksDiffer(
                f"rank {dist.get_rank(self._ranks.group)} or another one runs other collectives than the first rank, "
                "or in another order: all ranks must train the same model on inputs of the same shape"
            )
        here = set(dist.get_process_group_ranks(self._ranks.group))
        return self._ranks.all_equal(all(here.issuperset(group) for group in groups))

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """The first rank's measurements stand for all."""
        return profiles_of(self._ranks.share(lambda: self._table.put(device, profiles)))

    def derived(self, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """The first rank's, of kernels that were not all measured: nothing is written."""
        return profiles_of(self._ranks.share(lambda: dict(profiles)))


def _word(make: Callable[[], Any]) -> tuple[bytes, Exception | None]:
    """What `make` returns, or why it raised: the others wait for a word, whatever happens here."""
    try:
        return json.dumps({"made": make()}).encode(), None
    except Exception as error:  # noqa: BLE001 – it is returned, and raised once the others know
        return json.dumps({"error": _reason(error)}).encode(), error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

"""Data parallel: the first rank asks, every rank runs the same plan and checks that it has the same graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from remat_ir import Answer, Problem, Progress, RematError, problem_digest

from .planner import Planner, planner_for, profile_table
from .profiles import Profile


class RanksDiffer(RematError):
    """The ranks of a job do not train the same step: their graphs or budgets are not equal."""


class RankPlanner:
    """A planner for one of several ranks that train the same step on different data.

    All ranks must call it for the same steps in the same order, which they do when they train in step. Costs come from
    the first rank's measurements, so that all ranks pose one problem; its digest is compared on every rank.

    Args:
        planner: who is asked by the first rank: as for `remat.optimize`.
        group: the process group; None is the default one.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """

    def __init__(self, planner: Planner | str | None = None, group: Any = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("RankPlanner needs torch.distributed: call init_process_group first")
        self.group = group
        self.first = dist.get_rank(group) == 0
        self.asked = planner_for(planner)
        self.profiles = RankProfiles(self)

    def plan(
        self,
        problem: Problem,
        *,
        method: str = "auto",
        time_limit_s: float = 60.0,
        max_gap: float = 0.001,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        """The first rank's answer, on every rank.

        Raises:
            RanksDiffer: some rank poses another problem.
            RematError: the first rank got no answer; every rank hears why.
        """
        digest = problem_digest(problem)

        def ask() -> dict[str, Any]:
            try:
                answer = self.asked.plan(
                    problem, method=method, time_limit_s=time_limit_s, max_gap=max_gap, on_progress=on_progress
                )
            except RematError as error:
                return {"digest": digest, "error": str(error)}
            return {"digest": digest, "answer": answer.to_json()}

        heard = self.share(ask)
        equal = torch.tensor([int(heard["digest"] == digest)], device=_device(self.group))
        dist.all_reduce(equal, dist.ReduceOp.MIN, group=self.group)
        if not int(equal.item()):
            raise RanksDiffer(
                f"rank {dist.get_rank(self.group)} has graph and budget {digest[:12]}, the first rank "
                f"{heard['digest'][:12]}: all ranks must train the same model on inputs of the same shape"
            )
        if "error" in heard:
            raise RematError(f"the first rank has no plan: {heard['error']}")
        return Answer.from_json(heard["answer"])

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, on all of them; JSON, so nothing received is ever code."""
        device = _device(self.group)
        text = json.dumps(make()).encode() if self.first else b""
        size = torch.tensor([len(text)], device=device)
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast(size, source, group=self.group)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        if self.first:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, source, group=self.group)
        return json.loads(bytes(data.cpu().tolist()))


class RankProfiles:
    """The first rank's table of measured costs, seen by all ranks."""

    def __init__(self, ranks: RankPlanner) -> None:
        self._ranks = ranks
        self._table = profile_table(ranks.asked)

    def get(self, device: str, signatures: Sequence[str]) -> dict[str, Profile]:
        """What the first rank knows; every rank then measures the same rest."""
        known = self._ranks.share(lambda: {s: list(p) for s, p in self._table.get(device, signatures).items()})
        return {s: Profile(*p) for s, p in known.items()}

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """The first rank's measurements stand for all."""
        stands = self._ranks.share(lambda: {s: list(p) for s, p in self._table.put(device, profiles).items()})
        return {s: Profile(*p) for s, p in stands.items()}


def _device(group: Any) -> torch.device:
    """Where this group's messages have to lie."""
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")

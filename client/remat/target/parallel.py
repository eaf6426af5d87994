"""What a training step needs on one rank of many: replicas, sharded states, and the part of a model split by tensors.

Nothing is sent, and messages take no time here. Sharding is that of `fully_shard` around each block of a model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from torch import fx, nn

from remat_ir import InvalidData

from ..capture.operations import Kind, Op, Operations, to_graph
from ..profiling.fixed import all_gradients
from ..profiling.optimizers import UpdateMemory
from ..training.step import TrainingStep

FORM = "write dp=8, fsdp=8, tp=4, cp=2, ep=8 or pp=4, or several of them with commas"

AT_WORK = 2
"""Blocks whose parameters are gathered at a time: the one that runs, and the next one, which is fetched meanwhile."""


class Parallel(NamedTuple):
    """So many ranks for each way to spread a job.

    Attributes:
        dp: replicas by DistributedDataParallel, whose buckets hold all gradients.
        fsdp: ranks that share parameters, gradients and optimizer state by `fully_shard`.
        tp: ranks that share each layer; the function that makes the model is given it, and makes one rank's part.
        cp: ranks that share each sequence; the function is given it, and makes a call of one rank's tokens. Keys and
            values of the others come by in turn, a share at a time (ring attention).
        ep: ranks that share the experts of each layer; the function is given it, and makes one rank's part. A rank
            computes as many tokens as it sends away, which is so where the router is balanced.
        pp: ranks of a pipeline; the function is given `stage` and `stages`, and makes that stage's part.
        micros: micro-batches of a pipeline's step; left out, two a rank.
        schedule: of the pipeline, by torch's name: 1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    micros: int = 0
    schedule: str = ""

    @classmethod
    def of(cls, text: str | None) -> Parallel:
        """Read "fsdp=8,tp=2".

        Raises:
            InvalidData: it is something else, or a combination that is not known.
        """
        found: dict[str, Any] = {}
        for part in (text or "").split(",") if text else ():
            name, _, degree = part.strip().partition("=")
            number = name == "schedule" or (degree.isdecimal() and int(degree) >= 1)
            if name not in cls._fields or name in found or not degree or not number:
                raise InvalidData(f"parallel: {part.strip()!r} is not a way to spread a job: {FORM}")
            found[name] = degree if name == "schedule" else int(degree)
        made = cls(**found)
        if made.dp > 1 and made.fsdp > 1:
            raise InvalidData("parallel: dp replicates the gradients that fsdp shards: write one of them")
        if made.pp == 1 and (made.micros or made.schedule):
            raise InvalidData("parallel: micros and schedule are those of a pipeline: write pp=4 too")
        if made.pp > 1 and made.dp * made.fsdp > 1:
            raise InvalidData(
                "parallel: a stage of a pipeline inside DDP or fully_shard is not planned: no pp with dp, fsdp"
            )
        if made.pp == 1:
            return made
        return made._replace(micros=made.micros or 2 * made.pp, schedule=made.schedule or "1F1B")

    @property
    def ranks(self) -> int:
        """In all."""
        return self.dp * self.fsdp * self.tp * self.cp * self.ep * self.pp

    @property
    def shared(self) -> dict[str, int]:
        """What the function that makes the model is given: how many ranks share a layer, a sequence, the experts."""
        return {name: degree for name in ("tp", "cp", "ep") if (degree := getattr(self, name)) > 1}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if value not in (0, 1, ""))

    def check_released(self) -> None:
        """Refuse gradients that are released inside the backward pass where ranks or micro-batches add them up.

        Raises:
            InvalidData: they are.
        """
        if self.pp > 1:
            raise InvalidData("release_gradients does not go with pp: gradients add up over the micro-batches")
        if self.dp * self.fsdp * self.cp * self.ep > 1:
            raise InvalidData(
                "release_gradients does not go with dp, fsdp, cp or ep: ranks reduce gradients before updates"
            )

    def of_update(self, update: UpdateMemory) -> UpdateMemory:
        """What the optimizer's step takes on one rank."""
        return UpdateMemory(*(ceil(size / self.fsdp) for size in update))

    def fixed(self, model: nn.Module) -> dict[str, int]:
        """Bytes that are there throughout on one rank besides those of a job on one, by what they are."""
        if self.dp > 1:
            return {"DDP's buckets": all_gradients(model)}
        if self.fsdp == 1:
            return {}
        blocks = blocks_of(model)
        gathered = sorted(_bytes(block) for block in blocks)[-AT_WORK:]
        gradients = 2 * max(map(all_gradients, blocks))  # of the block that is reduced, and the copy that is sent
        return {"parameters that are gathered": sum(gathered), "gradients that are reduced": gradients}

    def of_rank(self, step: TrainingStep) -> TrainingStep:
        """A step with the shards of one rank in the place of whole parameters, states and gradients."""
        if self.fsdp == 1:
            return step
        shares = ("parameters", "optimizer state", "gradients")
        fixed = {name: ceil(size / self.fsdp) if name in shares else size for name, size in step.fixed.items()}
        ops = sharded_gradients(step.operations, self.fsdp, step.parameters)
        graph, values = to_graph(ops, step.profiled.kernels, sum(fixed.values()))
        return replace(step, operations=ops, graph=graph, values=values, fixed=fixed)


ALONE = Parallel()
"""One rank."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in a model's longest lists of modules, each of which `fully_shard` gathers alone; else the model."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    longest = max(lists, key=len, default=None)
    return [model] if longest is None else list(longest.children())


def sharded_gradients(step: Operations, ranks: int, parameters: Collection[int]) -> Operations:
    """The step where each gradient is reduced to a rank's share as soon as it is complete, and freed.

    Args:
        parameters: the positions of the parameters among the tensors that the step is given.
    """
    flow = step.flow
    trained = frozenset(flow.given[n] for n in parameters)
    pairs = zip(flow.primals, flow.backward_results, strict=False)
    results = list(dict.fromkeys(r for p, r in pairs if p in trained and isinstance(r, fx.Node)))
    returned = {s for r in flow.forward_results if isinstance(r, fx.Node) for s in flow.storages_of.get(r, ())}
    sizes, keep = list(step.sizes), set(step.keep)
    copies = {op.nodes[0]: op for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in results}
    ops = [op for op in step.ops if op not in copies.values()]
    after: dict[int, list[Op]] = {}
    for result in results:
        own = frozenset(flow.storages_of.get(result, ()))
        makers = [at for at, op in enumerate(ops) if own & set(op.makes)]
        if not makers or not (own & keep or result in copies):
            continue
        keep -= own - returned
        keep -= set(copies[result].makes) if result in copies else set()
        value = result.meta["val"]
        sizes.append(ceil(value.numel() / ranks) * value.element_size())
        keep.add(len(sizes) - 1)
        reduced = Op(Kind.ACCUMULATE, (result,), tuple(sorted(own)), (len(sizes) - 1,))
        after.setdefault(max(makers), []).append(reduced)
    placed = [one for at, op in enumerate(ops) for one in (op, *after.get(at, ()))]
    turn = next(at for at, op in enumerate(placed) if op.kind is Kind.TURN)
    return replace(step, ops=tuple(placed), turn=turn, sizes=tuple(sizes), keep=frozenset(keep))


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())

"""What each of some ranks does, in a process of its own under `test_ranks.py`: cases by name, found as JSON."""

# no `from __future__ import annotations`: DDP looks at the annotations of a communication hook

import copy
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_collectives import COLLECTIVE_CASES
from ranks_pipelines import PIPELINE_CASES
from ranks_training import (
    FRACTION,
    WIDE,
    Block,
    blocks,
    buckets,
    compared,
    data,
    message,
    sharded_budget,
    trained,
    unreduced,
)
from small_models import Joined
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transferring import Mover

import remat
from remat import _compat
from remat.distributed import RankPlanner, Ranks, planner_of
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.quick import Better
from remat.planning.sources import GreedyPlanner
from remat.training.enable import backend_of, plans_of
from remat_ir import Answer, Graph, Link, Problem, RematError


def ddp(**options: Any) -> dict[str, Any]:
    plain, planned = blocks(), blocks()
    remat.enable(planned, budget=FRACTION, planner="greedy", ranks=True)
    accumulate = not options.get("static_graph")
    return compared(plain, planned, lambda m: trained(m, DistributedDataParallel(m, **options), 4, accumulate))


def chain_in_ddp() -> dict[str, Any]:
    plain, planned = blocks(), blocks()
    chained = remat.optimize_chain(planned, data(0), budget=remat.Fraction(0.6), planner="greedy", ranks=True)
    return compared(plain, chained, lambda m: trained(m, DistributedDataParallel(m), steps=4, accumulate=True))


def refused() -> dict[str, Any]:
    rank = dist.get_rank()
    model = blocks(2)
    chained = remat.optimize_chain(copy.deepcopy(model), data(0), budget=remat.Fraction(0.8), planner="greedy")
    searching = DistributedDataParallel(chained, find_unused_parameters=True)
    planned = remat.optimize(copy.deepcopy(model), (data(0),), budget="100%", planner="greedy", ranks=True)
    x = data(0).requires_grad_()

    def twice(module: nn.Module) -> None:
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    planner = RankPlanner("greedy")

    def optimized(x: torch.Tensor, budget: Any = FRACTION) -> nn.Module:
        return remat.optimize(copy.deepcopy(model), (x,), budget=budget, planner=planner)

    shapes = data(0, rows=8 + rank)
    return {
        "unused": message(lambda: searching(data(0))),
        "double chain": message(lambda: twice(chained)),
        "double": message(lambda: twice(optimized(x))),
        "shapes": message(lambda: optimized(shapes)),
        "budgets": message(lambda: optimized(data(0), 10**6 + rank)),
        "chains": message(lambda: remat.optimize_chain(list(model)[: 1 + rank], x, budget=FRACTION, planner=planner)),
        "still": float(planned(data(0)).sum().isfinite()),
    }


def later() -> dict[str, Any]:
    """At which look each rank sees that something is there, and what."""
    rank, ranks = dist.get_rank(), RankPlanner("greedy").coordinator
    graph = Graph(op_cost_ns=(4, 3), op_inputs=((), (0,)), value_op=(0, 1), value_bytes=(4, 4))
    problem = Problem(graph, 100)
    go = threading.Event()

    def ask() -> Answer:
        assert rank == 0
        assert go.wait(60)
        return GreedyPlanner().plan(problem)

    def make(answer: Answer) -> str:
        return f"made of {answer.cost_ns} in {threading.current_thread().name}"

    def fails(answer: Answer) -> str:
        raise RuntimeError("no room")

    def looked(ask: Any, make: Any, most: int = 4000) -> tuple[int, Any]:
        better = Better(ranks.later(problem, ask), ranks, lambda _: True, make)
        for look in range(most):
            if look == 5:
                go.set()
            made = better.take(ready=look >= 10 + 10 * rank)
            if better.over:
                return look, made
            time.sleep(0.002)
        return most, None

    def no_answer() -> Answer:
        raise RematError("nobody is there")

    made = looked(ask, make)
    one_fails = looked(ask, fails if rank else make)
    nobody = looked(no_answer, make)
    return {"made": made, "one fails": one_fails, "nobody": nobody, "shared": message(lambda: ranks.share(no_answer))}


class Slow:
    """A planner that takes longer than the ranks' messages may."""

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        time.sleep(15)
        return GreedyPlanner().plan(problem, options)


def long_solve() -> dict[str, Any]:
    """A solve that takes longer than the timeout of the group under which the other rank waits."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    graph = Graph(op_cost_ns=(4, 3), op_inputs=((), (0,)), value_op=(0, 1), value_bytes=(4, 4))
    return {"cost": RankPlanner(Slow(), group).plan(Problem(graph, 100)).cost_ns}


def while_tracing() -> dict[str, Any]:
    """Words between ranks where torch traces with Python's dispatcher, which keeps the interpreter's lock."""
    ranks, heard = RankPlanner("greedy").coordinator, 0
    with enable_python_dispatcher(), FakeTensorMode():
        for word in range(500):
            with _compat.only_real_tensors():
                heard += ranks.share(lambda word=word: word)
    return {"heard": heard}


def at_once() -> dict[str, Any]:
    """Training that starts on a quick plan, while the first rank asks for a better one."""
    plain, planned = blocks(), blocks()
    remat.enable(planned, budget=FRACTION, planner="local", ranks=True, wait=False, time_limit_s=3.0)
    return compared(plain, planned, lambda m: trained(m, DistributedDataParallel(m), steps=6))


def sizes() -> dict[str, Any]:
    """Three sizes, of which the one in between is not timed: the first rank's fitted costs stand for both."""
    plain, planned = blocks(), blocks()
    remat.enable(planned, budget=FRACTION, planner="greedy", ranks=True)
    found: dict[str, Any] = {"plain": [], "planned": []}
    for name, model in (("plain", plain), ("planned", planned)):
        wrapped = DistributedDataParallel(model)
        for rows in (128, 48, 80):
            found[name] += trained(model, wrapped, steps=1, rows=rows)
    steps = [p for p in plans_of(planned).plans if p is not None]
    return {
        **found,
        "overhead": max(p.answer.overhead or 0 for p in steps),
        "digest": [p.answer.digest for p in steps],
        "fitted": [len(p.step.profiled.fitted) for p in steps],
    }


def largest_batch() -> dict[str, Any]:
    """A search in which the second rank's loss holds more than the first one's."""
    beside = 2**18 if dist.get_rank() else 0

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean() + torch.zeros(beside, requires_grad=True).square().sum()

    found = remat.max_batch(
        lambda: blocks(4), lambda rows: data(0, rows), 16 * 2**20, 0.5,
        planner="greedy", loss=loss, multiple_of=512, precision=0.1, ranks=True,
    )  # fmt: skip
    return {"batch": found.batch, "tries": [[tried.batch, tried.fits, tried.measured_bytes] for tried in found.tries]}


def own_plans() -> dict[str, Any]:
    """No RankPlanner: each rank has batches of its own size, and plans of its own."""
    plain, planned = blocks(), blocks()
    remat.enable(planned, budget=FRACTION, planner="greedy")
    rows = 48 + 32 * dist.get_rank()
    return compared(plain, planned, lambda m: trained(m, DistributedDataParallel(m), rows=rows))


def sharded_units() -> dict[str, Any]:
    plain, planned = blocks(), blocks()
    planner = RankPlanner("greedy")
    for block in planned:
        remat.enable(block, budget=FRACTION, planner=planner)
    for model in (plain, planned):
        for block in model:
            fully_shard(block)
        fully_shard(model)
    found = {"plain": trained(plain, plain), "planned": trained(planned, planned)}
    answers = [next(iter(plans_of(b).plans)).answer for b in planned]
    return {**found, "overhead": min(a.overhead or 0 for a in answers), "digest": answers[0].digest}


def sharded_stages() -> dict[str, Any]:
    plain, planned = blocks(), blocks()
    chained = remat.optimize_chain(planned, data(0), budget=remat.Fraction(0.6), planner="greedy", ranks=True)
    for units in (plain, chained.stages):
        for unit in units:
            fully_shard(unit)
    fully_shard(plain)
    fully_shard(chained)
    return compared(plain, chained, lambda m: trained(m, m))


def sharded_refused() -> dict[str, Any]:
    nested, outside, older = blocks(2), blocks(2), blocks(2)
    remat.enable(nested, budget=FRACTION, planner="greedy", ranks=True)
    for block in nested:
        fully_shard(block)
    fully_shard(nested)
    fully_shard(outside)
    remat.enable(older, budget=FRACTION, planner="greedy", ranks=True)
    wrapped = FullyShardedDataParallel(older, device_id=torch.device("cpu"))
    views = blocks(2)
    remat.enable(views, budget=FRACTION, planner="greedy", ranks=True)
    kept = FullyShardedDataParallel(views, device_id=torch.device("cpu"), use_orig_params=True)
    return {
        "nested": message(lambda: nested(data(0))),
        "outside": message(lambda: remat.optimize(outside, (data(0),), budget=FRACTION, planner="greedy")),
        "older": message(lambda: wrapped(data(0))),
        "older, original parameters": message(lambda: kept(data(0))),
    }


def overlap() -> dict[str, Any]:
    """The order of events in the third step's backward pass: blocks begin, buckets are reduced."""

    def events(model: nn.Module, units: nn.Module, steps: int = 3) -> list[str]:
        seen: list[str] = []
        for number, unit in enumerate(units.children()):
            unit.register_full_backward_pre_hook(lambda *_, n=number: seen.append(f"block {n}"))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)

        def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append("reduce")
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / 2)

        wrapped.register_comm_hook(None, reduce)
        for step in range(steps):
            seen.clear()
            wrapped(data(step)).square().mean().backward()
        return list(seen)

    plain, by_block = blocks(), blocks()
    planner = RankPlanner("greedy")
    for block in by_block:
        remat.enable(block, budget=FRACTION, planner=planner)
    chained = remat.optimize_chain(blocks(), data(0), budget=remat.Fraction(0.6), planner=planner)
    whole = nn.Sequential(remat.enable(blocks(), budget=FRACTION, planner=planner))
    return {
        "plain": events(plain, plain),
        "blocks": events(by_block, by_block),
        "chain": events(chained, chained.stages),
        "whole": events(whole, whole),
    }


def on_accelerators_only() -> dict[str, Any]:
    """A backend that takes messages from accelerators only, as NCCL does: here it takes none, and counts them."""
    sent: list[str] = []

    class Silent(dist.ProcessGroup):
        def broadcast(self, *args: Any, **_: Any) -> Any:
            sent.append("broadcast")
            raise RuntimeError("no message on a device")

        allreduce = broadcast

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.Backend.register_backend("silent", lambda *_: Silent(rank, size), devices=["cuda"])  # type: ignore[call-arg]
    group = dist.new_group(backend="silent")
    planner = planner_of("greedy", SolveOptions(ranks=group))
    assert isinstance(planner.coordinator, Ranks)
    heard = planner.coordinator.share(lambda: {"rank": rank})
    again = planner_of("greedy", SolveOptions(ranks=group)).coordinator
    same = isinstance(again, Ranks) and again.group is planner.coordinator.group
    return {"heard": heard, "least": planner.coordinator.least([rank, 5 - rank]), "sent": sent, "same": same}


class Broken(nn.Module):
    """A forward that Dynamo cuts into two graphs; while the second runs the first rank has more there."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([blocks(2), blocks(2)])

    @torch.compiler.disable
    def more(self) -> None:
        self.held = torch.empty(4096 if dist.get_rank() == 0 else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        self.more()
        return self.parts[1](x)


def broken() -> dict[str, Any]:
    plain, planned = Broken(), Broken()
    remat.enable(planned, budget=FRACTION, planner="greedy", ranks=True)
    outcome = [trained(m, DistributedDataParallel(m), steps=5) for m in (plain, planned)]
    division = backend_of(planned).division
    plans = [str(plan.to_json()) for _, plan in backend_of(planned).shared.chosen()]
    return {
        "plain": outcome[0],
        "planned": outcome[1],
        "overhead": division.overhead,
        "digest": [str(division), *plans],
    }


class Distance(nn.Module):
    """The mean square of the difference of what two branches give."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean()


def stages(count: int = 4, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)))


def join_in_ddp() -> dict[str, Any]:
    """One graph on both ranks, though each measures its own times; the losses of plain training."""
    plain, planned = (Joined([stages(), stages()], Distance()) for _ in range(2))
    inputs = [data(0, 256), data(1, 256)]
    joined = remat.optimize_chain(
        [list(b) for b in planned.branches],
        inputs,
        head=planned.head,
        budget=remat.Fraction(0.7),
        planner="local",
        ranks=True,
        time_limit_s=3.0,
    )
    return {
        **compared(plain, joined, lambda m: trained(m, DistributedDataParallel(m), rows=256, inputs=2)),
        "costs": joined.graph.op_cost_ns,
        "plan": joined.answer.cost_ns,
    }


def join_refused() -> dict[str, Any]:
    """Ranks whose branches, sizes or budgets differ; the method is the join's own, which fails in no other place."""
    rank = dist.get_rank()

    def joined(count: int = 3, rows: int = 64, budget: Any = FRACTION, method: str = "join") -> Any:
        inputs = [data(0, rows), data(1, rows)]
        branches = [stages(count), stages(count)]
        return remat.optimize_chain(
            branches, inputs, head=Distance(), budget=budget, planner="local", ranks=True, method=method
        )

    return {
        "stages": message(lambda: joined(count=3 + rank)),
        "sizes": message(lambda: joined(rows=64 + 64 * rank)),
        "budgets": message(lambda: joined(budget=10**6 + rank)),
        "budgets, auto": message(lambda: joined(budget=10**6 + rank, method="auto")),
    }


class Whole(nn.Module):
    """Blocks in a module that is not torch's own, whose call Dynamo takes as one."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled() -> dict[str, Any]:
    """`torch.compile` of DDP, by Inductor and by plans under Inductor."""
    torch._dynamo.config.optimize_ddp = False
    plain, planned = Whole(blocks=1), Whole(blocks=1)
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    wrapped = torch.compile(DistributedDataParallel(planned), backend=backend, dynamic=False)
    outcome = [
        trained(plain, torch.compile(DistributedDataParallel(plain), dynamic=False), rows=512),
        trained(planned, wrapped, rows=512),
    ]
    (answer,) = backend.answers
    return {"plain": outcome[0], "planned": outcome[1], "overhead": answer.overhead, "digest": answer.digest}


def sharded_compiled() -> dict[str, Any]:
    """FSDP2 around blocks that are compiled each, by Inductor and by plans under Inductor."""
    plain, planned = blocks(2), blocks(2)
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    for model, compiler in ((plain, "inductor"), (planned, backend)):
        for block in model:
            block.compile(backend=compiler, dynamic=False)
            fully_shard(block)
        fully_shard(model)
    outcome = {"plain": trained(plain, plain, rows=512), "planned": trained(planned, planned, rows=512)}
    found = backend.answers
    return {**outcome, "overhead": min(a.overhead or 0 for a in found), "digest": [a.digest for a in found]}


def compiled_refused() -> dict[str, Any]:
    """Buckets that are compiled one by one; ranks whose inputs are not of one shape."""
    rank = dist.get_rank()
    torch._dynamo.config.optimize_ddp = True
    found = {}
    for inner in ("eager", "inductor"):
        backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner=inner)
        wrapped = torch.compile(DistributedDataParallel(Whole(WIDE)), backend=backend, dynamic=False)
        found[f"buckets, {inner}"] = message(lambda wrapped=wrapped: wrapped(data(0, width=WIDE)))
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    alone = torch.compile(Whole(), backend=backend, dynamic=False)
    found["shapes"] = message(lambda: alone(data(0, rows=8 + 8 * rank)))
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **COLLECTIVE_CASES,
    **PIPELINE_CASES,
    "on_accelerators_only": on_accelerators_only,
    "ddp": ddp,
    "broken": broken,
    "buckets": buckets,
    "unreduced": unreduced,
    "static_graph": lambda: ddp(static_graph=True),
    "unused_parameters": lambda: ddp(find_unused_parameters=True),
    "chain_in_ddp": chain_in_ddp,
    "join_in_ddp": join_in_ddp,
    "join_refused": join_refused,
    "refused": refused,
    "later": later,
    "long_solve": long_solve,
    "while_tracing": while_tracing,
    "at_once": at_once,
    "largest_batch": largest_batch,
    "own_plans": own_plans,
    "sizes": sizes,
    "sharded_units": sharded_units,
    "sharded_budget": sharded_budget,
    "sharded_moves": lambda: sharded_budget(Mover(None), share=0.6, link=Link(10**12, 10**12)),
    "sharded_stages": sharded_stages,
    "sharded_refused": sharded_refused,
    "overlap": overlap,
    "compiled": compiled,
    "sharded_compiled": sharded_compiled,
    "compiled_refused": compiled_refused,
}


def one_rank(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    """One rank: its findings go to `found-{rank}`, what it says to `errors-{rank}`."""
    with (folder / f"errors-{rank}").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    os.environ["REMAT_CACHE_DIR"] = str(folder / f"cache-{rank}")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    found = {name: CASES[name]() for name in names}
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"found-{rank}").write_text(json.dumps(found))


def main() -> None:
    """Ranks forked from one process, so that torch is imported once; it ends badly when one of them does."""
    folder, count, *names = sys.argv[1:]
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[2]))  # of a script it is not
    from benchmarks.harness import threads

    threads.tell()
    ranks = []
    for rank in range(int(count)):
        child = os.fork()
        if not child:
            status = 1
            try:
                one_rank(rank, int(count), Path(folder), names)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        ranks.append(child)
    for _ in range(int(count)):
        child, status = os.wait()
        ranks.remove(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main()

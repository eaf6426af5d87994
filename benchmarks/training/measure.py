"""One model of the client's benchmark, in a process of its own: peaks, gradients and interleaved times.

What is known is written after each step, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch
from torch import nn

from benchmarks.harness.machine import machine
from benchmarks.harness.steps import Steps
from benchmarks.models.subject import Subject
from benchmarks.models.zoo import SEED, build
from benchmarks.training.peers import Peer, peers
from remat.lowering.lower import lower
from remat.planning.options import SolveOptions
from remat.planning.planner import planner_for
from remat.profiling.measure import Outcome, differences
from remat.settings import settings
from remat.training.enable import following
from remat.training.optimize import carry_out
from remat.training.step import TrainingStep, training_step
from remat_ir import Plan, Problem, plain_peak

UNMATCHED = ("each once",)
"""What is there to compare code, not peaks."""

PLAIN_PLAN = "remat plain"
TINY_ROUNDS = 60


class Bench:
    """The measurement of one model.

    Attributes:
        found: all that is known so far, as it is written.
    """

    def __init__(self, name: str, file: Path, cache: Path, *, tiny: bool, limit_s: float) -> None:
        self.subject: Subject = build(name, "tiny" if tiny else "full")
        self.file, self.limit_s, self.name = file, limit_s, name
        self.planner = planner_for("local", given=settings(cache_dir=str(cache), environ={}))
        self.steps = Steps(self.subject.model, self.subject.inputs)
        self.stock: Outcome | None = None
        self.found: dict[str, Any] = {"model": name, "title": self.subject.title, "complete": False}

    def save(self) -> None:
        """Write what is known, whole or not at all."""
        self.found["state"] = asdict(machine("torch")) | {"threads": torch.get_num_threads()}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1))
        part.replace(self.file)

    def prepare(self) -> None:
        """Capture, profile and plan; run each way once for its gradients and once for its peak."""
        step = training_step(self.subject.model, (), self.subject.inputs, table=self.planner.profiles)
        graph = step.graph
        self.found |= {
            "fixed_bytes": graph.fixed_bytes,
            "plain_bytes": plain_peak(graph) - graph.fixed_bytes,
            "ops": graph.ops,
            "kernels": len(step.operations.flow.kernels),
            "signatures": step.profiled.signatures,
            "profile_s": round(step.profiled.seconds, 2),
            "ways": {},
        }
        for name, make in peers(self.subject, step).items():
            self.try_out(name, make)
        self.against(step)
        self.save()

    def try_out(self, name: str, make: Callable[[], Peer]) -> None:
        """Enter a peer, or why it does not run."""
        try:
            made = make()
            self.enter(name, made.__dict__["owner"], made, {})
        except Exception as error:  # whatever a peer raises is its entry in the table
            self.found["ways"][name] = {"error": _first_line(error)}
            print(f"  {name}: {_first_line(error)}", flush=True)

    def against(self, step: TrainingStep) -> None:
        """Plan for the peak that each peer reached, and for what keeping everything needs."""
        plain = self.found["plain_bytes"]
        budgets = {PLAIN_PLAN: plain}
        for name, way in list(self.found["ways"].items()):
            if name in UNMATCHED or "error" in way:
                continue
            if way["peak_bytes"] >= plain:
                way["rival"] = PLAIN_PLAN
            else:
                same = [known for known, size in budgets.items() if size == way["peak_bytes"]]
                way["rival"] = same[0] if same else f"remat at {name}"
                budgets[way["rival"]] = way["peak_bytes"]
        for name, budget in budgets.items():
            self.plan(name, step, budget)

    def plan(self, name: str, step: TrainingStep, budget: int) -> None:
        """Enter remat at a budget of activation bytes."""
        problem = Problem(step.graph, step.graph.fixed_bytes + budget)
        answer = self.planner.plan(problem, SolveOptions(time_limit_s=self.limit_s))
        if not isinstance(answer.plan, Plan):
            self.found["ways"][name] = {"error": f"{answer.status.value}: {answer.message}", "budget_bytes": budget}
            print(f"  {name}: {answer.status.value} at {budget / 2**20:.1f} MiB", flush=True)
            return
        planned = carry_out(step, problem, answer)
        made = following(self.subject.model, planned, self.planner)
        known = {
            "budget_bytes": budget,
            "predicted_bytes": planned.activation_bytes,
            "predicted_ns": answer.cost_ns,
            "gap": answer.gap,
            "nodes": nodes_of(step, answer.plan),
        }
        self.enter(name, self.subject.model, made, known)

    def enter(self, name: str, owner: nn.Module, module: nn.Module, known: Mapping[str, Any]) -> None:
        """Run a way twice, for what it leaves behind and for its peak."""
        left, unequal, peak = self.steps.tried(name, owner, module)
        if (name == "each once" and self.stock is None) or name == "aot_eager":
            self.stock = left
        self.found["ways"][name] = {
            "peak_bytes": peak,
            "unequal_gradients": sum(text.startswith("gradient") for text in unequal),
            "unequal_buffers": sum(text.startswith("buffer") for text in unequal),
            "unequal_to_aot_eager": len(differences(self.stock, left)) if self.stock else None,
            "gradient_error": _error(self.steps.first, left),
            "seconds": [],
            **known,
        }
        print(f"  {name}: {peak / 2**20:.1f} MiB, {len(unequal)} results not bitwise plain's", flush=True)

    def rounds(self, count: int) -> None:
        """Time every way once a round, in an order drawn anew, each next to its rival; write after each round."""
        draw = random.Random(SEED)
        ways = self.found["ways"]
        for name in self.order(draw):  # a round before them warms caches
            self.steps.seconds(name)
        for number in range(count):
            for name in self.order(draw):
                ways[name]["seconds"].append(self.steps.seconds(name))
            self.found["rounds"] = number + 1
            self.save()

    def order(self, draw: random.Random) -> list[str]:
        """Peers in any order, what stands against each right after or before it."""
        names = [n for n in map(str, self.steps.ways) if not n.startswith("remat")]
        draw.shuffle(names)
        found: list[str] = []
        for name in names:
            rival = self.found["ways"][name].get("rival", PLAIN_PLAN)
            pair = [name, *([rival] if rival in self.steps.ways and rival not in found else [])]
            draw.shuffle(pair)
            found += pair
        return found

    def small(self) -> None:
        """What a node costs beyond its kernel: a tiny model of the same kind, whose kernels take next to nothing."""
        subject = build(self.name)
        step = training_step(subject.model, (), subject.inputs, table=self.planner.profiles)
        made = {name: make() for name, make in peers(subject, step).items() if name in ("aot_eager", "each once")}
        problem = Problem(step.graph, plain_peak(step.graph))
        answer = self.planner.plan(problem, SolveOptions(time_limit_s=self.limit_s))
        assert isinstance(answer.plan, Plan)
        plan = following(subject.model, carry_out(step, problem, answer), self.planner)
        steps = Steps(subject.model, subject.inputs)
        for name, way in (made | {PLAIN_PLAN: Peer(subject.model, plan)}).items():
            steps.tried(name, subject.model, way)
        seconds: dict[str, list[float]] = {str(name): [] for name in steps.ways}
        draw = random.Random(SEED)
        for number in range(TINY_ROUNDS + 5):
            for name in draw.sample(sorted(seconds), len(seconds)):
                took = steps.seconds(name)
                if number >= 5:
                    seconds[name].append(took)
        self.found["tiny"] = {"nodes": nodes_of(step, answer.plan), "seconds": seconds}
        self.save()


def nodes_of(step: TrainingStep, plan: Plan) -> int:
    """How many calls the code of a plan makes, views and tuple items included."""
    lowered = lower(step.operations, plan)
    return sum(n.op == "call_function" for g in (lowered.forward, lowered.backward) for n in g.graph.nodes)


def _error(plain: Outcome, other: Outcome) -> float:
    """The largest difference of a gradient, over the largest entry of plain training's."""
    worst = 0.0
    for name, mine in plain.gradients.items():
        theirs = other.gradients[name]
        if mine is not None and theirs is not None:
            worst = max(worst, float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-30)))
    return worst


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def main(name: str, file: str, cache: str, tiny: str, rounds: str, limit_s: str) -> None:
    """Measure one model; called by `benchmarks.training` in a child."""
    torch.set_num_threads(1)
    bench = Bench(name, Path(file), Path(cache), tiny=tiny == "tiny", limit_s=float(limit_s))
    bench.prepare()
    if int(rounds):
        bench.rounds(int(rounds))
        bench.small()
        bench.found["complete"] = True
        bench.save()


if __name__ == "__main__":
    main(*sys.argv[1:])

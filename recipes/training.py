"""What all recipes have in common: how a model is compiled, what is noted of a training, and what has to hold."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import remat
from remat.planning.division import peak_by
from remat.planning.greedy import greedy_answer
from remat.training.enable import Plans, plans_of
from remat_ir import Answer, Problem
from remat_solver import solve

VOCABULARY = 64
SEARCH_S = 2.0
LEAST_STEPS, LEAST_TAKE_OVERS = 40, 2
HELD_STEPS = 12
"""Of a training, in which most recipes have shown all of their sizes."""
ROOM_BYTES = 16 * 1024
"""Differences of a peak below this are none. What a plan's first step takes beyond it, the second may still disprove:
bfloat16 kernels on a CPU allocate up to 25 KiB when they first meet a shape."""


class Improving:
    """A planner whose first plan is one of a smaller budget, from which the further sizes start.

    What it is asked for next to the training it answers once `HELD_STEPS` steps have been made: all sizes that come
    before are planned from the first plan, and go over to better ones at their next call. It searches briefly: which
    plan is the best is not what a recipe shows.
    """

    def __init__(self) -> None:
        self.asked = self.steps = 0
        self.released = threading.Event()

    def plan(self, problem: Problem, options: Any = None, *, on_progress: Any = None) -> Answer:
        self.asked += 1
        if self.asked == 1:
            return tight_answer(problem)
        if threading.current_thread() is not threading.main_thread():
            self.released.wait()
        return solve(problem, time_limit_s=SEARCH_S)

    def step(self) -> None:
        """A step of the training has been made."""
        self.steps += 1
        if self.steps >= HELD_STEPS:
            self.released.set()


def tight_answer(problem: Problem) -> Answer:
    """A plan within a smaller budget, if there is one."""
    fixed = problem.graph.fixed_bytes
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        tight = Problem(problem.graph, fixed + int(share * (problem.budget_bytes - fixed)))
        found = greedy_answer(tight)
        if found.plan is not None:
            return Answer.of_plan(problem, found.plan, method="greedy")
    return greedy_answer(problem)


def answered(planners: Sequence[Improving]) -> None:
    """Wait until these have answered what they were asked next to the training, unless one of them holds it back.

    A step then takes over what the steps before it have asked for, whatever the machine does besides.
    """
    if planners and all(planner.released.is_set() for planner in planners):
        for thread in threading.enumerate():
            if thread.name == "remat-planner":
                thread.join(60)


class TakeOvers(logging.Handler):
    """Counts how often other plans take over, by what the log says: those of one graph, or of all calls of a step."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += record.getMessage().startswith(("a better plan takes over", "the budget is divided"))


@dataclass
class Training:
    """One training of a recipe, and what it comes to.

    Attributes:
        planned: whether by remat; else by torch's `aot_eager`.
        budget: a share of what plain training takes; a recipe whose largest op needs more says so.
        found: what has to be equal, by name: losses, weights, buffers, states of generators.
        plans: those of each module that was enabled, by what runs it, which they hold.
        planners: all that have been given.
        measured: whether peaks are known; not of what `torch.compile` trains by the backend's name.
    """

    planned: bool
    folder: str
    budget: str = "70%"
    found: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, Plans] = field(default_factory=dict)
    planners: list[Improving] = field(default_factory=list)
    measured: bool = True
    steps: int = 0

    def enable(self, model: nn.Module, **options: Any) -> None:
        """Train a model by plans, or by `aot_eager`, in place."""
        if self.planned:
            remat.enable(model, **self.options(), **options)
            self.see(model)
        else:
            model.compile(backend="aot_eager")

    def compile(self, model: nn.Module) -> None:
        """Train a model by `torch.compile` and the name of a backend, in place."""
        if self.planned:
            model.compile(backend="remat", options=self.options())
            self.measured = False
        else:
            model.compile(backend="aot_eager")

    def options(self) -> dict[str, Any]:
        """What a callback is given."""
        self.planners.append(Improving())
        return {"budget": self.budget, "planner": self.planners[-1]}

    def see(self, model: Any) -> None:
        """Note the plans of a module that is enabled, by this script or by a callback; each time that it is anew."""
        if self.planned:
            self.plans.setdefault(id(model.forward), plans_of(model))

    def step(self, loss: Any) -> None:
        """A step of the optimizer has been made."""
        self.found[f"loss {self.steps}"] = torch.as_tensor(loss).detach().clone()
        self.steps += 1
        for planner in self.planners:
            planner.step()
        answered(self.planners)

    def end(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Note weights and buffers of a model, and the optimizer's state."""
        state = [] if optimizer is None else list(tensors(optimizer.state_dict()["state"]))
        values = {**model.state_dict(), **{f"optimizer {i}": t for i, t in enumerate(state)}}
        self.found |= {f"{name} {key}": copy.deepcopy(t) for key, t in values.items() if isinstance(t, torch.Tensor)}
        self.found["generator"] = torch.get_rng_state()


def tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from tensors(item)


@dataclass(frozen=True)
class Outcome:
    """What a recipe came to; `faults` are sentences, none where all holds; `saved` is not known of plans by name."""

    steps: int
    plans: int
    take_overs: int
    saved: float | None
    faults: tuple[str, ...]


def compared(train: Any, folder: str) -> Outcome:
    """Train twice, by `aot_eager` and by plans, and say what differs."""
    torch.set_num_threads(1)  # several sum in another order
    log, handler = logging.getLogger("remat"), TakeOvers()
    trainings = []
    for planned in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        each = Training(planned, f"{folder}/{'remat' if planned else 'aot_eager'}")
        if planned:
            level = log.level
            log.addHandler(handler)
            log.setLevel(logging.INFO)
        train(each)
        for planner in each.planners:
            planner.released.set()
        answered(each.planners)
        trainings.append(each)
    log.removeHandler(handler)
    log.setLevel(level)
    stock, ours = trainings
    found = [plan for plans in ours.plans.values() for plan in plans.plans]
    peaks = [(plan, peak) for plans in ours.plans.values() for plan, peak in plans.peaks.items()]
    faults = [f"{name} differs" for name in stock.found if not _equal(stock.found[name], ours.found.get(name))]
    if ours.steps < LEAST_STEPS or ours.steps != stock.steps:
        faults.append(f"{ours.steps} steps by plans, {stock.steps} by aot_eager, {LEAST_STEPS} asked for")
    if handler.number < LEAST_TAKE_OVERS:
        faults.append(f"{handler.number} plans took over, {LEAST_TAKE_OVERS} asked for")
    plans = len(found) if ours.measured else sum(planner.asked for planner in ours.planners)
    shares = [shared for each in ours.plans.values() if (shared := each._carrier.backend.shared).division is not None]
    if not plans or (ours.measured and not peaks and not shares):
        faults.append("nothing was planned, or no step of it was measured")
    for plan, peak in peaks:
        allowed = plan.answer.budget_bytes - plan.step.graph.fixed_bytes
        if peak.measured_bytes > max(allowed, peak.predicted_bytes) + ROOM_BYTES or peak.predicted_bytes > allowed:
            faults.append(f"a step took {peak.measured_bytes} bytes of {allowed}")
    parts = [_share(plan) for plan in found]
    for shared in shares:
        chosen = {stack: point.option for stack, point in shared._table.items()}
        rows = [row for row in shared.watching.rows.values() if set(row.stacks) <= set(chosen)]
        there = peak_by(rows, chosen)
        plain = {stack: shared.watching.of[stack].plain.option for stack in chosen}
        parts.append(there / max(1, peak_by(rows, plain)))
        if there > shared.division.allowed_bytes + ROOM_BYTES:
            faults.append(f"the calls of a step took {there} bytes of {shared.division.allowed_bytes}")
    return Outcome(ours.steps, plans, handler.number, 1 - min(parts) if parts else None, tuple(faults))


def _share(plan: Any) -> float:
    from remat_ir import plain_peak

    graph = plan.step.graph
    return (plan.predicted_bytes - graph.fixed_bytes) / max(1, plain_peak(graph) - graph.fixed_bytes)


def _equal(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def token_rows(count: int, lengths: tuple[int, ...] = (16, 16, 24, 12), seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens whose lengths come four of a kind, so that a batch of four has one length."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        tokens = torch.randint(4, VOCABULARY, (lengths[i // 4 % len(lengths)],), generator=generator)
        rows.append({"input_ids": tokens, "labels": tokens.clone()})
    return rows


def language_model(**more: Any) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**{**given, **more}))


def tokenizer() -> Any:
    """Words w4 to w63 and the special ones, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCABULARY))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def words(tokens: torch.Tensor) -> str:
    return " ".join(f"w{int(token)}" for token in tokens)

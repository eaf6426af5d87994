"""What all recipes have in common: how a model is compiled, what is noted of a training, and what has to hold."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import remat
from remat.planning.greedy import greedy_answer
from remat.training.enable import Plans, plans_of
from remat_ir import Answer, Problem

BUDGET = "70%"
VOCABULARY = 64
ROOM_BYTES = 16 * 1024
"""Differences of a peak below this are none, however small the step."""


class Improving:
    """A planner whose first plan is one of a smaller budget; from it two further sizes start, and go over together.

    Its answers are the client's own greedy ones: which plan is the best is not what a recipe shows.
    """

    def __init__(self) -> None:
        self._asked, self._three = 0, threading.Event()

    def plan(self, problem: Problem, options: Any = None, *, on_progress: Any = None) -> Answer:
        self._asked += 1
        if self._asked >= 3:
            self._three.set()
        if self._asked > 1:
            self._three.wait(60)
            return greedy_answer(problem)
        fixed = problem.graph.fixed_bytes
        for share in (0.7, 0.8, 0.9):
            tight = Problem(problem.graph, fixed + int(share * (problem.budget_bytes - fixed)))
            found = greedy_answer(tight)
            if found.plan is not None:
                return Answer.of_plan(problem, found.plan, method="greedy")
        return greedy_answer(problem)


class _TakeOvers(logging.Handler):
    """Counts the plans that take over, by what the log says of each."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += record.getMessage().startswith("a better plan takes over")


@dataclass
class Training:
    """One training of a recipe, and what it comes to.

    Attributes:
        planned: whether by remat; else by torch's `aot_eager`.
        found: what has to be equal, by name: losses, weights, buffers, states of generators.
        plans: those of each module that was enabled.
    """

    planned: bool
    folder: str
    found: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, Plans] = field(default_factory=dict)
    steps: int = 0

    def enable(self, model: nn.Module, **options: Any) -> None:
        """Train a model by plans, or by `aot_eager`, in place."""
        if self.planned:
            remat.enable(model, **self.options(), **options)
            self.plans[id(model)] = plans_of(model)
        else:
            model.compile(backend="aot_eager")

    def options(self) -> dict[str, Any]:
        """What a callback is given."""
        return {"budget": BUDGET, "planner": Improving()}

    def see(self, model: Any) -> None:
        """Note the plans of a module that a callback has enabled."""
        if self.planned and id(model) not in self.plans:
            self.plans[id(model)] = plans_of(model)

    def step(self, loss: Any) -> None:
        """A step of the optimizer has been made."""
        self.found[f"loss {self.steps}"] = torch.as_tensor(loss).detach().clone()
        self.steps += 1

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
    """What a recipe came to; `faults` are sentences, none where all holds."""

    steps: int
    plans: int
    take_overs: int
    saved: float
    faults: tuple[str, ...]


def compared(train: Any, folder: str, least_steps: int = 40, take_overs: int = 2) -> Outcome:
    """Train twice, by `aot_eager` and by plans, and say what differs."""
    torch.set_num_threads(1)  # several sum in another order
    log, handler = logging.getLogger("remat"), _TakeOvers()
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
        trainings.append(each)
    log.removeHandler(handler)
    log.setLevel(level)
    stock, ours = trainings
    found = [plan for plans in ours.plans.values() for plan in plans.plans]
    peaks = [(plan, peak) for plans in ours.plans.values() for plan, peak in plans.peaks.items()]
    faults = [f"{name} differs" for name in stock.found if not _equal(stock.found[name], ours.found.get(name))]
    if ours.steps < least_steps or ours.steps != stock.steps:
        faults.append(f"{ours.steps} steps by plans, {stock.steps} by aot_eager, {least_steps} asked for")
    if handler.number < take_overs:
        faults.append(f"{handler.number} plans took over, {take_overs} asked for")
    if not found or not peaks:
        faults.append("nothing was planned, or no step of it was measured")
    for plan, peak in peaks:
        allowed = plan.answer.budget_bytes - plan.step.graph.fixed_bytes
        if peak.measured_bytes > max(allowed, peak.predicted_bytes) + ROOM_BYTES or peak.predicted_bytes > allowed:
            faults.append(f"a step took {peak.measured_bytes} bytes of {allowed}")
    saved = min((_share(plan) for plan in found), default=1.0)
    return Outcome(ours.steps, len(found), handler.number, 1 - saved, tuple(faults))


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

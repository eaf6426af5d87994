"""Callbacks of trainers, in runs that an exception ends; models that are saved whole after they were planned."""

from __future__ import annotations

import copy
import logging
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import remat
from client.transferring import LINK, Mover
from remat.trainers.transformers import RematCallback
from remat.training.enable import plans_of
from remat_ir import Answer, InvalidData, Offload

CONFIG = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=1, eos_token_id=2)
TOKENS = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def llama(layers: int) -> LlamaForCausalLM:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2))


class Stops(TrainerCallback):
    """Raises once, at the second step, when the model is running by a plan."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert plans_of(given["model"]).plans
        error, self.error = self.error, None
        if error is not None:
            raise error


def trainer(tmp_path: Path, model: nn.Module, *callbacks: Any, **settings: Any) -> Trainer:
    given = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), **{**given, **settings})
    return Trainer(model, arguments, train_dataset=ROWS, callbacks=list(callbacks))


def planning() -> RematCallback:
    return RematCallback("100%", planner="greedy")


@pytest.mark.parametrize(
    ("again", "checkpointing"),
    [
        ("the same trainer", False),
        ("another", False),
        pytest.param("the same trainer", True, marks=pytest.mark.thorough),
    ],
)
def test_transformers_trains_again_after_an_exception(tmp_path: Path, again: str, checkpointing: bool) -> None:
    model = GPT2LMHeadModel(CONFIG)
    run = trainer(tmp_path, model, planning(), Stops(KeyboardInterrupt()), gradient_checkpointing=checkpointing)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    if again == "another":
        run = trainer(tmp_path, model, planning())
    run.train()
    assert "forward" not in vars(model)
    assert model.is_gradient_checkpointing == checkpointing


@pytest.mark.thorough
def test_checkpointing_is_off_while_a_model_is_planned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As by TRL's defaults; the weights are those of a planned run without it, and it is back after the run."""
    weights = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(CONFIG)
        with caplog.at_level(logging.INFO, "remat"):
            run = trainer(tmp_path, model, planning(), gradient_checkpointing=checkpointing)
            run.train()
        assert ("gradient_checkpointing is off" in caplog.text) == checkpointing
        assert model.is_gradient_checkpointing == checkpointing
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.thorough
def test_a_cache_is_switched_on_again_by_disable_after_an_exception(tmp_path: Path) -> None:
    """Transformers 5's own Trainer switches it off, too, before it calls `on_train_begin`."""
    model, arguments = GPT2LMHeadModel(CONFIG), TrainingArguments(str(tmp_path), use_cpu=True)
    model.config.use_cache = True
    for _ in range(2):  # the first run ends without on_train_end
        planning().on_train_begin(arguments, None, None, model=model)
        assert not model.config.use_cache
    remat.disable(model)
    assert model.config.use_cache


@pytest.mark.thorough
def test_transformers_finds_a_batch_size(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, GPT2LMHeadModel(CONFIG), planning(), Stops(torch.OutOfMemoryError("CUDA out of memory.")),
        auto_find_batch_size=True,
    )  # fmt: skip
    run.train()
    assert run._train_batch_size < 4


def test_plans_that_the_user_has_enabled_stay(tmp_path: Path) -> None:
    model = remat.enable(GPT2LMHeadModel(CONFIG), budget="100%", planner="greedy")
    with pytest.raises(RuntimeError, match="enabled on this GPT2LMHeadModel already"):
        trainer(tmp_path, model, planning()).train()
    assert plans_of(model) is not None


def test_ranks_may_be_joined_after_the_callback_is_made(tmp_path: Path) -> None:
    """As Lightning does, in the beginning of `fit`; who has not joined them by then is told so."""
    with pytest.raises(InvalidData, match="a planner is a URL"):
        RematCallback("100%", planner="nobody", ranks=True)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    callback = RematCallback("100%", planner="greedy", ranks=True)
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        callback.begin(module, None, accumulate=1, clips=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        callback.begin(module, None, accumulate=1, clips=False)
        module(torch.ones(4, 8)).sum().backward()
        assert plans_of(module).plans
        callback.leave()
    finally:
        dist.destroy_process_group()
    assert "forward" not in vars(module)


@pytest.mark.thorough
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stop")])
def test_lightning_leaves_the_module_after_an_exception(tmp_path: Path, error: BaseException) -> None:
    import lightning.pytorch as pl

    from remat.trainers.lightning import RematCallback as Planning

    class Module(pl.LightningModule):
        stops = True

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).sum()
            assert plans_of(self.model).plans
            if self.stops:
                raise error
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit() -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(
            max_steps=1, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path,
            callbacks=[Planning("100%", part="model", planner="greedy")], **quiet,
        ).fit(module, data)  # fmt: skip

    module, data = Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)))
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit()
    assert "forward" not in vars(module.model)
    module.stops = False
    fit()


@pytest.mark.thorough
def test_a_model_that_was_planned_is_saved_whole(tmp_path: Path) -> None:
    model = llama(1)
    remat.enable(model, budget="100%", planner="greedy")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    remat.disable(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@pytest.mark.thorough
def test_states_that_a_call_asks_for_are_recorded_in_a_planned_step() -> None:
    model = llama(2)
    plain = model(input_ids=TOKENS, labels=TOKENS, output_hidden_states=True).hidden_states
    model = LlamaForCausalLM(model.config).train()
    remat.enable(model, budget="100%", planner="greedy")
    planned = model(input_ids=TOKENS, labels=TOKENS, output_hidden_states=True).hidden_states
    assert len(planned) == len(plain) == 3


class Tiled(torch.autograd.Function):
    """As TRL's head: products into a buffer, which no capture goes through."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tile = torch.empty(len(hidden), 30)
        logits = []
        for start in range(0, len(weight), 20):
            part = weight[start : start + 20]
            logits.append(torch.mm(hidden, part.t(), out=tile[:, : len(part)]).clone())
        found = torch.cat(logits, 1).log_softmax(1)
        ctx.save_for_backward(hidden, weight, labels, found)
        return found.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, labels, found = ctx.saved_tensors
        own = -found.exp() * gradients[0][:, None]
        own[torch.arange(len(labels)), labels] += gradients[0]
        return own @ weight, own.t() @ hidden, None


def with_tiled_head(model: Any) -> Any:
    """As `trl.trainer.utils.add_fused_lm_head`, which `SFTTrainer` calls."""
    original = model.forward

    @wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1].flatten(0, 1)
        found = Tiled.apply(hidden, self.get_output_embeddings().weight, labels[:, 1:].flatten())
        return {"loss": -found.mean()}

    model.forward = MethodType(forward, model)
    return model


class WithTiledHead(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs, fused_lm_head=True)["loss"]


class Look(TrainerCallback):
    """Notes, after each step, the answers by whose plans the trunk trains."""

    def __init__(self) -> None:
        self.answers: list[list[Answer]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.answers.append([planned.answer for planned in plans_of(given["model"].model).plans])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    [{"planner": "greedy"}, {"part": "model", "planner": Mover(None), "link": LINK}],
    ids=["the trunk is found", "it is named, and values move to the host"],
)
def test_the_trunk_before_a_tiled_head_is_planned(tmp_path: Path, given: dict[str, Any]) -> None:
    weights, look = [], Look()
    for added in ([], [RematCallback("100%", **given), look]):
        torch.manual_seed(0)
        model = with_tiled_head(llama(2))
        run = trainer(tmp_path, model, *added)
        run.__class__ = WithTiledHead
        run.train()
        weights.append([p.detach().clone() for p in model.parameters()])
        assert "forward" not in vars(model.model)
    assert all(map(torch.equal, *weights))
    moves = [[any(isinstance(step, Offload) for step in answer.plan.steps) for answer in each] for each in look.answers]
    assert moves == [["link" in given]] * 2


@pytest.mark.thorough
def test_a_forward_may_change_the_dictionary_of_its_own_keywords() -> None:
    class Defaults(nn.Linear):
        def forward(self, *given: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            kwargs.setdefault("scale", 2.0)
            kwargs["bias"] = kwargs["scale"]
            return super().forward(*given) * kwargs["scale"] + kwargs["bias"]

    model, x = Defaults(8, 8), torch.ones(4, 8)
    planned = remat.optimize(copy.deepcopy(model), x, budget="100%", planner="greedy")
    for kwargs in ({}, {"scale": 3.0}, {"scale": 3.0, "bias": 5.0}, {}):
        given = dict(kwargs)
        assert torch.equal(planned(x, **given), model(x, **kwargs))
        assert given == kwargs

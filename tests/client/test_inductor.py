"""Plans under Inductor: plain Inductor's gradients, the peak that was predicted, each known pitfall, and new shapes."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode

import remat
from client.comparing import outcome
from client.planners import Noting
from remat._compat.inductor import code
from remat.compile.inductor.backend import NOT_WITH, InductorBackend
from remat.planning.greedy import greedy_answer
from remat.planning.memo import Memo
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.planner import CoordinatedPlanner, FallbackPlanner
from remat.planning.profiles import Profile, ProfileTable
from remat.planning.sources import GreedyPlanner
from remat.profiling import measure
from remat_ir import Answer, Compute, Free, InvalidData, Plan, Problem, budget_at, plan_of, problem_digest, verify

prims = torch.ops.prims
TIGHT = remat.Fraction(0.75)

# each compiles with g++, which a busy machine does slowly
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("own_caches")]


class Block(nn.Module):
    """A residual around two layers with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.body(x)
        return made


class Net(nn.Module):
    """Blocks and a loss; with `norm`, batch statistics and a counter that are updated in place."""

    def __init__(self, norm: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32) for _ in range(blocks)))
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x)).square().mean()


INPUT = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


class Convolutions(nn.Module):
    """A residual block with batch statistics and dropout, and a head that reads a mean of the last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 1, 1)
        self.body = nn.Sequential(
            nn.Conv2d(8, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(16, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.around = nn.Conv2d(8, 16, 1, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        made = torch.relu(self.body(first) + self.around(first))
        return self.head(made.mean((2, 3))).square().mean()


class Levels(nn.Module):
    """Two levels of a U-Net with group statistics, whose decomposition reads its scales by strides, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = self.level(3, 16), self.level(16, 16), self.level(32, 16)
        self.last = nn.Conv2d(16, 3, 1)

    @staticmethod
    def level(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, 1, 1), nn.GroupNorm(8, outer), nn.SiLU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.down(x)
        made = F.interpolate(self.middle(F.avg_pool2d(kept, 2)), scale_factor=2.0)
        return F.mse_loss(self.last(self.up(torch.cat((made, kept), 1))), x)


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """A few layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Mixer(nn.Module):
    """Layer norms, and layers over the tokens and over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(64), nn.LayerNorm(64)
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64)) for wide in (128, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        made: torch.Tensor = x + self.channels(self.two(x))
        return made


class Mixers(nn.Module):
    """Two mixer blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Mixer(), Mixer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Next(nn.Module):
    """A small ConvNeXt of transformers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10, image_size=64)  # type: ignore[call-arg]
        self.inner = ConvNextForImageClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits.square().mean()


def compiled(model: nn.Module, **asking: Any) -> tuple[Any, Any]:
    """A model under Inductor with a plan, and the backend that planned it."""
    asking = {"budget": TIGHT, "planner": "greedy", "inner": "inductor"} | asking
    backend = remat.backend(**asking)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False), backend


def peak(model: nn.Module, run: Any, batch: torch.Tensor = INPUT) -> int:
    """The measured peak of a step beyond its first, above what was there before it."""
    step, before = measure.forward_backward(run, (batch,)), copy.deepcopy(model.state_dict())
    step()
    model.zero_grad(set_to_none=True)
    found = measure.peak_memory(step).peak_bytes
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "batch statistics"])
def test_the_same_training_inside_the_budget(norm: bool) -> None:
    """Gradients, buffers and the generator are plain Inductor's bit for bit; the measured peak is the predicted one.

    The answer's plan passes the verifier on the graph that was planned; regions are fewer than ATen's kernels.
    """
    torch.manual_seed(0)
    model = Net(norm)
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), INPUT)
    run, backend = compiled(model)
    assert measure.differences(plain, outcome(model, run, INPUT)) == []
    (carried,) = backend.carried
    assert carried.answer.overhead > 0, "at this budget something has to be computed again"
    measured = peak(model, run)
    assert measured <= carried.budget_bytes - carried.graph.fixed_bytes
    assert measured == pytest.approx(carried.activation_bytes, rel=0.03)
    problem = Problem(carried.graph, carried.answer.budget_bytes)
    verify(problem, carried.answer.plan, cost_ns=carried.answer.cost_ns, peak_bytes=carried.answer.peak_bytes)
    names = carried.graph.op_names
    assert any("+" in name for name in names), "some ops are regions of several kernels"
    assert all(cost > 0 for name, cost in zip(names, carried.graph.op_cost_ns, strict=True) if "mm" in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "share"),
    [(Layers, (8, 16, 32), 1.0), (Mixers, (8, 64, 64), 1.0), (Next, (8, 3, 64, 64), 0.95)],
)
def test_what_is_equal_bit_for_bit_is_said_when_it_is_planned(
    kind: type[nn.Module], shape: tuple[int, ...], share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan that keeps everything of a few layers runs plain Inductor's kernels; others may round otherwise."""
    torch.manual_seed(0)
    model, batch = kind(), torch.randn(shape)
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), batch)
    run, backend = compiled(model, budget=remat.Fraction(share))
    with caplog.at_level("INFO", "remat"):
        found = outcome(model, run, batch)
    (carried,) = backend.carried
    assert carried.kernels > 0
    assert carried.exact or kind is not Layers
    assert not carried.exact or measure.differences(plain, found) == []
    equal = "equal bit for bit to plain Inductor, which generates the same kernels"
    rounded = f"{carried.other_kernels} of {carried.kernels} generated kernels are not plain Inductor's"
    assert (equal if carried.exact else f"equal to plain Inductor up to rounding: {rounded}") in caplog.text
    for name, gradient in plain.gradients.items():
        other = found.gradients[name]
        assert (other - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.slow
def test_another_budget_is_not_served_from_the_caches() -> None:
    """Pitfall: a cache hit with another budget's plan. The same budget hits, another one is planned anew."""
    torch.manual_seed(0)
    model = Net()
    peaks = []
    for budget, planned in ((remat.Fraction(1.0), 1), (TIGHT, 1), (TIGHT, 0)):
        torch._dynamo.reset()
        run, backend = compiled(model, budget=budget)
        run(INPUT).backward()
        model.zero_grad(set_to_none=True)
        assert len(backend.carried) == planned
        peaks.append(peak(model, run))
    assert peaks[1] < peaks[0]
    assert peaks[2] == peaks[1], "what comes from the cache is the plan of this budget"


def test_keys_tell_plans_apart() -> None:
    """The caches' key holds the budget, the planner and how it is asked; a planner of the caller's own is never met."""

    def key(**asking: Any) -> str:
        asking = {"budget": "1GiB", "planner": "greedy", "inner": "inductor"} | asking
        backend = remat.backend(**asking)
        assert isinstance(backend, InductorBackend)
        return backend.key()

    class Own(GreedyPlanner):
        """A planner that nobody else has."""

    assert key() == key()
    assert len({key(), key(budget="2GiB"), key(planner="local"), key(time_limit_s=1.0), key(slack=1.1)}) == 5
    assert key(planner=Own()) != key(planner=Own())


def test_a_copied_configuration_holds_the_same_partitioner() -> None:
    """Pitfall: Inductor copies its configuration deeply, and what the partitioner holds cannot be copied."""
    from remat._compat.tags import Partitioner

    class Keyed(Partitioner):
        key = "key"

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("not called")

    one = Keyed()
    assert copy.deepcopy({"custom_partitioner_fn": one})["custom_partitioner_fn"] is one
    assert one.uuid() == "key"


@pytest.mark.slow
def test_options_reach_the_backward_pass() -> None:
    """Pitfall: a backward graph compiled lazily runs outside of the patched configuration."""
    import torch._inductor.config as config

    seen: list[tuple[bool, Any]] = []
    run, backend = compiled(Net(blocks=1), budget=remat.Fraction(1.0), inductor_options={"max_fusion_size": 3})
    told = backend._seen
    backend._seen = lambda backward, generated: (
        seen.append((backward, config.max_fusion_size)),
        told(backward, generated),
    )
    loss = run(INPUT)
    assert seen == [(False, 3), (True, 3)], "both graphs are compiled before the first step runs"
    loss.backward()


class Thrasher(GreedyPlanner):
    """Plans that are right, and compute a forward op again and again."""

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        """The first op that may be run again is run three times for each op of the graph, before the backward pass."""
        graph = problem.graph
        op = next(i for i, cost in enumerate(graph.op_cost_ns) if cost and i not in graph.once)
        again = [op] * (3 * graph.ops)
        sequence = [*range(graph.backward_from), *again, *range(graph.backward_from, graph.ops)]
        return Answer.of_plan(problem, plan_of(graph, sequence), method="thrasher")


class Untimed(ProfileTable):
    """A table in which all regions cost the same: none is compiled alone to be timed, for plans that do not look."""

    def get(self, device: str, signatures: Iterable[str]) -> dict[str, Profile]:
        return dict.fromkeys(signatures, Profile(1000, 0)) if device.startswith("inductor ") else {}

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        return dict(profiles)


class TwiceOver(GreedyPlanner):
    """Plans that keep nothing they can make again: all of the forward pass is run twice; or a share of its ops."""

    def __init__(self, share: slice = slice(None)) -> None:
        self.share = share

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        """The forward pass, the turn, the forward pass again, the backward pass."""
        graph, answer = problem.graph, super().plan(problem, options)
        stays = {v for v, op in enumerate(graph.value_op) if op in graph.once} | set(graph.keep)
        again = [o for o in range(graph.backward_from) if o not in graph.once and not set(graph.op_values[o]) & stays]
        again = again[self.share]
        steps = [Compute(op) for op in range(graph.backward_from)]
        freed = [Free(v) for op in again for v in graph.op_values[op]]
        rest = [Compute(op) for op in range(graph.backward_from, len(graph.op_cost_ns))]
        plan = Plan((*steps, *freed, rest[0], *(Compute(op) for op in again), *rest[1:]))
        verdict = verify(problem, plan)
        return replace(answer, cost_ns=verdict.cost_ns, peak_bytes=verdict.peak_bytes, plan=plan, overhead=1.0)


def planned_by(planner: GreedyPlanner, model: nn.Module) -> tuple[Any, Any]:
    """A model under Inductor by the plans of a planner that is not doubted."""
    return compiled(model, budget="1GiB", planner=CoordinatedPlanner(planner, Untimed()))


@pytest.mark.slow
def test_thrashing_plans_are_not_lowered() -> None:
    """Pitfall: a plan with several times the steps of the graph, which Inductor would compile for minutes."""
    run, backend = planned_by(Thrasher(), Net())
    with pytest.raises(Exception, match="thrash"):
        run(INPUT)
    assert backend.carried == []


@pytest.mark.slow
def test_seeds_are_saved_and_never_drawn_again() -> None:
    """Pitfall: drawing the seeds again in the backward pass, which gives wrong gradients with dropout.

    The whole forward pass is computed again here, batch statistics included; buffers are updated once.
    """
    model = Net(norm=True)
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), INPUT)
    run, backend = planned_by(TwiceOver(), model)
    assert measure.differences(plain, outcome(model, run, INPUT)) == []
    (carried,) = backend.carried
    drawn = [n for n in (*carried.forward.graph.nodes, *carried.backward.graph.nodes) if _is(n, prims.inductor_seeds)]
    assert len(drawn) == 1
    assert drawn[0].graph is carried.forward.graph
    assert any(_is(n, prims.inductor_random) for n in carried.backward.graph.nodes), "masks are made again from them"


def _is(node: fx.Node, packet: Any) -> bool:
    return getattr(node.target, "overloadpacket", None) is packet


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Convolutions, Levels])
def test_convolutions_sum_in_plain_inductors_order(kind: type[nn.Module]) -> None:
    """Pitfall: a saved activation lies in another layout than Inductor computes in, and what reads it sums otherwise.

    Of the forward pass nothing and every second op is computed again, the even and the odd ones; the peaks are those
    predicted. Scales that group norms read by strides are written to memory, and so are the indices of scattered sums.
    """
    torch.manual_seed(0)
    model = kind()
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), IMAGES)
    saved = []
    for share in (slice(0), slice(0, None, 2), slice(1, None, 2)):
        torch._dynamo.reset()
        run, backend = planned_by(TwiceOver(share), model)
        assert measure.differences(plain, outcome(model, run, IMAGES)) == []
        (carried,) = backend.carried
        assert peak(model, run, IMAGES) == carried.activation_bytes
        saved.append(sum(n.meta["val"].nbytes for n in carried.forward.graph.output_node().args[0]))
    assert saved[0] > max(saved[1:]), "bytes: what is computed again need not be saved"


@pytest.mark.slow
def test_a_plan_over_the_budget_is_replanned() -> None:
    """What Inductor's generated code needs decides: each try asks for less, in all or where the code held too much."""
    planner = Noting()
    run, backend = compiled(Net(), planner=planner, budget=remat.Fraction(0.6))
    run(INPUT).backward()
    (carried,) = backend.carried
    assert carried.predicted_bytes <= carried.budget_bytes
    assert len(planner.problems) == len(carried.tries) > 1
    needs = [sum(p.subject.op_workspace_bytes) - p.budget_bytes for p in planner.problems]
    for (_, came_to), now, then in zip(carried.tries, needs, needs[1:], strict=False):
        if came_to is not None and came_to > carried.budget_bytes:
            assert then > now
    torch._dynamo.reset()
    run, _ = compiled(Net(), budget=remat.ActivationBytes(20_000))
    with pytest.raises(Exception, match=r"[Nn]o plan"):
        run(INPUT)


def test_what_does_not_go_is_said() -> None:
    """Options that plans cannot be carried out with are refused, each with its reason."""
    for name in NOT_WITH:
        with pytest.raises(InvalidData, match=f"{name} does not go with inner='inductor'"):
            remat.backend("1GiB", planner="greedy", inner="inductor", inductor_options={name: True})
    with pytest.raises(ValueError, match="inner='inductor'"):
        remat.backend("1GiB", planner="greedy", inductor_options={"max_fusion_size": 3})


@pytest.mark.thorough
def test_a_workspace_of_a_generated_kernel_was_made_for_no_node() -> None:
    """Generated kernels for GPUs take workspaces (`mix_order_reduction`), which pretend to be buffers."""
    workspace = WorkspaceArg(
        count=sympy.Integer(4096),
        zero_mode=WorkspaceZeroMode.UNINITIALIZED,
        device=torch.device("cpu"),
        outer_name="workspace_0",
    )
    assert code._origins(workspace) == ()


@pytest.mark.slow
def test_code_that_came_out_larger_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """If Inductor generates other code than in the dry run, and more is needed, that is in the log."""
    run, backend = compiled(Net(blocks=1), budget=remat.Fraction(1.0))
    run(INPUT).backward()
    assert not [record for record in caplog.records if record.name == "remat"]
    (carried,) = backend.carried
    generated = copy.copy(carried.compiled[True])
    object.__setattr__(generated, "estimate_bytes", carried.estimate_bytes[True] + 1)
    with caplog.at_level(logging.WARNING, logger="remat"):
        backend._seen(True, generated)
    assert "other code for the backward pass" in caplog.text


@pytest.mark.slow
def test_why_not_torchs_own_budget() -> None:
    """`activation_memory_budget` draws the seeds again: its gradients are wrong, which the docs say of torch 2.13.

    Should this fail with another torch, the docs (adoption, benchmarks/results/inductor.md) want another look.
    """
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx

    def torchs_own(module: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=0.3):
            return compile_fx(module, inputs)

    torch.manual_seed(0)
    model = Net()
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), INPUT)
    other = outcome(model, torch.compile(model, backend=torchs_own, fullgraph=True, dynamic=False), INPUT)
    assert torch.equal(plain.loss, other.loss)
    assert "generator cpu" in measure.differences(plain, other), "the generator moved on twice"
    errors = [
        float((other.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in plain.gradients.items()
        if gradient is not None and name.endswith("weight")
    ]
    assert max(errors) > 0.1


class Held:
    """Tight plans until it is told to hold; from then on plans that cost less, once it is told to go on."""

    def __init__(self) -> None:
        self.held, self.go = False, threading.Event()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        if self.held:
            assert self.go.wait(60)
            return greedy_answer(problem)
        found = greedy_answer(Problem(problem.graph, budget_at(problem.graph, 0.75)))
        return replace(found, budget_bytes=problem.budget_bytes, digest=problem_digest(problem))


@pytest.mark.slow
@pytest.mark.thorough
def test_no_step_waits_at_a_new_shape_and_the_next_process_has_the_better_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, held = Layers(), Held()
    planner = FallbackPlanner([held], memo=Memo(tmp_path / "answers"))
    small, large = torch.randn(256, 32), torch.randn(512, 32)
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), large)
    torch._dynamo.reset()
    run, backend = compiled(model, budget=remat.Fraction(1.0), planner=planner)
    outcome(model, run, small)
    held.held = True
    found = outcome(model, run, large)  # the planner is still at work
    assert measure.differences(plain, found) == []
    first, quick = backend.answers
    assert quick.cache == "near"
    assert quick.plan == first.plan
    assert quick.overhead > 0
    held.go.set()
    for _ in range(600):
        if planner.memo is not None and any((tmp_path / "answers" / "alike").glob("*/*")):
            break
        time.sleep(0.1)
    assert measure.differences(found, outcome(model, run, large)) == []
    assert len(backend.answers) == 2, "no step of a process runs by other kernels than the one before"
    torch._dynamo.reset()
    again, later = compiled(model, budget=remat.Fraction(1.0), planner=planner)
    outcome(model, again, small)
    assert measure.differences(plain, outcome(model, again, large)) == []
    assert later.answers[-1].cost_ns < quick.cost_ns

"""`remat.tag`: torch's own partitioner carries out the plan, to the byte, and its cut has nothing left to decide."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.fx_passes import memory_estimator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

import remat
from client.comparing import equal
from client.small_models import FeedForward, mean_square, module_of, numbers
from remat._compat import tags as torch_tags
from remat.profiling.measure import peak_memory
from remat.tags.passes import GraphTrainerPass, TagPartitioner, TagPass
from remat.tags.torchtitan import stays
from remat_ir import tagged_plan
from tiers import first


def is_saved(node: fx.Node) -> bool | None:
    """Whether a node's tag says that it is saved; None without a tag."""
    tag = node.meta.get("recompute")
    return None if tag is None else tag in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Images(nn.Module):
    """Batch normalization in training, which torch cannot compute again."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for index in range(4):
            parts += [nn.Conv2d(8 if index else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x).mean((2, 3)))
        return found


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (nn.Sequential(*[FeedForward(32, dropout=0.0) for _ in range(6)]), numbers(128, 32)),
    "dropout": lambda: (nn.Sequential(*[FeedForward(32, dropout=0.2) for _ in range(6)]), numbers(128, 32)),
    "images": lambda: (Images(), numbers(4, 3, 16, 16)),
}


@pytest.fixture(autouse=True)
def fresh(own_caches: None) -> None:
    """No compilation of another test is seen."""


def _step(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The loss, all gradients, all buffers and the generator's state after a step from the same beginning."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = mean_square(call(x))
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*found, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def _by_pass(model: nn.Module, x: torch.Tensor, tags: TagPass) -> list[torch.Tensor]:
    torch._dynamo.reset()
    with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
        return _step(model, torch.compile(model, backend="aot_eager", dynamic=False), x)


@pytest.mark.parametrize(
    ("name", "share"),
    first(
        2,
        [("dropout", "60%"), ("images", "75%"), ("mlp", "80%"), ("mlp", "60%"), ("dropout", "80%"), ("images", "85%")],
    ),
)
def test_torch_carries_out_the_plan_to_the_byte(name: str, share: str) -> None:
    """Gradients, buffers and generator are those of the plain step; the partition's peak is the planned one."""
    model, x = MODELS[name]()
    plain = copy.deepcopy(model)
    tags = TagPass(share, planner="local", time_limit_s=4)
    got = _by_pass(model, x, tags)
    assert equal(got, _step(plain, plain, x))
    (found,) = tags.tagged
    assert found.again
    assert tags.peaks == [found.peak_bytes]


def test_views_of_equal_values_are_views_of_the_one_that_is_left() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Equal products, each looked at in another way: the partitioner makes them one."""
        rows, columns = self.up(x).unsqueeze(0), self.up(x).unsqueeze(1)
        first, second = self.up(x).chunk(2, 1)
        found: torch.Tensor = (rows * columns).tanh() + torch.cat((second, first), 1).sigmoid()
        return found

    model, x = module_of(forward, up=nn.Linear(32, 32)), numbers(24, 32)
    plain, tags = copy.deepcopy(model), TagPass("100%", planner="greedy")
    got = _by_pass(model, x, tags)
    assert equal(got, _step(plain, plain, x))
    (found,) = tags.tagged
    kernels = [op.nodes[0] for op in found.joint.step.ops if op.nodes]
    assert sum("addmm" in str(node.target) for node in kernels) == 1
    assert not any(getattr(node.target, "is_view", False) for node in kernels)
    assert tags.peaks == [found.peak_bytes]


@pytest.mark.parametrize(("name", "share"), [("dropout", "60%"), ("images", "75%")])
def test_a_real_step_needs_what_was_promised_and_not_a_byte_more(name: str, share: str) -> None:
    """Torch would hold new statistics of a batch normalization until its backward pass, which does not read them."""
    model, x = MODELS[name]()
    step = module_of(lambda self, x: mean_square(self.inner(x)), inner=model)
    tags = TagPass(share, planner="greedy")
    with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
        call = torch.compile(step, backend="aot_eager", dynamic=False)
        call(x).backward()
    model.zero_grad()
    measured = peak_memory(lambda: call(x).backward()).peak_bytes
    promised = tags.tagged[0].peak_bytes - tags.tagged[0].joint.graph.fixed_bytes
    assert 0.98 * promised <= measured <= promised


class _Seen:
    """Tags, and then keeps the tags and torch's partition of the tagged graph."""

    def __init__(self, share: str) -> None:
        self.share = share

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        self.found = remat.tag(gm, self.share, planner="greedy")
        self.tags = {n.name: is_saved(n) for n in gm.graph.nodes if n.op == "call_function"}
        trial = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        self.passes = torch_tags.partition(trial, inputs, num_fwd_outputs=torch_tags.forward_results(gm.graph))
        self.checked = self.found.checked(self.passes[1])
        return gm


@pytest.mark.thorough
def test_every_node_is_tagged_and_the_partition_follows() -> None:
    model, x = MODELS["images"]()
    seen = _Seen("75%")
    with functorch.patch(joint_custom_pass=seen, enable_autograd_cache=False):
        torch.compile(model, backend="aot_eager", dynamic=False)(x).sum().backward()
    backward = seen.passes[1].graph.nodes
    assert None not in seen.tags.values()
    assert seen.found.again
    assert seen.found.again <= {n.name for n in backward if n.op == "call_function"}
    named = {name for name, saved in seen.tags.items() if saved}
    assert {n.name for n in backward if n.op == "placeholder" and n.name in seen.tags} <= named
    assert {name for name in seen.tags if "native_batch_norm" in name and "backward" not in name} <= named
    assert any(seen.tags[name] for name in seen.tags if name.startswith("getitem"))


@pytest.mark.thorough
def test_torchs_own_estimator_agrees_with_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts tensors of accelerators alone, so that it is made to count these; it knows no kernel's workspace, nor
    parameters that the backward pass does not read. Its `get_peak_memory` over both passes raises in torch 2.13."""
    monkeypatch.setattr(memory_estimator, "device_filter", lambda device: True)
    model, x = MODELS["mlp"]()
    found = []
    for share in ("90%", "65%"):
        torch._dynamo.reset()
        seen = _Seen(share)
        with functorch.patch(joint_custom_pass=seen, enable_autograd_cache=False):
            torch.compile(model, backend="aot_eager", dynamic=False)(x).sum().backward()
        profiles = (
            memory_estimator.build_memory_profile(part.graph, lambda node: not node.name.startswith("primals"))
            for part in seen.passes
        )
        found.append(max(map(max, profiles)))
        assert seen.checked == seen.found.peak_bytes
        assert found[-1] == pytest.approx(seen.found.peak_bytes, rel=0.05)
    assert found[0] > found[1]


def test_a_second_budget_does_not_run_by_the_first_ones_code() -> None:
    """AOTAutograd's cache does not know of the pass: refused by a sentence, and nothing is left in the cache."""
    model, x = MODELS["mlp"]()
    for share in ("90%", "60%"):
        torch._dynamo.reset()
        tags = TagPass(share, planner="greedy")
        with (
            functorch.patch(joint_custom_pass=tags, enable_autograd_cache=True),
            pytest.raises(BackendCompilerFailed, match="cache does not know of this pass"),
        ):
            torch.compile(model, dynamic=False)(x)
        assert not tags.tagged


@pytest.mark.slow
def test_two_budgets_against_one_warm_cache_under_inductor() -> None:
    """Each partitioner is called once; a third compilation with a known budget comes from the cache."""
    model, x = MODELS["mlp"]()
    plain = _step(model, model, x)
    found = []
    for share in ("90%", "60%", "90%"):
        torch._dynamo.reset()
        tags = TagPartitioner(share, planner="greedy")
        with inductor.patch(custom_partitioner_fn=tags), functorch.patch(enable_autograd_cache=True):
            got = _step(model, torch.compile(model, dynamic=False), x)
        torch.testing.assert_close(got[:-1], plain[:-1])
        found.append(tags)
    assert [len(tags.tagged) for tags in found] == [1, 1, 0]
    assert len(found[0].tagged[0].again) < len(found[1].tagged[0].again)
    for tags in found[:2]:
        assert tags.peaks[0] == tags.tagged[0].peak_bytes
    assert found[0].uuid() == found[2].uuid() != found[1].uuid()


def test_ranks_that_plan_together_take_nothing_from_an_earlier_job() -> None:
    """Where one rank has its code in a cache and another has not, this one would wait for the other."""
    alone = [TagPartitioner("70%", planner="greedy").uuid() for _ in range(2)]
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        together = [TagPartitioner("70%", planner="greedy", ranks=True).uuid() for _ in range(2)]
    finally:
        dist.destroy_process_group()
    assert alone[0] == alone[1]
    assert len({alone[0], *together}) == 3


@pytest.mark.thorough
def test_a_step_of_several_graphs_is_refused() -> None:
    """Never the whole budget to each."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def split(x: torch.Tensor) -> torch.Tensor:
        y = first(x).tanh()
        torch._dynamo.graph_break()
        found: torch.Tensor = second(y).tanh()
        return found

    tags = TagPass("100%", planner="greedy")
    with (
        functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False),
        pytest.raises(BackendCompilerFailed, match="second graph"),
    ):
        torch.compile(split, backend="aot_eager", dynamic=False)(numbers(4, 8)).sum().backward()
    assert len(tags.tagged) == 1


def test_a_graph_without_tangents_is_refused() -> None:
    graph = fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(remat.CaptureError, match="no tangents"):
        remat.tag(graph, "50%", planner="greedy")


def test_a_budget_that_no_plan_fits_is_refused() -> None:
    model, x = MODELS["mlp"]()
    tags = TagPass("1%", planner="greedy")
    with pytest.raises(BackendCompilerFailed) as caught:
        _by_pass(model, x, tags)
    assert isinstance(caught.value.inner_exception, (remat.BudgetTooSmall, remat.NothingFound))


def test_options_are_checked_at_the_call() -> None:
    with pytest.raises(remat.RematError, match="no option tim"):
        TagPass("50%", tim=3)  # type: ignore[call-arg]
    with pytest.raises(remat.RematError, match="budget"):
        TagPartitioner(0.5)


class Headed(nn.Module):
    """Blocks, and a head whose gradient the trainer's pass computes from what is there."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.layers, self.noise = nn.ModuleList(FeedForward(32, dropout=0.0) for _ in range(6)), noise
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with fx.traceback.annotate({"module_fqn": f"layers.{number}"}):
                x = layer(x)
            if self.noise:
                x = x * (1 + self.noise * torch.rand_like(x))
        x = self.norm(x)
        with fx.traceback.annotate({"module_fqn": "lm_head"}):
            found: torch.Tensor = self.lm_head(x)
        with fx.traceback.annotate({"module_fqn": "loss"}):
            return found.square().mean()


def _traced(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """A step of loss and gradients as torchtitan's graph trainer traces it, its backward nodes marked."""
    names = [name for name, _ in model.named_parameters()]

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(names, given[:-1], strict=True))
        loss = torch.func.functional_call(model, values, (given[-1],))
        return [loss, *torch.autograd.grad(loss, [values[name] for name in names])]

    with fx.traceback.preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")(*model.parameters(), x)
    order = list(gm.graph.nodes)
    start = next(i for i, n in enumerate(order) if n.target is torch.ops.aten.ones_like.default)
    head = True
    for node in order[start + 1 : -1]:
        node.meta["autograd_backward"] = True
        head &= node.target is not torch.ops.aten.native_layer_norm_backward.default
        if head:
            node.meta["custom"] = {"module_fqn": "lm_head"}
    return gm


def _run_again(gm: fx.GraphModule) -> None:
    """A stand-in for torchtitan's pass: what is tagged gets a second node before its first reader behind the loss."""
    order = list(gm.graph.nodes)
    head = max(i for i, n in enumerate(order) if n.meta.get("custom", {}).get("module_fqn") in ("lm_head", "loss"))
    place: dict[fx.Node, fx.Node] = {}
    for reader in order[head + 1 : -1]:
        stack = list(reader.all_input_nodes) if reader.meta.get("autograd_backward") else []
        while stack:
            node = stack.pop()
            if is_saved(node) is False and node not in place:
                place[node] = reader
                stack.extend(node.all_input_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        if node in place:
            with gm.graph.inserting_before(place[node]):
                copies[node] = gm.graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node].meta["autograd_backward"] = True
    for node, again in copies.items():
        later = order.index(place[node])
        node.replace_all_uses_with(
            again, lambda user, later=later: user in order[later:-1] and bool(user.meta.get("autograd_backward"))
        )
    for node in reversed(copies):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


@pytest.mark.parametrize("share", ["85%", "70%"])
def test_a_traced_step_is_tagged_for_torchtitans_trainer(share: str) -> None:
    """By a stand-in for its pass: gradients equal bit for bit, the measured peak is the promised one."""
    model, x = Headed(), numbers(128, 32)
    gm = _traced(model, x)
    given = [*(p.detach() for p in model.parameters()), x]
    plain = gm(*given)
    tags = GraphTrainerPass(share, planner="local", time_limit_s=4)
    assert tags(gm, given, config=None) is gm
    (found,) = tags.tagged
    assert found.again
    for node in gm.graph.nodes:
        assert ("recompute" in node.meta) == (node.op == "call_function" and not torch_tags.is_backward(node))
        if node.name in found.again:
            assert node.meta.get("custom", {}).get("module_fqn") not in ("lm_head", "loss")
    _run_again(gm)
    assert equal(gm(*given), plain)
    measured = peak_memory(lambda: gm(*given)).peak_bytes
    promised = found.peak_bytes - found.joint.graph.fixed_bytes
    assert 0.98 * promised <= measured <= promised
    with pytest.raises(remat.CaptureError, match="one graph already"):
        tags(gm, given)


def test_a_graph_that_is_no_whole_step_is_refused() -> None:
    with pytest.raises(remat.CaptureError, match="no results that are gradients"):
        GraphTrainerPass("50%", planner="greedy")(fx.symbolic_trace(nn.Linear(4, 4)))


@pytest.mark.thorough
def test_what_a_plan_has_on_the_host_is_tagged_for_torchtitans_pass() -> None:
    """With a link less fits than by tags alone; what is tagged can be followed by the pass, and leaves in time."""
    gm = _traced(Headed(), numbers(512, 32))
    tags = GraphTrainerPass("45%", planner="local", link="400GB", time_limit_s=6)
    tags(gm)
    (found,) = tags.tagged
    moved = [n for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD]
    assert {n.name for n in moved} == found.host
    assert found.host
    assert not found.host & found.again
    order, known = list(gm.graph.nodes), stays(found.joint.step)
    again = [i for i, op in enumerate(found.joint.step.ops) if op.nodes and op.nodes[0].name in found.again]
    runs = tagged_plan(found.joint.graph, again).computes
    away = {storage: stay for storage, stay in known.items() if stay.node.name in found.host}
    assert found.peak_bytes == found.joint.peak_of(runs, away) < found.joint.peak_of(runs, {})
    for stay in known.values():
        node = next(n for n in order if n.name == stay.node.name)
        assert not torch_tags.is_known_view(node)
        layer, nodes = torch_tags.layer_of(node), [n for n in order if n.op == "call_function"]
        if layer not in (torch_tags.NO_LAYER, 5):
            assert torch_tags.layer_of(nodes[stay.leaves]) == layer + 1
            assert torch_tags.layer_of(nodes[stay.leaves + 1]) != layer + 1
    with pytest.raises(remat.RematError, match="name the link"):
        GraphTrainerPass("45%", planner="greedy", link="measured")(_traced(Headed(), numbers(128, 32)))
    with pytest.raises(remat.RematError, match="no option link"):
        TagPass("45%", planner="greedy", link="pcie5")


def test_random_operators_are_saved_for_torchtitan() -> None:
    gm = _traced(Headed(0.2), numbers(128, 32))
    tags = GraphTrainerPass("75%", planner="greedy")
    tags(gm)
    drawn = [n for n in gm.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert drawn
    assert all(is_saved(n) for n in drawn)

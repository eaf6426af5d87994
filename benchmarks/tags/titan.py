"""torchtitan's own tracer and passes run a plan by tags: `python -m benchmarks.tags.titan`, where torchtitan 0.3.0 is.

It prints whether loss and gradients are equal bit for bit, the plain peak, the promised and the measured one, in bytes.
With `--link` some values go to the host between the passes. The trainer's operators for that need an accelerator, so
that after its passes others take their place here, which copy out of what the allocator counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from unittest.mock import MagicMock

import torch
from torch import nn

from benchmarks.upstream.issue_197838 import Block
from remat.profiling.measure import peak_memory
from remat.tags.passes import GraphTrainerPass


def without_triton() -> None:
    """Let torchtitan's modules be imported on a machine without Triton; none of its kernels is called here."""
    import torch._inductor.compile_fx  # looks for Triton, and is to find none

    assert torch._inductor.compile_fx
    if importlib.util.find_spec("triton") is None:
        for name in ("triton", "triton.language", "triton.language.extra"):
            sys.modules[name] = MagicMock(name=name, __spec__=None, __path__=[])


class Layers(nn.Module):
    """Blocks in a list of that name, as torchtitan's models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all blocks."""
        for layer in self.layers:
            x = layer(x)
        return x


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that is not the allocator's."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def to_device(host: torch.Tensor, device: torch.device, size: list[int], stride: list[int]) -> torch.Tensor:
    """A copy in the allocator's memory."""
    return torch.empty_strided(size, stride, dtype=host.dtype).copy_(host)


def waited(tensor: torch.Tensor, source: torch.Tensor, last_use: torch.Tensor | None = None) -> torch.Tensor:
    """The copy, after what it was copied from is freed, as the trainer's operator does."""
    storage = source.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    return tensor


def main() -> int:
    """One step, traced, tagged and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--link", help="to the host, such as pcie5")
    given = parser.parse_args()
    without_triton()
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.cpu_offload import apply_cpu_offload_pass
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    torch.manual_seed(1)
    model, x = Layers(), torch.randn(4, 64, 64)
    annotate_module_fqns(model)

    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        loss = model(batch).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    traced = minimal_fx_tracer(step, module=model)(x)
    run = run_traced(traced, module=model)
    plain, before = run(x), peak_memory(lambda: run(x)).peak_bytes
    more = {} if given.link is None else {"link": given.link}
    tags = GraphTrainerPass(given.budget, planner="local", time_limit_s=10, **more)
    traced.gm = apply_cpu_offload_pass(tags(traced.gm, traced.example_inputs))
    traced.gm = selective_activation_remat_pass(traced.gm)
    ours = {
        torch.ops.ao.offload.default: to_host,
        torch.ops.ao.reload.default: to_device,
        torch.ops.ao.wait_tensor.default: waited,
    }
    for node in traced.gm.graph.nodes:
        node.target = ours.get(node.target, node.target)
    traced.gm.recompile()
    found, measured = run(x), peak_memory(lambda: run(x)).peak_bytes
    equal = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    (plan,) = tags.tagged
    promised = plan.peak_bytes - plan.joint.graph.fixed_bytes
    print(f"{len(plan.again)} kernels run again, {len(plan.host)} values go to the host")
    print(f"equal: {equal}; plain {before:,}, promised {promised:,}, measured {measured:,} bytes")
    return 0 if equal and 0.98 * promised <= measured <= promised else 1


if __name__ == "__main__":
    raise SystemExit(main())

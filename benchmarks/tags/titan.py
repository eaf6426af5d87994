"""torchtitan's own tracer and pass run a plan by tags: `python -m benchmarks.tags.titan`, where torchtitan 0.3.0 is.

It prints whether loss and gradients are equal bit for bit, the plain peak, the promised and the measured one, in bytes.
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


def main() -> int:
    """One step, traced, tagged and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", default="70%")
    given = parser.parse_args()
    without_triton()
    import torch._functorch._activation_offloading.offload_ops  # its pass asks for these operators
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    assert torch._functorch._activation_offloading.offload_ops
    torch.manual_seed(1)
    model, x = nn.Sequential(*[Block(64) for _ in range(4)]), torch.randn(4, 64, 64)

    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        loss = model(batch).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    traced = minimal_fx_tracer(step, module=model)(x)
    run = run_traced(traced, module=model)
    plain, before = run(x), peak_memory(lambda: run(x)).peak_bytes
    tags = GraphTrainerPass(given.budget, planner="local", time_limit_s=10)
    traced.gm = selective_activation_remat_pass(tags(traced.gm, traced.example_inputs))
    traced.gm.recompile()
    found, measured = run(x), peak_memory(lambda: run(x)).peak_bytes
    equal = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    promised = tags.tagged[0].peak_bytes - tags.tagged[0].joint.graph.fixed_bytes
    print(f"equal: {equal}; plain {before:,}, promised {promised:,}, measured {measured:,} bytes")
    return 0 if equal and 0.98 * promised <= measured <= promised else 1


if __name__ == "__main__":
    raise SystemExit(main())

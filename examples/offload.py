"""Train with values that wait on the host for the backward pass.

    python examples/offload.py

The link is given by its numbers here; `link="measured"` measures that of the model's device.
"""

import copy

import torch
from torch import nn

import remat
from remat_ir import Link

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
plain = copy.deepcopy(model)
batch = torch.randn(512, 256)

link = Link(25 * 10**9, 25 * 10**9, latency_ns=10_000)
print(remat.explain(model, (batch,), budget="60%", link=link, host_bytes="64MiB"))
remat.enable(model, budget="60%", link=link, host_bytes="64MiB")

for trained in (model, plain):
    trained(batch).square().mean().backward()
same = all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
print(f"the same gradients, bit for bit: {same}")

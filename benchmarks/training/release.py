"""Llama-7B's shape, all parameters trained: the least budget and the trade-off, with gradients released and without.

`python -m benchmarks.training.release` captures the step from fake tensors, prices it for a GPU that is not there by a
roofline, and plans it at budgets between the least that is found and what plain training needs. The optimizer is fused
AdamW; its state (two numbers a parameter) is left out of all figures, since it is the same in each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.table import Report
from benchmarks.training.large import fake_llama
from remat.capture.backward import with_updates
from remat.capture.dataflow import dataflow
from remat.capture.group import groups
from remat.capture.operations import operations, to_graph
from remat.compile.alone import capture
from remat.profiling.fixed import resident
from remat.target.devices import target_of
from remat.target.price import price
from remat_ir import Graph, overhead_of, plain_peak
from remat_ir.greedy import greedy_plan, least_memory, peak_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the way from the least budget that is found to what plain training needs."""


def graphs(given: argparse.Namespace) -> dict[str, Graph]:
    """The step without and with release."""
    model, tokens = fake_llama(given)
    kwargs = {"input_ids": tokens, "labels": tokens}
    captured = capture(model, (), kwargs)
    flow = dataflow(captured.joint, captured.forward_outputs)
    plain = operations(flow, groups(flow))
    trained = {id(parameter) for parameter in model.parameters()}
    pairs = zip(flow.given, captured.inputs, strict=True)
    released = with_updates(plain, {primal: 0 for primal, held in pairs if id(held) in trained})
    costs = price(flow.kernels, target_of(given.device)).profiled.kernels
    fixed = sum(resident(model, ((), kwargs), dict(enumerate(captured.inputs))).values())
    steps = {"all gradients at the end": plain, "released as they are made": released}
    return {name: to_graph(step, costs, fixed)[0] for name, step in steps.items()}


def rows(name: str, graph: Graph) -> Any:
    """A row for each budget."""
    plain = plain_peak(graph)
    smallest = least_memory(graph)
    least = peak_of(graph, smallest)
    for share in SHARES if least < plain else (1.0,):
        budget = least + int(share * (plain - least))
        plan = smallest if budget == least else greedy_plan(graph, budget)
        assert plan is not None
        cost = sum(graph.op_cost_ns[op] for op in plan.computes)
        overhead = f"{100 * overhead_of(cost, graph.total_cost_ns):.1f} %"
        yield name, f"{budget / 2**30:.2f}", f"{(budget - graph.fixed_bytes) / 2**30:.2f}", overhead


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.release", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--train", default="", help="train only the parameters whose names this expression finds")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--out", type=Path, help="a file that the table is added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("gradients", "budget in GiB", "beyond parameters", "time")
    title = (
        f"{given.layers} layers of width {given.width}, {given.length} tokens, {given.dtype}, all parameters trained"
    )
    with Report(title, columns, given.out) as report:
        for name, graph in graphs(given).items():
            for row in rows(name, graph):
                report.add(*row)
    return 0


if __name__ == "__main__":
    sys.exit(main())

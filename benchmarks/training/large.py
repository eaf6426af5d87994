"""A model larger than this machine: captured under fake tensors, profiled kernel by kernel, planned, never allocated.

`python -m benchmarks.training.large` takes Llama-7B's shape (32 layers of width 4096) and prints what each phase took
in seconds and in memory of this process. `--layers`, `--length` and `--dtype` make it smaller or another.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from remat._compat import FakeTensorMode
from remat.capture.dataflow import dataflow
from remat.capture.group import groups
from remat.capture.operations import operations, to_graph
from remat.compile.alone import capture
from remat.planning.greedy import greedy_answer
from remat.planning.options import SolveOptions
from remat.planning.profiles import DiskProfiles
from remat.planning.sources import LocalPlanner
from remat.profiling.fixed import resident
from remat.profiling.profile import profile_kernels
from remat_ir import Problem, plain_peak, readable, verify
from remat_ir.working_set import working_set

T = TypeVar("T")


def main(argv: list[str] | None = None) -> None:
    """Run all phases and print a line for each; `--json` prints them as one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.large")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the way from the least conceivable budget to plain"
    )
    parser.add_argument("--train", default="", help="train only the parameters whose names this expression finds")
    parser.add_argument("--profiles", type=Path, help="a folder where measured kernels are kept from run to run")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds for the solver; 0: the greedy plan only"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    rows = measured(given)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(f"{name:<10}", ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def measured(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each phase's seconds, the most memory this process had by its end, and what came of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}

    def phase(name: str, run: Callable[[], T]) -> T:
        start, cpu = time.perf_counter(), time.process_time()
        found = run()
        rows[name] = {
            "seconds": round(time.perf_counter() - start, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "process": readable(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }
        print(name, rows[name], file=sys.stderr, flush=True)
        return found

    model, tokens = phase("model", lambda: fake_llama(given))
    kwargs = {"input_ids": tokens, "labels": tokens}
    captured = phase("capture", lambda: capture(model, (), kwargs))
    table = None if given.profiles is None else DiskProfiles(given.profiles)
    flow = dataflow(captured.joint, captured.forward_outputs)
    step = phase("group", lambda: operations(flow, groups(flow)))
    profiled = phase("profile", lambda: profile_kernels(flow.kernels, table))
    fixed = sum(resident(model, ((), kwargs), dict(enumerate(captured.inputs))).values())
    graph, _ = to_graph(step, profiled.kernels, fixed)
    plain, floor = plain_peak(graph), working_set(graph).least_bytes
    rows["model"] |= {"parameters": sum(p.numel() for p in model.parameters()), "fixed": readable(fixed)}
    rows["capture"] |= {"nodes": len(captured.joint.graph.nodes), "kernels": len(flow.kernels)}
    rows["group"] |= {"ops": graph.ops, "values": graph.values}
    rows["profile"] |= {"plain peak": readable(plain), "least conceivable": readable(floor)}
    rows["profile"] |= {
        "signatures": profiled.signatures,
        "known": profiled.shared,
        "plain step": f"{graph.total_cost_ns / 1e9:.1f} s",
    }
    problem = Problem(graph, floor + int(given.share * (plain - floor)))
    answers = {"greedy": phase("greedy", lambda: greedy_answer(problem, time_limit_s=60, max_gap=0.01))}
    if given.time_limit:
        options = SolveOptions(time_limit_s=given.time_limit, max_gap=0.001)
        answers["auto"] = phase("auto", lambda: LocalPlanner().plan(problem, options))
    for name, answer in answers.items():
        rows[name] |= {"budget": readable(problem.budget_bytes), "status": answer.status.value}
        if answer.plan is not None:
            verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
            rows[name] |= {"peak": readable(verdict.peak_bytes), "overhead": answer.overhead, "gap": answer.gap}
    torch.set_num_threads(threads)
    return rows


def fake_llama(given: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Llama-7B's shape with fake parameters, and a sequence of fake tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=given.width * 11008 // 4096,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 128,
        vocab_size=32000,
        max_position_embeddings=max(2048, given.length),
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, given.dtype))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = LlamaForCausalLM(config).train()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(bool(re.search(given.train, name)))
            return model, torch.zeros(1, given.length, dtype=torch.int64)
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    main()

"""The generated instances are what their page says, and the same wherever they are made."""

from __future__ import annotations

import pytest
from benchmarks.graphs.instances import NAMES, instance

from remat_ir import InvalidData, Problem, graph_digest, plain_peak, plain_plan, verify
from tiers import first

_QUICK = [name for name in NAMES if int(name.split("-")[1]) <= 60]


@pytest.mark.parametrize("name", first(6, _QUICK))
def test_an_instance_is_a_training_step_that_trains(name: str) -> None:
    graph = instance(name)
    assert verify(Problem(graph, plain_peak(graph)), plain_plan(graph)).cost_ns == graph.total_cost_ns
    if name.startswith("dag"):
        assert graph.backward_from is None
        return
    forward = graph.backward_from
    assert 0.2 * graph.ops < forward < 0.6 * graph.ops
    saved = {v for op in range(forward, graph.ops) for v in graph.op_inputs[op] if graph.value_op[v] < forward}
    assert len(saved) > forward / 4  # the backward pass reads what the forward pass made
    assert bool(graph.keep) == (name.endswith("-whole"))


@pytest.mark.parametrize(
    ("name", "ops"), [("vgg-13", 84), ("gpt-12", 371), ("resnet-50-whole", 1030), ("gpt-300", 9011), ("tape-64", 129)]
)
def test_sizes_are_those_of_the_page(name: str, ops: int) -> None:
    assert abs(instance(name).ops - ops) <= 0.05 * ops


def test_an_instance_is_the_same_each_time() -> None:
    assert graph_digest(instance("random-125")) == graph_digest(instance("random-125"))
    assert graph_digest(instance("gpt-4")) != graph_digest(instance("gpt-4-whole"))


@pytest.mark.parametrize("name", ["gpt", "gpt-", "gpt-0", "nothing-3", "gpt-3-half", "gpt--1"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidData, match="no instance"):
        instance(name)

"""What the baselines ask of a graph: where its forward pass ends, whether it is linear, which ops cut it in two."""

from __future__ import annotations

from typing import Any

from remat_ir import Graph


def linear(graph: Graph, forward: int) -> bool:
    """Whether ops 0 … forward−1 form a path: each reads values of the op before it and of no other."""
    return all(
        {graph.value_op[value] for value in graph.op_inputs[op]} == ({op - 1} if op else set()) for op in range(forward)
    )


def articulation_points(graph: Graph, forward: int) -> list[int]:
    """Forward ops whose removal disconnects the forward pass, seen as an undirected graph, ascending.

    The step's input is joined to op 0 and its backward pass to op forward−1, so that on a linear graph every op is
    one, and the heuristics that use them are the original ones (Checkmate, Section 5.1.1).
    """
    import networkx as nx  # here, because loading it takes longer than most plans

    joined: Any = nx.Graph()
    joined.add_nodes_from(range(-1, forward + 1))
    joined.add_edges_from([(-1, 0), (forward - 1, forward)])
    for op in range(forward):
        joined.add_edges_from((graph.value_op[value], op) for value in graph.op_inputs[op])
    return sorted(op for op in nx.articulation_points(joined) if 0 <= op < forward)

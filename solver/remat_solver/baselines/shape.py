"""What the baselines ask of a graph: where its forward pass ends, whether it is linear, which ops cut it in two."""

from __future__ import annotations

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
    near: list[list[int]] = [[] for _ in range(forward + 2)]  # op + 1 at each place; the step's input is at 0
    edges = {(0, 1), (forward, forward + 1)}
    edges |= {(graph.value_op[value] + 1, op + 1) for op in range(forward) for value in graph.op_inputs[op]}
    for one, other in sorted(edges):
        near[one].append(other)
        near[other].append(one)
    # depth first from every part's first op: an op cuts off a child from which no way leads back above it
    number, low, found = [-1] * len(near), [0] * len(near), set()
    for root in range(len(near)):
        if number[root] >= 0:
            continue
        number[root], count, branches = 0, 1, 0
        path = [(root, root, iter(near[root]))]
        while path:
            place, parent, ways = path[-1]
            for way in ways:
                if number[way] < 0:
                    number[way] = low[way] = count
                    count += 1
                    path.append((way, place, iter(near[way])))
                    break
                if way != parent:
                    low[place] = min(low[place], number[way])
            else:
                path.pop()
                if parent == root:
                    branches += place != root
                elif low[place] >= number[parent]:
                    found.add(parent)
                low[parent] = min(low[parent], low[place])
        if branches > 1:
            found.add(root)
    return sorted(place - 1 for place in found if 0 < place <= forward)

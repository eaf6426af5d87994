"""Random graphs of the whole model: several values per op, optional and kept ones, workspaces, `once` ops."""

from __future__ import annotations

from hypothesis import strategies as st

from remat_ir import Graph


@st.composite
def whole_graphs(draw: st.DrawFn, least_ops: int = 1, most_ops: int = 12) -> Graph:
    """A graph of the whole model, small enough to reason about."""
    ops = draw(st.integers(least_ops, most_ops))
    value_op: list[int] = []
    inputs: list[tuple[int, ...]] = []
    for op in range(ops):
        earlier = len(value_op)
        near = list(range(max(0, earlier - 5), earlier))
        far = list(range(earlier))
        read = set(draw(st.lists(st.sampled_from(near), max_size=3))) if near else set()
        read |= set(draw(st.lists(st.sampled_from(far), max_size=1))) if far else set()
        inputs.append(tuple(sorted(read)))
        value_op += [op] * draw(st.sampled_from((1, 1, 1, 2, 3, 0)))
    values = len(value_op)
    flags = [draw(st.sampled_from("----------ok")) for _ in range(values)]
    return Graph(
        op_cost_ns=tuple(draw(st.lists(st.integers(0, 20), min_size=ops, max_size=ops))),
        op_inputs=tuple(inputs),
        value_op=tuple(value_op),
        value_bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=values, max_size=values))),
        op_workspace_bytes=tuple(draw(st.lists(st.sampled_from((0, 0, 0, 3)), min_size=ops, max_size=ops))),
        optional=tuple(v for v in range(values) if flags[v] == "o"),
        keep=tuple(v for v in range(values) if flags[v] == "k"),
        once=tuple(sorted(draw(st.sets(st.integers(0, ops - 1), max_size=1)))),
        fixed_bytes=draw(st.sampled_from((0, 0, 5))),
    )


fractions = st.integers(1, 20).map(lambda twentieths: twentieths / 20)

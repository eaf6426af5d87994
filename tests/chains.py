"""Random chains for hypothesis, and the papers' instances."""

from __future__ import annotations

from operator import add

from hypothesis import strategies as st

from remat_ir import Chain


@st.composite
def chains(draw: st.DrawFn, most_stages: int = 5, most: int = 6, link: bool = False) -> Chain:
    """A chain of small integers; with `link`, one that has a link to the host."""
    stages = draw(st.integers(1, most_stages))

    def column(length: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, most), min_size=length, max_size=length)))

    activation, rests, workspaces = column(stages + 1), column(stages), column(stages)
    more = draw(st.none() | st.tuples(*(st.integers(0, rest) for rest in rests)))
    return Chain(
        forward_ns=column(stages),
        backward_ns=column(stages),
        forward_workspace_bytes=workspaces,
        untaped_workspace_bytes=None if more is None else tuple(map(add, workspaces, more)),
        backward_workspace_bytes=column(stages),
        tape_bytes=tuple(map(add, activation[1:], rests)),
        activation_bytes=activation,
        gradient_bytes=column(stages + 1),
        link_bytes_per_s=draw(st.integers(1, 4)) * 500_000_000 if link else None,
    )


@st.composite
def lift_orders(draw: st.DrawFn, chain: Chain) -> list[int]:
    """An order in which a valid plan can compute the ops of the chain's lift, with recomputations anywhere."""
    count = chain.stages
    order: list[int] = []
    for stage in range(1, count + 1):
        order += draw(st.lists(st.integers(0, stage - 2), max_size=1)) if stage > 1 else []
        order.append(stage - 1)
    order.append(count)
    for stage in range(count, 0, -1):
        if draw(st.booleans()):
            order += range(draw(st.integers(1, stage)) - 1, stage)
        order += draw(st.lists(st.integers(0, count - 1), max_size=2))
        order.append(2 * count + 1 - stage)
    return order


def counter_example(n: int) -> Chain:
    """The chain after RR-9302, Figure 2, on which no persistent schedule is optimal; its budget is 8."""
    activation = (0, 1, 2, *[3] * (n - 1), 4)
    stages = len(activation) - 1
    zeros = (0,) * stages
    return Chain(
        forward_ns=(n - 1, 2, *[0] * (stages - 2)),
        backward_ns=zeros,
        forward_workspace_bytes=zeros,
        backward_workspace_bytes=zeros,
        tape_bytes=activation[1:],
        activation_bytes=activation,
        gradient_bytes=(0, *zeros),
    )

"""The optimal schedule of a small join by search over all its states, straight from RR-9273, Table 3."""

from __future__ import annotations

from collections.abc import Iterator

from solver.shortest import shortest

# the x in memory of each branch; the index of its x̄, −1 before the turn, −2 after the branch has ended
State = tuple[tuple[frozenset[int], ...], tuple[int, ...]]


def fewest_forward_steps(lengths: tuple[int, ...], slots: int, stays: tuple[bool, ...] = ()) -> int | None:
    """The fewest forward steps of any valid schedule in so many slots, or None (Dijkstra over states).

    `stays` is b: whether the x̄_0 of a branch is in memory at the end; none is by default.
    """
    stays = stays or (False,) * len(lengths)
    ends = tuple(0 if stay else -2 for stay in stays)
    if len(lengths) > slots:
        return None
    start: State = (tuple(frozenset((0,)) for _ in lengths), (-1,) * len(lengths))
    found = shortest(
        start,
        lambda state: ((None, *move) for move in _moves(lengths, slots, state, ends)),
        lambda state: not any(state[0]) and state[1] == ends,
    )
    return None if found is None else found[0]


def _moves(lengths: tuple[int, ...], slots: int, state: State, ends: tuple[int, ...]) -> Iterator[tuple[int, State]]:
    held, gradients = state
    filled = sum(map(len, held)) + sum(gradient >= 0 for gradient in gradients)

    def with_branch(j: int, values: frozenset[int]) -> tuple[frozenset[int], ...]:
        return (*held[:j], values, *held[j + 1 :])

    for j, length in enumerate(lengths):
        for i in held[j]:
            if i < length and i + 1 not in held[j]:
                yield 1, (with_branch(j, held[j] - {i} | {i + 1}), gradients)
                if filled < slots:
                    yield 1, (with_branch(j, held[j] | {i + 1}), gradients)
            yield 0, (with_branch(j, held[j] - {i}), gradients)
        if gradients[j] > 0 and gradients[j] - 1 in held[j]:
            # an x̄_0 that does not stay is of no more use: it is discarded at once
            after = gradients[j] - 1 or ends[j]
            yield 0, (with_branch(j, held[j] - {gradients[j] - 1}), (*gradients[:j], after, *gradients[j + 1 :]))
    turning = all(gradient == -1 for gradient in gradients)
    if turning and all(length in values for length, values in zip(lengths, held, strict=True)):
        after = tuple(values - {length} for length, values in zip(lengths, held, strict=True))
        yield 0, (after, tuple(length or end for length, end in zip(lengths, ends, strict=True)))

"""Simulated annealing over schedules, in compiled code."""

from __future__ import annotations

import math

from .layout import BEST_COST, COST, JOURNAL, OVER, Ints, compiled
from .moves import chance, move, undo
from .state import note_best

_WINDOW = 2000


@compiled
def anneal(m: Ints, weight: float, hot: float, cold: float, moves: int, pool: int) -> tuple[float, int]:
    """Make so many moves while the temperature falls from `hot` to `cold` ns; notes the best schedule in the profile.

    The objective is cost + `weight` · Σ over keys of the bytes above the budget. The weight adapts so that the search
    is within the budget for 20 to 60 % of its time. Returns the weight as it ends, and how many moves were kept.
    """
    kept, over_count = 0, 0
    ratio = math.log(cold / hot) / moves
    temperature = hot
    for number in range(moves):
        if number & 63 == 0:
            temperature = hot * math.exp(ratio * number)
        cost, over = m[COST], m[OVER]
        move(m, pool)
        if m[JOURNAL] > 0:
            worse = (m[COST] - cost) + weight * (m[OVER] - over)
            if worse <= 0 or chance(m) < math.exp(-worse / temperature):
                kept += 1
                m[JOURNAL] = 0
                if m[OVER] == 0 and m[COST] < m[BEST_COST]:
                    note_best(m)
            else:
                undo(m)
        if m[OVER] > 0:
            over_count += 1
        if number % _WINDOW == _WINDOW - 1:
            if over_count > 0.8 * _WINDOW:
                weight *= 1.15
            elif over_count < 0.4 * _WINDOW:
                weight /= 1.15
            over_count = 0
    return weight, kept

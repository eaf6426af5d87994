"""Whose turn it is on an integer program: CP-SAT's searches alternate, each longer than the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

_SEARCHES = (("max_lp", 2), ("objective_lb_search_max_lp", 4))
_FIRST_TURN = 1.0
"""CP-SAT's searches, each with a level of symmetry detection, and the work after which the other takes over, twofold
from turn to turn: in its own units of one to two seconds, so that the same problem gives the same turns everywhere.

Most programs are solved within the first turn, by the first search sooner: of ResNet-50 at 0.75 the first program in
0.8 s, by the second in 45 s. Where layers repeat it is the other way round: of a GPT at 0.5 in 1.4 s instead of over
30. Of ResNet-16 at 0.3 with 8 cuts the second proves 18.5 % in 10 s and the first 18.0 %.
"""
_PATIENCE = 8.0
"""The first turn goes to the search that solved the round before, and is longer than it took then by this factor."""


def turns(engine: str, lead: int, lead_work: float) -> Iterator[tuple[int, dict[str, object]]]:
    """A search and the engine's options, turn by turn, from the search that solved the last program in so much work."""
    if engine != "cpsat":
        yield 0, {}
        return
    work = max(_FIRST_TURN, _PATIENCE * lead_work)
    for number in itertools.count(lead):
        name, symmetry = _SEARCHES[number % len(_SEARCHES)]
        options = {"subsolvers": [name], "symmetry_level": symmetry, "max_deterministic_time": work}
        yield number % len(_SEARCHES), options
        work *= 2.0

"""What a certificate of any kind proves about a problem."""

from __future__ import annotations

from ..digest import problem_digest
from ..problem import Problem
from .certificate import PairProof, Proof, WindowProof
from .check import Proved, graph_of_subject, prove_stages
from .pairs import PairCheck, check_pairs
from .rows import InvalidProof
from .windows import prove_windows


def prove(problem: Problem, proof: Proof) -> Proved:
    """What a certificate proves about a problem: a graph, or a chain without a link, taken as its lift.

    Raises:
        InvalidProof: it is for another problem, or proves nothing; the message says why.
    """
    if proof.digest != problem_digest(problem):
        raise InvalidProof("the certificate is for another problem: its digest is not the problem's")
    graph = graph_of_subject(problem)
    capacity = problem.budget_bytes - graph.fixed_bytes
    if isinstance(proof, PairProof):
        check_pairs(PairCheck(graph, capacity, proof))
        return Proved(None)
    if isinstance(proof, WindowProof):
        return prove_windows(graph, capacity, proof)
    return prove_stages(graph, capacity, proof)

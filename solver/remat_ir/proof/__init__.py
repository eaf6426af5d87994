"""Certificates: a proof of a bound, or that no plan fits, as data that plain Python checks in whole numbers."""

from .carry import carried
from .certificate import Branch, Leaf, PairProof, Proof, StageProof, read_proof
from .check import Proved, certifiable, graph_of_subject, prove
from .pairs import certain_need
from .rows import InvalidProof

__all__ = [
    "Branch",
    "InvalidProof",
    "Leaf",
    "PairProof",
    "Proof",
    "Proved",
    "StageProof",
    "carried",
    "certain_need",
    "certifiable",
    "graph_of_subject",
    "prove",
    "read_proof",
]

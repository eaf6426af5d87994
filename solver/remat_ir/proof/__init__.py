"""Certificates: a proof of a bound, or that no plan fits, as data that plain Python checks in whole numbers."""

from .carry import Certificate, carried, prove
from .certificate import Branch, Leaf, PairProof, Proof, StageProof, WindowProof, read_proof
from .check import certifiable, graph_of_subject
from .pairs import certain_need
from .rows import InvalidProof

__all__ = [
    "Branch",
    "Certificate",
    "InvalidProof",
    "Leaf",
    "PairProof",
    "Proof",
    "StageProof",
    "WindowProof",
    "carried",
    "certain_need",
    "certifiable",
    "graph_of_subject",
    "prove",
    "read_proof",
]

"""The heuristics that the literature compares with, made to run on any graph (Checkmate, Table 1 and Section 5.1)."""

"""The heuristics that the literature compares with, made to run on any graph (Checkmate, Table 1 and Section 5.1)."""

from .heuristics import BASELINES, Baseline, BaselineOptions, NoOptions, checkpoint_all, keep_everything

__all__ = ["BASELINES", "Baseline", "BaselineOptions", "NoOptions", "checkpoint_all", "keep_everything"]

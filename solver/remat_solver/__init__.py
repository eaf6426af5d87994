"""From a problem to an answer: bounds, incumbents, programs, engines, and the methods that combine them."""

from remat_ir.batch import LargestBatch

from .batch import BatchSearch, max_batch
from .bounds import least_need, pair_proof
from .contradiction import Evidence, report_bound, report_budget
from .incumbent import Incumbent, checked
from .kernels import all_cached, load_for_forks
from .knowledge import Bound, Ending, Known, claim_sentence, sentence
from .methods import METHODS, Method, method_named, runner_of
from .methods.least import least_budget
from .solve import solve
from .sweep import sweep
from .version import solver_version

__all__ = [
    "METHODS",
    "BatchSearch",
    "Bound",
    "Ending",
    "Evidence",
    "Incumbent",
    "Known",
    "LargestBatch",
    "Method",
    "all_cached",
    "checked",
    "claim_sentence",
    "least_budget",
    "least_need",
    "load_for_forks",
    "max_batch",
    "method_named",
    "pair_proof",
    "report_bound",
    "report_budget",
    "runner_of",
    "sentence",
    "solve",
    "solver_version",
    "sweep",
]

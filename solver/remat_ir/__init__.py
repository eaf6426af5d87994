"""The language all parts speak: graphs, problems, plans, answers, their digests, and the judge of every plan."""

from .answer import Answer, Progress, Status, gap_of, overhead_of
from .digest import graph_digest, problem_digest, structure_digest
from .errors import InvalidData, InvalidPlan, RematError
from .graph import Graph, graph_of
from .plan import Compute, Drop, Free, Offload, Plan, Prefetch, Step, Wait, plain_plan, plan_of, recomputed
from .problem import Problem, budget_at, plain_peak
from .replay import Moment, replay
from .verify import Verdict, verify

__all__ = [
    "Answer",
    "Compute",
    "Drop",
    "Free",
    "Graph",
    "InvalidData",
    "InvalidPlan",
    "Moment",
    "Offload",
    "Plan",
    "Prefetch",
    "Problem",
    "Progress",
    "RematError",
    "Status",
    "Step",
    "Verdict",
    "Wait",
    "budget_at",
    "gap_of",
    "graph_digest",
    "graph_of",
    "overhead_of",
    "plain_peak",
    "plain_plan",
    "plan_of",
    "problem_digest",
    "recomputed",
    "replay",
    "structure_digest",
    "verify",
]

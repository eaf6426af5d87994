"""The language all parts speak: graphs, problems, plans, answers, their digests, and the verifier of every plan."""

from .answer import Answer, Progress, Status, gap_of, overhead_of, worth_more_time
from .chain import Chain
from .chain_lift import lifted_plan, lowered_plan
from .chain_plan import ChainPlan, ChainStep, Verb, plain_chain_plan
from .chain_replay import replay_chain
from .digest import Digests, digests_of, graph_digest, problem_digest, structure_digest
from .errors import InvalidData, InvalidPlan, RematError
from .graph import Graph, graph_of
from .join import Join, JoinPlan, JoinStep, JoinVerb, join_in_bytes, plain_join_plan
from .join_replay import replay_join
from .link import Link
from .node_link import from_node_link, to_node_link
from .plan import Compute, Drop, Free, Offload, Plan, Prefetch, Step, Wait, plain_plan, plan_of, recomputed
from .problem import Problem, budget_at, plain_peak
from .proof import InvalidProof, Proof
from .replay import Moment, replay
from .subject import AnyPlan, Subject, plain_plan_of, read_plan, replay_any, subject_kind
from .verify import Verdict, host_peak, verify
from .verify_answer import AnswerVerdict, Certificate, certificate_for, certified, certified_need, verify_answer

__all__ = [
    "Answer",
    "AnswerVerdict",
    "AnyPlan",
    "Certificate",
    "Chain",
    "ChainPlan",
    "ChainStep",
    "Compute",
    "Digests",
    "Drop",
    "Free",
    "Graph",
    "InvalidData",
    "InvalidPlan",
    "InvalidProof",
    "Join",
    "JoinPlan",
    "JoinStep",
    "JoinVerb",
    "Link",
    "Moment",
    "Offload",
    "Plan",
    "Prefetch",
    "Problem",
    "Progress",
    "Proof",
    "RematError",
    "Status",
    "Step",
    "Subject",
    "Verb",
    "Verdict",
    "Wait",
    "budget_at",
    "certificate_for",
    "certified",
    "certified_need",
    "digests_of",
    "from_node_link",
    "gap_of",
    "graph_digest",
    "graph_of",
    "host_peak",
    "join_in_bytes",
    "lifted_plan",
    "lowered_plan",
    "overhead_of",
    "plain_chain_plan",
    "plain_join_plan",
    "plain_peak",
    "plain_plan",
    "plain_plan_of",
    "plan_of",
    "problem_digest",
    "read_plan",
    "recomputed",
    "replay",
    "replay_any",
    "replay_chain",
    "replay_join",
    "structure_digest",
    "subject_kind",
    "to_node_link",
    "verify",
    "verify_answer",
    "worth_more_time",
]

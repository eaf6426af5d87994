"""The language all parts speak: graphs, problems, plans, answers, their digests, and the verifier of every plan."""

from .answer import ANSWER, Answer, Progress, Status, gap_of, overhead_of, worth_more_time
from .batch import LARGEST_BATCH, BatchFamily, LargestBatch, one_forward_pass_more
from .chain import Chain
from .chain_plan import ChainPlan, ChainStep, Verb, lifted_plan, lowered_plan, plain_chain_plan, replay_chain
from .digest import Digests, Written, digests_of, graph_digest, problem_digest, structure_digest
from .errors import InvalidData, InvalidPlan, RematError
from .graph import Graph, graph_of
from .greedy import checkpointed, greedy_plans, least_memory, peak_of
from .join import Join, JoinPlan, JoinStep, JoinVerb, join_in_bytes, plain_join_plan, replay_join
from .link import Link
from .node_link import from_node_link, is_node_link, to_node_link
from .plan import (
    Compute,
    Drop,
    Free,
    Offload,
    Plan,
    Prefetch,
    Step,
    Wait,
    permitted,
    plain_plan,
    plan_of,
    recomputed,
    without_unread,
)
from .plot import draw_memory, figure_of
from .problem import (
    PROBLEMS,
    SUBJECTS,
    AnyPlan,
    Problem,
    Subject,
    budget_at,
    plain_peak,
    plain_plan_of,
    read_plan,
    replay_any,
    subject_kind,
)
from .proof import InvalidProof, Proof
from .replay import Moment, replay
from .restrictions import best_of, gap_sentence, optimal_sentence, outgrown
from .tags import is_tagged, tagged_plan, tags_of
from .verify import Verdict, host_peak, verify
from .verify_answer import AnswerVerdict, Certificate, certificate_for, certified, certified_need, verify_answer
from .words import duration, readable
from .working_set import pinned_ops, working_set

__all__ = [
    "ANSWER",
    "LARGEST_BATCH",
    "PROBLEMS",
    "SUBJECTS",
    "Answer",
    "AnswerVerdict",
    "AnyPlan",
    "BatchFamily",
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
    "LargestBatch",
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
    "Written",
    "best_of",
    "budget_at",
    "certificate_for",
    "certified",
    "certified_need",
    "checkpointed",
    "digests_of",
    "draw_memory",
    "duration",
    "figure_of",
    "from_node_link",
    "gap_of",
    "gap_sentence",
    "graph_digest",
    "graph_of",
    "greedy_plans",
    "host_peak",
    "is_node_link",
    "is_tagged",
    "join_in_bytes",
    "least_memory",
    "lifted_plan",
    "lowered_plan",
    "one_forward_pass_more",
    "optimal_sentence",
    "outgrown",
    "overhead_of",
    "peak_of",
    "permitted",
    "pinned_ops",
    "plain_chain_plan",
    "plain_join_plan",
    "plain_peak",
    "plain_plan",
    "plain_plan_of",
    "plan_of",
    "problem_digest",
    "read_plan",
    "readable",
    "recomputed",
    "replay",
    "replay_any",
    "replay_chain",
    "replay_join",
    "structure_digest",
    "subject_kind",
    "tagged_plan",
    "tags_of",
    "to_node_link",
    "verify",
    "verify_answer",
    "without_unread",
    "working_set",
    "worth_more_time",
]

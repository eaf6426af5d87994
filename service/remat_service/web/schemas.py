"""The documents of the wire as schemas, for OpenAPI: what a generator of clients, or a fuzzer, may rely on.

Bodies are read by the language's own readers, which say more than a schema can; a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

Count = Annotated[int, Field(ge=0, le=2**53)]
Counts = list[Count]


class Document(BaseModel):
    """A JSON object without unknown members."""

    model_config = ConfigDict(extra="forbid", strict=True)


class GraphDocument(Document):
    """A `remat-graph/1`: the training step as columns of integers."""

    format: Literal["remat-graph/1"]
    fixed_bytes: Count = 0
    op_cost_ns: Annotated[Counts, Field(min_length=1)]
    op_workspace_bytes: Counts = []
    op_inputs: list[Counts]
    value_op: Counts
    value_bytes: Counts
    optional: Counts = []
    once: Counts = []
    keep: Counts = []
    backward_from: Count | None = None


class ChainDocument(Document):
    """A `remat-chain/1`: stages 1 … L, the loss stage last."""

    format: Literal["remat-chain/1"]
    forward_ns: Annotated[Counts, Field(min_length=1)]
    backward_ns: Counts
    forward_workspace_bytes: Counts
    backward_workspace_bytes: Counts
    tape_bytes: Counts
    activation_bytes: Counts
    gradient_bytes: Counts
    link_bytes_per_s: Annotated[int, Field(ge=1, le=2**53)] | None = None
    host_bytes: Count | None = None


class JoinDocument(Document):
    """A `remat-join/1`: branches that meet at a turn."""

    format: Literal["remat-join/1"]
    lengths: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(min_length=1, max_length=64)]
    forward_ns: Count
    backward_ns: Count
    turn_ns: Count
    slots: Count
    slot_bytes: Annotated[int, Field(ge=1, le=2**53)] = 1


class GraphProblem(Document):
    """A graph and its budget."""

    graph: GraphDocument
    budget_bytes: Count


class ChainProblem(Document):
    """A chain and its budget."""

    chain: ChainDocument
    budget_bytes: Count


class JoinProblem(Document):
    """A join and its budget."""

    join: JoinDocument
    budget_bytes: Count


ProblemDocument = GraphProblem | ChainProblem | JoinProblem


class Limits(Document):
    """How to look for a plan, and for how long."""

    method: Annotated[str, Field(description="A name of `GET /v1/capabilities`.")] = "auto"
    options: Annotated[dict[str, Any], Field(description="The method's own options.")] = {}
    time_limit_s: Annotated[float, Field(gt=0, description="Seconds of solving, the queue not counted.")] = 60.0
    max_gap: Annotated[float, Field(ge=0, lt=1, description="Stop once (cost − bound) / cost is no more.")] = 0.001
    priority: Annotated[int, Field(ge=-100, le=100, description="Higher goes first.")] = 0
    queue_limit_s: Annotated[float, Field(gt=0)] | None = None
    start: Annotated[str | None, Field(description="Id of an ended solve whose plan to start from.")] = None
    force: Annotated[bool, Field(description="Solve anew even where the store has an answer.")] = False


class SolveRequest(Limits):
    """A request for a plan."""

    problem: ProblemDocument


class PlanDocument(BaseModel):
    """A `remat-plan/1`, `remat-chain-plan/1` or `remat-join-plan/1`."""

    format: Literal["remat-plan/1", "remat-chain-plan/1", "remat-join-plan/1"]
    steps: list[list[Any]]


class AnswerDocument(BaseModel):
    """The answer to a solve, in whatever state it is; `plan` is there when it has ended with one."""

    id: str | None
    status: Literal["queued", "running", "optimal", "feasible", "infeasible", "nothing_found", "cancelled", "failed"]
    method: str
    budget_bytes: int
    cost_ns: int | None
    bound_ns: int | None
    overhead: float | None
    gap: float | None
    peak_bytes: int | None
    seconds: float
    limit: Literal["gap", "time", "cancel", "memory"] | None
    restricted_to: list[str]
    least_budget_bytes: int | None
    least_budget_bound_bytes: int | None
    digest: str
    message: str
    cache: Literal["hit", "near", "joined", "miss"] | None
    claimed_bound_ns: int | None
    claimed_by: str | None
    plan: PlanDocument | None = None
    proof: dict[str, Any] | None = None


class SolveRow(AnswerDocument):
    """An answer in a list, with the size of its problem and when it was asked for."""

    ops: int | None
    joined: int
    created_at: str


class SolveList(BaseModel):
    """A page of solves, newest first; `next` is the `after` of the next page."""

    solves: list[SolveRow]
    next: str | None


class ProgressPoint(BaseModel):
    """One improvement of a running solve."""

    seq: int
    seconds: float
    cost_ns: int | None
    bound_ns: int | None
    restricted_to: list[str]
    source: str


class ProgressList(BaseModel):
    """A solve's improvements in order."""

    id: str
    progress: list[ProgressPoint]


class ProblemOut(BaseModel):
    """A problem as it was asked: one of graph, chain, join, and its budget."""

    graph: dict[str, Any] | None = None
    chain: dict[str, Any] | None = None
    join: dict[str, Any] | None = None
    budget_bytes: int


class Curve(BaseModel):
    """Memory over the steps: when each starts, the bytes while it runs, what it is, and whether it has run before."""

    start_ns: list[int]
    end_ns: int
    memory_bytes: list[int]
    what: list[str]
    again: list[bool]


class TimelineDocument(BaseModel):
    """The memory curve of a solve's plan, and of training without rematerialization."""

    kind: Literal["graph", "chain", "join"]
    total_cost_ns: int
    plain: Curve
    plan: Curve | None


Budgets = Annotated[list[Count], Field(min_length=1, max_length=64)]


class GraphSweep(Limits):
    """A graph at many budgets: those named, or `points` of them over the whole curve."""

    graph: GraphDocument
    budgets_bytes: Budgets


class GraphCurve(Limits):
    """A graph's whole trade-off curve, from the least budget proved necessary to the plain peak."""

    graph: GraphDocument
    points: Annotated[int, Field(ge=2, le=64)]


class ChainSweep(Limits):
    """A chain at many budgets."""

    chain: ChainDocument
    budgets_bytes: Budgets


class ChainCurve(Limits):
    """A chain's whole trade-off curve."""

    chain: ChainDocument
    points: Annotated[int, Field(ge=2, le=64)]


class JoinSweep(Limits):
    """A join at many budgets."""

    join: JoinDocument
    budgets_bytes: Budgets


class SweepRequest(RootModel[GraphSweep | GraphCurve | ChainSweep | ChainCurve | JoinSweep]):
    """One step at many budgets."""


class SweepDocument(BaseModel):
    """A group of solves; `ended` once all have."""

    id: str
    ended: bool
    solves: list[AnswerDocument]


class BatchRequest(Limits):
    """A graph captured at one batch size, and the batch sizes to try within its budget."""

    problem: GraphProblem
    batch: Annotated[int, Field(ge=1, le=10**6, description="The batch size that the graph was captured at.")]
    batches: Annotated[list[Annotated[int, Field(ge=1, le=10**6)]], Field(min_length=1, max_length=64)]
    batch_values: Annotated[Counts | None, Field(description="Values that grow with it; by default all but kept.")] = (
        None
    )
    max_overhead: Annotated[float, Field(ge=0)] | None = None


class BatchDocument(SweepDocument):
    """The solves of the batch sizes in order, and the largest that fits so far."""

    batches: list[int]
    best_batch: int | None


class GraphCheck(Document):
    """A graph to check; a budget may come with it."""

    graph: GraphDocument
    budget_bytes: Count = 0


class ChainCheck(Document):
    """A chain to check."""

    chain: ChainDocument
    budget_bytes: Count = 0


class JoinCheck(Document):
    """A join to check."""

    join: JoinDocument
    budget_bytes: Count = 0


class ValidateRequest(RootModel[GraphCheck | ChainCheck | JoinCheck]):
    """What to check."""


class ValidateDocument(BaseModel):
    """What a valid graph, chain or join is."""

    kind: Literal["graph", "chain", "join"]
    digest: str
    structure_digest: str
    ops: int
    edges: int
    total_cost_ns: int
    fixed_bytes: int
    plain_peak_bytes: int
    least_budget_bound_bytes: int
    model_entries: int


class ExplainDocument(BaseModel):
    """What the store has for a request, and what it misses by."""

    result: Literal["hit", "near", "miss"]
    digest: str
    reasons: list[str]


Signature = Annotated[str, Field(min_length=1, max_length=500)]
Device = Annotated[str, Field(min_length=1, max_length=500)]


class ProfileLookup(Document):
    """Which measured costs are wanted."""

    device: Device
    signatures: Annotated[list[Signature], Field(max_length=100_000)]


class ProfileUpload(Document):
    """Measured costs: signature → [ns, workspace bytes]. What already stands stays."""

    device: Device
    profiles: Annotated[
        dict[Signature, Annotated[list[Count], Field(min_length=2, max_length=2)]], Field(max_length=100_000)
    ]


class ProfileTable(BaseModel):
    """Signature → [ns, workspace bytes]."""

    profiles: dict[str, list[int]]


class MethodDocument(BaseModel):
    """A method that solves can ask for."""

    name: str
    summary: str
    takes: list[str]
    options: dict[str, Any]
    restricted_to: list[str]


class Capabilities(BaseModel):
    """What this service does, and its limits."""

    version: str
    formats: list[str]
    methods: list[MethodDocument]
    limits: dict[str, float]


class Health(BaseModel):
    """Whether the service is well."""

    status: str


class Problem(BaseModel):
    """A refusal (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    pointer: str | None = None

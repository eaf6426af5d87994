"""The methods of RematBench through one protocol: a name, the families that it answers, and a function to call.

`run(question, seconds)` gives what was found: a plan of the question's graph, or why there is none. To add a method,
enter one below; `measure` calls it, replays its plan with the one verifier, and takes nothing on trust.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from benchmarks.rematbench import Unanswered
from benchmarks.rematbench.hiremate import hiremate
from benchmarks.rematbench.instances import FAMILIES, Instance
from benchmarks.rematbench.intervals import moccasin
from benchmarks.rematbench.peers import dtr, knapsack
from benchmarks.rematbench.poet import poet
from remat_ir import Chain, ChainPlan, InvalidData, Plan, Problem, Progress, lifted_plan, problem_digest, verify
from remat_ir.errors import InvalidPlan
from remat_ir.proof import InvalidProof, prove
from remat_solver import METHODS as BY_NAME
from remat_solver import solve

Moment = tuple[float, int | None, int | None]


class Question(NamedTuple):
    """An instance at one of its budgets, and the seed of what is random."""

    instance: Instance
    number: int
    seed: int = 0

    @property
    def key(self) -> str:
        """What rows and files call it."""
        return f"{self.instance.name}@{self.number}"

    @property
    def problem(self) -> Problem:
        """The graph and the budget."""
        return self.instance.problem(self.number)

    @property
    def as_it_is(self) -> Problem:
        """The same with the chain where the subject is one."""
        return Problem(self.instance.subject, self.problem.budget_bytes)


class Found(NamedTuple):
    """What a method gives: a plan of the graph, or why not; a certificate; what it claims beyond it, in ns.

    `progress` are triples of seconds, cost and bound so far.
    """

    plan: Plan | None = None
    why: str = ""
    proof: Any = None
    claimed_ns: int | None = None
    progress: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        families: those that it answers.
        run: takes a question and the seconds it has.
        source: what it is written from, or whose it is.
        reproduces: which figure of its paper it was compared with, and how close it came; or that none was.
        fast: whether it belongs to the baselines that end in no time.
        at_most: ops beyond which it isn't asked.
    """

    name: str
    families: tuple[str, ...]
    run: Callable[[Question, float], Found]
    source: str
    reproduces: str = "none yet"
    fast: bool = False
    at_most: int = 100_000


def _graphs(call: Callable[[Problem, float], Plan]) -> Callable[[Question, float], Found]:
    return lambda question, seconds: Found(call(question.problem, seconds))


def ours(method: str, *, chains: bool = False) -> Callable[[Question, float], Found]:
    """A method of this solver by its name; `chains`: given the chain where there is one."""

    def run(question: Question, seconds: float) -> Found:
        problem = question.as_it_is if chains else question.problem
        seeded = {"seed": question.seed} if "seed" in {field.name for field in fields(BY_NAME[method].options)} else {}
        seen: list[Moment] = []

        def note(news: Progress) -> None:
            seen.append((round(news.seconds, 3), news.cost_ns, news.whole_bound_ns))

        answer = solve(problem, method=method, time_limit_s=seconds, max_gap=0.0, options=seeded, on_progress=note)
        plan: Any = answer.plan
        if isinstance(plan, ChainPlan):
            assert isinstance(problem.subject, Chain)
            plan = lifted_plan(problem.subject, plan)
        proof = answer.proof if problem is question.problem or problem.kind == "graph" else None
        if proof is not None and answer.restricted_to and proof.digest != problem_digest(problem):
            proof = None  # of the plans of that space alone
        claimed = answer.claimed_bound_ns if not answer.restricted_to else None
        return Found(plan, "" if plan is not None else answer.message, proof, claimed, tuple(seen))

    return run


GRAPHS = ("captured", "checkmate", "random", "chains")
JOINTS = ("captured", "checkmate", "random")
OURS = "this project"
CHECKMATE = "Jain et al., MLSys 2020"
CHEN = "Chen et al., 2016; as Checkmate's comparison completes it"
ROTOR = "Beaumont et al., RR-9302 (2019)"
BEFORE = "benchmarks/results/figures.md"
DTR = "O(N) operations with memory of order √N: at most 3.2 a layer with 2 √N units, N to 1,024; no figure of it"
TORCH = "none: torch's functions themselves, which no publication measures"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("auto", FAMILIES, ours("auto"), OURS),
        Method("staged", GRAPHS, ours("staged"), OURS),
        Method("search", GRAPHS, ours("search"), OURS),
        Method("blocks", GRAPHS, ours("blocks"), OURS, fast=True),
        Method("greedy", GRAPHS, ours("greedy"), OURS, fast=True),
        Method("tags", ("captured", "checkmate"), ours("tags"), OURS),
        Method("transfers", ("link",), ours("transfers"), OURS),
        Method("offload-only", ("link",), ours("offload-only"), OURS, fast=True),
        Method("save-on-cpu", ("link",), ours("save-on-cpu"), "torch.autograd.graph.save_on_cpu", fast=True),
        Method("layer-fractions", ("link",), ours("layer-fractions"), "a proposal for torchtitan's trainer", fast=True),
        Method("milp", GRAPHS, ours("milp"), CHECKMATE, BEFORE, at_most=400),
        Method("lp-rounding", GRAPHS, ours("lp-rounding"), CHECKMATE, BEFORE, at_most=400),
        Method("checkpoint-all", GRAPHS, ours("checkpoint-all"), "no plan at all", fast=True),
        Method("chen-sqrt", GRAPHS, ours("chen-sqrt"), CHEN, BEFORE, fast=True),
        Method("chen-greedy", GRAPHS, ours("chen-greedy"), CHEN, BEFORE, fast=True),
        Method("ap-sqrt", GRAPHS, ours("ap-sqrt"), CHECKMATE, BEFORE, fast=True),
        Method("ap-greedy", GRAPHS, ours("ap-greedy"), CHECKMATE, BEFORE, fast=True),
        Method("linearized-sqrt", GRAPHS, ours("linearized-sqrt"), CHECKMATE, BEFORE, fast=True),
        Method("linearized-greedy", GRAPHS, ours("linearized-greedy"), CHECKMATE, BEFORE, fast=True),
        Method("griewank", GRAPHS, ours("griewank"), "Griewank and Walther, 2000", BEFORE, fast=True),
        Method("rotor", ("chains",), ours("rotor", chains=True), ROTOR, "benchmarks/results/rotor.md", fast=True),
        Method("pofo", ("link",), ours("pofo", chains=True), "Beaumont et al., NeurIPS 2021"),
        Method(
            "poet",
            ("link",),
            _graphs(poet),
            "Patil et al., ICML 2022, for time in place of energy",
            "none: its figures are energies of microcontrollers",
            at_most=250,
        ),
        Method("dtr", GRAPHS, _graphs(dtr("h")), "Kirisame et al., ICLR 2021, h_DTR", DTR, at_most=1500),
        Method(
            "dtr-lru",
            GRAPHS,
            _graphs(dtr("lru")),
            "the same, h_LRU",
            "none: on such a chain its operations a layer grow",
            fast=True,
        ),
        Method("dtr-msps", GRAPHS, _graphs(dtr("msps")), "the same, h_MSPS (Peng et al., 2020)", DTR, at_most=1500),
        Method("moccasin", GRAPHS, _graphs(moccasin), "Bartan et al., ICML 2023", at_most=1000),
        Method(
            "hiremate",
            GRAPHS,
            _graphs(hiremate),
            "Gusak et al., ICML 2025",
            "none: its tables are of graphs and costs that are not published",
            at_most=2500,
        ),
        *(
            Method(f"torch-{kind}", JOINTS, _graphs(knapsack(kind)), "PyTorch 2", TORCH, fast=True)
            for kind in ("greedy", "dp", "ilp")
        ),
    )
}
FAST = tuple(name for name, method in METHODS.items() if method.fast)


class Measured(NamedTuple):
    """What a method's answer is worth: what the verifier and the checker say of it, and its wall-clock seconds."""

    cost_ns: int | None
    peak_bytes: int | None
    bound_ns: int
    claimed_ns: int | None
    seconds: float
    why: str
    plan: Plan | None
    proof: Any
    progress: tuple[Moment, ...] = ()


def measure(method: Method, question: Question, seconds: float) -> Measured:
    """Ask a method, and check what it says."""
    problem, begun = question.problem, time.monotonic()
    total = problem.graph.total_cost_ns
    if question.instance.family not in method.families:
        return Measured(None, None, total, None, 0.0, "doesn't answer this family", None, None)
    if problem.graph.ops > method.at_most:
        return Measured(None, None, total, None, 0.0, f"not asked beyond {method.at_most} ops", None, None)
    try:
        found = method.run(question, seconds)
    except (Unanswered, InvalidData) as error:
        found = Found(why=str(error))
    taken = round(time.monotonic() - begun, 3)
    cost = peak = None
    plan, why, bound = found.plan, found.why, total
    if plan is not None:
        try:
            cost, peak = verify(problem, plan)
        except InvalidPlan as error:
            plan, why = None, f"its plan is refused: {error}"
    if found.proof is not None:
        try:
            proved = prove(problem, found.proof).bound_ns
        except InvalidProof as error:
            found, why = found._replace(proof=None), f"{why} its certificate is refused: {error}".strip()
        else:
            bound = total if proved is None else proved
    return Measured(cost, peak, bound, found.claimed_ns, taken, why, plan, found.proof, found.progress)

"""Every method by its name: what it does, which problems it takes, and the options it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from remat_ir import InvalidData, Problem
from remat_ir.restrictions import FORWARD_OPS, ONE_PER_STAGE, PERSISTENT, TAGS

from ..baselines.heuristics import BASELINES, checkpoint_all
from ..chain.rotor import RotorOptions, SequentialOptions, revolve, rotor, sequential
from ..incumbent import Incumbent
from ..join.method import equiv_chain, join
from ..lift import LiftedIncumbent
from ..offload.method import PofoOptions, pofo
from ..options import Options
from ..transfers.method import TransferOptions
from .auto import AutoOptions, run_auto
from .heuristics import GreedyOptions, SearchOptions, StagedOptions, run_blocks, run_greedy, run_search, run_staged
from .least import run_least
from .lp_rounding import LpRoundingOptions, lp_rounding
from .milp import MilpOptions, OrderOptions, run_forward, run_milp, run_order
from .structured import falling_back
from .tags import TagOptions, run_tags
from .transfers import layer_fractions, offload_all, offload_only, save_on_cpu, transfers

KINDS = ("graph", "chain", "join")
GRAPH_OR_CHAIN = KINDS[:2]


@dataclass(frozen=True)
class Method:
    """A named way to solve.

    `run(incumbent, options)` offers plans and raises bounds until done or `incumbent.stopped()`; it returns nothing.
    `options` is a frozen dataclass whose defaults are the method's; `restriction` is the space it is confined to;
    `linked` says that it makes use of a graph's link: the others plan such a graph without transfers;
    `kernels` says that it runs compiled code; `any_budget`, that it has something to say also where a single op needs
    more than the budget.
    """

    name: str
    summary: str
    run: Callable[[Incumbent, Any], None]
    options: type[Any] = Options
    takes: tuple[str, ...] = ("graph",)
    restriction: tuple[str, ...] = ()
    linked: bool = False
    kernels: bool = False
    any_budget: bool = False

    def read_options(self, given: Mapping[str, object] | None) -> Any:
        """The options dataclass from a mapping.

        Raises:
            InvalidData: an unknown option, or a value of the wrong type or range.
        """
        known = {field.name for field in fields(self.options)}
        for key in given or {}:
            if key not in known:
                has = f"it has {', '.join(sorted(known))}" if known else "it has none"
                raise InvalidData(f"method {self.name!r} has no option {key!r}; {has}", f"/options/{key}")
        try:
            return self.options(**(given or {}))
        except (TypeError, ValueError) as error:
            raise InvalidData(f"method {self.name!r}: {error}", "/options") from None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "auto",
            "a plan at once, then search and proof side by side",
            run_auto,
            AutoOptions,
            KINDS,
            linked=True,
            kernels=True,
        ),
        Method("checkpoint-all", "keep every value until its last use: no rematerialization", checkpoint_all),
        *(Method(each.name, each.summary, each, each.options) for each in BASELINES.values()),
        Method(
            "staged",
            "coarse stages, refined where they break memory: proofs",
            falling_back(run_staged, only_chains=True),
            StagedOptions,
            kernels=True,
        ),
        Method(
            "rotor",
            "the optimal persistent schedule, on chains",
            rotor,
            RotorOptions,
            ("graph", "chain"),
            (PERSISTENT,),
            kernels=True,
        ),
        Method(
            "revolve",
            "activations saved, tapes never, on chains",
            revolve,
            RotorOptions,
            ("graph", "chain"),
            kernels=True,
        ),
        Method("sequential", "equal segments, their inputs kept, on chains", sequential, SequentialOptions, ("chain",)),
        Method(
            "pofo", "keep, recompute or offload, on chains with a link", pofo, PofoOptions, ("chain",), kernels=True
        ),
        Method(
            "offload-all", "every saved value to the host, overlapped", offload_all, takes=GRAPH_OR_CHAIN, linked=True
        ),
        Method(
            "save-on-cpu", "every saved value to the host, waited for", save_on_cpu, takes=GRAPH_OR_CHAIN, linked=True
        ),
        Method("offload-only", "keep or offload, nothing recomputed", offload_only, takes=GRAPH_OR_CHAIN, linked=True),
        Method(
            "layer-fractions",
            "torchtitan's proposal: fractions of layers by a linear program, a greedy inside them",
            layer_fractions,
            takes=GRAPH_OR_CHAIN,
            linked=True,
        ),
        Method(
            "transfers",
            "keep, recompute or offload, with a link",
            transfers,
            TransferOptions,
            GRAPH_OR_CHAIN,
            linked=True,
            kernels=True,
        ),
        Method("join", "the optimal schedule of a join network, in slots", join, takes=("join",), kernels=True),
        Method("equiv-chain", "a join network taken as one chain", equiv_chain, takes=("join",), kernels=True),
        Method(
            "milp",
            "the Checkmate program as in the paper",
            falling_back(run_milp),
            MilpOptions,
            restriction=(ONE_PER_STAGE,),
        ),
        Method(
            "milp-tight",
            "the same space by disaggregated rows and exact reductions",
            falling_back(partial(run_milp, source="milp-tight")),
            MilpOptions,
            restriction=(ONE_PER_STAGE,),
        ),
        Method(
            "milp-forward",
            "the tight program, only forward ops recomputed",
            falling_back(run_forward),
            MilpOptions,
            restriction=(FORWARD_OPS, ONE_PER_STAGE),
        ),
        Method(
            "milp-order",
            "the program that chooses the op order too, for small graphs",
            falling_back(run_order),
            OrderOptions,
            restriction=(ONE_PER_STAGE,),
        ),
        Method(
            "lp-rounding",
            "round the linear relaxation in two phases",
            falling_back(lp_rounding, only_chains=True),
            LpRoundingOptions,
        ),
        Method("greedy", "evict by cost, size and next use: a first plan at once", run_greedy, GreedyOptions),
        Method(
            "least-budget",
            "the least budget, from both sides: small plans, and certificates",
            run_least,
            any_budget=True,
            kernels=True,
        ),
        Method("blocks", "a chain program over blocks, each distinct one solved once", run_blocks, kernels=True),
        Method(
            "tags",
            "what is saved, the rest computed again once: plans that torch's partitioner carries out by tags",
            run_tags,
            TagOptions,
            restriction=(TAGS,),
            kernels=True,
        ),
        Method("search", "local search over sets of recomputations", run_search, SearchOptions, kernels=True),
    )
}


OUTSIDE = "remat.methods"
"""The group of entry points by which other installed packages add methods: each names a `Method` of the same name."""


def method_named(name: str) -> Method:
    """The method of that name, of this package or of another that is installed.

    Raises:
        InvalidData: there is none; the message lists those there are. Or what another package calls so is no `Method`.
    """
    if name in METHODS:
        return METHODS[name]
    outside = {point.name: point for point in entry_points(group=OUTSIDE)}
    if name not in outside:
        there = ", ".join((*METHODS, *sorted(outside.keys() - METHODS.keys())))
        raise InvalidData(f"unknown method {name!r}; there are: {there}", "/method")
    try:
        found = outside[name].load()
    except (ImportError, AttributeError) as error:
        raise InvalidData(f"method {name!r}, {outside[name].value}, cannot be loaded: {error}", "/method") from None
    if not isinstance(found, Method) or found.name != name:
        raise InvalidData(f"{outside[name].value} is not a remat_solver.Method with the name {name!r}", "/method")
    return found


def runner_of(method: Method, problem: Problem) -> Callable[[Incumbent, Any], None]:
    """What runs a method on a problem: the method itself, or the method on the lift of a chain or a linked graph.

    Raises:
        InvalidData: the method takes no such problem.
    """
    linked = problem.kind == "graph" and problem.graph.link is not None and not method.linked
    if problem.kind in method.takes and not linked:
        return method.run
    if (problem.kind == "chain" or linked) and "graph" in method.takes:
        return lambda incumbent, options: method.run(LiftedIncumbent(incumbent), options)
    raise InvalidData(f"method {method.name!r} takes no {problem.kind}; it takes: {', '.join(method.takes)}", "/method")

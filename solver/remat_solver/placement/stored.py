"""The steps of a chain as a graph in which each of them stores a value: what is stored at a cut moves as one."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

from remat_ir import Chain, ChainPlan, ChainStep, Compute, Free, Graph, Plan, Verb, graph_of
from remat_ir.chain_lift import STEP_OF_VERB

INPUT = ChainStep(Verb.F_CK, 0)
"""What stands for making a^0, where that may leave."""
_VERB_OF_STEP: dict[type, Verb] = {Free: Verb.FREE} | {step: verb for verb, step in STEP_OF_VERB.items()}


def stored_graph(chain: Chain, steps: Iterable[ChainStep]) -> Graph:
    """The graph of forward and backward steps that each run once, in which what a step stores is a value.

    δ^L appears with B^L and goes with it: it is part of its workspace. An input that may leave is made by a step of its
    own.
    """
    costs: list[int] = []
    sizes: list[int] = []
    workspaces: list[int] = []
    inputs: list[list[int]] = []
    stored: dict[int, int] = {}  # cut -> the step that made what is stored there
    gradient = -1
    for i, (verb, stage) in enumerate(steps):
        reads = [stored[cut] for cut in (stage - 1, *((stage,) if verb is Verb.B else ())) if cut in stored]
        if not stage:
            costs.append(0)
            sizes.append(chain.fixed_bytes)
            workspaces.append(0)
            stored[0] = i
        elif verb is Verb.B:
            last = stage == chain.stages
            costs.append(chain.backward_ns[stage - 1])
            sizes.append(chain.gradient_bytes[stage - 1])
            workspaces.append(chain.backward_workspace_bytes[stage - 1] + (chain.gradient_bytes[stage] if last else 0))
            reads += [] if last else [gradient]
            gradient = i  # δ^(l−1)
        else:
            tape = verb is Verb.F_ALL
            costs.append(chain.forward_ns[stage - 1])
            sizes.append(chain.tape_bytes[stage - 1] if tape else chain.activation_bytes[stage])
            workspaces.append((chain.forward_workspace_bytes if tape else chain.untaped_workspaces)[stage - 1])
            stored[stage] = i
        inputs.append(sorted(reads))
    return graph_of(
        costs,
        sizes,
        inputs,
        op_workspace_bytes=workspaces,
        keep=(len(costs) - 1,),
        fixed_bytes=chain.staying_bytes,
    ).with_link(chain.link)


def moved_plan(stored: Sequence[ChainStep], plan: Plan) -> ChainPlan:
    """The chain plan of a plan of `stored_graph`. A backward step frees what it has used, so copies of that out are
    waited for before it, not after.
    """
    steps: list[ChainStep] = []
    freed = {step.value: i for i, step in enumerate(plan.steps) if isinstance(step, Free)}
    computed = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
    backward = -1  # where the backward step is that ran last, if no forward step has run since
    for i, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            verb, stage = stored[step.op]
            if not stage:
                continue
            backward = len(steps) if verb is Verb.B else -1
            steps.append(ChainStep(Verb.F_CK if verb is Verb.F_NONE else verb, stage))
            continue
        cut = stored[step.value].stage
        found = ChainStep(_VERB_OF_STEP[type(step)], cut)
        dies = backward >= 0 and bisect(computed, freed.get(step.value, -1)) == bisect(computed, i)
        if isinstance(step, Free) and steps[-1] == ChainStep(Verb.F_CK, cut + 1):
            steps[-1] = ChainStep(Verb.F_NONE, cut + 1)
        elif not dies:
            steps.append(found)
        elif not isinstance(step, Free):
            steps.insert(backward, found)
            backward += 1
    return ChainPlan(tuple(steps))

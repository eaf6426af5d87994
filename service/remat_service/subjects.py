"""Graphs, chains and joins alike: what the service needs to know of a problem's subject."""

from __future__ import annotations

from dataclasses import replace

from remat_ir import Chain, Graph, Problem, Subject


def net_of(problem: Problem) -> Problem | None:
    """The problem with its fixed bytes taken off subject and budget; None where the budget does not even cover them."""
    subject = problem.subject
    budget = problem.budget_bytes - subject.fixed_bytes
    return None if budget < 0 else Problem(with_fixed(subject, 0), budget)


def gross_of(net: Problem, fixed_bytes: int) -> Problem:
    """A net problem with its fixed bytes put back."""
    if not fixed_bytes:
        return net
    return Problem(with_fixed(net.subject, fixed_bytes), net.budget_bytes + fixed_bytes)


def with_fixed(subject: Subject, fixed_bytes: int) -> Subject:
    """The same subject with other fixed bytes and no names; a chain's are its input, a join has none."""
    if isinstance(subject, Graph):
        if subject.op_names is not None or subject.value_names is not None:
            subject = replace(subject, op_names=None, value_names=None)
        return subject if subject.fixed_bytes == fixed_bytes else subject.with_fixed(fixed_bytes)
    if isinstance(subject, Chain):
        return replace(subject, activation_bytes=(fixed_bytes, *subject.activation_bytes[1:]))
    return subject


def costs_of(subject: Subject) -> tuple[int, ...]:
    """The cost of each kind of step, in ns, in a fixed order: a plan's cost is a sum of them, each at least once."""
    if isinstance(subject, Graph):
        return subject.op_cost_ns
    if isinstance(subject, Chain):
        return subject.forward_ns + subject.backward_ns
    return (subject.forward_ns, subject.backward_ns, subject.turn_ns)


def size_of(subject: Subject) -> tuple[int, int]:
    """(ops, edges): steps and inputs, for lists and limits."""
    if isinstance(subject, Graph):
        return subject.ops, sum(map(len, subject.op_inputs))
    steps = 2 * subject.stages if isinstance(subject, Chain) else 2 * sum(subject.lengths) + 1
    return steps, 2 * steps

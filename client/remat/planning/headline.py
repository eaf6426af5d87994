"""A plan in one line: what it saves, what it costs, and how close to the best it is proved to be."""

from __future__ import annotations

from remat_ir import Answer, Subject, overhead_of, plain_peak

from .transfers import moved

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def headline(
    subject: Subject,
    answer: Answer,
    *,
    peak_bytes: int | None = None,
    seconds: float | None = None,
    url: str | None = None,
) -> str:
    """One line such as `12.0 → 6.1 GiB (−49 %), +7.1 % time, within 0.08 % of optimal (certified), 8 s; http://…`.

    A bound that nobody certified is named with who claims it, in place of "certified".

    Args:
        peak_bytes: of the step as it runs; None takes the plan's.
        seconds: from the call to the plan; None takes those of the solve.
        url: of the solve's page, where a service has one.

    >>> from remat_ir import Problem, graph_of, plain_plan
    >>> graph = graph_of([1, 2, 3], [4096, 5120, 6144], [[], [0], [0, 1]])
    >>> print(headline(graph, Answer.of_plan(Problem(graph, 15360), plain_plan(graph), method="auto")))
    15.0 → 15.0 KiB (−0 %), +0.0 % time, optimal (certified), 0 s
    """
    took = f"{answer.seconds if seconds is None else seconds:.0f} s{f'; {url}' if url else ''}"
    plain, peak = plain_peak(subject), peak_bytes if peak_bytes is not None else answer.peak_bytes
    if answer.cost_ns is None or peak is None:
        return f"no plan: {answer.ending}, {took}"
    power = max(0, min(len(_UNITS) - 1, (max(plain, 1).bit_length() - 1) // 10))
    sizes = f"{plain / 1024**power:.1f} → {peak / 1024**power:.1f} {_UNITS[power]}"
    saved = 1 - peak / plain if plain else 0.0
    share = f"{'−' if saved >= 0 else '+'}{100 * abs(saved):.0f} %"
    more = 100 * overhead_of(answer.cost_ns, subject.total_cost_ns)
    within = f" among plans restricted to {', '.join(answer.restricted_to)}" if answer.restricted_to else ""
    if answer.gap is None:
        best = ""
    else:
        close = "optimal" if answer.gap == 0 else f"within {100 * answer.gap:.2g} % of optimal"
        best = f", {close}{within} ({f'claimed by {answer.claimed_by}' if rests_on_claim(answer) else 'certified'})"
    away = moved(subject, answer.plan)
    return f"{sizes} ({share}){away and ', '}{away}, {more:+.1f} % time{best}, {took}"


def rests_on_claim(answer: Answer) -> bool:
    """Whether the bound of an answer is somebody's word, without a certificate."""
    claimed, bound = answer.claimed_bound_ns, answer.bound_ns
    return answer.claimed_by is not None and claimed is not None and (bound is None or claimed <= bound)

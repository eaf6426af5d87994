"""The cases of the solver's benchmark: each has an aim, and a budget that lies where its aim says."""

from __future__ import annotations

from benchmarks.solver.cases import AIMS, CASES, Case, Of, Run, problem_of

from remat_ir import plain_peak
from remat_solver.bounds import pair_need

SMALL = ("vgg-16", "made-unet", "gpt-12-whole", "dense-100-s1", "random-125-s1")


def test_every_case_has_an_aim_and_a_name_of_its_own() -> None:
    assert {case.aim for case in CASES} == set(AIMS)
    assert len({case.key for case in CASES}) == len(CASES)


def test_budgets_are_above_what_pairs_need_and_below_the_peak() -> None:
    looked = [problem_of(case, ()) for case in CASES if case.name in SMALL]
    assert len(looked) > 10
    for problem in looked:
        assert pair_need(problem.graph).least_bytes < problem.budget_bytes < plain_peak(problem.graph)


def test_what_an_aim_asks_for() -> None:
    def run(aim: str, *track: tuple[float, int | None, int]) -> Run:
        return Run(Case("gpt-330", 0.5, aim), 10_000, track, "feasible", 1000, 900)

    soon, late = (2.0, 1000, 995), (4.0, 1000, 995)
    assert AIMS["10000"].reached(run("10000", soon))
    assert not AIMS["10000"].reached(run("10000", late))
    assert not AIMS["10000"].reached(run("10000", (2.0, 1000, 980)))
    assert not AIMS["10000"].reached(run("10000", (2.0, 1000, 900), (31.0, 1000, 995)))
    assert not AIMS["10000"].reached(run("10000"))
    assert AIMS["random-over"].reached(run("random-over", (59.0, 1395, 900)))
    assert not AIMS["random-over"].reached(run("random-over", (59.0, 1396, 900)))


def test_the_key_says_what_a_share_is_of() -> None:
    assert [Case("g", 1.05, "pairs", of).key for of in Of] == ["g@1.05", "g@pairs*1.05", "g@known*1.05"]

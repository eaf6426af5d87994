"""The chain: what is refused and where, what travels, and its two replays against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains, lift_orders
from drawn import examples
from remat_ir import (
    Answer,
    AnyPlan,
    Chain,
    ChainPlan,
    ChainStep,
    InvalidData,
    InvalidPlan,
    Moment,
    Plan,
    Problem,
    Status,
    Subject,
    Verb,
    budget_at,
    graph_digest,
    lifted_plan,
    lowered_plan,
    plain_chain_plan,
    plain_peak,
    plain_plan,
    plan_of,
    problem_digest,
    replay_any,
    structure_digest,
    verify,
)

SETTINGS = settings(max_examples=examples(150), deadline=None, derandomize=True)
PLENTY = 10**9

CHAIN = Chain(
    forward_ns=(10, 20, 5),
    backward_ns=(20, 40, 5),
    forward_workspace_bytes=(1, 2, 0),
    backward_workspace_bytes=(3, 4, 0),
    tape_bytes=(30, 50, 4),
    activation_bytes=(8, 10, 20, 1),
    gradient_bytes=(8, 10, 20, 1),
)
UNTAPED = replace(CHAIN, untaped_workspace_bytes=(1, 30, 3))
LINKED = replace(CHAIN, link_bytes_per_s=1_000_000_000, host_bytes=100)


def plan(text: str) -> ChainPlan:
    """A plan from text such as "F_all 1, B 1"."""
    steps = (step.split() for step in text.split(","))
    return ChainPlan(tuple(ChainStep(Verb(verb), int(stage)) for verb, stage in steps))


@pytest.mark.parametrize(
    ("change", "message", "pointer"),
    [
        ({"backward_ns": [1, 2]}, "backward_ns has 2 entries where there are 3 stages", "/backward_ns"),
        (
            {"activation_bytes": [1, 2, 3]},
            "activation_bytes has 3 entries where there are 3 stages, and one more for the input",
            "/activation_bytes",
        ),
        ({"gradient_bytes": [1]}, "gradient_bytes has 1 entries", "/gradient_bytes"),
        ({"tape_bytes": [30, -1, 4]}, "stage 2: tape_bytes must not be negative", "/tape_bytes/1"),
        ({"activation_bytes": [8, 10, -20, 1]}, "cut 2: activation_bytes must not be negative", "/activation_bytes/2"),
        ({"forward_ns": [1, 2.0, 3]}, "forward_ns[1] must be an integer", "/forward_ns/1"),
        ({"tape_bytes": [30, 50, 0]}, "stage 3: tape_bytes 0 is less than its activation_bytes 1", "/tape_bytes/2"),
        ({"link_bytes_per_s": 0}, "link_bytes_per_s must be at least 1", "/link_bytes_per_s"),
        ({"input_may_leave": True}, "input_may_leave needs link_bytes_per_s", "/input_may_leave"),
        ({"host_bytes": 5}, "host_bytes needs link_bytes_per_s", "/host_bytes"),
        ({"link_bytes_per_s": 5, "host_bytes": -5}, "host_bytes must not be negative", "/host_bytes"),
        ({"forward_ns": [2**53, 2**53, 1]}, "overflows 2^53", "/forward_ns"),
        ({"tape_bytes": [2**53, 2**53, 4]}, "overflows 2^53", "/tape_bytes"),
        (
            {"untaped_workspace_bytes": [1, 33, 0]},
            "stage 2: untaped_workspace_bytes 33 is not from 2, its forward_workspace_bytes, to 32, those and what",
            "/untaped_workspace_bytes/1",
        ),
        ({"untaped_workspace_bytes": [0, 2, 0]}, "stage 1: untaped_workspace_bytes 0", "/untaped_workspace_bytes/0"),
        ({"untaped_workspace_bytes": [1, 2]}, "untaped_workspace_bytes has 2 entries", "/untaped_workspace_bytes"),
        ({"forward_ns": []}, "chain has 0 stages", "/forward_ns"),
        ({"extra": 1}, "unknown key 'extra'", "/extra"),
        ({"format": "remat-chain/2"}, "chain must have format", "/format"),
    ],
)
def test_chains_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    with pytest.raises(InvalidData) as caught:
        Problem.from_json(json.dumps({"chain": CHAIN.to_json() | change, "budget_bytes": 5}))
    assert message in str(caught.value)
    assert caught.value.pointer == "/chain" + pointer


@pytest.mark.parametrize(
    ("data", "message", "pointer"),
    [
        ({"steps": [["F_all", 1, 2]]}, "step 0 must be [verb, stage]", "/steps/0"),
        ({"steps": [["B", 1], ["F_some", 1]]}, "step 1: unknown verb 'F_some'", "/steps/1/0"),
        ({"steps": [[3, 1]]}, "step 0: unknown verb an integer", "/steps/0/0"),
        ({"steps": [["B", 0]]}, "step 0: the stage must be an integer from 1, not 0", "/steps/0/1"),
        ({"steps": [["drop", -1]]}, "step 0: the stage must be an integer from 0, not -1", "/steps/0/1"),
        ({"steps": [["B", "1"]]}, "step 0: the stage must be an integer from 1", "/steps/0/1"),
        ({}, "plan lacks the key 'steps'", "/steps"),
    ],
)
def test_chain_plans_refused(data: dict[str, Any], message: str, pointer: str) -> None:
    with pytest.raises(InvalidData) as caught:
        ChainPlan.from_json(json.dumps({"format": "remat-chain-plan/1"} | data))
    assert message in str(caught.value)
    assert caught.value.pointer == pointer


@SETTINGS
@given(chains(link=True), st.data())
def test_all_travels(chain: Chain, data: st.DataObject) -> None:
    problem = Problem(chain, data.draw(st.integers(0, 99)))
    assert Problem.from_json(json.dumps(problem.to_json())) == problem
    plain = plain_chain_plan(chain)
    assert ChainPlan.from_json(json.dumps(plain.to_json())) == plain
    answer = Answer(Status.OPTIMAL, "rotor", 9, plan=plain)
    assert Answer.from_json(json.dumps(answer.to_json())) == answer


def test_a_plan_that_moves_the_input_travels() -> None:
    """It is stored at cut 0: of the steps, transfers alone may name that."""
    chain = replace(CHAIN, link_bytes_per_s=10**9, input_may_leave=True)
    moves = tuple(ChainStep(verb, 0) for verb in (Verb.OFFLOAD, Verb.WAIT, Verb.DROP, Verb.PREFETCH, Verb.WAIT))
    first, *rest = plain_chain_plan(chain).steps
    plan = ChainPlan((first, *moves, *rest))
    verify(Problem(chain, PLENTY), plan)
    assert ChainPlan.from_json(json.dumps(plan.to_json())) == plan


def test_the_plain_plan() -> None:
    verdict = verify(Problem(CHAIN, PLENTY), plain_chain_plan(CHAIN))
    # the peak is at B 2: a 0, tapes 1 and 2, delta 2 and delta 1, workspace 4
    assert verdict == (100, 8 + 30 + 50 + 20 + 10 + 4)
    assert plain_peak(CHAIN) == 122
    assert budget_at(CHAIN, 0.5) == 8 + 57


def test_the_papers_example() -> None:
    """RR-9302, Section 3.1: the sequence for L = 4 and the loss."""
    chain = Chain((1,) * 5, (1,) * 5, (0,) * 5, (0,) * 5, (2,) * 5, (1,) * 6, (1,) * 6)
    example = plan("F_ck 1, F_none 2, F_ck 3, F_all 4, F_all 5, B 5, B 4, F_all 3, B 3, F_all 1, F_all 2, B 2, B 1")
    # the peak is at B 5: a 0, a 2, a 3, tapes 4 and 5, delta 5 and 4
    with pytest.raises(InvalidPlan, match="step 3: F 5 is first computed before F 4"):
        verify(Problem(chain, PLENTY), plan("F_ck 1, F_none 2, F_none 3, F_all 5"))
    with pytest.raises(InvalidPlan, match="step 4: F 3 reads a 2, which is not resident"):
        verify(Problem(chain, PLENTY), plan("F_ck 1, F_none 2, F_none 3, F_all 4, F_all 3"))
    assert verify(Problem(chain, PLENTY), example) == (13, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F_all 2", "step 0: F 2 is first computed before F 1"),
        ("F_all 4", "step 0: there is no stage 4"),
        ("F_ck 1, F_none 2, F_ck 2", "step 2: F 2 reads a 1, which is not resident"),
        ("F_ck 1, F_ck 1", "step 1: F 1 makes a 1 while it is stored"),
        ("F_none 1", "step 0: F_none 1 frees the input, which stays"),
        ("F_all 1, F_none 2", "step 1: F_none 2 frees a 1, whose tape is resident"),
        ("F_all 1, B 1", "step 1: B 1 is computed where B 3 is next"),
        ("F_all 1, F_all 2, F_ck 3, B 3", "step 3: B 3 reads the tape of stage 3, which is not resident"),
        ("F_all 1, free 1", "step 1: free frees a 1, whose tape is resident"),
        ("F_ck 1, free 2", "step 1: a 2 is freed but not resident"),
        ("F_ck 1, offload 1", "step 1: offload needs a link to the host, which this chain has not"),
        ("F_all 1, F_all 2, F_all 3, B 3, B 2", "B 1 is never computed"),
        ("F_all 1, F_all 2, F_ck 3, free 2, free 3, F_ck 2", "step 3: free frees a 2, whose tape is resident"),
    ],
)
def test_plans_that_break_a_rule(text: str, message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        verify(Problem(CHAIN, PLENTY), plan(text))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F_all 1, offload 1, offload 1", "step 2: offload of 1, which is not resident or already has a copy"),
        ("F_all 1, offload 1, drop 1", "step 2: drop of 1, whose offload has not ended and been waited for"),
        ("F_all 1, wait 1", "step 1: wait for 1, which is not being transferred"),
        ("F_all 1, prefetch 1", "step 1: prefetch of 1, which is not on the host"),
        ("F_all 1, F_all 2, offload 2, offload 1, F_all 3, B 3, B 2", "step 6: B 2 frees a 2 while it is transferred"),
        ("F_all 1, offload 1, wait 1, drop 1, F_all 2", "step 4: F 2 reads a 1, which is not resident"),
        ("F_all 1, offload 1, wait 1, drop 1, F_all 1", "step 4: F 1 makes a 1 while it is stored"),
        ("F_all 1, F_all 2, offload 1, F_all 3, B 3, B 2", "B 1 is never computed"),
        ("F_ck 1, F_ck 2, offload 1, free 1", "step 3: free frees a 1 while it is transferred"),
    ],
)
def test_transfers_that_break_a_rule(text: str, message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        verify(Problem(LINKED, PLENTY), plan(text))
    assert str(caught.value).startswith(message)


def test_the_hosts_limit_is_checked() -> None:
    with pytest.raises(InvalidPlan, match="step 3: the host would hold 80 B, over its limit of 79 B"):
        verify(Problem(replace(LINKED, host_bytes=79), PLENTY), plan("F_all 1, offload 1, F_all 2, offload 2"))


def test_transfers_take_their_time_and_are_charged() -> None:
    """A byte takes a nanosecond: the offload of 30 bytes outlasts F 3, and B 2 waits for the prefetch."""
    moved = plan("F_all 1, F_all 2, offload 1, F_all 3, wait 1, drop 1, B 3, prefetch 1, wait 1, B 2, B 1")
    # now: 10, 30, 30 (offload to 60), 35, 60, 60, 65, 65 (prefetch to 95), 95, 135, 155
    assert verify(Problem(LINKED, PLENTY), moved).cost_ns == 155
    # at B 3: a 0, tape 2, tape 3, delta 3 and delta 2; at B 2: a 0, tapes 1 and 2, delta 2 and 1, workspace 4
    assert verify(Problem(LINKED, PLENTY), moved).peak_bytes == 122
    queued = plan(
        "F_all 1, offload 1, F_all 2, offload 2, F_all 3, wait 2, wait 1, drop 1, drop 2,"
        " prefetch 2, prefetch 1, wait 2, B 3, wait 1, B 2, B 1"
    )
    # the second offload waits for the first: 10 to 40, then to 90; back: 90 to 140, then to 170; B 3 fits between
    assert verify(Problem(LINKED, PLENTY), queued).cost_ns == 170 + 40 + 20


def test_a_run_without_a_tape_has_a_workspace_of_its_own() -> None:
    def peaks(text: str) -> list[int]:
        return [moment.peak_bytes for moment in moments(UNTAPED, plan(text)) or ()]

    assert peaks("F_ck 1, F_none 2, F_all 3") == [8 + 10 + 1, 8 + 10 + 20 + 30, 8 + 20 + 4]
    assert peaks("F_all 1, F_all 2") == [8 + 30 + 1, 8 + 30 + 50 + 2]
    assert UNTAPED.to_graph().op_workspace_bytes == CHAIN.to_graph().op_workspace_bytes


def test_the_column_is_left_out_where_it_says_nothing() -> None:
    same = replace(CHAIN, untaped_workspace_bytes=list(CHAIN.forward_workspace_bytes))
    assert same == CHAIN
    assert "untaped_workspace_bytes" not in same.to_json()
    assert Chain.from_json(CHAIN.to_json() | {"untaped_workspace_bytes": None}) == CHAIN
    assert graph_digest(CHAIN) == "61fcd1538b3725e31f360a510eaec13ece6c3814e3a49d83b144af94b799e33a"
    assert graph_digest(UNTAPED) != graph_digest(CHAIN)


@SETTINGS
@given(chains(most_stages=6), st.data())
def test_the_two_replays_agree(chain: Chain, data: st.DataObject) -> None:
    graph = chain.to_graph()
    order = data.draw(lift_orders(chain))
    general = plan_of(graph, order)
    found = verify(Problem(graph, PLENTY), general)
    lowered = lowered_plan(chain, general.computes)
    replayed = verify(Problem(chain, PLENTY), lowered)
    assert replayed.cost_ns <= found.cost_ns
    assert replayed.peak_bytes <= found.peak_bytes
    lifted = lifted_plan(chain, lowered)
    assert verify(Problem(graph, PLENTY), lifted) == replayed
    assert lowered_plan(chain, lifted.computes) == lowered


@SETTINGS
@given(chains())
def test_plain_is_plain_in_both(chain: Chain) -> None:
    graph = chain.to_graph()
    assert plain_peak(chain) == verify(Problem(graph, PLENTY), lifted_plan(chain, plain_chain_plan(chain))).peak_bytes
    # the general plain plan is never worse: it can free an input that no tape holds
    assert plain_peak(graph) <= plain_peak(chain)
    assert graph.total_cost_ns == chain.total_cost_ns
    assert len(plain_plan(graph).computes) == graph.ops


@settings(SETTINGS, max_examples=examples(60))
@given(chains(most_stages=4, link=True), st.data())
def test_the_two_replays_agree_about_transfers(chain: Chain, data: st.DataObject) -> None:
    """Any steps that the chain's replay takes: its lift has the same times, copies and memory; what one refuses of
    transfers, the other does."""
    chain = replace(chain, link_bytes_per_s=10**9, host_bytes=data.draw(st.none() | st.integers(0, 20)))
    graph = chain.to_graph().with_link(chain.link)
    steps: list[ChainStep] = []
    every = [ChainStep(verb, stage) for verb in Verb for stage in range(1, chain.stages + 1)]
    for _ in range(data.draw(st.integers(1, 14))):
        allowed = [step for step in every if moments(chain, ChainPlan((*steps, step))) is not None]
        for step in every:
            if step.verb in (Verb.OFFLOAD, Verb.WAIT, Verb.DROP, Verb.PREFETCH) and step not in allowed:
                assert moments(graph, lifted_plan(chain, ChainPlan((*steps, step)))) is None
        if not allowed:
            break
        steps.append(data.draw(st.sampled_from(allowed)))
        here = moments(chain, ChainPlan(tuple(steps)))
        there = moments(graph, lifted_plan(chain, ChainPlan(tuple(steps))))
        for what in ("cost_ns", "resident_bytes", "host_bytes"):
            assert getattr(here[-1], what) == getattr(there[-1], what)
        assert max(m.peak_bytes for m in here) == max(m.peak_bytes for m in there)
        assert max(m.host_bytes for m in here) == max(m.host_bytes for m in there)
        ends = [max((m.copy_ns[1] for m in found if m.copy_ns), default=0) for found in (here, there)]
        assert ends[0] == ends[1]


def moments(subject: Subject, plan: AnyPlan) -> list[Moment] | None:
    """What a replay sees of a plan, or None where it refuses one of its steps; the plan may end too soon."""
    found: list[Moment] = []
    try:
        found.extend(replay_any(subject, plan))
    except InvalidPlan as error:
        return None if error.step is not None else found
    return found


def test_a_chain_has_chain_plans() -> None:
    with pytest.raises(InvalidPlan, match="a chain has plans of another form than Plan"):
        verify(Problem(CHAIN, PLENTY), Plan(()))
    with pytest.raises(InvalidData, match="this problem is about a chain, not a graph"):
        Problem(CHAIN, 5).graph
    with pytest.raises(InvalidData, match="both 'graph' and 'chain'"):
        Problem.from_json({"graph": {}, "chain": {}, "budget_bytes": 1})


def test_the_key_of_a_chain() -> None:
    key = problem_digest(Problem(CHAIN, 100))
    other_input = replace(CHAIN, activation_bytes=(18, 10, 20, 1))
    assert problem_digest(Problem(other_input, 110)) == key  # what is resident throughout only lowers the budget
    assert problem_digest(Problem(CHAIN, 101)) != key
    assert problem_digest(Problem(LINKED, 100)) != key
    assert graph_digest(CHAIN) != graph_digest(CHAIN.to_graph())
    slower = {"forward_ns": (11, 20, 5)}
    assert structure_digest(replace(CHAIN, **slower)) == structure_digest(CHAIN)
    assert structure_digest(replace(LINKED, **slower)) != structure_digest(LINKED)
    assert graph_digest(replace(CHAIN, **slower)) != graph_digest(CHAIN)

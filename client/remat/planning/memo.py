"""Answers remembered on this machine: content-addressed files, written aside and renamed, read without a lock.

The key is the problem's digest, the method and its options (the digest has fixed bytes normalised away, so what is
stored says which fixed bytes it was made for). A corrupted entry is a miss, and so is a folder that cannot be read;
one that cannot be written is read all the same. Entries of one structure are listed together, so that a plan and its
certificate can answer for other costs and budgets (`near`). Whatever is read is checked on the problem at hand.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat_ir import (
    Answer,
    AnyPlan,
    InvalidData,
    InvalidPlan,
    Problem,
    Proof,
    Status,
    certificate_for,
    certified,
    gap_of,
    gap_sentence,
    optimal_sentence,
    outgrown,
    problem_digest,
    structure_digest,
    verify,
    verify_answer,
    worth_more_time,
)
from remat_ir.read import members, parse

from .folder import trim, used, write_whole

FORMAT = "remat-memo/1"

_MOST_ALIKE = 8
"""Entries that are tried for a problem with other costs or another budget."""

log = logging.getLogger("remat")


class Memo:
    """The answers under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"Memo({str(self.folder)!r})"

    def get(
        self, problem: Problem, method: str, time_limit_s: float | None, max_gap: float, steps: int | None = None
    ) -> Answer | None:
        """An answer that needs no more work: settled, within the gap, already given the time asked for, or so much that
        `steps` of training could gain less by a better plan.

        Its plan has been replayed on the caller's own problem. What was said of a space smaller than the method's
        is no answer.
        """
        digest = problem_digest(problem)
        stored = self._read(self._path(digest, method), digest)
        if stored is None:
            return None
        try:
            answer = _rebased(Answer.from_json(stored["answer"]), problem, stored["fixed_bytes"], digest)
            answer = certified(problem, answer, verify_answer(problem, answer))
        except Contradicted as error:
            log.error("memo: the entry for %s contradicts itself: %s; %s", digest, error, self._path(digest, method))
            return None
        except (InvalidData, InvalidPlan, TypeError) as error:
            log.warning("memo: the entry for %s is of no use and is ignored: %s", digest[:12], error)
            return None
        if outgrown(method, answer.restricted_to) or answer.claims_infeasible:
            return None
        near = answer.gap is not None and answer.gap <= max_gap
        tried = time_limit_s is not None and stored["time_limit_s"] >= time_limit_s
        spent = float(stored["time_limit_s"])
        enough = max_gap > 0 and not worth_more_time(answer.cost_ns, answer.bound_ns, steps, spent)
        return answer if answer.ran_to_its_end or near or tried or enough else None

    def near(self, problem: Problem, method: str, max_gap: float) -> Answer | None:
        """An answer within the gap from entries of the same structure, with other costs or under other budgets.

        Their plans are replayed on the problem, their certificates carried over to it and checked there. Only for
        `auto`, as the plan may come from anywhere.
        """
        if method != "auto":
            return None
        plan: AnyPlan | None = None
        cost, bound = 0, problem.subject.total_cost_ns
        proof: Proof | None = None
        for digest in self._alike(problem):
            stored = self._read(self._path(digest, method), digest)
            if stored is None:
                continue
            with suppress(InvalidData, InvalidPlan, TypeError):
                answer = Answer.from_json(stored["answer"])
                if answer.proof is not None:
                    found = certificate_for(problem, answer.proof)
                    if found.bound_ns is not None and found.bound_ns > bound:
                        bound, proof = found.bound_ns, found.proof
                if answer.plan is not None:
                    verdict = verify(problem, answer.plan)
                    if plan is None or verdict.cost_ns < cost:
                        plan, cost = answer.plan, verdict.cost_ns
        if plan is None or gap_of(cost, bound) > max_gap:
            return None
        answer = Answer.of_plan(problem, plan, method=method, bound_ns=bound, cache="near")
        if answer.gap:
            answer = replace(answer, limit="gap", message=gap_sentence(answer.gap, (), "planned for a like problem"))
        else:
            answer = replace(answer, message=optimal_sentence(()))
        return replace(answer, proof=proof)

    def put(self, problem: Problem, method: str, answer: Answer, time_limit_s: float | None) -> None:
        """Remember an answer unless a better one is there; a folder that cannot be written is no error.

        That no plan fits is not remembered where it is claimed without a certificate: it would hide a plan.
        """
        if answer.status is Status.INFEASIBLE and certified(problem, answer, verify_answer(problem, answer)) != answer:
            return
        digest = problem_digest(problem)
        path = self._path(digest, method)
        spent = float(time_limit_s) if time_limit_s is not None and answer.limit == "time" else answer.seconds
        stored = self._read(path, digest)
        if stored is not None and not _better(answer, stored):
            return
        body = {
            "answer": replace(answer, id=None, cache=None).to_json(),
            "digest": digest,
            "fixed_bytes": problem.subject.fixed_bytes,
            "format": FORMAT,
            "time_limit_s": spent,
        }
        text = json.dumps({**body, "sha256": _sum(body)}, separators=(",", ":"))
        with suppress(OSError):
            write_whole(path, text.encode())
            if method == "auto":
                alike = [digest, *(other for other in self._alike(problem) if other != digest)][:_MOST_ALIKE]
                write_whole(self._index(problem), json.dumps(alike).encode(), durable=False)
        trim(self.folder)

    def _index(self, problem: Problem) -> Path:
        digest = structure_digest(problem.subject)
        return self.folder / "alike" / digest[:2] / f"{digest}.json"

    def _alike(self, problem: Problem) -> list[str]:
        """Digests of problems with the structure of this one that were remembered lately, the last one first."""
        try:
            found = parse(used(self._index(problem)))
        except (OSError, InvalidData):
            return []
        digests = found if isinstance(found, list) else []
        return [digest for digest in digests[:_MOST_ALIKE] if isinstance(digest, str)]

    def _path(self, digest: str, method: str) -> Path:
        key = hashlib.sha256(f"{digest}/{method}".encode()).hexdigest()
        return self.folder / key[:2] / f"{key}.json"

    def _read(self, path: Path, digest: str) -> dict[str, Any] | None:
        try:
            text = used(path)
        except OSError:
            return None
        try:
            found = dict(
                members(parse(text), "memo", ("answer", "digest", "fixed_bytes", "time_limit_s", "sha256"), (), FORMAT)
            )
            if found.pop("sha256") != _sum(found) or found["digest"] != digest:
                raise InvalidData("the entry is not what was written")
            if type(found["fixed_bytes"]) is not int or not isinstance(found["time_limit_s"], (int, float)):
                raise InvalidData("the entry is not what was written")
        except InvalidData as error:
            log.warning("memo: %s is ignored: %s", path, error)
            return None
        return found


def _sum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _better(answer: Answer, stored: dict[str, Any]) -> bool:
    """Whether an answer says more than the stored one: settled before open, then the cheaper plan, then the bound."""
    try:
        old = Answer.from_json(stored["answer"])
    except InvalidData:
        return True
    if outgrown(old.method, old.restricted_to):
        return True
    if old.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return False
    if answer.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return True
    if answer.cost_ns is None or old.cost_ns is None:
        return answer.cost_ns is not None
    return (answer.cost_ns, -(answer.bound_ns or 0), -answer.seconds) < (
        old.cost_ns,
        -(old.bound_ns or 0),
        -old.seconds,
    )


def _rebased(answer: Answer, problem: Problem, fixed_bytes: int, digest: str) -> Answer:
    """A stored answer in terms of the caller's problem, which may have other fixed bytes; the plan is verified here."""
    shift = problem.subject.fixed_bytes - fixed_bytes

    def moved(amount: int | None) -> int | None:
        return None if amount is None else amount + shift

    answer = replace(
        answer,
        budget_bytes=problem.budget_bytes,
        least_budget_bytes=moved(answer.least_budget_bytes),
        least_budget_bound_bytes=moved(answer.least_budget_bound_bytes),
        digest=digest,
        cache="hit",
    )
    if answer.plan is None:
        if answer.status is not Status.INFEASIBLE:
            raise InvalidData("an answer without a plan is remembered only when it is infeasible")
        return answer
    verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns)
    bound = answer.bound_ns or 0
    if bound > verdict.cost_ns:
        raise Contradicted(f"its bound of {bound} ns is above the cost of its plan, {verdict.cost_ns} ns")
    return answer.priced(problem.subject.total_cost_ns, verdict.cost_ns, bound, verdict.peak_bytes)


class Contradicted(InvalidData):
    """An answer whose bound its own plan refutes: one of the two is wrong."""

    remedy = "Nothing: the answer is dropped and asked for again; report it, with the message."

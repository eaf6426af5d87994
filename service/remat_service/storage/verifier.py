"""The way in and out of the store: how graphs and plans are packed, and that none leaves unchecked.

No plan and no certificate is given but on the problem that it is served for. Bytes that this process has verified
before, on the same graph, need no second replay: their SHA-256 is taken at every read, and the verdict that belongs to
it is compared with what the row claims.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from remat_ir import (
    AnyPlan,
    Certificate,
    InvalidData,
    InvalidPlan,
    Problem,
    Subject,
    Verdict,
    Written,
    certificate_for,
    graph_digest,
    read_plan,
    subject_kind,
    verify,
    within_space,
)
from remat_ir.proof import certain_need, prove, read_proof
from remat_ir.read import parse

from ..identity import size_of
from ..memory import Lru
from .seals import WHOLE, names

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST_BYTES = 1 << 30
"""No stored object inflates to more than this."""

P = ParamSpec("P")
T = TypeVar("T")
_SMALL_OPS = 5_000
_SMALL_BYTES = 20_000  # packed; below it a thread costs more than the work


def pack(text: bytes) -> bytes:
    """A text as compressed bytes, the same for the same text."""
    packed: bytes = zstd.compress(text, level=3)
    return packed


def subject_text(subject: Written) -> bytes:
    """A subject without fixed bytes, as the text that is packed."""
    return b'{"%s":%s}' % (subject_kind(subject.subject).encode(), subject.text())


def written(data: Any) -> bytes:
    """JSON data as the text that is packed."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def unpack(packed: bytes) -> Any:
    """What was packed.

    Raises:
        ValueError: the bytes are damaged, or inflate to more than a stored object may.
    """
    return json.loads(inflated(packed))


def inflated(packed: bytes) -> bytes:
    """The JSON text of what was packed.

    Raises:
        ValueError: as `unpack`.
    """
    inflater = zstd.ZstdDecompressor()
    try:
        text: bytes = inflater.decompress(packed, MOST_BYTES)
    except zstd.ZstdError as error:
        raise ValueError(f"damaged: {error}") from None
    if not inflater.eof or inflater.unused_data:
        raise ValueError("damaged: truncated, or too long")
    return text


def checksum(packed: bytes, space: str = WHOLE) -> str:
    """SHA-256 of packed bytes; a certificate's also of its space, since the same bytes may prove less of all plans."""
    return hashlib.sha256(space.encode() + packed).hexdigest()


class CheckedProof(NamedTuple):
    """A certificate of one problem, checked on it: what it proves (None: no plan fits), packed, and as JSON text.

    `space` has the restrictions, as a column, within which it proves that.
    """

    bound_ns: int | None
    data: bytes
    text: bytes
    space: str = WHOLE

    def proves(self, bound_ns: int | None) -> bool:
        """Whether it proves at least what is said: at a smaller budget a bound may turn into that no plan fits."""
        return self.bound_ns is None or (bound_ns is not None and self.bound_ns >= bound_ns)


class Verifier:
    """Reads graphs and plans from packed bytes, with a memory of what it has already verified."""

    def __init__(self, most_graphs: int = 64, most_plan_bytes: int = 64 << 20) -> None:
        self._graphs: Lru[str, Subject] = Lru(most_graphs)
        self._plans: Lru[tuple[str, str], tuple[Verdict, bytes]] = Lru(most_plan_bytes)
        self._proofs: Lru[tuple[str, int, str], CheckedProof] = Lru(most_plan_bytes // 2)
        self._checks: dict[tuple[str, int, str], asyncio.Task[CheckedProof | None]] = {}
        self._byte_s = 0.0

    async def graph(
        self, key: str, packed: bytes, key_of: Callable[[str], str], expected: Written | None = None
    ) -> Subject | None:
        """The graph of a row, or None where its bytes are damaged: its digest must lead to its key again.

        Args:
            expected: what it should be, by its digest; bytes as it is packed need not be read.
        """
        stored = key + checksum(packed)
        found = self._graphs.get(stored)
        if found is None:
            try:
                found = await _run(len(packed), read_graph, packed, key, key_of, expected)
            except (ValueError, InvalidData):
                return None
            self._graphs.put(stored, found, 1)
        return found

    async def plan(self, graph_key: str, problem: Problem, packed: bytes, claimed: Verdict) -> AnyPlan | None:
        """The plan of a row if it is valid for the problem and costs what the row claims; else None."""
        text = await self.text(graph_key, problem, packed, claimed)
        return None if text is None else await _run(len(packed), lambda: read_plan(json.loads(text)))

    async def text(self, graph_key: str, problem: Problem, packed: bytes, claimed: Verdict) -> bytes | None:
        """The plan as JSON text, under the same condition; quick for bytes verified before, whose texts are kept."""
        held = self.text_in_memory(graph_key, problem.budget_bytes, packed, claimed)
        if held is not None:
            return held
        try:
            text = await _run(len(packed), _verified_text, packed, problem, claimed)
        except (ValueError, InvalidData, InvalidPlan):
            return None
        self._plans.put((graph_key, checksum(packed)), (claimed, text), len(text) + 500)
        return text

    def text_in_memory(self, graph_key: str, net_budget: int, packed: bytes, claimed: Verdict) -> bytes | None:
        """The text of a plan whose bytes were verified before and are still in memory; None says nothing about it."""
        found = self._plans.get((graph_key, checksum(packed)))
        return found[1] if found is not None and found[0] == claimed and claimed.peak_bytes <= net_budget else None

    async def measure(self, subject: Subject) -> None:
        """Let a large graph work out what its ops need, off the event loop; it remembers that."""
        if size_of(subject)[0] > _SMALL_OPS:
            await asyncio.to_thread(certain_need, subject)

    async def proof(
        self, graph_key: str, problem: Problem, packed: bytes, within_s: float | None = None, space: str = WHOLE
    ) -> CheckedProof | None:
        """A stored certificate, carried over to the problem where it is of another budget or other costs, and checked.

        None where the bytes are damaged, or prove nothing. The graph key is the problem's.

        Args:
            within_s: seconds to wait for it. A check that has begun goes on for whoever asks next; one that will take
                longer, by its size and the last one's speed, is not begun, nor is a second one at the same time.
            space: the restrictions that it is of.

        Raises:
            TimeoutError: it takes longer.
        """
        key = graph_key, problem.budget_bytes, checksum(packed, space)
        found = self._proofs.get(key)
        if found is not None:
            return found
        check = self._checks.get(key)
        if check is None:
            large = len(packed) * 8 >= _SMALL_BYTES
            if within_s is not None and large and (self._checks or len(packed) * self._byte_s > within_s):
                raise TimeoutError
            check = self._checks[key] = asyncio.create_task(self._checked(key, problem, packed, space))
        async with asyncio.timeout(within_s):
            return await asyncio.shield(check)

    async def _checked(
        self, key: tuple[str, int, str], problem: Problem, packed: bytes, space: str
    ) -> CheckedProof | None:
        begun = time.monotonic()
        try:
            found = await _run(len(packed) * 8, _check_proof, problem, packed, space)
        except (ValueError, TypeError, InvalidData, InvalidPlan):
            return None
        finally:
            self._byte_s = (time.monotonic() - begun) / max(len(packed), _SMALL_BYTES)
            del self._checks[key]
        size = len(found.data) + len(found.text) + 500
        self._proofs.put(key, found, size)
        self._proofs.put((*key[:2], checksum(found.data, space)), found, size)
        return found

    async def new_proof(self, graph_key: str, problem: Problem, data: object, space: str = WHOLE) -> CheckedProof:
        """Check a certificate, as JSON, that is about to be stored.

        Raises:
            InvalidData: it is none.
            InvalidPlan: it proves nothing about the problem.
        """
        found = await asyncio.to_thread(_check_new, problem, data, space)
        size = len(found.data) + len(found.text) + 500
        self._proofs.put((graph_key, problem.budget_bytes, checksum(found.data, space)), found, size)
        return found

    def proof_text_in_memory(self, graph_key: str, net_budget: int, packed: bytes, space: str) -> bytes | None:
        """The text of a certificate whose bytes were checked before and are still in memory."""
        found = self._proofs.get((graph_key, net_budget, checksum(packed, space)))
        return None if found is None else found.text

    async def read_plan(self, packed: bytes) -> AnyPlan | None:
        """A plan that has not been verified, on any problem, yet; None where its bytes are damaged."""
        try:
            return read_plan(await _run(len(packed), unpack, packed))
        except (ValueError, InvalidData):
            return None

    async def verify(self, problem: Problem, plan: AnyPlan) -> Verdict:
        """Verify a plan that is about to be stored.

        Raises:
            InvalidPlan: it breaks a rule of the problem.
        """
        return await _run(len(plan.steps) * 8, verify, problem, plan)

    def packed(self, graph_key: str, plan: AnyPlan, verdict: Verdict) -> tuple[bytes, str]:
        """A verified plan as it is stored, and the SHA-256 of that; its text stays in memory."""
        text = written(plan.to_json())
        found = pack(text)
        digest = checksum(found)
        self._plans.put((graph_key, digest), (verdict, text), len(text) + 500)
        return found, digest


def read_graph(packed: bytes, key: str, key_of: Callable[[str], str], expected: Written | None = None) -> Subject:
    """The graph of packed bytes, if its digest leads to its key.

    Raises:
        ValueError: it is damaged, or another graph.
        InvalidData: it is none.
    """
    if expected is not None and inflated(packed) == subject_text(expected):
        return expected.subject
    subject = Problem.from_json({**unpack(packed), "budget_bytes": 0}).subject
    if key_of(graph_digest(subject)) != key:
        raise ValueError("damaged: another graph than its key says")
    return subject


def _verified_text(packed: bytes, problem: Problem, claimed: Verdict) -> bytes:
    """The text of a plan, as it is stored, once it is verified."""
    text = inflated(packed)
    verify(problem, read_plan(parse(text)), cost_ns=claimed.cost_ns, peak_bytes=claimed.peak_bytes)
    return text


def _check_proof(problem: Problem, packed: bytes, space: str) -> CheckedProof:
    text = inflated(packed)
    proof = read_proof(parse(text))
    found = certificate_for(problem, proof, names(space))
    return CheckedProof(found.bound_ns, packed, text, space) if found.proof is proof else _packed_proof(found, space)


def _check_new(problem: Problem, data: object, space: str) -> CheckedProof:
    proof = read_proof(data)
    if space:  # one of all plans may come with the same answer, and is not carried over
        inside = within_space(problem, names(space))
        return _packed_proof(Certificate(proof, prove(inside, proof).bound_ns), space)
    return _packed_proof(certificate_for(problem, proof), space)


def _packed_proof(found: Certificate, space: str) -> CheckedProof:
    text = written(found.proof.to_json())
    return CheckedProof(found.bound_ns, pack(text), text, space)


async def _run(size: int, function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    if size < _SMALL_BYTES:
        return function(*arguments, **more)
    return await asyncio.to_thread(function, *arguments, **more)

"""Who asks, what the problem is without its fixed bytes, and the keys under which a caller's problems are stored.

The cache key, field by field:
    salt        of the tenant's scope: no tenant can name, or find by guessing, what another stores; tenants that opt
                into one sharing group share its scope
    epoch       of the scope: raising it disowns everything stored before
    digest      of the canonical graph, exactly as sent, `fixed` normalised to 0, and of the budget reduced by it;
                `remat_ir.digest` lists what is in it and what is not, with the reasons
    method key  next to the problem, not in it: a method's name, its options where they are not the defaults, and
                whether engines are taken at their word
Not in it: time limit and gap (a stored answer says what it reached), the solver's version (on bounds and efforts; plans
outlive it), names, ranks, devices.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import asdict, dataclass, replace

from remat_ir import Chain, Digests, Graph, Problem, Subject
from remat_solver import METHODS

ID = re.compile("^[0-9a-f]{32}$")
"""What every id is, for `fullmatch`."""
ASKING = ("solve", "read")
"""What a key, or a token, may do unless it is said otherwise."""
OPERATE = "operate"
"""To see and change what belongs to all tenants."""
ALL_SCOPES = (*ASKING, OPERATE)


@dataclass(frozen=True)
class Caller:
    """Who asks: a tenant, the scope whose salt keys its entries, what it may do, and the group that it shares with.

    Attributes:
        key_id: of the API key, empty where there is none.
    """

    tenant_id: str
    scope_id: str
    salt: bytes
    epoch: int
    allowed: tuple[str, ...] = ASKING
    tenant: str = ""
    group: str | None = None
    key_id: str = ""

    def key(self, digest: str) -> str:
        """A digest as this caller's scope stores it."""
        text = f"{self.epoch}:{digest}".encode()
        return hmac.new(self.salt, text, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Retry:
    """What makes a repeated POST the same one: the client's key, and the hash of the body it came with."""

    key: str
    body_hash: str


_AUTO, _CLAIMS = "auto", ":claims"


@dataclass(frozen=True)
class Keys:
    """The keys of one problem and method for one caller."""

    digest: str
    problem: str
    graph: str
    structure: str
    method: str
    flight: str

    @property
    def method_name(self) -> str:
        """The method without its options."""
        return self.method.partition(":")[0]

    @property
    def restriction(self) -> tuple[str, ...]:
        """The space to which the method is confined."""
        return METHODS[self.method_name].restriction

    @property
    def any_method(self) -> bool:
        """Whether a plan of any method will do: `auto` combines them."""
        return self.method in (_AUTO, _AUTO + _CLAIMS)

    @property
    def certify(self) -> bool:
        """Whether a bound counts only with a certificate, where there are any."""
        return certifies(self.method)


def keys_of(caller: Caller, digests: Digests, method_key: str) -> Keys:
    """Every key of a problem for a caller."""
    key = caller.key(digests.problem)
    return Keys(
        digest=digests.problem,
        problem=key,
        graph=caller.key(digests.graph),
        structure=caller.key(digests.structure),
        method=method_key,
        flight=hashlib.sha256(f"{key}:{method_key}".encode()).hexdigest(),  # one for all who share what is stored
    )


def method_key_of(method: str, options: dict[str, object], start: str | None = None, certify: bool = True) -> str:
    """The second key: the method, its options where they differ from its defaults, the start it was told to use."""
    if not certify:
        return method_key_of(method, options, start) + _CLAIMS
    if not options and start is None:
        return method
    known = METHODS[method]
    given, default = asdict(known.read_options(options)), asdict(known.options())
    changed = {name: value for name, value in sorted(given.items()) if value != default[name]}
    if not changed and start is None:
        return method
    text = json.dumps([changed, start], sort_keys=True, default=str)
    return f"{method}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def certifies(method_key: str) -> bool:
    """Whether a method key asks for certificates."""
    return not method_key.endswith(_CLAIMS)


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

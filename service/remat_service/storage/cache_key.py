"""The keys under which a caller's problems are stored.

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
import json
from dataclasses import asdict, dataclass

from remat_ir import Digests
from remat_solver import METHODS, solver_version

from ..identity import Caller

SOLVER = solver_version()
"""What bounds and efforts carry: a solver whose source differs uses none of them, and is given the time anew."""

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

"""The tables: what is true, whatever a queue or a process believes. Bytes are net of the caller's fixed bytes.

tenants, scopes, api_keys     who may ask, and whose keys are salted alike
graphs, problems              what was asked about, under salted keys
pins                          which tenant keeps which plan, for which problem; `plans.pinned` says whether any does
plans, proofs                 what was found and proved, checked whenever it is read: it outlives its solver
bounds, floors, efforts       what nobody can check anew: it carries the solver's version and a seal (`seals.py`)
solves, events                the work: one row a flight, with a fencing token; its improvements in order
requests, groups              one row a POST: its own id, limits and answer; sweeps of several
attachments                   what a job has said of a request since: its run as measured, what its ops are called
profiles, profile_reports     the costs that stand, and what each tenant has measured
administration                who has changed tenants, keys, groups or the store
probes                        the row that a look at readiness writes
seal_keys                     by which keys the store was sealed (`seals.py`)
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)


class Utc(TypeDecorator[datetime]):
    """An aware moment in UTC, also where the database forgets the zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database, in UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """From the database, aware."""
        if not isinstance(value, datetime):
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_KEY = String(64)
_ID = String(32)

scopes = Table(
    "scopes",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("salt", LargeBinary, nullable=False),
    Column("epoch", Integer, nullable=False, server_default="0"),
    Column("everyone", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Utc, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("scope_id", _ID, ForeignKey("scopes.id"), nullable=False),
    Column("weight", Float, nullable=False, server_default="1"),
    Column("most_running", Integer),
    Column("most_queued", Integer),
    Column("most_solver_seconds", Float),
    Column("most_stored_bytes", BigInteger),
    Column("most_requests", Integer),
    Column("most_profiles", Integer),
    Column("disabled", Boolean, nullable=False, server_default=text("false")),
    Column("store_names", Boolean, nullable=False, server_default=text("false")),
    Column("identity_group", String(200), unique=True),
    Column("created_at", Utc, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("label", String(100), nullable=False, server_default=""),
    Column("prefix", String(20), nullable=False),
    Column("secret_hash", _KEY, nullable=False, unique=True),
    Column("scopes", String(200), nullable=False),
    Column("created_at", Utc, nullable=False),
    Column("expires_at", Utc),
    Column("revoked_at", Utc),
)

graphs = Table(
    "graphs",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("structure_key", _KEY, nullable=False, index=True),
    Column("ops", Integer, nullable=False),
    Column("edges", Integer, nullable=False),
    Column("total_cost_ns", BigInteger, nullable=False),
    Column("plain_peak_bytes", BigInteger),  # of training without a plan; known once a solve has begun
    Column("data", LargeBinary, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_at", Utc, nullable=False),
    Column("used_at", Utc, nullable=False, index=True),
)


def _graph_column(index: bool = False) -> Column[str]:
    return Column("graph_key", _KEY, ForeignKey("graphs.key", ondelete="CASCADE"), nullable=False, index=index)


def _seal_column() -> Column[str]:
    return Column("seal", _KEY)


problems = Table(
    "problems",
    metadata,
    Column("key", _KEY, primary_key=True),
    _graph_column(index=True),
    Column("budget_bytes", BigInteger, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("id", _ID, primary_key=True),
    _graph_column(),
    Column("method_key", String(100), nullable=False),
    Column("source", String(100), nullable=False),
    Column("solver", String(50), nullable=False, server_default=""),
    Column("cost_ns", BigInteger, nullable=False),
    Column("peak_bytes", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("checksum", _KEY, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("pinned", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Utc, nullable=False),
    Column("used_at", Utc, nullable=False, index=True),
    UniqueConstraint("graph_key", "method_key", "checksum"),
    Index("ix_plans_graph_key_cost_ns", "graph_key", "cost_ns"),
)

pins = Table(
    "pins",
    metadata,
    Column("plan_id", _ID, ForeignKey("plans.id", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("problem_key", _KEY, nullable=False, index=True),
    PrimaryKeyConstraint("plan_id", "tenant_id", "problem_key"),
)

proofs = Table(
    "proofs",
    metadata,
    Column("id", _ID, primary_key=True),
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("bound_ns", BigInteger),  # null: no plan fits
    Column("solver", String(50), nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("checksum", _KEY, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_at", Utc, nullable=False),
    Column("restricted_to", String(400), nullable=False, server_default=""),
    UniqueConstraint("graph_key", "budget_bytes", "checksum"),
    Index("ix_proofs_graph_key_bound_ns", "graph_key", "bound_ns"),
)

bounds = Table(
    "bounds",
    metadata,
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("restricted_to", String(400), nullable=False),
    Column("solver", String(50), nullable=False),
    Column("bound_ns", BigInteger, nullable=False),
    Column("source", String(100)),  # who claims it
    Column("created_at", Utc, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "budget_bytes", "method_key", "restricted_to", "solver"),
)

floors = Table(
    "floors",
    metadata,
    _graph_column(),
    Column("solver", String(50), nullable=False),
    Column("least_bytes", BigInteger, nullable=False),  # proved necessary
    Column("enough_bytes", BigInteger),  # known to suffice, also where no plan of that peak is stored
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "solver"),
)

efforts = Table(
    "efforts",
    metadata,
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("solver", String(50), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("status", String(20), nullable=False),
    Column("limit", String(20)),
    Column("restricted_to", String(400), nullable=False),
    Column("message", Text, nullable=False),
    Column("created_at", Utc, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "budget_bytes", "method_key", "solver"),
)

ACTIVE = text("solves.state IN ('queued', 'running')")
"""The condition of the partial index on flights, word for word: a planner can't prove it from bound parameters."""

solves = Table(
    "solves",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("flight_key", _KEY, nullable=False),
    _graph_column(index=True),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("fixed_bytes", BigInteger, nullable=False),
    Column("method", String(50), nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("options", JSON, nullable=False),
    Column("start_plan_id", _ID),
    Column("forced", Boolean, nullable=False, server_default=text("false")),
    Column("state", String(10), nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("worker", String(100)),
    Column("ticket", BigInteger),  # the engine's job under which it runs: workers of the version before look at it
    Column("heartbeat_at", Utc),
    Column("revision", Integer, nullable=False, server_default="0"),
    Column("plan_id", _ID),
    Column("cost_ns", BigInteger),
    Column("peak_bytes", BigInteger),
    Column("total_cost_ns", BigInteger),
    Column("bound_ns", BigInteger),
    Column("restricted_to", String(400), nullable=False, server_default=""),
    _seal_column(),
    Column("spent_s", Float, nullable=False, server_default="0"),
    Column("outcome", JSON),
    Column("trace", String(100)),  # of the request that queued it, as W3C's traceparent
    Column("asked_by", JSON),  # what every line of the log says of that request: tenant, key, request
    Column("queued_at", Utc, nullable=False),
    Column("started_at", Utc),
    Column("ended_at", Utc),
    Index(
        "uq_solves_flight_key",
        "flight_key",
        unique=True,
        sqlite_where=text("state IN ('queued', 'running')"),
        postgresql_where=text("state IN ('queued', 'running')"),
    ),
    Index("ix_solves_state_priority", "state", "priority", "queued_at"),
    Index("ix_solves_tenant_id_state", "tenant_id", "state"),
)

requests = Table(
    "requests",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("solve_id", _ID, ForeignKey("solves.id", ondelete="SET NULL"), index=True),
    Column("graph_key", _KEY, nullable=False),
    Column("digest", _KEY, nullable=False),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("fixed_bytes", BigInteger, nullable=False),
    Column("name", String(100)),
    Column("method", String(50), nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("time_limit_s", Float, nullable=False),
    Column("max_gap", Float, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("queue_limit_s", Float),
    Column("cache", String(10), nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("answer", JSON),
    Column("plan_id", _ID),
    Column("proof_id", _ID),
    _seal_column(),
    Column("idempotency_key", String(200)),
    Column("body_hash", _KEY),
    Column("group_id", _ID, index=True),
    Column("epoch", Integer),  # of the caller; never null
    Column("created_at", Utc, nullable=False, index=True),
    Column("ended_at", Utc),
    Index("ix_requests_tenant_id_id", "tenant_id", "id"),
    Index("uq_requests_tenant_id_idempotency_key", "tenant_id", "idempotency_key", unique=True),
)

attachments = Table(
    "attachments",
    metadata,
    Column("request_id", _ID, ForeignKey("requests.id", ondelete="CASCADE"), nullable=False),
    Column("kind", String(10), nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_at", Utc, nullable=False),
    PrimaryKeyConstraint("request_id", "kind"),
)

groups = Table(
    "groups",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("kind", String(20), nullable=False),
    Column("about", JSON, nullable=False),
    Column("created_at", Utc, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("solve_id", _ID, ForeignKey("solves.id", ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("cost_ns", BigInteger),
    Column("bound_ns", BigInteger),
    Column("restricted_to", String(400), nullable=False),
    Column("source", String(100), nullable=False),
    PrimaryKeyConstraint("solve_id", "seq"),
)

probes = Table(
    "probes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("at", Utc, nullable=False),
)

seal_keys = Table(
    "seal_keys",
    metadata,
    Column("seal", _KEY, primary_key=True),
    Column("signs", Boolean, nullable=False),
    Column("at", Utc, nullable=False),
)

profiles = Table(
    "profiles",
    metadata,
    Column("scope_id", _ID, ForeignKey("scopes.id", ondelete="CASCADE"), nullable=False),
    Column("device", String(500), nullable=False),
    Column("signature", String(500), nullable=False),
    Column("cost_ns", BigInteger, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("created_at", Utc, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("scope_id", "device", "signature"),
)

profile_reports = Table(
    "profile_reports",
    metadata,
    Column("scope_id", _ID, ForeignKey("scopes.id", ondelete="CASCADE"), nullable=False),
    Column("device", String(500), nullable=False),
    Column("signature", String(500), nullable=False),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("cost_ns", BigInteger, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("created_at", Utc, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("scope_id", "device", "signature", "tenant_id"),
)

administration = Table(
    "administration",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("at", Utc, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("act", String(100), nullable=False),
    Column("about", JSON, nullable=False),
)


def of_epoch(epoch: Any) -> ColumnElement[bool]:
    """Whether a row of `requests` was asked in an epoch or, where another server knew sooner, a later one.

    Once an epoch is raised, whatever a scope's tenants asked and stored before is found no more. What is stored is out
    of reach because the epoch is in its key (`identity.py`). A request is found by its own id, so its row carries the
    epoch that its caller had, and every look at it compares the two: what a server remembers of the answer does not
    matter. A server knows a raised epoch when it looks the caller up again, after two seconds at most.
    """
    found: ColumnElement[bool] = requests.c.epoch >= epoch
    return found

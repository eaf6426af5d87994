"""Every setting of the service, in one place: environment variables with the prefix REMAT_, or arguments."""

from __future__ import annotations

import os
import re

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL


class Settings(BaseSettings):
    """What can be set; each field is read from `REMAT_` + its name in capitals."""

    model_config = SettingsConfigDict(env_prefix="REMAT_", extra="ignore")

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback only with keys.")
    port: int = Field(default=8750, ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    database_url: SecretStr = Field(
        default=SecretStr("sqlite:///.remat/service.sqlite"),
        description="`sqlite:///PATH`, with the path as it is, or `postgresql://…` for a cluster.",
    )
    database_pool: int = Field(
        default=10,
        ge=2,
        description="Connections to the database that a process opens at most, besides two for notes and a worker's "
        "five for jobs.",
    )
    statement_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds after which PostgreSQL ends a statement; 0 for never. Migrations have none.",
    )
    lock_timeout_s: float = Field(
        default=10.0, ge=0, description="Seconds for which PostgreSQL waits for a lock; 0 for ever."
    )
    durable: bool = Field(
        default=False,
        description="Whether SQLite has each commit on the disk before it is answered. Without it what was answered "
        "survives the end of the process, and a power cut may take the last moments.",
    )
    seal_key: SecretStr | None = Field(
        default=None,
        description="Secret by which the store seals what cannot be proved anew, several by commas: the first signs, "
        "all are accepted. Needed with PostgreSQL; without it SQLite's rows are not sealed.",
    )
    dispatcher: str = Field(
        default="embedded",
        pattern="^(embedded|cluster)$",
        description="`embedded` solves in this process's children; `cluster` leaves it to `remat-service worker`.",
    )
    require_keys: bool = Field(default=False, description="Refuse requests without an API key.")
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host headers to accept besides loopback names and `host` (JSON array). Where it is empty and "
        "keys are required, any is accepted: a page of another host has no key to send.",
    )

    oidc_issuer: str | None = Field(
        default=None, description="URL of an OpenID Connect provider whose tokens are taken next to API keys."
    )
    oidc_audience: str = Field(default="remat", description="Audience that such a token must be made for.")
    oidc_groups_claim: str = Field(default="groups", description="Claim of a token that lists its subject's groups.")
    metrics_key: SecretStr | None = Field(
        default=None, description="Bearer key without which `/metrics` is refused; none is needed where it is not set."
    )

    workers: int = Field(default_factory=lambda: max(1, os.cpu_count() or 1), ge=1, description="Solves run at once.")
    solver_threads: int = Field(
        default=1, ge=1, description="Threads that numeric libraries may start in a solver child."
    )
    solver_memory_bytes: int = Field(
        default=8 * 2**30, ge=2**26, description="Resident bytes at which a solve's process group is ended."
    )
    most_time_limit_s: float = Field(default=3600.0, gt=0, description="Longest solve that a request may ask for.")
    most_queue_limit_s: float = Field(
        default=86400.0, gt=0, description="Longest wait in the queue that a request may ask for."
    )
    most_attempts: int = Field(
        default=5, ge=1, description="Starts of one solve, crashes included, before it counts as failed."
    )
    cancel_after_s: float = Field(
        default=0.5, ge=0, description="Seconds past its deadline at which a solver child is told to stop."
    )
    terminate_after_s: float = Field(
        default=2.0, ge=0, description="Seconds from that to SIGTERM of its process group."
    )
    kill_after_s: float = Field(default=2.0, ge=0, description="Seconds from that to SIGKILL of its process group.")
    heartbeat_s: float = Field(
        default=2.0, gt=0, description="Seconds between signs of life of a worker, and of a solve."
    )
    stale_after_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds without one after which a solve is taken over: three heartbeats or more.",
    )
    notice_s: float = Field(
        default=1.0, ge=0, description="Seconds that a stopping server is not ready but still answers, for balancers."
    )
    drain_s: float = Field(
        default=10.0, ge=0, description="Seconds that a stopping server gives requests and solves to end."
    )

    most_wire_bytes: int = Field(default=32 * 2**20, ge=1024, description="Largest body on the wire.")
    most_body_bytes: int = Field(default=32 * 2**20, ge=1024, description="Largest body once inflated.")
    most_bodies_bytes: int = Field(
        default=512 * 2**20, ge=2**20, description="Memory for all bodies being read, with what is built from them."
    )
    head_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds in which a request's line and headers must have come."
    )
    body_timeout_s: float = Field(default=60.0, gt=0, description="Seconds in which a request's body must have come.")
    most_connections: int = Field(default=8192, ge=1, description="Connections open at once.")
    most_connections_per_address: int = Field(
        default=1024, ge=1, description="Connections open at once from one address, such as a proxy's."
    )
    most_requests_per_tenant: int = Field(
        default=4096, ge=1, description="Requests of one tenant under way at once, waits and streams included."
    )
    most_rate_per_tenant: float = Field(
        default=0.0, ge=0, description="Requests of one tenant a second, in each process; 0 for no limit."
    )
    most_streams_per_tenant: int = Field(default=1024, ge=1, description="Event streams of one tenant open at once.")
    most_ops: int = Field(default=100_000, ge=1, description="Most ops in a graph.")
    most_edges: int = Field(default=2_000_000, ge=1, description="Most inputs of all ops together.")
    most_values: int = Field(default=400_000, ge=1, description="Most values in a graph.")
    most_model_entries: int = Field(
        default=200_000_000, ge=1, description="Largest whole model (`milp…`), estimated before it is built."
    )
    most_sweep: int = Field(default=64, ge=1, le=64, description="Most budgets in one sweep.")
    most_queued: int = Field(
        default=10_000,
        ge=1,
        description="Solves waiting at once, of all tenants; at more, only a tenant below its share is let in.",
    )
    longest_wait_s: float = Field(default=30.0, ge=0, le=30.0, description="Longest long-poll.")

    store_bytes: int = Field(
        default=10 * 2**30,
        ge=0,
        description="Bytes of plans, graphs, certificates and answered hits; the oldest hits go first, then what is "
        "used least.",
    )
    hit_days: float = Field(
        default=1.0, gt=0, description="Days that a request stays which was answered from the store at once."
    )
    store_days: float = Field(
        default=90.0, gt=0, description="Days that an unused, unpinned plan or an ended request is kept."
    )
    housekeeping_s: float = Field(
        default=60.0, gt=0, description="Seconds between rounds of eviction and reconciliation."
    )

    look_up_s: float = Field(
        default=0.2, ge=0, description="Seconds for which a request is looked up in the store before it is queued."
    )
    recall_bytes: int = Field(
        default=128 * 2**20, ge=0, description="Bytes of answers lately given that are kept in memory."
    )

    log_level: str = Field(
        default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least severe level to log."
    )
    log_format: str = Field(
        default="json", pattern="^(json|console)$", description="One JSON object a line, or for people."
    )

    @model_validator(mode="after")
    def _silence_outlasts_a_heartbeat(self) -> Settings:
        if self.stale_after_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"REMAT_STALE_AFTER_S ({self.stale_after_s:g}) must be at least three times REMAT_HEARTBEAT_S "
                f"({self.heartbeat_s:g}), or workers that are alive are taken for dead"
            )
        return self

    @property
    def embedded(self) -> bool:
        """Whether this process runs the solves itself."""
        return self.dispatcher == "embedded"


def driver_url(url: str) -> str | URL:
    """The URL with the async driver that the service uses: a string for PostgreSQL, an object for SQLite.

    What follows `sqlite:///` is a path as it is, with `#`, `?` and `%`; only what reads as an option is refused.

    Raises:
        ValueError: another database, or options where there are none.
    """
    if url.startswith("sqlite://"):
        path = url.removeprefix("sqlite://").removeprefix("/")
        if re.search(r"\?\w+=[^/]*$", path):
            raise ValueError("REMAT_DATABASE_URL takes a path after sqlite:/// and no options after a ?")
        return URL.create("sqlite+remat", database=path or None)
    for scheme in ("postgresql+psycopg://", "postgresql://", "postgres://"):
        if url.startswith(scheme):
            return "postgresql+psycopg://" + url.removeprefix(scheme)
    raise ValueError("REMAT_DATABASE_URL must start with sqlite:// or postgresql://")

"""Where the client's settings come from: arguments first, then the environment.

REMAT_BASE_URL     the service, such as http://127.0.0.1:8750; unset means none
REMAT_API_KEY      its key, if it asks for one
REMAT_CACHE_DIR    answers and measured costs kept on this machine; default ~/.cache/remat
REMAT_OFFLINE      1: never ask a service, whatever REMAT_BASE_URL says
REMAT_CHECK_WRITES 1: each step compares checksums of the parameters from which its backward pass computes again
REMAT_STRICT       1: a planner that fails is an error, and no other's plan is taken in its place
REMAT_SEND_NAMES   1: solves are called by the model's class and the shape of its input in the service's lists, and the
                   ops of a plan by module and operator on its page, where the service stores names
REMAT_REPORT_RUNS  1: what the first steps by a plan came to is shown on the solve's page
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from remat_ir import InvalidData

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """What the client needs to know of its surroundings; the key never shows in a repr.

    Example:
        >>> Settings("http://127.0.0.1:8750", Path("cache"), offline=True).service_url is None
        True
    """

    base_url: str | None
    cache_dir: Path
    api_key: str | None = field(default=None, repr=False)
    offline: bool = False
    send_names: bool = False
    report_runs: bool = False
    check_writes: bool = False
    strict: bool = False

    @property
    def service_url(self) -> str | None:
        """The service to ask, or None where there is none or the client is offline."""
        return None if self.offline else self.base_url


def settings(
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings in force: each argument that is not None stands over its environment variable.

    Raises:
        InvalidData: a URL that is not http or https, a key that no header can have, a folder of a user without a home,
            or a flag that is neither yes nor no.
    """
    env = os.environ if environ is None else environ
    url = base_url or env.get("REMAT_BASE_URL") or None
    usual = os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "remat")
    where = cache_dir or env.get("REMAT_CACHE_DIR") or usual
    try:
        folder = Path(where).expanduser()
    except RuntimeError:  # a user without a home, as a container may give one
        raise InvalidData(f"there is no folder {where}: set REMAT_CACHE_DIR to one for what is remembered") from None
    return Settings(
        base_url=None if url is None else checked_url(url),
        cache_dir=folder,
        api_key=checked_key(api_key or env.get("REMAT_API_KEY")),
        offline=_flag(env, "REMAT_OFFLINE") if offline is None else offline,
        send_names=_flag(env, "REMAT_SEND_NAMES"),
        report_runs=_flag(env, "REMAT_REPORT_RUNS"),
        check_writes=_flag(env, "REMAT_CHECK_WRITES"),
        strict=_flag(env, "REMAT_STRICT"),
    )


def checked_url(url: str) -> str:
    """A base URL without its trailing slash and the space around it.

    Raises:
        InvalidData: not http or https, without a host, or with space inside.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        fine = fine and url.isprintable() and " " not in url
    except ValueError:
        fine = False
    if not fine:
        raise InvalidData(f"the service's URL must be http://HOST[:PORT] or https://…, not {url!r}")
    return url.rstrip("/")


def checked_key(key: str | None) -> str | None:
    """A key without the space around it, such as the end of a line of a mounted secret; None: there is none.

    Raises:
        InvalidData: it has characters that a header cannot have; the message does not show it.
    """
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidData("REMAT_API_KEY must be printable ASCII on one line")
    return key or None


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text not in _YES | _NO:
        raise InvalidData(f"{name} must be 1 or 0, not {text!r}")
    return text in _YES

"""Measured costs shared between jobs, so that equal steps become equal graphs: the first writer wins."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from remat_ir import InvalidData
from remat_ir.read import members, parse

from ..errors import ServiceError
from . import service
from .folder import trim, used, write_whole
from .http import Http

FORMAT = "remat-profile/1"

log = logging.getLogger("remat")

_APART, _NOISE_NS, _NOISE_BYTES = 10, 100, 2**20
"""What stands is believed up to ten times more or less than what was measured here, and whatever is below the noise."""


class Profile(NamedTuple):
    """What one op costs: its time in ns, and the bytes that live only while it runs.

    Example:
        >>> Profile(cost_ns=1000, workspace_bytes=0).cost_ns
        1000
    """

    cost_ns: int
    workspace_bytes: int


class ProfileTable(Protocol):
    """Profiles by device (kind and library versions) and op signature.

    Example:
        >>> import tempfile
        >>> table: ProfileTable = DiskProfiles(Path(tempfile.mkdtemp()))
        >>> table.put("cpu", {"mm 8x8": Profile(1000, 0)})["mm 8x8"].cost_ns
        1000
    """

    alone: bool = True
    """Whether no other process waits for the same calls, so that what is asked for may depend on measurements here."""

    def get(self, device: str, signatures: Iterable[str]) -> dict[str, Profile]:
        """Those of the signatures that are known on the device."""
        ...

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """Offer profiles; what now stands for each of them."""
        ...

    def forget(self, device: str, signatures: Iterable[str]) -> None:
        """Have these measured again by the next that asks here; what others keep stands until they report otherwise."""

    def derived(self, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """What stands for profiles that were not measured but follow from others; nothing is written."""
        return dict(profiles)

    def meets(self, groups: Sequence[Sequence[int]], order: str) -> bool:
        """Whether all ranks of some groups are here, so that collectives launched now pair.

        Args:
            order: of the collectives of the step, as a digest.

        Raises:
            RanksDiffer: those who meet are about to run other collectives, or in another order.
        """
        return False


class DiskProfiles(ProfileTable):
    """One small file per device and signature; a corrupted one is a miss, and is replaced by the next writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, device: str, signatures: Iterable[str]) -> dict[str, Profile]:
        """Those of the signatures that are known on the device."""
        found = {signature: self._read(device, signature) for signature in sorted(set(signatures))}
        return {signature: profile for signature, profile in found.items() if profile is not None}

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """Write what is new, or `apart` from what stands; what now stands.

        A folder that cannot be written leaves the caller's own standing.
        """
        stands: dict[str, Profile] = {}
        for signature, profile in sorted(profiles.items()):
            known = self._read(device, signature)
            if known is None or apart(known, profile):
                self._write(device, signature, profile, replace_existing=known is not None)
                known = self._read(device, signature)
            stands[signature] = profile if known is None or apart(known, profile) else known
        if profiles:
            trim(self.folder)
        return stands

    def forget(self, device: str, signatures: Iterable[str]) -> None:
        """Delete these files."""
        for signature in signatures:
            with suppress(OSError):
                self._path(device, signature).unlink(missing_ok=True)

    def _path(self, device: str, signature: str) -> Path:
        return self.folder / _hash(device)[:16] / f"{_hash(signature)}.json"

    def _read(self, device: str, signature: str) -> Profile | None:
        try:
            found = members(
                parse(used(self._path(device, signature))),
                "profile",
                ("device", "signature", "cost_ns", "workspace_bytes"),
                (),
                FORMAT,
            )
        except (OSError, InvalidData):
            return None
        profile = Profile(found["cost_ns"], found["workspace_bytes"])
        if (found["device"], found["signature"]) != (device, signature) or not valid(profile):
            return None
        return profile

    def _write(self, device: str, signature: str, profile: Profile, replace_existing: bool) -> None:
        path = self._path(device, signature)
        text = json.dumps({"format": FORMAT, "device": device, "signature": signature, **profile._asdict()})
        with suppress(OSError):
            written = write_whole(path, text.encode(), replace_existing=replace_existing, durable=False)
            if not written and self._read(device, signature) is None:
                write_whole(path, text.encode(), durable=False)


class SharedProfiles(ProfileTable):
    """The service's table, with the disk behind it for when the service is away.

    Where both know a signature the service's profile counts: that is the one other jobs have. Where a kernel has been
    measured here and the service's profile is `apart` from that, it is not believed: ours counts, and the log warns.
    """

    def __init__(self, http: Http, disk: DiskProfiles) -> None:
        self.http, self.disk = http, disk

    def get(self, device: str, signatures: Iterable[str]) -> dict[str, Profile]:
        """Those of the signatures that are known on the device, to the service or to this machine."""
        asked = sorted(set(signatures))
        try:
            shared = profiles_of(service.lookup_profiles(self.http, device, asked)) if asked else {}
        except ServiceError as error:
            log.warning("the profile table is out of reach, this machine's own is used: %s", error)
            return self.disk.get(device, asked)
        local = self.disk.get(device, [signature for signature in asked if signature not in shared])
        if local:
            local = self._offer(device, local)
        self.disk.put(device, shared)
        known = local | shared
        return {signature: known[signature] for signature in asked if signature in known}

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """Offer profiles to the service and the disk; what now stands for each of them."""
        stands = self._offer(device, profiles) if profiles else {}
        self.disk.put(device, stands)
        return stands

    def forget(self, device: str, signatures: Iterable[str]) -> None:
        """Delete those of this machine."""
        self.disk.forget(device, signatures)

    def _offer(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        try:
            stands = profiles_of(service.put_profiles(self.http, device, profiles))
        except ServiceError as error:
            log.warning("the profile table is out of reach, this machine's own is used: %s", error)
            return self.disk.put(device, profiles)
        doubted = sorted(signature for signature, stood in stands.items() if apart(stood, profiles[signature]))
        if doubted:
            first = doubted[0]
            log.warning(
                "the profile table says %s of kernel %s, which measures %s here; of %d such kernels our own count",
                tuple(stands[first]),
                first,
                tuple(profiles[first]),
                len(doubted),
            )
        return {**profiles, **{signature: stood for signature, stood in stands.items() if signature not in doubted}}


def apart(stands: Profile, measured: Profile) -> bool:
    """Whether a profile cannot be that of a kernel that measures so here.

    >>> apart(Profile(0, 0), Profile(2_000, 0)), apart(Profile(1_000, 0), Profile(2_000, 0))
    (True, False)
    """
    pairs = zip(stands, measured, (_NOISE_NS, _NOISE_BYTES), strict=True)
    return any(max(one, other) > _APART * min(one, other) + noise for one, other, noise in pairs)


def valid(profile: Profile) -> bool:
    """Whether both numbers are integers from 0 to 2^53."""
    return all(type(number) is int and 0 <= number <= 2**53 for number in profile)


def profiles_of(rows: Mapping[str, Sequence[int]]) -> dict[str, Profile]:
    """Profiles from their two numbers, as they come from a service or another process."""
    return {signature: Profile(*row) for signature, row in rows.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

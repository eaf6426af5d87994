"""The link between a device and its host: as an option names it, by its data sheet, and the share that copies reach.

Copies from and to pinned memory. The shares and the time that starting a copy takes are not measured: they are what
such copies are reported to reach, rounded. `remat.lowering.link` measures a device that is there. No figure
of this module was taken on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from remat_ir import InvalidData, Link

from .budget import bytes_of

ACHIEVED = 0.80
"""The share of a data sheet's bandwidth that large copies reach."""


def _by_sheet(bytes_per_s: float, latency_ns: int) -> Link:
    """A link of so many bytes per second each way by the data sheet, and this time from the call to the first byte."""
    usable = round(bytes_per_s * ACHIEVED)
    return Link(usable, usable, latency_ns)


LINKS: Mapping[str, Link] = {
    "pcie3": _by_sheet(15.75e9, 10_000),
    "pcie4": _by_sheet(31.5e9, 10_000),
    "pcie5": _by_sheet(63.0e9, 10_000),
    "nvlink-c2c": _by_sheet(450.0e9, 5_000),
}
"""Sixteen lanes of PCI Express 3, 4 and 5 after their line code; NVLink-C2C of Grace Hopper, half of its 900 GB/s."""

OF_TARGET: dict[str, str] = {"a100": "pcie4", "l40s": "pcie4", "h100": "pcie5", "h200": "pcie5"}
OF_TARGET |= dict.fromkeys(("rtx3090", "rtx4090", "a10", "l4"), "pcie4")
OF_TARGET |= dict.fromkeys(("rtx5090", "mi300x", "gaudi3"), "pcie5")
OF_TARGET |= dict.fromkeys(("t4", "v100", "flops"), "pcie3")
"""Which link a kind of device of `remat.target.devices` has in a common machine."""


def named_link(text: str) -> Link:
    """A link by its name, by a device that has it, by its bandwidth each way, or from a JSON file.

    Example:
        >>> named_link("pcie5").to_host_bytes_per_s, named_link("h100") == named_link("pcie5")
        (50400000000, True)
        >>> named_link("25GB").latency_ns
        0

    Raises:
        InvalidData: none of these; the message says what may be written.
    """
    name = text.lower()
    name = OF_TARGET.get(name, name)
    if name in LINKS:
        return LINKS[name]
    if Path(text).suffix == ".json":
        try:
            return Link.from_json(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidData(f"the link {text} cannot be read: {error.strerror or error}") from None
        except InvalidData as error:
            raise InvalidData(f"the link {text}: {error}") from None
    try:
        both = bytes_of(text.removesuffix("/s"))
        return Link(both, both)
    except InvalidData:
        known = ", ".join((*LINKS, *OF_TARGET))
        raise InvalidData(
            f"{text!r} is no link: write one of {known}, bytes a second such as 25GB, or a .json file"
        ) from None


MEASURED = "measured"


def read_link(link: object, host_bytes: int | str | None = None) -> Link | None:
    """The link that an option means; None where it is to be measured, or where there is none.

    Example:
        >>> read_link("pcie4", "64GiB").host_bytes
        68719476736

    Args:
        link: None, "measured", what `named_link` reads, or a `remat_ir.Link`.
        host_bytes: what the host may hold, in place of the link's own limit.

    Raises:
        InvalidData: it is none, or not a size; the message says what is one.
    """
    if link is not None and not isinstance(link, (Link, str)):
        raise InvalidData(f"link is {MEASURED!r}, a name such as 'pcie4', or a remat_ir.Link, not {link!r}", "/link")
    limit = None if host_bytes is None else bytes_of(host_bytes)
    if link is None and limit is not None:
        raise InvalidData("host_bytes says what a link's host may hold: give link= as well", "/host_bytes")
    if link is None or link == MEASURED:
        return None
    found = link if isinstance(link, Link) else named_link(link)
    return found if limit is None else replace(found, host_bytes=limit)

"""Sizes and times in sentences for people; messages in JSON stand next to the whole numbers."""

from __future__ import annotations


def readable(size: int, *, up: bool = False) -> str:
    """Bytes for a person, with three digits, or as a whole number of a unit where they are one.

    Args:
        up: rounded up, so that what is written is enough where the bytes are; else to the nearest.

    Example:
        >>> readable(472 * 1024), readable(1_688_300), readable(1_688_300, up=True)
        ('472 KiB', '1.61 MiB', '1.62 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, abs(size).bit_length() - 1) // 10)
    if not power:
        return f"{size} B"
    unit = 1024**power
    digits = 2 if abs(size) < 10 * unit else 1 if abs(size) < 100 * unit else 0
    digits = digits if size % unit else 0
    scale: int = 10**digits
    shown = -(-size * scale // unit) if up else round(size * scale / unit)
    return f"{shown / scale:.{digits}f} {units[power]}"


def duration(ns: int) -> str:
    """Nanoseconds for a person, with four digits.

    Example:
        >>> duration(3_210_999_200), duration(5_000), duration(7_384_000_000_000)
        ('3.211 s', '5 µs', '2 h 3 min')
    """
    minutes = round(ns / 60e9)
    if minutes >= 100:
        return f"{minutes // 60} h {minutes % 60} min"
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= size:
            return f"{ns / size:.4g} {unit}"
    return f"{ns} ns"

"""Quantities as people write them: 100MB, 25MiB, 400Gb/s, 14us, 2.5h; and back."""

from __future__ import annotations

import re

_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_RATES = {f"{name}/s": factor for name, factor in _BYTES.items()}
_RATES |= {f"{prefix}b/s": factor / 8 for prefix, factor in (("M", 1e6), ("G", 1e9), ("T", 1e12))}


def nbytes(text: str) -> float:
    """Bytes of "100MB", "25MiB", …"""
    return _parse(text, _BYTES)


def seconds(text: str) -> float:
    """Seconds of "14us", "35ms", "2.5h", …"""
    return _parse(text, _SECONDS)


def rate(text: str) -> float:
    """Bytes per second of "40GB/s" or "400Gb/s"."""
    return _parse(text, _RATES)


def _parse(text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(\S+)\s*", text)
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def in_ms(value: float) -> str:
    """Seconds as milliseconds."""
    return significant(value * 1e3)


def significant(value: float) -> str:
    """Three significant digits, more only before the point."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def as_size(value: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("TB", "GB", "MB", "KB"):
        if value >= _BYTES[unit]:
            return f"{significant(value / _BYTES[unit])} {unit}"
    return f"{value:.0f} B"


def as_duration(value: float) -> str:
    """Seconds in the unit that fits."""
    for unit in ("h", "min", "s", "ms"):
        if value >= _SECONDS[unit]:
            return f"{significant(value / _SECONDS[unit])} {unit}"
    return f"{significant(value / 1e-6)} µs"

"""Sizes, rates and times as people write and read them, as bytes, bytes per second and seconds."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*"
_SIZE = re.compile("([0-9]+)(?:([KMG])(I?B|BIT)?|B)?", re.IGNORECASE | re.ASCII)
_RATE = re.compile(_NUMBER + "([KMGT]?)(I?)(?:(B|BYTES?|BITS?)(PS|/S|/SEC)?)?", re.IGNORECASE | re.ASCII)
_TIME = re.compile(_NUMBER + "([A-Zµμ]+)", re.IGNORECASE | re.ASCII)


def parse_nbytes(text: str) -> int:
    """Read a size such as ``8``, ``64K``, ``64KiB``, ``1mb`` or ``2G`` (1024-based, all of them) as bytes.

    Raises:
        ValueError: it is none, or may be bits, as ``4Mb``.
    """
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError("expected a positive size in bytes, such as 65536, 64K, 64KiB or 4MB, in units of 1024")
    number = int(match[1])
    scale = (match[2] or "").upper()
    unit = match[3] or ""
    if unit.lower().endswith("t") or (unit.endswith("b") and scale and match[2].isupper()):
        raise ValueError(f"that may be {number}{scale}B, or {number} {scale}bit, which are {number / 8:.6g} {scale}B")
    return int(number * 1024 ** _POWERS[scale])


def parse_rate(text: str, *, of_link: bool = True) -> float:
    """Read a rate as bytes per second: ``400Gbit/s``, ``400Gbps`` and ``400Gb/s`` are bits, ``50GB/s`` is bytes.

    K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Args:
        text: of a person.
        of_link: whether it is the rate of a network's link, which people state in bits: then ``100G`` and ``100gb`` are
            bits. Else these are ambiguous, as rates of memory are stated in bytes.

    Raises:
        ValueError: it is no rate above 0, or may be bits as well as bytes; then the text shows both.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]) > 0 or not (match[2] or match[4]) or (match[3] and not match[2]):
        raise ValueError("expected a rate with its unit, such as 400Gbit/s or 50GB/s")
    number, scale, binary, unit, per = match.groups()
    prefix = scale.upper() + binary.lower()
    in_bits = _in_bits(scale, unit, per=per, of_link=of_link)
    if in_bits is None:
        as_bits = f"{_written(float(number) / 8, prefix)}B/s"
        as_bytes = f"{_written(float(number) * 8, prefix)}bit/s"
        raise ValueError(
            f"that is ambiguous: write {number}{prefix}bit/s ({as_bits}), or {number}{prefix}B/s ({as_bytes})"
        )
    rate = float(number) * float(1024 if binary else 1000) ** _POWERS[scale.upper()]
    return rate / 8 if in_bits else rate


def _in_bits(scale: str, unit: str | None, per: str | None, of_link: bool) -> bool | None:
    """Return whether a rate is in bits, not in bytes; None: that cannot be known.

    The case of a lone b or B says it, except where everything is written in one case.
    """
    usual = True if of_link else None
    if unit is None:
        return usual
    if len(unit) > 1:
        return unit.lower().startswith("bit")
    if unit == "B":
        return None if per == "PS" else False
    return True if scale.isupper() or per else usual


def _written(number: float, prefix: str) -> str:
    return f"{number:.6g} {prefix}"


def parse_seconds(text: str) -> float:
    """Read a time such as ``2us``, ``1.5 ms``, ``1s``, ``5m`` or ``1.5h`` as seconds.

    Raises:
        ValueError: it is none.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError("expected a time, such as 2us, 1.5ms, 1s, 5m or 1.5h")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_share(text: str) -> float:
    """Read a share such as ``5%`` or ``0.05``.

    Raises:
        ValueError: it is none, or less than 0.
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ValueError("expected a share, such as 5% or 0.05")
    return share


def plural(number: float, word: str) -> str:
    """Write a number before a word: ``1 core``, ``2.5 cores``."""
    return f"{number:g} {word}{'s' * (number != 1)}"


def format_nbytes(nbytes: int) -> str:
    """Write a size shortly: ``8 B``, ``64 KiB``, ``1.5 MiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """Write a time shortly: ``12.3 us``, ``4.56 ms``, ``1.23 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"

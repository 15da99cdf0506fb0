"""Human-readable numbers."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Bytes in the most readable unit."""
    power = _largest_power(count, 1024, 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def share_text(share: float) -> str:
    # 99.99 % must not display as all.
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def flops_text(count: float) -> str:
    power = _largest_power(count, 1000, 5)
    return f"{count / 1000**power:.3g} {('', 'K', 'M', 'G', 'T', 'P')[power]}FLOP"


def _largest_power(count: float, base: int, most: int) -> int:
    """Returns the largest power of the base, ``most`` at most, that is not above the count; 0 for less than the base."""
    return next((power for power in range(most, 0, -1) if count >= base**power), 0)

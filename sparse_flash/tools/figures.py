"""Human-readable numbers, and the table that explanations print."""

from __future__ import annotations


def explanation_text(head: list[str], lines: dict[str, str], hints: list[str]) -> str:
    """Returns the head, a table of the lines by name, and the hints."""
    width = max(map(len, lines))
    table = [f"{name:<{width}}  {line}" for name, line in lines.items()]
    return "\n".join([*head, "", *table, *(f"hint: {hint}" for hint in hints)])


def size_text(count: float) -> str:
    """Bytes in the most readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def share_text(share: float) -> str:
    # 99.99 % must not display as all.
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def flops_text(count: float) -> str:
    for unit in ("", "K", "M", "G", "T", "P"):
        if count < 1000 or unit == "P":
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    raise AssertionError

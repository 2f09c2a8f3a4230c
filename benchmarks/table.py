"""Rows of measurements for people: one table on the terminal, one in the docs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.timing import Row

HEAD = ["measured", "time", "beside", "its time", "ratio [range]", "held to"]


def duration(value: float | None) -> str:
    """Seconds for people.

    Example:
        >>> duration(0.00321), duration(12.5), duration(None)
        ('3.21 ms', '12.5 s', '')
    """
    if value is None:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def _ratio(row: Row) -> str:
    if "exponent" in row:
        low, high = row["interval"]
        return f"{row['variable']}^{row['exponent']:.2f} [{low:.2f}, {high:.2f}]"
    if "peaks" in row:
        parts = [f"{peak / 1e9:.2f} GB ({what})" for what, peak in row["peaks"]]
        if "predicted_GB" in row:
            parts.append(f"{row['predicted_GB']:.2f} GB predicted")
        if "bytes_per_image" in row:
            parts.append(
                f"{row['bytes_per_image'] / 1e3:.1f} kB per image, its logits {row['logits_per_image'] / 1e3:.1f} kB"
            )
        return ", ".join(parts)
    if row["ratio"] is None:
        return ""
    after = "x faster" if row.get("inverse") else "x"
    span = "" if row["spread"] is None else " [{:.3g}, {:.3g}]".format(*row["spread"])
    return f"{row['ratio']:.3g}{after}{span}"


def _extra(row: Row) -> str:
    """Whatever else belongs to the number, in a few words."""
    found = []
    if "noisy_images_per_second" in row:
        found.append(f"{row['noisy_images_per_second']:,.0f} noisy images/s".replace(",", " "))
    if "MB_per_second" in row:
        found.append(f"{row['MB_per_second']:.0f} MB/s")
    if "steady_ratio" in row:
        found.append(f"{row['steady_ratio']:.2f}x faster once started")
    if "mean_draws" in row:
        found.append(f"{row['mean_draws']:.1f} of {row['sizes']['draws']} draws")
    if "mean_set" in row:
        found.append(f"mean set {row['mean_set']:.2f} beside {row['published_mean_set']:.2f}")
    if row.get("labels_decided_otherwise"):
        found.append(f"{row['labels_decided_otherwise']} labels decided otherwise")
    return f" ({', '.join(found)})" if found else ""


def cells(row: Row) -> list[str]:
    """One row of the table, in the order of ``HEAD``."""
    per = f" per {row['unit']}" if "unit" in row else ""
    held = f"{row['goal']}: {'met' if row['met'] else 'missed'}" if "goal" in row else ""
    other = duration(row["baseline_seconds"])
    return [
        row["name"] + _extra(row),
        duration(row["seconds"]) + per,
        row["baseline"] or "",
        other + (per if other else ""),
        _ratio(row),
        held,
    ]


def as_text(rows: Sequence[Row]) -> str:
    """Columns of equal width."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


def as_markdown(rows: Sequence[Row]) -> str:
    """The same for a page."""
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

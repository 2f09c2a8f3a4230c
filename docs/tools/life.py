"""The figure of a promise's life: evidence over queries, from results/life.json."""

from __future__ import annotations

from typing import Any

from keepcover.pages import plots

PHASES = {"quiet": "as calibrated", "drift": "drifted", "renewed": "drifted, recalibrated"}


@plots.styled
def draw(rows: list[dict[str, Any]], per: int) -> Any:
    """Both kinds of evidence on a logarithmic axis, the alarm, and where drift and recalibration begin; a row is ``per`` queries."""
    figure, axis = plots.subplots(figsize=(8.4, 3.2), layout="constrained")
    for kind, color in (("promise", plots.COLORS[0]), ("queries", plots.COLORS[1])):
        name = {"promise": "labels: the promise", "queries": "queries alone"}[kind]
        for phases in (("quiet", "drift"), ("renewed",)):  # a renewed predictor has a new monitor
            own = [(per * at, row[kind]) for at, row in enumerate(rows, 1) if row["phase"] in phases]
            found = [max(one["evidence"], 1e-3) for _, one in own]
            label = name if phases[0] == "quiet" else None
            axis.plot([at for at, _ in own], found, color=color, lw=1.6, label=label)
        axis.axhline(rows[0][kind]["alarm_at"], color=color, lw=1, ls=":")
    for phase, words in PHASES.items():
        first = next(per * at for at, row in enumerate(rows) if row["phase"] == phase)
        axis.axvline(first, color=plots.INK, lw=0.8)
        axis.annotate(
            words,
            (first, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            fontsize=9,
        )
    top = 30 * max(row["promise"]["alarm_at"] for row in rows)
    axis.set(yscale="log", ylim=(1e-3, top), xlabel="queries answered", ylabel="evidence (dotted: alarm)")
    axis.legend(fontsize=9, loc="lower left", frameon=False)
    return figure

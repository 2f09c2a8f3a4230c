"""``keepcover plan``: what draws buy, before any data are seen."""

from __future__ import annotations

from pathlib import Path

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.evaluation import plan as planning
from keepcover.methods import Holdout
from keepcover.noise import Threat
from keepcover.prediction.source import check_outputs
from keepcover.specs import read_shape
from keepcover.store import read_logits
from keepcover.tasks import Classification


@opt.command
def plan(
    epsilon: opt.Epsilon,
    asked: opt.Question,
    *,
    shape: opt.InputShape = None,
    alpha: opt.Alpha = 0.1,
    draws: opt.Draws = 16,
    calibration_draws: int = 64,
    n: int = 4750,
    holdout: Path | None = None,
) -> ui.Answer:
    """What N draws per query buy: the best exact rules beside what RSCP+ pays. Needs no data.

    Sizes are estimates on a reference population that resembles CIFAR-10, or on your own `--holdout` logits.

    Args:
        calibration_draws: Model evaluations per calibration point, paid once.
        n: Calibration points.
        holdout: Noisy logits of your own holdout: a file or a store.
    """
    threat = Threat(asked.required(), epsilon, asked.norm, read_shape(shape))
    beta = 0.001 if asked.beta is None else asked.beta
    held = None if holdout is None else _holdout(holdout)
    how = {"calibration_draws": calibration_draws, "n": n, "beta": beta, "shape": threat.shape, "holdout": held}
    with ui.err.status("solving"):
        plans = planning.make_plan(alpha, epsilon, threat.noise, draws, **how, **asked.arguments())

    def cell(value: float | int | None, form: str = "d") -> str:
        return "-" if value is None else format(value, form)

    each = f" per {unit.unit}" if (unit := asked.promise().partition) else ""
    rows = []
    for p in plans:
        chosen = (cell(p.c), cell(p.kappa), cell(p.level, ".5f"), cell(p.estimated_size, ".2f"))
        rows.append([p.method, p.draws, p.calibration_draws, *chosen, p.least if p.least < 2**53 else "-"])
    title = f"alpha {alpha:g}, {threat.reach}, {threat.noise}: {draws} draw{'s' if draws != 1 else ''} per query"
    head = ["certificate", "draws", "cal. draws", "c", "kappa", "level alpha'", "size (est.)", f"points needed{each}"]
    rules = [f"{p.method} ({p.draws}/{p.calibration_draws}): {p.rule}" for p in plans]
    where = "your holdout" if holdout else "a reference population (see --help)"
    note = ui.dim(f"\nalpha' near alpha: robustness nearly free. Sizes are estimates on {where}.")
    request = {"alpha": alpha, **threat.config(), "draws": draws, "n": n, "beta": beta}
    return ui.Answer(request | {"plans": [p.to_dict() for p in plans]}, [ui.table(title, head, rows), *rules, note])


def _holdout(path: Path) -> Holdout:
    logits, labels = read_logits(path)
    outputs = check_outputs(logits)
    task = Classification().seen(outputs)
    return Holdout(task, outputs, task.check_truth(labels, len(outputs)))

"""``keepcover plan``: what draws buy, before any data are seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepcover.cli import console as ui

if TYPE_CHECKING:
    from keepcover.methods import Holdout


@ui.app.command()
def plan(
    epsilon: ui.Epsilon,
    sigma: ui.MaybeSigma = None,
    noise: ui.NoiseSpec = None,
    norm: ui.NormName = None,
    shape: ui.InputShape = None,
    alpha: ui.Alpha = 0.1,
    draws: Annotated[int, typer.Option(help="Model evaluations per query.")] = 16,
    calibration_draws: Annotated[int, typer.Option(help="Model evaluations per calibration point, paid once.")] = 64,
    n: Annotated[int, typer.Option(help="Calibration points.")] = 4750,
    beta: Annotated[float, typer.Option(help="Monte Carlo budget of RSCP+.")] = 0.001,
    holdout: Annotated[Path | None, typer.Option(help="Noisy logits of your own holdout: a file or a store.")] = None,
    as_json: ui.Json = False,
) -> None:
    """What N draws per query buy: the best exact rules beside what RSCP+ pays. Needs no data.

    Sizes are estimates on a reference population that resembles CIFAR-10, or on your own `--holdout` logits.
    """
    from keepcover.evaluation.plan import make_plan
    from keepcover.noise import Threat

    threat = Threat(ui.some_noise(sigma, noise), epsilon, norm, ui.read_shape(shape))
    own = None if holdout is None else _holdout(holdout)
    with ui.err.status("solving"):
        plans = make_plan(
            alpha,
            epsilon,
            threat.noise,
            draws,
            calibration_draws=calibration_draws,
            n=n,
            beta=beta,
            norm=threat.norm,
            shape=threat.shape,
            holdout=own,
        )
    if as_json:
        request = {"alpha": alpha, **threat.config(), "draws": draws, "n": n, "beta": beta}
        ui.print_json({**request, "plans": [p.to_dict() for p in plans]})
        return

    def cell(value: float | int | None, form: str = "d") -> str:
        return "-" if value is None else format(value, form)

    ui.print_table(
        f"alpha {alpha:g}, {threat.reach}, {threat.noise}: {draws} draw{'s' if draws != 1 else ''} per query",
        ["certificate", "draws", "cal. draws", "c", "kappa", "level alpha'", "size (est.)"],
        [
            [
                p.method,
                p.draws,
                p.calibration_draws,
                cell(p.c),
                cell(p.kappa),
                cell(p.level, ".5f"),
                cell(p.estimated_size, ".2f"),
            ]
            for p in plans
        ],
    )
    for p in plans:
        ui.out.print(f"{p.method} ({p.draws}/{p.calibration_draws}): {p.rule}")
    where = "your holdout" if holdout else "a reference population (see --help)"
    ui.out.print(f"\nalpha' near alpha: robustness nearly free. Sizes are estimates on {where}.", style="dim")


def _holdout(path: Path) -> Holdout:
    from keepcover.methods import Holdout
    from keepcover.prediction.outputs import check_outputs
    from keepcover.store import read_logits
    from keepcover.tasks import Classification

    logits, labels = read_logits(path)
    outputs = check_outputs(logits)
    task = Classification().seen(outputs)
    return Holdout(task, outputs, task.check_truth(labels, len(outputs)))

"""``keepcover demo``: every method on handwritten digits, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepcover.cli import console as ui


@ui.app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("demo"),
    figures: ui.Figures = None,
    seed: ui.Seed = 0,
    as_json: ui.Json = False,
) -> None:
    """Train, calibrate every method and attack them all on handwritten digits (about a minute, no download).

    Ends with a table and an HTML report that opens offline.
    """
    from keepcover.demo.demo import ALPHA, run_demo
    from keepcover.demo.report import write_report
    from keepcover.files import check_folder
    from keepcover.pages.sections import methods_table

    check_folder(folder, "report.html", "results.json", "predictor.safetensors")
    if figures is not None:
        check_folder(figures)
    with ui.err.status("starting") as status:
        result = run_demo(seed, say=ui.told(status))
    page = write_report(result, folder, figures)
    if as_json:
        ui.print_json({**result.to_dict(), "report": str(page)})
        return
    best = result.best
    table = methods_table(result.rows())
    ui.print_table(
        f"Digits: 90 % coverage, {best.noise}, attacked within {best.guarantee.threat.reach}",
        table.head,
        table.texts,
        f"alpha {ALPHA:g}; 500 calibration, 500 test points, {len(result.audit.images)} of them attacked; one split, seed {seed}; {result.seconds:.0f} s",
    )
    ui.out.print(f"\n{best.guarantee}\n")
    ui.out.print(f"report     {page}\npredictor  {folder / 'predictor.safetensors'}")

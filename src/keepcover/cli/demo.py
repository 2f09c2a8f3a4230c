"""``keepcover demo``: every method on handwritten digits, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from keepcover import demo as digits
from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.files import check_folder
from keepcover.pages.audit_page import methods_table


@opt.command
def demo(
    folder: Annotated[Path, "--out", lambda to: check_folder(to, *digits.FILES)] = Path("demo"),
    figures: opt.Figures = None,
    seed: opt.Seed = 0,
) -> ui.Answer:
    """Train, calibrate every method and attack them all on handwritten digits (about a minute, no download).

    Ends with a table and an HTML report that opens offline.

    Args:
        folder: Where the report goes.
    """
    with ui.err.status("starting") as status:
        result = digits.run_demo(seed, say=ui.progress_lines(status))
    page = digits.write_report(result, folder, figures)
    best, table = result.best, methods_table(result.rows())
    title = f"Digits: 90 % coverage, {best.noise}, attacked within {best.guarantee.threat.reach}"
    note = f"alpha {digits.ALPHA:g}; 500 calibration, 500 test points, {len(result.audit.images)} of them attacked; one split, seed {seed}; "
    shown = [ui.table(title, table.head, table.rows), ui.dim(f"{note}{result.seconds:.0f} s")]
    shown.append(f"\n{best.guarantee}\n\nreport     {page}\npredictor  {folder / 'predictor.safetensors'}")
    return ui.Answer({**result.to_dict(), "report": str(page)}, shown)

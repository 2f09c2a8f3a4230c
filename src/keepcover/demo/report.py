"""The demo's HTML page."""

from __future__ import annotations

import json
from pathlib import Path

from keepcover.demo.demo import ALPHA, RADII, DemoResult
from keepcover.files import make_folder, write_file
from keepcover.pages import plots
from keepcover.pages.audit_page import audit_page
from keepcover.pages.report import Figure, Section
from keepcover.pages.sections import curve_figures, radius_axis
from keepcover.prediction.report import facts


def write_report(result: DemoResult, folder: Path, figures: Path | None = None) -> Path:
    """Write ``report.html``, ``results.json`` and the predictor, figures too where they have a folder; returns the page."""
    make_folder(folder)
    best = result.best
    certified = {name: predictor.guarantee.certified for name, predictor in result.predictors.items()}
    top = 1.05 * max(point[1] for points in result.curves.values() for point in points)
    costs = Section(
        "What robustness costs",
        "Mean set size on clean test images as the promised radius grows.",
        figures=curve_figures(
            "size-by-epsilon",
            result.curves,
            certified,
            radius_axis(best.guarantee.threat),
            "Mean set size against epsilon.",
            guides=[10.0],
            limits=(0.0, top),
        ),
        note=f"Radii {', '.join(f'{r:g}' for r in sorted(RADII))}; each predictor answers for all of them from one pass.",
    )
    densities = Section(
        "Why PTT helps RSCP+",
        "PTT maps scores through their holdout ranks and a steep sigmoid. Nearly all noisy scores then sit at 0 or 1, "
        "where the smoothed score moves least under attack.",
        figures=[
            Figure(
                "score-densities",
                plots.score_densities(*result.noisy_scores),
                "True-label scores under noise.",
                "Densities of true-label scores under noise: spread out before PTT, at 0 and 1 after it.",
            )
        ],
    )
    page = audit_page(
        result.audit,
        f"seed {result.seed}, {len(result.data)} images of 8 x 8 pixels in [0, 1], {result.seconds:.0f} s",
        title="keepcover on handwritten digits",
        rows=result.rows(),
        text=f"A small CNN trained under {best.noise} (right on {result.accuracy:.0%} of noisy test draws). 500 calibration and "
        f"500 test points, one split, alpha {ALPHA:g}. The attack is projected gradient ascent on the first {len(result.audit.images)} test "
        "images. ",
        more=[costs, densities],
        origin={
            "data": "scikit-learn's handwritten digits: 697 for training, 100 holdout, 500 calibration, 500 test",
            "seed": f"{result.seed}, of split, training and noise: for a demo; a deployed predictor draws fresh noise",
            **facts(best),
            "wall-clock": f"{result.seconds:.0f} s",
        },
    )
    best.save(folder / "predictor.safetensors")
    write_file(folder / "results.json", json.dumps(result.to_dict(), indent=1).encode())
    return page.write(folder / "report.html", figures)

"""The demo's HTML page."""

from __future__ import annotations

import json
from pathlib import Path

from keepcover.demo.demo import ALPHA, EPSILON, RADII, SIGMA, DemoResult
from keepcover.files import make_folder, write_file
from keepcover.pages import plots
from keepcover.pages.predictor_page import facts
from keepcover.pages.report import (
    Figure,
    Page,
    Section,
    attack_figures,
    audit_examples,
    audit_section,
    conclusion,
    curve_words,
    hardware,
    methods_table,
    origin_section,
    promise_section,
)


def write_report(result: DemoResult, folder: Path, figures: Path | None = None) -> Path:
    """Write ``report.html``, ``results.json`` and the predictor, figures too where they have a folder; returns the page."""
    make_folder(folder)
    best, names = result.best, list(result.predictors)
    rows = result.rows()
    certified = {name: predictor.guarantee.certified for name, predictor in result.predictors.items()}
    page = Page(
        "keepcover on handwritten digits",
        f"seed {result.seed}, {len(result.data)} images of 8 x 8 pixels in [0, 1], {hardware()}, {result.seconds:.0f} s",
        str(best.guarantee),
        conclusion=conclusion(rows, ALPHA, EPSILON),
    )
    groups = plots.in_groups(result.curves)
    top = 1.05 * max(point[1] for points in result.curves.values() for point in points)
    page.sections.append(
        Section(
            "Every method, clean and attacked",
            f"A small CNN trained under noise of sigma {SIGMA:g} (right on {result.accuracy:.0%} of noisy test draws). 500 "
            f"calibration and 500 test points, alpha {ALPHA:g}, epsilon {EPSILON:g}. The attack is projected gradient ascent "
            f"on the first {len(result.audit.images)} test images; the worse of two attacks is shown.",
            methods_table(rows),
            attack_figures(rows, ALPHA, EPSILON),
            note="Coverage with 95 % Clopper-Pearson intervals, for this one split. A certified method promises 90 % under "
            "attack; vanilla CP and RSCP promise it only on clean data.",
        )
    )
    page.sections.append(
        Section(
            "What robustness costs",
            "Mean set size on clean test images as the promised radius grows.",
            figures=[
                Figure(
                    f"size-by-epsilon-{number}",
                    plots.size_curves(group, 10, certified, top),
                    f"Mean set size against epsilon, {number} of {len(groups)}.",
                    f"Mean set size against epsilon. {curve_words(group)}.",
                )
                for number, group in enumerate(groups, 1)
            ],
            note=f"Radii {', '.join(f'{r:g}' for r in sorted(RADII))}; each predictor answers for all of them from one pass.",
        )
    )
    before, after, alpha = result.noisy_scores
    page.sections.append(
        Section(
            "Why PTT helps RSCP+",
            "PTT maps scores through their holdout ranks and a steep sigmoid. Nearly all noisy scores then sit at 0 or 1, "
            "where the smoothed score moves least under attack.",
            figures=[
                Figure(
                    "score-densities",
                    plots.score_densities(before, after, alpha),
                    "True-label scores under noise.",
                    "Densities of true-label scores under noise: spread out before PTT, at 0 and 1 after it.",
                )
            ],
        )
    )
    page.sections.append(audit_section(result.audit))
    shown = audit_examples(result.audit, names[0], names[-1], EPSILON)
    if shown:
        page.sections.append(shown)
    page.sections.append(promise_section(best.guarantee.assumptions))
    page.sections.append(
        origin_section(
            {
                "data": "scikit-learn's handwritten digits: 697 for training, 100 holdout, 500 calibration, 500 test",
                "seed": f"{result.seed}, of split, training and noise: for a demo; a deployed predictor draws fresh noise",
                **facts(best),
                "wall-clock": f"{result.seconds:.0f} s",
            }
        )
    )
    best.save(folder / "predictor.safetensors")
    write_file(folder / "results.json", json.dumps(result.to_dict(), indent=1).encode())
    return page.write(folder / "report.html", figures)

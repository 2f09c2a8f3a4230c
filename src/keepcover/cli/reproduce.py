"""The paper's tables and figures, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt


@opt.command
def reproduce(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    show_list: Annotated[bool, "--list"] = False,
    data: Path | None = None,
    models: Path | None = None,
    folder: Annotated[Path, "--out"] = Path("out/reproduce"),
    store: Path = Path("out/store"),
    device: str | None = None,
    compile: bool = False,
    images: int | None = None,
    draws: int | None = None,
    splits: int = 50,
    holdout: int = 500,
    attack_images: int = 2000,
    resume: bool = False,
    draw_only: bool = False,
    seed: opt.Seed = 0,
) -> ui.Answer:
    """Reproduce tables and figures of the paper from data and weights, beside what it prints.

    Writes NAME.json (rows, and a manifest of settings, versions, hardware, seconds and commit), NAME.md, NAME.html and
    figures. Noisy outputs are stored as they are computed: a run that was stopped goes on where it was.

    Args:
        names: What to reproduce: names from `--list`, or `all`.
        show_list: Say what there is, and stop.
        data: Folder of the official CIFAR files, and of `imagenet/CLASS/*.JPEG`.
        models: Folder of weights and heads; a checkout's own are found by name.
        folder: Where rows, tables and figures go.
        store: Where noisy features are kept between runs.
        device: cpu or cuda; cuda where there is one.
        compile: Compile the network: worth it from minutes on.
        images: Only so many test images.
        draws: At most so many draws per image: 256 take hours on a CPU, 16 minutes.
        splits: Random calibration/test halves.
        holdout: Points set aside for tuning and PTT.
        attack_images: Test images to attack, where a table is about attacks.
        resume: Keep results that are there with these settings.
        draw_only: Compute nothing: tables and figures from the JSON files in `--out`.
    """
    from keepcover.paper.reproduce.material import Material
    from keepcover.paper.reproduce.run import Run, catalogue, chosen, write_page

    if show_list:
        entries = [
            {"name": name, "title": item.title, "where": item.where, "needs": sorted(item.datasets)}
            for name, item in catalogue().items()
        ]
        lines = [f"{one['name']:20} {', '.join(one['needs']) or 'no data':18} {one['title']}" for one in entries]
        return ui.Answer(entries, lines)
    if draw_only:
        files = [folder / f"{name}.json" for name in chosen(names or []) if (folder / f"{name}.json").is_file()]
    else:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        material = Material(data, models, store, device, images, compile, seed, holdout, attack_images=attack_images)
        run = Run(material, folder, splits, draws, resume, ui.err.print)
        files = run.reproduce(names or [], ui.command_line())
    written = {path.stem: [str(made) for made in (path, *write_page(path))] for path in files}
    shown = [f"{name:20} {made[-1]}" for name, made in written.items()]
    return ui.Answer({"out": str(folder), "files": written}, shown)

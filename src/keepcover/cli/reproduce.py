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
    names: Annotated[list[str] | None, typer.Argument(help="What to reproduce: names from `--list`, or `all`.")] = None,
    show_list: Annotated[bool, "--list", "Say what there is, and stop."] = False,
    data: Annotated[Path | None, "Folder of the official CIFAR files, and of `imagenet/CLASS/*.JPEG`."] = None,
    models: Annotated[Path | None, "Folder of weights and heads; a checkout's own are found by name."] = None,
    folder: Annotated[Path, "--out", "Where rows, tables and figures go."] = Path("out/reproduce"),
    store: Annotated[Path, "Where noisy features are kept between runs."] = Path("out/store"),
    device: Annotated[str | None, "cpu or cuda; cuda where there is one."] = None,
    compile: Annotated[bool, "--compile", "Compile the network: worth it from minutes on."] = False,
    images: Annotated[int | None, "Only so many test images."] = None,
    draws: Annotated[int | None, "At most so many draws per image: 256 take hours on a CPU, 16 minutes."] = None,
    splits: Annotated[int, "Random calibration/test halves."] = 50,
    holdout: Annotated[int, "Points set aside for tuning and PTT."] = 500,
    attack_images: Annotated[int, "Test images to attack, where a table is about attacks."] = 2000,
    resume: Annotated[bool, "--resume", "Keep results that are there with these settings."] = False,
    draw_only: Annotated[
        bool, "--draw-only", "Compute nothing: tables and figures from the JSON files in `--out`."
    ] = False,
    seed: opt.Seed = 0,
) -> ui.Answer:
    """Reproduce tables and figures of the paper from data and weights, beside what it prints.

    Writes NAME.json (rows, and a manifest of settings, versions, hardware, seconds and commit), NAME.md, NAME.html and
    figures. Noisy outputs are stored as they are computed: a run that was stopped goes on where it was.
    """
    from keepcover.paper.reproduce.material import Material
    from keepcover.paper.reproduce.run import Run, catalogue, chosen, write_page

    if show_list:
        entries = [
            {"name": name, "title": item.title, "where": item.where, "needs": sorted(item.datasets)}
            for name, item in catalogue().items()
        ]
        form = "{:20} {:18} {}".format
        return ui.Answer(
            entries, [form(one["name"], ", ".join(one["needs"]) or "no data", one["title"]) for one in entries]
        )
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

"""Datasets: what is known, downloads, checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.data.download import complete_forms, download, inventory
from keepcover.data.known import CLASSES, SOURCES


@opt.command
def data(
    name: Annotated[str | None, typer.Argument()] = None,
    folder: Annotated[Path, "--out"] = Path("data"),
    form: Literal["binary", "python"] = "binary",
    mirror: str | None = None,
    check: bool = False,
) -> ui.Answer:
    """Download a dataset from its official address and verify it; an interrupted download continues where it stopped.

    Archives stay as they are: `--data-dir` reads them without extracting. With `--check`, the exit code is 1 unless a complete
    form is there and nothing is damaged.

    Args:
        name: `cifar10`, `cifar100`, `mnist` or `fashion-mnist`; none lists them all.
        folder: Where the files go, or are.
        form: Which official version; CIFAR comes in both.
        mirror: Another address that holds the same files.
        check: Only compare what is there with the checksums.
    """
    if name is None:
        return _list()
    if not check:
        download(name, folder, form, mirror=mirror)
    found = inventory(name, folder)
    complete = complete_forms(name, found)
    good = bool(complete) and all(one.state == "verified" for one in found)
    files = [
        {"path": str(one.path), "form": one.form, "state": one.state, "bytes": one.path.stat().st_size} for one in found
    ]
    rows = [(Path(one["path"]).relative_to(folder), one["form"], f"{one['bytes']:,}", one["state"]) for one in files]
    listed = ui.table(f"{name} in {folder}", ["file", "version", "bytes", "checksum"], rows)
    facts = {"name": name, "folder": str(folder), "complete": complete, "files": files}
    return ui.Answer(facts, [listed if found else f"nothing of {name} in {folder}"], int(check and not good))


def _list() -> ui.Answer:
    rows, lines = [], []
    for name, form, source in ((name, form, one) for name, forms in SOURCES.items() for form, one in forms.items()):
        size, files = sum(file.size for file in source.files), [source.address + file.name for file in source.files]
        rows.append({"name": name, "form": form, "classes": len(CLASSES[name]), "bytes": size, "files": files})
        lines.append((name, form, len(CLASSES[name]), f"{size / 1e6:.0f}", files[0].rsplit("/", 1)[0]))
    note = ui.dim("`digits` comes with scikit-learn; a folder of class folders needs no name")
    head = ["name", "version", "classes", "MB", "address"]
    return ui.Answer({"datasets": rows}, [ui.table("Datasets", head, lines), note])

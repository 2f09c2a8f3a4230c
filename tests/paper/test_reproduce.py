"""The paper's tables end to end on small networks, what is written, what is refused, and the paper's numbers as data."""

from __future__ import annotations

import copy
import hashlib
import html
import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from keepcover.data import cifar
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation import Attacked, InMemory, Row, evaluate_entries
from keepcover.models import CifarResNet, ResNet50, backbone, last_linear
from keepcover.models.checkpoints import head_bytes
from keepcover.noise import Gaussian, Stream
from keepcover.paper.reproduce import show
from keepcover.paper.reproduce.figures import FIGURES
from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.run import Item, Run, capped, catalogue, chosen, write_page
from keepcover.paper.reproduce.tables import TABLES, Cell, Origin, head_name

N, CLASSES = 180, {"cifar10": 10, "cifar100": 100}


def tables() -> dict[str, Item]:
    return {name: item for name, item in catalogue().items() if item.cells}


def _images(random: np.random.Generator, count: int = N, side: int = 32) -> np.ndarray:
    """Four coloured squares each: what an untrained network tells apart."""
    squares = random.integers(0, 256, (count, 3, 2, 2)).repeat(side // 2, axis=2).repeat(side // 2, axis=3)
    return np.clip(squares + random.integers(-20, 21, squares.shape), 0, 255).astype(np.uint8)


@torch.no_grad()
def _opinionated(model: nn.Module, images: np.ndarray, sigma: float) -> Tensor:
    """The noisy logits of a network that was untrained and constant: its last layer now spreads images over classes."""
    pixels, (_, head) = torch.from_numpy(images) / 255, last_linear(model)
    before = model(pixels + sigma * torch.randn_like(pixels))
    middle, scale = before.mean(dim=0), 3 / float((before - before.mean(dim=0)).std())
    head.bias.sub_(middle).mul_(scale)
    head.weight.mul_(scale)
    return scale * (before - middle)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small CIFAR-10 and CIFAR-100, and untrained networks with heads under the names that the tables ask for."""
    root = tmp_path_factory.mktemp("reproduce")
    data, models = root / "data", root / "models"
    models.mkdir()
    random, networks = np.random.default_rng(0), {}
    for name, folder, file, label_bytes in (
        ("cifar10", "cifar-10-batches-bin", "test_batch.bin", 1),
        ("cifar100", "cifar-100-binary", "test.bin", 2),
    ):
        images = _images(random)
        torch.manual_seed(0)
        networks[name] = CifarResNet(8, CLASSES[name]).eval()
        labels = _opinionated(networks[name], images, 0.25).argmax(dim=1)
        rows = np.zeros((N, label_bytes + 3072), dtype=np.uint8)
        rows[:, label_bytes - 1], rows[:, label_bytes:] = labels.numpy(), images.reshape(N, -1)
        (data / folder).mkdir(parents=True)
        rows.tofile(data / folder / file)
    origins = {cell.origin for table in tables().values() for cell in table.cells if table.name != "table2"}
    for dataset, weights in sorted({(o.dataset, o.weights) for o in origins if o.dataset != "imagenet"}):
        model = copy.deepcopy(networks[dataset])
        state = {name: value for name, value in model.state_dict().items() if not name.startswith("normalize")}
        save_file(state, models / f"{weights}.safetensors")
        for origin in sorted(origins, key=str):
            if origin.weights == weights and origin.head != "base":
                _, head = last_linear(model)
                with torch.no_grad():
                    head.weight.add_(torch.randn_like(head.weight), alpha=0.3 * float(head.weight.std()))
                (models / f"{head_name(weights, origin.head, origin.epsilon)}.safetensors").write_bytes(
                    head_bytes(model)
                )
    return data, models


def material(folders: tuple[Path, Path], tmp_path: Path, **changes: Any) -> Material:
    options: dict[str, Any] = {
        "holdout": 40,
        "attack_images": 20,
        "attack_steps": 2,
        "attack_draws": 2,
        "depth": 8,
        "progress": False,
    }
    return Material(folders[0], folders[1], tmp_path / "store", **{**options, **changes})


def run(folders: tuple[Path, Path], tmp_path: Path, **changes: Any) -> Run:
    return Run(material(folders, tmp_path), tmp_path / "out", splits=2, draws=4, say=lambda _: None, **changes)


# -- the paper as data -------------------------------------------------------------------------------------------------


def test_printed_values_are_the_papers() -> None:
    """A few of every table, read off the paper by hand."""

    def printed(table: str, row: str, column: str) -> tuple[float | None, float | None, float | None]:
        (paper,) = [cell.paper for cell in tables()[table].cells if (cell.row, cell.column) == (row, column)]
        return paper.get("size"), paper.get("size_std"), paper.get("coverage")

    assert printed("table1", "PTT", "CIFAR-100 HPS") == (26.06, 15.48, None)
    assert printed("table1", "PTT + RCT", "CIFAR-10 APS") == (2.824, 0.047, None)
    assert printed("table2", "PTT + Bernstein", "HPS") == (59.12, 135.87, None)
    assert printed("table3", "PTT, Hoeffding", "N = 4096") == (1.816, None, None)
    assert printed("draws-cifar100", "PTT, Hoeffding", "N = 128") == (39.95, None, None)
    assert printed("draws-imagenet", "PTT, Bernstein", "N = 1024") == (10.34, None, None)
    assert printed("conservativeness", "Baseline", "before inflation") == (1.482, None, None)
    assert printed("smoothadv-cifar10", "PTT + RCT", "APS") == (1.895, 0.033, 0.9115)
    assert printed("smoothadv-cifar100", "Baseline", "HPS") == (14.30, 0.43, 0.9343)
    assert printed("smoothadv-imagenet", "PTT", "HPS") == (8.52, 0.175, 0.9053)
    assert printed("epsilon", "PTT + RCT", "RSCP, epsilon 0.5") == (4.245, None, None)
    assert printed("sigma", "PTT", "RSCP+, sigma 1") == (4.663, None, None)
    assert printed("ablation", "ConfTr", "HPS") == (3.501, None, 0.9039)


def test_every_printed_number_has_its_cell() -> None:
    """A name in printed.toml that no cell has would be a number that is shown nowhere."""
    path = Path(sys.modules[Run.__module__].__file__ or "").parent / "printed.toml"
    for name, about in tomllib.loads(path.read_text()).items():
        assert (name in TABLES) != (name in FIGURES)
        listed = {(row, column) for row, columns in about.get("printed", {}).items() for column in columns}
        assert listed == {(cell.row, cell.column) for cell in catalogue()[name].cells if cell.paper}
    assert set(catalogue()) == {*TABLES, *FIGURES}


@pytest.mark.parametrize("name", sorted(tables()))
def test_every_table_has_what_goes_beyond_the_paper(name: str) -> None:
    """Places are unique, and beside the paper's rows stand the exact certificates."""
    table = tables()[name]
    places = [(cell.row, cell.column) for cell in table.cells]
    assert len(places) == len(set(places))
    assert any("exact" in cell.entry.method.name for cell in table.cells)
    if name not in ("table3", "draws-cifar100", "draws-imagenet", "draws-imagenet-5k", "bank") and not name.startswith(
        ("heads", "imagenet")
    ):
        rows = {cell.row for cell in table.cells}
        assert {"exact, 1 draw", "exact, 4 draws", "exact, 16 draws", "exact, 64 draws", "exact, 256 draws"} <= rows
        assert {"RCP1, 1 draw", "BinCP, 256 draws", "CAS, 256 draws"} <= rows


def test_fewer_draws_are_said() -> None:
    """A row never claims draws it did not have: it is renamed, or left out where its place names its draws."""
    for table in tables().values():
        for cell in capped(table.cells, 4):
            draws = cell.entry.draws or 0
            assert draws <= 4
            if "draw" in cell.row:
                assert f"{draws} draw" in cell.row
            assert "N =" not in cell.column
            assert "draws" not in cell.column or f"{draws} draw" in cell.column
    rows = {cell.row for cell in capped(tables()["table1"].cells, 4)}
    assert {"PTT, 4 draws", "exact, 1 draw", "exact, 4 draws"} <= rows
    assert capped(tables()["table3"].cells, 4) == []
    assert capped(tables()["table1"].cells, None) == tables()["table1"].cells


def test_settings_are_the_papers() -> None:
    """RCT heads are those of the cell's own epsilon; sigma is twice epsilon where the table says so."""
    for table in tables().values():
        for cell in table.cells:
            if cell.origin.head == "rct":
                assert cell.origin.epsilon == cell.entry.epsilon
            if table.name == "epsilon":
                assert cell.origin.sigma == 2 * cell.entry.epsilon
            if table.name == "sigma":
                assert cell.entry.epsilon == 0.125
            if cell.origin.dataset == "imagenet" and not cell.origin.network:
                assert (cell.origin.sigma, cell.entry.epsilon) == (0.5, 0.25)


# -- running -----------------------------------------------------------------------------------------------------------


def test_all_of_cifar_runs_and_draws(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Every kind of table and figure but ImageNet's, with few draws: rows for every cell, pages and pictures of every kind."""
    drawn = {"table1", "temperature", "motivation", "inverse-cdf", "densities", "overhead"}
    said: list[str] = []
    job = replace(run(folders, tmp_path), say=said.append)
    files = job.reproduce(["all"], "keepcover reproduce all")
    more = ["table3", "draws-cifar100"]  # about more draws than four
    missing = [name for name, item in catalogue().items() if "imagenet" in item.datasets or name in more]
    assert {path.stem for path in files} == set(catalogue()) - set(missing)
    assert sum("ImageNet is needed and cannot be downloaded" in line for line in said) == len(missing) - 4
    assert "  passed over: table3 is about more than 4 draws; ask for more with --draws" in said
    assert said[-1] == f"passed over: {', '.join(missing)}"
    for path in files:
        content = json.loads(path.read_text())
        assert content["manifest"]["config"]["splits"] == 2
        item = catalogue()[path.stem]
        if path.stem in tables():
            cells = capped(tables()[path.stem].cells, 4)
            assert [(row["row"], row["column"]) for row in content["rows"]] == [(c.row, c.column) for c in cells]
            for row, cell in zip(content["rows"], cells, strict=True):
                assert (row["attack"] == "SmoothAdv") == cell.attacked
                assert row["draws"] <= 4
        if path.stem not in drawn:
            continue
        page = next(made for made in write_page(path) if made.suffix == ".html").read_text()
        assert item.title in html.unescape(page)
    assert {p.stem for p in (tmp_path / "out").glob("*.png")} == drawn - {"table1"}
    assert "(paper 2.294 ± 0.051)" in (tmp_path / "out" / "table1.md").read_text()


def expect(row: dict[str, Any], want: Row, **near: float) -> None:
    """A written row is this row, up to how many labels and points rounding may decide otherwise."""
    assert (row["method"], row["score"], row["transform"]) == (want.method, want.guarantee.score, want.transform)
    assert (row["draws"], row["attack"]) == (want.guarantee.draws, want.attack)
    assert row["size"]["mean"] == pytest.approx(want.size.mean, **near)
    assert row["coverage"]["mean"] == pytest.approx(want.coverage.mean, abs=0.03)


@pytest.mark.parametrize("head", ["base", "rct"])
def test_cells_are_what_the_method_gives_on_the_networks_own_logits(
    folders: tuple[Path, Path], tmp_path: Path, head: str
) -> None:
    """A row from stored features and a head is the method on the same network run as one, with float16 features."""
    job = run(folders, tmp_path)
    origin = Origin("cifar10", 0.25, head, 0.125 if head == "rct" else 0.0)
    cells = [cell for cell in capped(tables()["heads-cifar10"].cells, 4) if cell.origin == origin]
    rows = job.rows(cells)
    data, model = cifar("cifar10", folders[0], "test"), job.material.model(origin)
    noisy = Smoother(model, 0.25, channels_last=True, progress=False).logits(data.images, 4, Stream(0, "test"))
    features = Smoother(backbone(model), 0.25, channels_last=True).logits(data.images, 4, Stream(0, "test"))
    with torch.inference_mode():
        logits = last_linear(model)[1](features.half().float())
    torch.testing.assert_close(logits, noisy, rtol=0.02, atol=0.02 * float(noisy.abs().max()))
    entries = list(dict.fromkeys(cell.entry for cell in cells))
    want = evaluate_entries(InMemory(logits, data.labels, Gaussian(0.25)), entries, splits=2, holdout=40)
    by_entry = dict(zip(entries, want, strict=True))
    for cell, row in zip(cells, rows, strict=True):
        expect(row, by_entry[cell.entry][0], abs=0.05)
    sizes = {round(row["size"]["mean"], 1) for row in rows}
    assert len(sizes) > 2  # rows that are all alike would agree with anything


def test_the_attack_of_a_table_is_smoothadv_on_its_own_network(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Attacked rows are those of images moved on that network, under the noise of their positions."""
    job = run(folders, tmp_path)
    (path,) = job.reproduce(["smoothadv-cifar10"], "")
    m, origin = job.material, Origin("cifar10", 0.25)
    data, chosen = cifar("cifar10", folders[0], "test"), m.victims(N)
    assert len(set(chosen.tolist())) == 20
    moved = m.attack(origin, data.images[chosen], data.labels[chosen], chosen, 0.125)
    lengths = (moved.double() - data.images[chosen].double()).flatten(1).norm(dim=1)
    assert float(lengths.max()) <= 0.125
    assert float(lengths.min()) > 0.1
    smoother = Smoother(m.model(origin), 0.25, channels_last=True, progress=False)
    hit = InMemory(smoother.logits(moved, 4, Stream(0, "test"), chosen), data.labels[chosen], Gaussian(0.25))
    clean = InMemory(smoother.logits(data.images, 4, Stream(0, "test")), data.labels, Gaussian(0.25))
    cells = capped(tables()["smoothadv-cifar10"].cells, 4)
    mine = [(cell, row) for cell, row in zip(cells, json.loads(path.read_text())["rows"], strict=True)]
    mine = [(cell, row) for cell, row in mine if cell.origin == origin]
    attacked = Attacked("SmoothAdv", chosen, hit)
    want = evaluate_entries(clean, [cell.entry for cell, _ in mine], splits=2, holdout=40, attacked=attacked)
    for (_, row), (_, expected) in zip(mine, want, strict=True):
        expect(row, expected, abs=0.25)  # of about ten points
    assert len({round(row["size"]["mean"], 1) for _, row in mine}) > 2


def test_heads_share_the_features_of_their_backbone(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """One store per backbone, whatever the heads; and a head gives its own logits."""
    m = material(folders, tmp_path)
    base, rct = Origin("cifar10", 0.25), Origin("cifar10", 0.25, "rct", 0.125)
    one, other = m.logits(base, 4), m.logits(rct, 4)
    assert not torch.allclose(one, other)
    assert len(list((tmp_path / "store").iterdir())) == 1
    assert torch.allclose(other, m.logits(rct, 4))


def test_a_stopped_run_goes_on(folders: tuple[Path, Path], tmp_path: Path) -> None:
    job = run(folders, tmp_path)
    (path,) = job.reproduce(["conservativeness"], "")
    before = path.stat().st_mtime_ns
    said: list[str] = []
    again = replace(job, resume=True, say=said.append)
    again.reproduce(["conservativeness"], "")
    assert (path.stat().st_mtime_ns, said) == (before, ["conservativeness: done before"])
    replace(again, splits=3).reproduce(["conservativeness"], "")
    assert json.loads(path.read_text())["manifest"]["config"]["splits"] == 3
    path.write_text("nonsense")
    again.reproduce(["conservativeness"], "")
    assert json.loads(path.read_text())["manifest"]["config"]["splits"] == 2


def test_a_run_on_other_weights_does_not_count_as_done(folders: tuple[Path, Path], tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(folders[1], models)
    said: list[str] = []
    (path,) = run((folders[0], models), tmp_path).reproduce(["conservativeness"], "")
    again = replace(run((folders[0], models), tmp_path), resume=True, say=said.append)
    again.reproduce(["conservativeness"], "")
    assert said == ["conservativeness: done before"]
    weights = models / "cifar10-resnet110-sigma0.25.safetensors"
    state = load_file(weights)
    save_file({name: value * 1.01 if value.is_floating_point() else value for name, value in state.items()}, weights)
    after = replace(run((folders[0], models), tmp_path), resume=True, say=said.append)
    after.reproduce(["conservativeness"], "")
    assert said[1] != "conservativeness: done before"
    used = json.loads(path.read_text())["manifest"]["inputs"]
    assert used[weights.stem] == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_imagenet_runs_on_any_folder_of_a_thousand_classes(tmp_path: Path) -> None:
    """Random weights and small pictures: the ImageNet tables end to end, streamed, attacks included."""
    image = pytest.importorskip("PIL.Image")
    images, models = _images(np.random.default_rng(0), 1000, 16), tmp_path / "models"
    torch.manual_seed(0)
    model = ResNet50().eval()
    opinion = _opinionated(model, images, 0.5)
    _, classes = linear_sum_assignment(-opinion.numpy())  # one picture per class, of a class that it looks like
    for picture, k in zip(images, classes, strict=True):
        folder = tmp_path / "data" / "imagenet" / f"n{k:08d}"
        folder.mkdir(parents=True)
        image.fromarray(picture.transpose(1, 2, 0)).save(folder / "one.png")
    models.mkdir()
    state = {f"1.module.{name}": value for name, value in model.state_dict().items() if "normalize" not in name}
    torch.save({"state_dict": state}, models / "imagenet-resnet50-sigma0.5.pth.tar")
    m = material((tmp_path / "data", models), tmp_path, images=54, holdout=14, attack_images=4)
    names = ["table2", "holdout-imagenet", "smoothadv-imagenet"]
    files = Run(m, tmp_path / "out", splits=2, draws=2, say=lambda _: None).reproduce(names, "")
    assert [path.stem for path in files] == names
    # The same from logits in memory: the images are those that the seed chooses, the noise that of their positions.
    origin, data = Origin("imagenet", 0.5), m.imagenet().load(progress=False)
    smoother, chosen = Smoother(m.model(origin), 0.5, channels_last=True, progress=False), m.victims(54)
    moved = m.attack(origin, data.images[chosen], data.labels[chosen], chosen, 0.25)
    sources = {
        False: InMemory(smoother.logits(data.images, 2, Stream(0, "test")), data.labels, Gaussian(0.5)),
        True: InMemory(smoother.logits(moved, 2, Stream(0, "test"), chosen), data.labels[chosen], Gaussian(0.5)),
    }
    # Fewer draws are the first of those that were kept: the network does not run again.
    kept = m._kept[origin]
    (one,) = m.noisy(origin, 1).read(torch.tensor([3, 1]))
    assert m._kept[origin] is kept
    assert torch.equal(one.outputs, m._kept[origin].outputs[[3, 1], :1].float())
    assert torch.allclose(one.outputs, sources[False].outputs[[3, 1], :1], atol=0.02)
    sizes: set[int] = set()
    for path in files:
        cells: list[Cell] = capped(tables()[path.stem].cells, 2)
        want = evaluate_entries(
            sources[False],
            [cell.entry for cell in cells],
            splits=2,
            holdout=14,
            attacked=Attacked("SmoothAdv", chosen, sources[True]),
        )
        rows = json.loads(path.read_text())["rows"]
        for cell, row, both in zip(cells, rows, want, strict=True):
            expect(row, both[cell.attacked], rel=0.02)
        assert {row["attack"] for row in rows} == {"SmoothAdv" if path.stem == "smoothadv-imagenet" else "none"}
        sizes |= {round(row["size"]["mean"]) for row in rows}
    assert len(sizes) > 3  # rows that are all alike would agree with anything


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_cell_says_what_was_measured_and_what_was_printed() -> None:
    row = {
        "row": "PTT",
        "column": "HPS",
        "size": {"mean": 1.9512, "std": 0.0241},
        "coverage": {"mean": 0.9123, "std": 0.004},
        "attack": "SmoothAdv",
        "trivial_splits": 3,
        "splits": 50,
        "paper": {"size": 2.294, "size_std": 0.051, "coverage": 0.909, "coverage_std": None},
    }
    assert show.measured(row) == "1.951 ± 0.024, covers 91.2 ± 0.4 % (3/50 trivial)"
    assert show.printed(row) == "2.294 ± 0.051, covers 90.9 %"
    base = {**row, "row": "Baseline", "size": {"mean": 10.0, "std": 0.0}, "paper": {**row["paper"], "size": 10.0}}
    assert show.improvements([base, row]) == ["HPS: PTT 5.13× (paper 4.36×)"]


def test_wide_tables_are_turned() -> None:
    head, body = ["", *"abcdefgh"], [["x", *"12345678"]]
    assert show.markdown(head, body).splitlines()[:3] == ["|  | x |", "|---|---|", "| a | 1 |"]
    assert show.markdown(["", "a"], [["x", "1"]]).splitlines()[2] == "| x | 1 |"


def test_closed_forms_stand_beside_the_printed_digits() -> None:
    rows = FIGURES["one-dimensional"](Material(None, None, Path("nowhere")), 1)
    head, body = show.any_grid(rows)
    gap = body[0][head.index("coverage_gap")]
    assert "paper 7.98" in gap
    assert gap.startswith("0.079")


# -- the command -------------------------------------------------------------------------------------------------------


Command = Callable[[list[str]], int]


@pytest.fixture
def command() -> Command:
    pytest.importorskip("typer", reason="needs the cli extra")
    from keepcover.cli import main

    return main


def test_the_list_names_everything(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(catalogue())
    assert command(["reproduce", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in catalogue())


def test_closed_forms_need_nothing(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["one-dimensional", "failure-case", "sigmoid-cdf"]
    assert command(["reproduce", *names, "--out", str(tmp_path / "out"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["files"]
    assert list(written) == names
    for files in written.values():
        assert all(Path(file).is_file() for file in files)
        assert {Path(file).suffix for file in files} == {".json", ".md", ".html", ".svg", ".png"}
    manifest = json.loads((tmp_path / "out" / "failure-case.json").read_text())["manifest"]
    assert str(tmp_path) not in json.dumps(manifest)
    for file in [*written["one-dimensional"], *written["failure-case"], written["sigmoid-cdf"][-1]]:
        Path(file).unlink()
    assert command(["reproduce", "all", "--draw-only", "--out", str(tmp_path / "out")]) == 0
    assert {str(path) for path in (tmp_path / "out").iterdir()} == set(written["sigmoid-cdf"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["table9"], "nothing is called 'table9'; there are table1, "),
        ([], "say what to reproduce"),
        (["table1"], "cifar10 is needed: give the folder"),
        (["table2"], "ImageNet is needed and cannot be downloaded freely"),
    ],
)
def test_what_cannot_be_is_refused(
    command: Command, words: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["reproduce", *words, "--out", str(tmp_path)]) == 2
    assert match in capsys.readouterr().err
    with pytest.raises(InputError):
        chosen(["table9"])

"""The command line: JSON with a fixed schema, tables with the same numbers, errors in one line with exit code 2."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from keepcover import cli, zipped
from keepcover.demo.demo import Entry
from keepcover.errors import InputError
from keepcover.evaluation.plan import make_plan
from keepcover.evaluation.splits import evaluate_methods
from keepcover.methods import METHODS
from keepcover.models import SmallCNN
from keepcover.paper import demo, demo_report
from keepcover.prediction.artifact import load
from keepcover.prediction.calibration import calibrate
from keepcover.store.logits_file import names_in, read_arrays

from .test_report import offline, parsed
from .test_smoothing import nearest, toy

CONDITIONS = ["--sigma", "0.25", "--epsilon", "0.05"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Exit code 2, one line on stderr, nothing on stdout, no traceback; returns the line."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert len(errors[0]) > len("error: ")
    assert "Traceback" not in err
    return errors[0]


def noisy_logits(n: int = 200, draws: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = 2 * torch.randn(n, 1, classes, generator=generator) + torch.randn(n, draws, classes, generator=generator)
    logits[torch.arange(n), :, labels] += 4
    return logits, labels


@pytest.fixture(scope="module")
def logits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / "noisy.safetensors"
    logits, labels = noisy_logits()
    save_file({"logits": logits, "labels": labels}, path)
    np.savez(path.with_suffix(".npz"), logits=logits.numpy(), labels=labels.numpy())
    return path


SMALL = [*CONDITIONS, "--splits", "2", "--holdout", "40"]


# -- help --------------------------------------------------------------------------------------------------------------


COMMANDS = {" ".join(path): command for path, command in cli.every_command()}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    words = " ".join((COMMANDS[command].help or "").split()[:5])
    assert words
    assert words in " ".join(out.replace("│", " ").split())
    assert "--json" in out or command == "serve"  # which speaks JSON to its clients and in its log


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command.split()[0]} " in out


def test_no_command_shows_help_and_no_empty_error(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys)
    assert "evaluate" in out + err
    assert "error" not in err


# -- plan --------------------------------------------------------------------------------------------------------------

PLAN = ["plan", "--epsilon", "0.1", "--sigma", "0.2", "--draws", "4", "--calibration-draws", "8"]


def test_plan_as_json_is_make_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *PLAN)
    assert set(found) == {"alpha", "epsilon", "sigma", "draws", "n", "beta", "plans"}
    assert (found["alpha"], found["epsilon"], found["sigma"], found["draws"], found["n"]) == (0.1, 0.1, 0.2, 4, 4750)
    expected = make_plan(0.1, 0.1, 0.2, 4, calibration_draws=8)
    assert found["plans"] == [plan.to_dict() for plan in expected]
    keys = {"method", "draws", "calibration_draws", "c", "kappa", "level", "estimated_size", "rule"}
    assert all(set(plan) == keys for plan in found["plans"])
    assert [plan["method"] for plan in found["plans"]] == [
        "exact",
        "exact",
        "exact_asymmetric",
        "rcp1",
        "rscp_plus_hoeffding",
    ]


def test_plan_as_text_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *PLAN)
    assert code == 0
    for plan in make_plan(0.1, 0.1, 0.2, 4, calibration_draws=8):
        assert f"{plan.method} ({plan.draws}/{plan.calibration_draws}): {plan.rule}" in out.replace("\n", " ") or (
            plan.rule in out
        )
        if plan.level is not None:
            assert f"{plan.level:.5f}" in out
        if plan.estimated_size is not None:
            assert f"{plan.estimated_size:.2f}" in out


def test_plan_reads_your_holdout(capsys: pytest.CaptureFixture[str], logits_file: Path) -> None:
    own = as_json(capsys, *PLAN, "--holdout", logits_file)["plans"]
    assert own != as_json(capsys, *PLAN)["plans"]
    assert all(plan["estimated_size"] is None or 0 < plan["estimated_size"] <= 4 for plan in own)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--alpha", "1.5"], "alpha strictly between 0 and 1"),
        (["--alpha", "0"], "alpha strictly between 0 and 1"),
        (["--epsilon", "-1"], "epsilon >= 0"),
        (["--sigma", "0"], "sigma"),
        (["--sigma", "-1"], "sigma"),
        (["--n", "3"], "are needed; add data"),
        (["--draws", "0"], "draw"),
        (["--calibration-draws", "0", "--draws", "0"], "draw"),
        (["--beta", "0"], "beta"),
        (["--epsilon", "abc"], "--epsilon"),
        (["--holdout", "nothing.npz"], "no file at nothing.npz"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_plans_are_refused(changes: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert match in refused(capsys, *PLAN, *changes)


def test_missing_options_and_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--epsilon" in refused(capsys, "plan")
    assert "nonsense" in refused(capsys, "nonsense")


# -- evaluate ----------------------------------------------------------------------------------------------------------

ROW = {
    "method",
    "score",
    "transform",
    "certified",
    "alpha",
    "epsilon",
    "sigma",
    "draws",
    "calibration_draws",
    "splits",
    "size",
    "coverage",
    "trivial_splits",
    "attack",
}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_evaluate_as_json_has_the_schema_and_the_numbers(
    suffix: str, logits_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["--method", "exact", "rscp", "--method", "cp"]
    found = as_json(capsys, "evaluate", logits_file.with_suffix(suffix), *SMALL, *methods)
    assert set(found) == {"rows"}
    for row in found["rows"]:
        assert set(row) == ROW
        assert set(row["size"]) == set(row["coverage"]) == {"mean", "std"}
    expected = evaluate_methods(
        *noisy_logits(), sigma=0.25, epsilon=0.05, methods=["exact", "rscp", "cp"], splits=2, holdout=40
    )
    assert found["rows"] == [row.to_dict() for row in expected]
    assert [(row["method"], row["transform"]) for row in found["rows"]] == [
        ("exact", "none"),
        ("rscp", "none"),
        ("rscp", "ptt"),
        ("cp", "none"),
    ]


def test_method_takes_several_words_or_repeats(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spaced = as_json(capsys, "evaluate", logits_file, *SMALL, "--method", "cp", "rcp1", "rscp")
    repeated = as_json(
        capsys, "evaluate", logits_file, *SMALL, "--method", "cp", "--method", "rcp1", "--method", "rscp"
    )
    first = as_json(capsys, "evaluate", "--method", "cp", "rcp1", "rscp", *SMALL, logits_file)
    assert spaced == repeated == first


def test_all_methods_are_the_default(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = [*CONDITIONS, "--splits", "1", "--holdout", "40", "--draws", "2", "--calibration-draws", "2"]
    plain = as_json(capsys, "evaluate", logits_file, *fast)
    assert list(dict.fromkeys(row["method"] for row in plain["rows"])) == list(METHODS)
    assert as_json(capsys, "evaluate", logits_file, *fast, "--method", "all") == plain
    assert {(row["draws"], row["calibration_draws"]) for row in plain["rows"]} == {(1, 1), (2, 2)}


def test_options_of_evaluate_reach_the_evaluation(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--method",
        "exact",
        "--score",
        "aps",
        "--alpha",
        "0.2",
        "--draws",
        "4",
        "--calibration-draws",
        "8",
        "--seed",
        "3",
        "--redraw-holdout",
        "--transform",
        "none",
    ]
    found = as_json(capsys, "evaluate", logits_file, *SMALL, *options)
    expected = evaluate_methods(
        *noisy_logits(),
        sigma=0.25,
        epsilon=0.05,
        alpha=0.2,
        score="aps",
        methods=["exact"],
        transforms=("none",),
        draws=4,
        calibration_draws=8,
        splits=2,
        holdout=40,
        redraw_holdout=True,
        seed=3,
    )
    assert found["rows"] == [row.to_dict() for row in expected]


def test_evaluate_as_text_has_the_same_numbers(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "evaluate", logits_file, *SMALL, "--method", "exact")
    assert (code, err) == (0, "")
    (row,) = evaluate_methods(*noisy_logits(), sigma=0.25, epsilon=0.05, methods=["exact"], splits=2, holdout=40)
    line = next(line for line in out.splitlines() if line.strip().startswith("exact"))
    assert str(row.size) in line
    assert str(row.coverage) in line
    assert f"{row.trivial_splits}/2" in line
    assert "noisy.safetensors" in out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--method", "magic"], "method among cp, "),
        (["--method", "exact", "--alpha", "1.5"], "alpha strictly between 0 and 1"),
        (["--method", "exact", "--epsilon", "-1"], "epsilon >= 0"),
        (["--method", "exact", "--sigma", "0"], "sigma is 0"),
        (["--method", "rscp_plus_hoeffding", "--beta", "0.05"], "2 beta"),
        (["--method", "exact", "--draws", "9"], "asked for 9 draws, the file has 8"),
        (["--method", "exact", "--draws", "0"], "ask for 1 to 8"),
        (["--method", "exact", "--calibration-draws", "0"], "ask for 1 to 8"),
        (["--splits", "0"], "at least one split"),
        (["--holdout", "199"], "holdout of 1 to 198 of the 200 points"),
        (["--holdout", "0"], "holdout of 1 to 198"),
        (["--score", "magic"], "--score"),
        (["--transform", "magic"], "--transform"),
    ],
)
def test_bad_evaluations_are_refused(
    changes: list[str], match: str, logits_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert match in refused(capsys, "evaluate", logits_file, *SMALL, *changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logits": torch.zeros(20, 4)}, "[images, draws, classes]"),
        ({"logits": torch.zeros(20, 3, 4).long()}, "float logits"),
        ({"logits": torch.full((20, 3, 4), torch.nan)}, "NaN or infinity, first at image 0"),
        ({"labels": torch.full((20,), 4)}, "labels between 0 and 3"),
        ({"labels": torch.zeros(20)}, "integer class labels"),
        ({"labels": torch.zeros(19).long()}, "expected 20 labels"),
    ],
)
def test_bad_logits_are_refused(
    change: dict[str, Tensor], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"logits": torch.zeros(20, 3, 4), "labels": torch.zeros(20).long(), **change}, path)
    assert match in refused(capsys, *PLAN, "--holdout", path)


def test_arrays_that_explode_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros shrink to a thousandth. Up to a gigabyte that is no harm; beyond, it is no data."""
    monkeypatch.setattr(zipped, "ALWAYS", 1 << 20)
    noise = np.random.default_rng(0).normal(size=(100, 8, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "small.npz", logits=np.zeros((100, 8, 3), np.float32), labels=np.zeros(100, int))
    np.savez_compressed(tmp_path / "fine.npz", logits=np.tile(noise, (20, 1, 1)), labels=np.zeros(2000, int))
    for name in ("small.npz", "fine.npz"):
        assert read_arrays(tmp_path / name, "logits")[0].shape[1:] == (8, 3)
    np.savez_compressed(tmp_path / "bomb.npz", logits=np.zeros((20_000, 64, 8), np.float32), labels=np.zeros(9, int))
    for read in (names_in, lambda path: read_arrays(path, "labels")):
        with pytest.raises(InputError, match=r"bomb\.npz has \d+ bytes and would take .* GiB when read"):
            read(tmp_path / "bomb.npz")


def test_an_array_that_claims_more_than_it_has_is_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (35184372088832,), }"
        archive.writestr("logits.npy", b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n")
    with pytest.raises(InputError, match="not a readable safetensors or npz file") as caught:
        read_arrays(tmp_path / "x.npz", "logits")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.txt"])
def test_files_that_are_none_are_refused(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert "not a readable safetensors or npz file" in refused(capsys, "evaluate", tmp_path / name, *SMALL)
    assert "no file at" in refused(capsys, "evaluate", tmp_path / "nothing.npz", *SMALL)


# -- audit -------------------------------------------------------------------------------------------------------------


def make_nearest() -> nn.Module:
    return nearest()


@pytest.fixture
def toy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data in a file, and a module of one's own that makes the model."""
    images, labels = toy(400, seed=1)
    save_file({"images": images, "labels": labels}, tmp_path / "toy.safetensors")
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    return tmp_path / "toy.safetensors"


TINY = [
    "--model",
    "own_models:make_nearest",
    "--sigma",
    "0.15",
    "--epsilon",
    "0.15",
    "--images",
    "40",
    "--steps",
    "4",
    "--attack-draws",
    "4",
    "--draws",
    "4",
]


def test_audit_attacks_side_by_side(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    arguments = ["audit", "--data", toy_file, *TINY, "--method", "cp", "rcp1", "exact", "--out", out]
    found = as_json(capsys, *arguments)
    assert set(found) == {"rows", "images", "violated", "report"}
    assert (found["images"], found["violated"], found["report"]) == (40, 0, str(out / "audit.html"))
    names = {"cp (1)": False, "rcp1 (1)": True, "exact (4)": True}
    assert [(row["name"], row["attack"]) for row in found["rows"]] == [
        (name, attack) for name in names for attack in ("none", "softmax", "margin")
    ]
    assert all(row["certified"] == names[row["name"]] for row in found["rows"])
    assert sorted(path.name for path in out.iterdir()) == ["audit.html", "audit.json"]
    offline((out / "audit.html").read_text())
    written = json.loads((out / "audit.json").read_text())
    assert written["rows"] == found["rows"]
    assert written["manifest"]["config"]["sigma"] == 0.15
    code, text, _ = run(capsys, *arguments)
    assert code == 0
    for row in found["rows"]:
        interval = f"{row['coverage']['mean']:.3f} [{row['coverage']['low']:.3f}, {row['coverage']['high']:.3f}]"
        assert any(row["name"] in line and row["attack"] in line and interval in line for line in text.splitlines())


def test_audit_of_a_saved_predictor(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "mine.safetensors"
    calibrate(nearest(), toy(200, seed=7), method="rcp1", epsilon=0.15, sigma=0.15, seed=1).save(saved)
    found = as_json(
        capsys, "audit", "--data", toy_file, *TINY, "--predictor", saved, "--radius", "0.05", "--radius", "0.15"
    )
    assert [(row["name"], row["radius"]) for row in found["rows"]] == [("mine", r) for r in (0, 0.05, 0.05, 0.15, 0.15)]
    assert found["report"] is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--model", "magic"], "a model among small-cnn"),
        (["--model", "own_models:nothing"], "cannot find 'own_models:nothing'"),
        (["--data", "svhn"], "digits, cifar10, cifar100, mnist, fashion-mnist, a folder"),
        (["--data", "cifar10"], "--data-dir DIR"),
        (["--method", "magic"], "method among cp"),
        (["--predictor", "nothing.safetensors"], "no predictor at"),
        (["--method", "exact", "--sigma", "0"], "sigma is 0"),
        (["--method", "exact", "--draws", "0"], "at least 1 draw"),
        (["--method", "rcp1", "--steps", "0"], "steps >= 1"),
        (["--method", "rcp1", "--radius", "-1"], "epsilon >= 0"),
        (["--method", "rcp1", "--images", "0"], "at least one image"),
        (["--method", "rcp1", "--attack-draws", "0"], "draw"),
        (["--method", "rcp1", "--attack", "magic"], "attacks among softmax, margin, random"),
        (["--method", "rcp1", "--surrogate", "magic"], "an .onnx or .pt2 file"),
        (["--part", "9"], "a part k/m"),
    ],
)
def test_bad_audits_are_refused(
    changes: list[str], match: str, toy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert match in refused(capsys, "audit", "--data", toy_file, *TINY, *changes)


def test_small_cnn_is_trained_on_one_channel_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"images": torch.rand(40, 3, 8, 8), "labels": torch.arange(40) % 2}, tmp_path / "rgb.safetensors")
    assert "give a model" in refused(capsys, "audit", "--data", tmp_path / "rgb.safetensors")


def test_a_place_that_cannot_be_written_is_one_line(
    toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback after minutes of work."""
    (tmp_path / "taken").write_text("a file, not a folder")
    line = refused(capsys, "audit", "--data", toy_file, *TINY, "--method", "rcp1", "--out", tmp_path / "taken")
    assert "taken" in line


def test_stopping_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keepcover.evaluation.plan.make_plan", interrupted)
    code, out, err = run(capsys, *PLAN)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("keepcover.evaluation.plan.make_plan", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(PLAN)


# -- demo --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines, few draws, few attacked images."""
    entries = (Entry("vanilla CP", "cp", 1, sigma=0.0), Entry("RCP1", "rcp1", 1), Entry("exact, 16 draws", "exact", 8))
    fit = demo.fit_under_noise
    monkeypatch.setattr(
        demo, "fit_under_noise", lambda *data, epochs, **options: fit(*data, epochs=min(epochs, 15), **options)
    )
    for module in (demo, demo_report):
        monkeypatch.setattr(module, "ENTRIES", entries)
        monkeypatch.setattr(module, "ATTACKED", 20)


@pytest.mark.usefixtures("short_demo")
def test_the_demo_ends_with_a_page_a_file_and_a_predictor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "demo"
    code, text, _ = run(capsys, "demo", "--out", out, "--seed", "1")
    assert code == 0
    assert torch.get_num_threads() == threads
    assert sorted(path.name for path in out.iterdir()) == ["predictor.safetensors", "report.html", "results.json"]
    page = (out / "report.html").read_text()
    offline(page)
    results = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["vanilla CP", "RCP1", "exact, 16 draws"]
    assert results["audit"]["images"] == 20
    for row in results["rows"]:
        assert row["coverage"]["count"] == 500
        assert row["attacked_coverage"]["count"] == 20
        assert any(row["name"] in line and f"{row['coverage']['mean']:.3f}" in line for line in text.splitlines())
        assert any(cells[0] == row["name"] for cells in parsed(page).rows)
    assert str(out / "report.html") in text.replace("\n", "")
    with pytest.raises(Exception, match="the model differs from the one calibrated"):
        load(out / "predictor.safetensors", SmallCNN())  # the file is whole: only the weights are missing


@pytest.mark.usefixtures("short_demo")
def test_the_demos_predictor_loads_with_its_model_and_says_the_same(tmp_path: Path) -> None:
    result = demo.run_demo(2, say=lambda text: None)
    page = demo_report.write_report(result, tmp_path)
    assert page == tmp_path / "report.html"
    original, loaded = result.predictors["exact, 16 draws"], load(tmp_path / "predictor.safetensors", result.model)
    images = result.data.images[:50]
    for key, sets in original.predict_all(images, seed=1).items():
        assert torch.equal(loaded.predict_all(images, seed=1)[key].mask, sets.mask)
    assert str(loaded.guarantee) in page.read_text()
    assert result.to_dict()["rows"] == json.loads((tmp_path / "results.json").read_text())["rows"]

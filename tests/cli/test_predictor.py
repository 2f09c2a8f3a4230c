"""One's own model from the command line: every kind of model and data, rows that can be read back, errors in one line."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import keepcover
from keepcover.__main__ import main as keepcover_main
from keepcover.cli.predictor import write_rows
from keepcover.data import digits
from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.guarantee import Guarantee
from keepcover.models import SmallCNN
from keepcover.noise import Gaussian, Threat
from keepcover.pages import plots
from keepcover.pages.predictor_page import predictor_page
from keepcover.pages.sections import MOST_CLASSES
from keepcover.prediction.artifact import load, read
from keepcover.specs import load_inputs, load_model, part_rows
from keepcover.tasks import Classification, PredictionSets
from keepcover.training import fit_under_noise
from tests.cli.runner import as_json, refused, run
from tests.pages.reader import offline, parsed
from tests.prediction.saved import rewrite
from tests.toys import SHAPE, nearest, toy

DATA, NEW = toy(400, seed=1), toy(60, seed=2)
LEVEL = ["--sigma", "0.15", "--epsilon", "0.1", "--draws", "4", "--calibration-draws", "8", "--seed", "1"]


def make_nearest() -> nn.Module:
    return nearest()


def make_estimator() -> LogisticRegression:
    images, labels = toy(600, seed=4)
    noisy = images + 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return LogisticRegression(max_iter=1000).fit(noisy.flatten(1), labels)


def make_vectors() -> Callable[[Tensor], Tensor]:
    return make_nearest()


def not_a_model() -> int:
    return 3


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of every kind."""
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    cnn = fit_under_noise(SmallCNN(classes=4), *toy(400, seed=5), sigma=0.15, epochs=25, progress=False).eval()
    save_file(cnn.state_dict(), folder / "cnn.safetensors")
    example = torch.rand(2, *SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = {0: torch.export.Dim("batch", min=1, max=4096)}
        torch.export.save(torch.export.export(cnn, (example,), dynamic_shapes=(batch,)), folder / "cnn.pt2")
    save_file({"images": DATA[0], "labels": DATA[1]}, folder / "data.safetensors")
    np.savez(folder / "data.npz", images=DATA[0].numpy(), labels=DATA[1].numpy())
    np.savez(folder / "new.npz", images=NEW[0].numpy())
    np.savez(folder / "labelled.npz", images=NEW[0].numpy(), labels=NEW[1].numpy())
    np.savez(folder / "vectors.npz", images=DATA[0].flatten(1).numpy(), labels=DATA[1].numpy())
    return folder


@pytest.fixture(scope="module")
def onnx_file(place: Path) -> Path:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript: pip install '.[test]'")
    pytest.importorskip("onnxruntime", reason="ONNX models run in onnxruntime: pip install '.[onnx]'")
    model = load_model("small-cnn", place / "cnn.safetensors", 4)
    assert isinstance(model, nn.Module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.rand(2, *SHAPE),),
            place / "cnn.onnx",
            dynamic_shapes={"images": {0: torch.export.Dim.DYNAMIC}},
            verbose=False,
        )
    return place / "cnn.onnx"


@pytest.fixture
def saved(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "p.safetensors"
    code, _, _ = run(
        capsys,
        "calibrate",
        "--model",
        "own:make_nearest",
        "--data",
        place / "data.npz",
        *LEVEL,
        "--epsilon",
        "0.05",
        "--alpha",
        "0.1",
        "--alpha",
        "0.2",
        "--class-names",
        "ant,bee,cow,dog",
        "--out",
        path,
    )
    assert code == 0
    return path


OWN = ["--model", "own:make_nearest"]

# -- every kind of model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weights", "function", "estimator", "pt2", "onnx"])
def test_every_kind_of_model_from_calibration_to_audit(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if kind == "onnx":
        request.getfixturevalue("onnx_file")
    model = {
        "weights": ["--model", "small-cnn", "--weights", str(place / "cnn.safetensors")],
        "function": OWN,
        "estimator": ["--model", "own:make_estimator"],
        "pt2": ["--model", str(place / "cnn.pt2")],
        "onnx": ["--model", str(place / "cnn.onnx")],
    }[kind]
    path = tmp_path / "p.safetensors"
    made = as_json(capsys, "calibrate", *model, "--data", place / "data.npz", "--part", "1/2", *LEVEL, "--out", path)
    assert set(made) == {"predictor", "classes", "model_fingerprint", "holdout_size", "levels", "warning", "seconds"}
    assert (made["classes"], made["holdout_size"], made["predictor"]) == (4, 20, str(path))
    assert len(made["model_fingerprint"]) == 64
    (level,) = made["levels"]
    assert 0.5 < level["estimated_size"] < 3
    assert level["guarantee"].startswith("With probability at least 90 %")
    shown = as_json(capsys, "show", path)
    assert shown["levels"][0]["guarantee"]["n"] == 180
    rest = as_json(capsys, "predict", path, *model, "--data", place / "data.npz", "--part", "2/2")
    assert rest["coverage"]["count"] == rest["images"] == 200
    assert rest["coverage"]["mean"] > 0.85
    assert abs(rest["mean_size"] - level["estimated_size"]) < 0.5
    black_box = kind in ("estimator", "onnx")
    attack = ["--attack", "random"] if black_box else ["--attack", "softmax"]
    arguments = [
        "audit",
        "--predictor",
        path,
        *model,
        "--data",
        place / "data.npz",
        "--part",
        "2/2",
        "--images",
        "50",
        "--steps",
        "3",
        "--attack-draws",
        "4",
    ]
    found = as_json(capsys, *arguments, *attack)
    assert [row["attack"] for row in found["rows"]] == ["none", attack[1]]
    assert found["violated"] == 0
    if black_box:
        line = refused(capsys, *arguments)
        assert "no gradients" in line
        assert "--attack random" in line
        surrogate = ["--surrogate", "small-cnn", "--surrogate-weights", place / "cnn.safetensors"]
        both = as_json(capsys, *arguments, *attack, *surrogate)
        assert [row["attack"] for row in both["rows"]] == ["none", "random", "transfer"]
        assert [row["attack"] for row in as_json(capsys, *arguments, *surrogate)["rows"]] == ["none", "transfer"]


def test_vectors_are_data_too(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.safetensors"
    model = ["--model", "own:make_estimator"]
    made = as_json(capsys, "calibrate", *model, "--data", place / "vectors.npz", *LEVEL, "--out", path)
    assert as_json(capsys, "show", path)["inputs"]["shape"] == [16]
    found = as_json(capsys, "predict", path, *model, "--data", place / "vectors.npz", "--seed", "1")
    assert abs(found["mean_size"] - made["levels"][0]["estimated_size"]) < 0.3
    page = tmp_path / "r.html"
    code, _, _ = run(capsys, "report", path, *model, "--data", place / "vectors.npz", "--out", page)
    assert code == 0
    assert "Examples" not in page.read_text()  # vectors cannot be shown


def test_another_model_is_refused(saved: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["--model", "small-cnn", "--weights", place / "cnn.safetensors"]
    for command in ("predict", "report"):
        assert "the model differs from the one calibrated" in refused(
            capsys, command, saved, *other, "--data", place / "labelled.npz"
        )


def test_parts_are_disjoint_cover_everything_and_mix_classes() -> None:
    for n, m in ((10, 3), (5, 5), (400, 2)):
        parts = [part_rows(n, f"{k}/{m}").tolist() for k in range(1, m + 1)]
        assert sorted(row for part in parts for row in part) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert all(part == sorted(part) for part in parts)
    half = part_rows(1000, "1/2")
    assert 180 < int((half < 400).sum()) < 220  # not the first half
    for bad in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"):
        with pytest.raises(InputError, match="a part k/m"):
            part_rows(10, bad)
    with pytest.raises(InputError, match="cannot make 11 parts of 10 rows"):
        part_rows(10, "1/11")


# -- calibrate ---------------------------------------------------------------------------------------------------------


def test_options_of_calibrate_reach_the_predictor(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    arguments = [
        "calibrate",
        *OWN,
        "--data",
        place / "data.safetensors",
        "--sigma",
        "0.2",
        "--epsilon",
        "0.02",
        "--alpha",
        "0.2",
        "--method",
        "rscp_plus_hoeffding",
        "--score",
        "aps",
        "--transform",
        "ptt",
        "--draws",
        "256",
        "--beta",
        "0.002",
        "--holdout",
        "60",
        "--seed",
        "7",
        "--batch-size",
        "512",
        "--autocast",
        "bfloat16",
        "--channels-last",
        "--device",
        "cpu",
        "--out",
        path,
    ]
    made = as_json(capsys, *arguments)
    manifest, _ = read(path)
    (level,) = manifest["levels"]
    asked = level["asked"]
    assert (asked["alpha"], asked["threat"]["epsilon"], asked["draws"], asked["n"]) == (0.2, 0.02, 256, 340)
    assert asked["threat"]["noise"] == {"name": "gaussian", "sigma": 0.2}
    assert (level["method"], level["options"]["beta"]) == ("rscp_plus_hoeffding", 0.002)
    assert level["guarantee"]["transform"] == "ptt"
    assert (manifest["task"]["score"]["name"], made["holdout_size"]) == ("aps", 60)
    assert manifest["numerics"] == {"autocast": "bfloat16", "channels_last": True, "compile": False}
    again = tmp_path / "again.safetensors"
    as_json(capsys, *arguments[:-1], again)
    assert read(again)[1]["calibration"].equal(read(path)[1]["calibration"])  # the seed


def test_calibrate_as_text_says_the_promise_the_size_and_what_next(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    weights = ["--model", "small-cnn", "--weights", place / "cnn.safetensors"]
    code, out, err = run(capsys, "calibrate", *weights, "--data", place / "data.npz", *LEVEL, "--out", path)
    assert (code, err) == (0, "")
    predictor = load(path, load_model("small-cnn", place / "cnn.safetensors", 4))
    assert str(predictor.guarantee) in out
    assert "of 4 labels" in out
    for command in ("predict", "report", "audit --predictor"):
        assert f"keepcover {command} {path} --model small-cnn --weights {place / 'cnn.safetensors'} --data" in out
    assert predictor.provenance["model"] == "small-cnn"
    assert predictor.provenance["data"] == "data"


def test_a_model_without_a_fingerprint_needs_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_nearest()
    monkeypatch.setattr(sys.modules[__name__], "make_vectors", lambda: lambda x: module(x))
    path, given = tmp_path / "p.safetensors", ["--model", "own:make_vectors", "--data", place / "data.npz"]
    code, _, err = run(capsys, "calibrate", *given, *LEVEL, "--out", path)
    assert code == 2
    assert 'a plain function has no fingerprint: give fingerprint="..." (--fingerprint)' in err
    assert not path.exists()
    code, out, _ = run(capsys, "calibrate", *given, *LEVEL, "--out", path, "--fingerprint", "version-3")
    assert code == 0
    assert f"keepcover predict {path} --model own:make_vectors --fingerprint version-3 --data NEW" in out
    assert as_json(capsys, "show", path)["model"]["fingerprint"] == "version-3"
    for more, expected in (([], 2), (["--fingerprint", "version-4"], 2), (["--fingerprint", "version-3"], 0)):
        assert run(capsys, "predict", path, *given, *more)[0] == expected


def test_class_names_from_a_list_a_file_or_the_data(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("ant\n bee \n\ncow\nzebra, striped\n")
    base = ["calibrate", *OWN, "--data", place / "data.npz", *LEVEL, "--out", tmp_path / "p.safetensors"]
    for given, expected in (("a, b,c,d", ["a", "b", "c", "d"]), (names, ["ant", "bee", "cow", "zebra, striped"])):
        as_json(capsys, *base, "--class-names", given)
        assert as_json(capsys, "show", tmp_path / "p.safetensors")["task"]["class_names"] == expected
    as_json(capsys, *base)
    assert as_json(capsys, "show", tmp_path / "p.safetensors")["task"]["class_names"] is None
    assert load_inputs("digits").class_names == digits().class_names
    assert "4 class names" in refused(capsys, *base, "--class-names", "a,b")
    assert "4 class names" in refused(capsys, *base, "--class-names", "a," * 300)  # longer than a file's name may be
    names.write_bytes(b"caf\xe9\n")
    assert "expected one name per line in UTF-8" in refused(capsys, *base, "--class-names", names)


def test_sigma_auto_is_chosen_on_the_holdout(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ask = tmp_path / "p.safetensors", ["--sigma", "auto", "--epsilon", "0.1", "--method", "rcp1", "--seed", "1"]
    made = as_json(capsys, "calibrate", *OWN, "--data", place / "data.npz", *ask, "--batch-size", "64", "--out", path)
    predictor = load(path, nearest())
    assert str(predictor.noise) in made["levels"][0]["guarantee"]
    assert f"The holdout alone chose {predictor.noise}, among " in run(capsys, "show", path)[1]
    assert "--sigma auto is for calibrate" in refused(capsys, "plan", "--epsilon", "0.1", "--sigma", "auto")
    assert "expected a finite sigma" in refused(capsys, "plan", "--epsilon", "0.1", "--sigma", "-1")


def test_one_sentence_says_everywhere_that_sets_are_of_little_use(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    level = ["--sigma", "1.5", "--epsilon", "0.1", "--draws", "4", "--seed", "1"]
    with pytest.warns(KeepcoverWarning) as caught:
        made = as_json(capsys, "calibrate", *OWN, "--data", place / "data.npz", *level, "--out", path)
    sentence = made["warning"]
    assert str(caught[0].message) == sentence
    assert re.fullmatch(
        r"the model is right on only [3-5]\d.\d% of noisy draws under Gaussian noise sigma 1.5, on 9\d.\d% without noise, and sets "
        r"hold about \d.\d of 4 labels; put a denoiser .*",
        sentence,
    )
    predictor = load(path, nearest())
    assert predictor.warning == sentence
    assert f"Warning: {sentence}" in run(capsys, "show", path)[1].replace("\n", " ")
    sets = predictor.predict_all(NEW[0])
    assert sentence in " ".join(parsed(predictor_page(predictor, sets, *NEW, "new").html()).text)
    served = pytest.importorskip("keepcover.serve.app", reason="the service needs pip install '.[serve]'")
    assert served.create_app(predictor).state.service.describe()["warning"] == sentence
    rewrite(path, lambda manifest: manifest["accuracy"].update(noisy="most"))
    with pytest.raises(InputError, match="the manifest of"):
        load(path, nearest())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--model", "small-cnn"], "small-cnn needs trained weights: --weights FILE"),
        (["--model", "magic"], "a Hugging Face folder or package.module:function, got 'magic'"),
        (["--model", "model.h5"], "got 'model.h5'"),
        (["--model", "model.pth"], "weights alone are no model"),
        (["--model", "model.safetensors"], "weights alone are no model"),
        (["--model", "forest.joblib"], "pickles run code"),
        (["--model", "forest.pkl"], "pickles run code"),
        (["--model", "nothing.onnx"], "no ONNX model at nothing.onnx"),
        (["--model", "nothing.pt2"], "no program at nothing.pt2"),
        (["--model", "own:missing"], "cannot find 'own:missing'"),
        (["--model", "own:not_a_model"], "or with predict_proba, not int"),
        (["--weights", "x.safetensors"], "weights are for built-in models"),
        (["--model", "small-cnn", "--weights", "nothing.safetensors"], "no weights at"),
        (["--model-output", "probabilities"], "probabilities are for ONNX files"),
        (["--data", "nothing.npz"], "no file at nothing.npz"),
        (["--data", "svhn"], "digits, cifar10, cifar100, mnist"),
        (["--part", "3/2"], "a part k/m"),
        (["--alpha", "1.5"], "alpha strictly between 0 and 1"),
        (["--sigma", "0"], "there is none; give sigma > 0"),
        (["--method", "magic"], "method among auto, cp"),
        (["--holdout", "400"], "holdout of 1 to 399"),
        (["--draws", "0"], "at least 1 draw"),
        (["--out", "nowhere/p.safetensors"], "no folder nowhere"),
        (["--out", "."], "is a folder"),
        (["--score", "magic"], "--score"),
        (["--autocast", "int8"], "--autocast"),
    ],
)
def test_bad_calibrations_are_refused(
    changes: list[str], match: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base: dict[str, Any] = {
        "--model": "own:make_nearest",
        "--data": place / "data.npz",
        "--out": tmp_path / "p.safetensors",
    }
    base.update(zip(changes[::2], changes[1::2]))
    line = refused(capsys, "calibrate", *LEVEL, *(word for pair in base.items() for word in pair))
    assert match in line
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"labels": None}, "no array 'labels'; it holds images"),
        ({"images": None}, "no array 'images'; it holds labels"),
        ({"images": (255 * DATA[0]).to(torch.uint8)}, "float images in [0, 1], got torch.uint8"),
        ({"images": DATA[0].clone().index_fill_(0, torch.tensor([5]), torch.nan)}, "NaN or infinity, first in image 5"),
        ({"images": DATA[0][:7]}, "7 labels"),
        ({"labels": DATA[1].float()}, "integer class labels"),
        ({"labels": -1 - DATA[1]}, "labels between 0 and"),
        ({"labels": DATA[1] + 1}, "labels between 0 and 3 (the model has 4 outputs)"),
        ({"images": torch.rand(400, 1, 5, 5)}, ", 1, 5, 5]: mat1 and mat2 shapes"),
    ],
    ids=["unlabelled", "no-images", "bytes", "nan", "lengths", "float-labels", "negative", "too-many-classes", "shape"],
)
def test_bad_data_are_refused(
    arrays: dict[str, Tensor | None], match: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"images": DATA[0], "labels": DATA[1], **arrays}
    save_file({name: value for name, value in content.items() if value is not None}, tmp_path / "d.safetensors")
    arguments = ["calibrate", *OWN, "--data", tmp_path / "d.safetensors", *LEVEL, "--out", tmp_path / "p.safetensors"]
    assert match in refused(capsys, *arguments)


def test_weights_of_another_number_of_classes_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data that lack the last class name fewer classes than the weights have; --classes says how many."""
    keep = DATA[1] < 3
    save_file({"images": DATA[0][keep], "labels": DATA[1][keep]}, tmp_path / "three.safetensors")
    base = [
        "calibrate",
        "--model",
        "small-cnn",
        "--weights",
        place / "cnn.safetensors",
        "--data",
        tmp_path / "three.safetensors",
        *LEVEL,
        "--out",
        tmp_path / "p.safetensors",
    ]
    assert "is the number of classes right?" in refused(capsys, *base)
    assert as_json(capsys, *base, "--classes", "4")["classes"] == 4
    found = as_json(capsys, "predict", tmp_path / "p.safetensors", *base[1:5], "--data", tmp_path / "three.safetensors")
    assert found["images"] == int(keep.sum())  # the file knows that there are four


# -- predict -----------------------------------------------------------------------------------------------------------


def indexed(sets: PredictionSets) -> list[dict[str, Any]]:
    return [{"index": i, **row} for i, row in enumerate(sets.rows())]


def test_rows_are_the_predictors_sets_with_names(saved: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "predict", saved, *OWN, "--data", place / "new.npz", "--seed", "3")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    predictor = load(saved, nearest())
    sets = predictor.predict(NEW[0], seed=3)
    assert rows == indexed(sets)
    assert [row["labels"] for row in rows] == sets.labels()
    assert all(list(row) == ["index", "labels", "size", "trivial"] for row in rows)
    assert [row["size"] for row in rows] == sets.size.tolist()
    assert {name for row in rows for name in row["labels"]} <= {"ant", "bee", "cow", "dog"}
    assert str(sets.guarantee) in err.replace("\n", " ")
    assert "coverage" not in err  # no labels, no coverage


def test_levels_nested_sets_and_parts(saved: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = load(saved, nearest())
    arguments = ["predict", saved, *OWN, "--data", place / "labelled.npz", "--seed", "3"]
    for options, expected in (
        (["--alpha", "0.2"], predictor.predict(NEW[0], alpha=0.2, seed=3)),
        (["--epsilon", "0.05"], predictor.predict(NEW[0], epsilon=0.05, seed=3)),
        (["--nested"], predictor.predict(NEW[0], nested=True, seed=3)),
        (["--batch-size", "3"], predictor.predict(NEW[0], seed=3)),
        (["--early-exit"], predictor.predict(NEW[0], seed=3)),
    ):
        found = as_json(capsys, *arguments, *options)
        assert found["rows"] == indexed(expected)
        assert found["guarantee"] == expected.guarantee.to_dict()
        assert found["coverage"] == expected.measure(NEW[1]).coverage.__dict__
        assert found["mean_size"] == pytest.approx(float(expected.size.double().mean()))
    early = as_json(capsys, *arguments, "--early-exit")
    assert 1 <= early["mean_draws"] <= 4
    assert "of 4 draws per input with early exit" in run(capsys, *arguments, "--early-exit")[2].replace("\n", " ")
    part = as_json(capsys, *arguments, "--part", "2/3")
    rows = part_rows(60, "2/3").tolist()
    assert [row["index"] for row in part["rows"]] == rows
    everything = as_json(capsys, *arguments)["rows"]
    assert part["rows"] == [everything[i] for i in rows]  # noise is keyed by the row, not by the batch
    assert "calibrated for" in refused(capsys, *arguments, "--alpha", "0.3")


def test_without_a_seed_the_noise_is_fresh(saved: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", saved, *OWN, "--data", place / "data.npz"]
    assert as_json(capsys, *arguments)["rows"] != as_json(capsys, *arguments)["rows"]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_files_hold_the_same_rows(
    form: str, saved: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", saved, *OWN, "--data", place / "labelled.npz", "--seed", "3"]
    expected = as_json(capsys, *arguments)["rows"]
    target = tmp_path / f"rows.{form}"
    target.write_text("old")
    summary = as_json(capsys, *arguments, "--out", target)
    assert "rows" not in summary
    assert summary["out"] == str(target)
    assert read_rows(target.read_text(), form) == expected
    code, out, _ = run(capsys, *arguments, "--format", form)
    assert code == 0
    assert read_rows(out, form) == expected
    code, out, err = run(capsys, *arguments, "--out", target)
    assert (code, err) == (0, "")
    assert "coverage" in out
    assert str(target) in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.safetensors", target.name]


def test_a_file_of_another_ending_is_refused_before_any_work(
    saved: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", saved, *OWN, "--data", place / "new.npz", "--out", tmp_path / "sets.xlsx"]
    line = refused(capsys, *arguments)
    assert "expected a file that ends in .jsonl, .csv or .npz" in line
    assert not (tmp_path / "sets.xlsx").exists()
    code, _, _ = run(capsys, *arguments, "--format", "csv")
    assert code == 0
    assert (tmp_path / "sets.xlsx").read_text().startswith("index,labels")


def test_names_as_labels_in_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "d.npz", images=DATA[0].numpy(), labels=np.array(["ant"] * len(DATA[0])))
    line = refused(capsys, "calibrate", *OWN, "--data", tmp_path / "d.npz", *LEVEL, "--out", tmp_path / "p.safetensors")
    assert "expected numbers in 'labels', got text such as ['ant']" in line


def test_a_function_in_the_folder_the_command_runs_in_is_found(tmp_path: Path) -> None:
    """As the installed command runs, which does not look there by itself."""
    (tmp_path / "fmnet.py").write_text("import torch\nbuild = torch.nn.Flatten\n")
    script = "import sys; sys.path = [p for p in sys.path if p not in ('', sys.argv[1])]; "
    script += "from keepcover.specs import load_model; print(load_model('fmnet:build'))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "Flatten" in done.stdout, done.stderr


def read_rows(text: str, form: str) -> list[dict[str, Any]]:
    if form == "jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return [
        {
            "index": int(row["index"]),
            "labels": row["labels"].split(";") if row["labels"] else [],
            "size": int(row["size"]),
            "trivial": row["trivial"] == "true",
        }
        for row in csv.DictReader(io.StringIO(text))
    ]


def rows_of(mask: Tensor, names: tuple[str, ...] | None, index: list[int]) -> list[dict[str, Any]]:
    promise = Guarantee("exact", True, 0.1, Threat(Gaussian(0.2), 0.1), draws=4, n=99)
    rows = PredictionSets(mask, promise, names).rows()
    return [{"index": i, **row} for i, row in zip(index, rows)]


def test_names_with_commas_quotes_and_letters_survive() -> None:
    names = ("zebra, striped", 'the "fox"', "naïve 犬", "a\nb")
    mask = torch.tensor([[True, True, True, True], [False, False, True, False], [False] * 4])
    for form in ("jsonl", "csv"):
        rows = read_rows(write_rows(rows_of(mask, names, [5, 6, 9]), form), form)
        assert [row["labels"] for row in rows] == [list(names), ["naïve 犬"], []]
        assert [(row["index"], row["trivial"]) for row in rows] == [(5, True), (6, False), (9, False)]
    assert read_rows(write_rows(rows_of(mask, None, [0, 1, 2]), "jsonl"), "jsonl")[1]["labels"] == [2]
    with pytest.raises(InputError, match="joins labels by semicolons, and the class 'a;b' holds one"):
        write_rows(rows_of(mask, ("a;b", "c", "d", "e"), [0, 1, 2]), "csv")


def test_a_failed_prediction_leaves_the_old_file(
    saved: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("old")
    refused(capsys, "predict", saved, *OWN, "--data", place / "nothing.npz", "--out", target)
    assert target.read_text() == "old"


@pytest.mark.parametrize(
    ("images", "labels", "match"),
    [
        (torch.rand(5, 1, 5, 5), None, "calibrated on inputs [n, 1, 4, 4], got [5, 1, 5, 5]"),
        (torch.rand(5, 16), None, "calibrated on inputs [n, 1, 4, 4], got [5, 16]"),
        ((255 * torch.rand(5, *SHAPE)).to(torch.uint8), None, "float images in [0, 1], got torch.uint8"),
        (torch.full((5, *SHAPE), torch.nan), None, "NaN or infinity, first in image 0"),
        (torch.rand(5, *SHAPE), torch.full((5,), 4), "labels between 0 and 3"),
        (torch.rand(0, *SHAPE), None, "at least one image"),
    ],
    ids=["shape", "flat", "bytes", "nan", "classes", "empty"],
)
def test_other_inputs_than_at_calibration_are_refused(
    images: Tensor, labels: Tensor | None, match: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"images": images} if labels is None else {"images": images, "labels": labels}
    save_file(content, tmp_path / "d.safetensors")
    assert match in refused(capsys, "predict", saved, *OWN, "--data", tmp_path / "d.safetensors")


@pytest.mark.filterwarnings("ignore:pixels reach")
def test_other_units_than_at_calibration_are_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"images": 255 * NEW[0]}, tmp_path / "d.safetensors")
    line = refused(capsys, "predict", saved, *OWN, "--data", tmp_path / "d.safetensors")
    assert "calibrated on values in [0, 1], got values in [0, 255]; bring the images to the same units" in line


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_prints_the_promise_and_where_it_comes_from(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", saved)
    assert (code, err) == (0, "")
    predictor = load(saved, nearest())
    for level, calibrated in predictor.levels.items():
        assert str(predictor.at(*level).guarantee) in out
        assert f"{float(calibrated.threshold):.6g}" in out
    for assumption in predictor.guarantee.assumptions:
        assert assumption in out
    for text in (
        "4: ant, bee, cow, dog",
        "[1, 4, 4] in [0, 1]",
        "360 points, holdout 40",
        fingerprint(nearest()),
        fingerprint(saved),
        "own:make_nearest",
        "format 3",
        str(torch.__version__),
        "data",
    ):
        assert str(text) in out


def test_show_as_json_is_the_manifest(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "show", saved)
    manifest, _ = read(saved)
    assert found == {"file": str(saved), "sha256": fingerprint(saved), **manifest}
    assert {"created", "keepcover", "torch", "model", "data", "data_sha256"} < set(found["history"][0])


def test_show_refuses_what_was_altered(saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = saved.read_bytes()
    for place in (content.index(b"statement") + 30, len(content) - 3):
        altered = bytearray(content)
        altered[place] ^= 1
        saved.write_bytes(bytes(altered))
        assert "does not match its checksum" in refused(capsys, "show", saved)
    saved.write_bytes(content[:-1])
    assert "not a complete safetensors file" in refused(capsys, "show", saved)
    assert "no predictor at" in refused(capsys, "show", tmp_path / "nothing")


def test_warnings_are_one_line_too(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["keepcover", "show", str(saved), "--json"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert keepcover_main() == 0
    capsys.readouterr()
    warnings.showwarning(KeepcoverWarning("be careful"), KeepcoverWarning, "some/file.py", 3)
    assert capsys.readouterr().err == "warning: be careful\n"


# -- report ------------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_says_what_was_measured(
    saved: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    pictures = tmp_path / "figures"
    found = as_json(
        capsys,
        "report",
        saved,
        *OWN,
        "--data",
        place / "labelled.npz",
        "--seed",
        "3",
        "--out",
        target,
        "--figures",
        pictures,
    )
    assert sorted({file.stem for file in pictures.iterdir()}) == [
        "coverage-by-class",
        "coverage-by-epsilon",
        "set-sizes",
        "size-by-epsilon",
    ]
    assert len(list(pictures.iterdir())) == 8
    page = target.read_text()
    offline(page)
    reader = parsed(page)
    predictor = load(saved, nearest())
    sets = predictor.predict(NEW[0], seed=3)
    measured = sets.measure(NEW[1])
    assert found["evaluation"]["coverage"] == measured.coverage.__dict__
    assert found["report"] == str(target)
    text = " ".join(reader.text)
    assert str(sets.guarantee) in text
    assert str(measured.coverage) in [cell for row in reader.rows for cell in row]
    by_class = {row[0]: row[1:] for row in reader.rows}
    for k, share in measured.by_class.items():
        size = float(sets.size[NEW[1] == k].double().mean())
        assert by_class[("ant", "bee", "cow", "dog")[k]] == [str(share), f"{size:.2f}", str(share.count)]
    for key, every in predictor.predict_all(NEW[0], seed=3).items():
        one = every.measure(NEW[1])
        low, high = one.size_interval
        row = by_class[f"alpha {key[0]:g}, epsilon {key[1]:g}"]
        assert row[:3] == [str(one.coverage), f"{1 - key[0]:g}", f"{one.size:.2f} [{low:.2f}, {high:.2f}]"]
    draws, n = sets.guarantee.calibration_draws or 4, sets.guarantee.n + predictor.holdout_size
    assert by_class[sets.guarantee.method] == ["4", str(draws), f"{draws * n:,}"]
    assert by_class["noise"] == ["seed 3: for experiments, it can be guessed"]
    assert by_class["predictor"] == [f"{saved.name}, SHA-256 {fingerprint(saved)}"]
    assert by_class["test data"] == [f"labelled, all of it, {len(NEW[1])} inputs"]
    assert {"test data fingerprint", "calibrated on", "this page", "versions", "command"} <= set(by_class)
    assert "nothing is promised per class" in text
    assert str(tmp_path) not in page
    assert by_class["model fingerprint"] == [fingerprint(nearest())]
    assert by_class["model"] == ["own:make_nearest"]
    for title in (
        "Coverage and size",
        "What a larger radius costs",
        "How large the sets are",
        "Coverage by class",
        "Examples",
        "What it costs",
        "What the promise rests on",
        "Where it comes from",
    ):
        assert title in text
    code, out, _ = run(capsys, "report", saved, *OWN, "--data", place / "labelled.npz", "--seed", "3", "--out", target)
    assert code == 0
    assert str(measured) in out


def test_a_page_of_many_classes_shows_the_worst(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """Forty classes, of which the first ten are never covered."""
    predictor = load(saved, nearest())
    predictor = replace(
        predictor, task=Classification(class_names=tuple(f"<class {k}>" for k in range(40)), classes=40)
    )
    labels = torch.arange(400) % 40
    mask = torch.zeros(400, 40, dtype=torch.bool)
    mask[torch.arange(400), labels] = labels >= 10
    shown: dict[str, Any] = {}
    monkeypatch.setattr(
        plots,
        "coverage_by_class",
        lambda names, shares, alpha: shown.update(names=names, shares=shares) or plots.subplots()[0],
    )
    sets = PredictionSets(mask, predictor.guarantee, predictor.class_names)
    level = predictor.guarantee.alpha, predictor.guarantee.epsilon
    made = predictor_page(predictor, {level: sets}, torch.rand(400, 3, 4, 4), labels, "many & more")
    page = made.html()
    (examples,) = [section.examples for section in made.sections if section.title == "Examples"]
    assert "What a larger radius costs" not in page  # one epsilon is no curve
    with pytest.raises(InputError, match="expected one of the levels"):
        predictor_page(predictor, {level: sets}, torch.rand(400, 3, 4, 4), labels, "many", level=(0.3, 0.1))
    assert "many &amp; more" in page
    assert "<class" not in page.replace("<class>", "")
    assert len(shown["names"]) == MOST_CLASSES
    assert set(shown["names"][:10]) == {f"<class {k}>" for k in range(10)}
    assert f"The {MOST_CLASSES} classes of lowest coverage; 10 more are not shown." in page
    assert len(examples) == 8  # four that are missed, four single labels, no larger set
    assert (examples[0].title, examples[0].images[0][1], examples[0].bad) == ("truth: <class 0>, missed", "{}", True)
    assert (examples[-1].title, examples[-1].images[0][1], examples[-1].bad) == (
        "truth: <class 13>",
        "{<class 13>}",
        False,
    )


def test_a_report_needs_labels_and_a_place(
    saved: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["report", saved, *OWN]
    assert "no array 'labels'" in refused(capsys, *base, "--data", place / "new.npz", "--out", tmp_path / "r.html")
    line = refused(capsys, *base, "--data", place / "labelled.npz", "--out", tmp_path / "no" / "r.html")
    assert "create it first" in line


def test_weights_given_as_a_predictor_and_devices_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from keepcover.models import SmallCNN
    from keepcover.models.checkpoints import weights_bytes

    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights_bytes(SmallCNN(), {"architecture": "small-cnn"}))
    given = ("--model", "small-cnn", "--weights", weights, "--data", "digits")
    assert "not a keepcover predictor" in refused(capsys, "predict", weights, *given)
    line = refused(capsys, "calibrate", *given, "--device", "banana", *LEVEL, "--out", tmp_path / "p.safetensors")
    assert "no device 'banana' here" in line


def test_names_out_of_a_file_cannot_speak_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes that clear the screen, a turned direction of text, markup: all are shown and none is obeyed."""
    names = ["\x1b[2J\x1b]0;title\x07", "[bold]two[/bold]", "\u202eeerht", "\x9b31m"]
    model, data = nearest(), toy(400, seed=1)
    classes = int(data[1].max()) + 1
    names = (names + [f"class {k}" for k in range(classes)])[:classes]
    predictor = keepcover.calibrate(model, data, epsilon=0.1, sigma=0.15, draws=4, class_names=names)
    predictor.save(tmp_path / "p.safetensors")
    code, shown, _ = run(capsys, "show", tmp_path / "p.safetensors")
    assert code == 0
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
    assert "\\x1b[2J\\x1b]0;title" in shown
    assert "[bold]two[/bold]" in shown
    code, _, error = run(capsys, "show", "\x1b[2J.safetensors")
    assert code == 2
    assert "\x1b" not in error

"""keepcover.check: its numbers by hand, what it recommends, and that its lines run."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover import APS, Check, Gaussian, InputError, KeepcoverWarning, Smoother, Stream, check
from keepcover.data import Labelled
from keepcover.methods import Asked, Exact, Holdout, Rule
from keepcover.models.denoiser import Denoiser
from keepcover.noise import Threat
from keepcover.tasks import Classification
from tests.cli.runner import as_json, refused, run
from tests.toys import nearest, prototypes, toy

SEEN, OTHERS = toy(200, seed=5), toy(200, seed=6)
CENTRES = prototypes(4)
ASK: dict[str, Any] = {"epsilon": 0.1, "draws": 4, "seed": 1}


class Perfect(Denoiser):
    """It knows the four images that there are."""

    def __init__(self) -> None:
        super().__init__(channels=1, widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1))

    def forward(self, images: Tensor, sigma: Tensor | float) -> Tensor:
        found = torch.cdist(images.flatten(1), CENTRES.flatten(1)).argmin(dim=1)
        return CENTRES[found] + 0 * images


class Brittle(nn.Module):
    """Right on the images as they are; whatever else it sees is of class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        distance = torch.cdist(images.flatten(1), CENTRES.flatten(1))
        lost = distance.amin(dim=1, keepdim=True) > 0.62
        return torch.where(lost, torch.eye(4)[0] * 5, -self.scale * 40 * distance**2)


@pytest.fixture(scope="module")
def found() -> Check:
    return check(nearest(), SEEN, **ASK)


def test_numbers_are_those_of_the_sample(found: Check) -> None:
    assert [trial.sigma for trial in found.trials] == [0.05, 0.1, 0.2, 0.4]
    assert (found.points, found.classes, found.clean) == (200, 4, pytest.approx(_right(nearest()(SEEN[0])[:, None])))
    for trial in found.trials:
        outputs = Smoother(nearest(), trial.sigma).logits(SEEN[0], 4, Stream(1, "holdout"))
        assert trial.accuracy == pytest.approx(_right(outputs))
        holdout = Holdout(Classification(classes=4), outputs, SEEN[1])
        rule = Exact().fit(Asked(0.1, Threat(Gaussian(trial.sigma), 0.1), 4, 200, 4), holdout)
        assert trial.size == pytest.approx(Rule.estimated_size(rule, holdout))
        assert trial.low <= trial.size <= trial.high
        assert trial.low < trial.high < trial.low + 1
    assert found.best == min(found.trials, key=lambda trial: trial.size)


def test_a_norm_is_an_l2_length_of_its_own() -> None:
    """The L2 ball of 0.1 holds the Linf ball of 0.1 / sqrt(d): the same noise, the same sizes, and the line says so."""
    d = SEEN[0][0].numel()
    linf = check(nearest(), SEEN, **{**ASK, "epsilon": 0.1 / d**0.5}, norm="linf")
    assert [trial.sigma for trial in linf.trials] == [0.05, 0.1, 0.2, 0.4]
    assert [trial.size for trial in linf.trials] == [trial.size for trial in check(nearest(), SEEN, **ASK).trials]
    assert (linf.norm, linf.near) == ("linf", 0.1)
    assert "norm='linf'" in linf.python
    assert "--norm linf" in linf.command
    assert "Linf" in repr(linf)
    with pytest.raises(InputError, match="gaussian noise certifies attacks in l2, l1, linf, got 'l0'; use Ablation"):
        check(nearest(), SEEN, **ASK, norm="l0")


def _right(outputs: Tensor) -> float:
    return float((outputs.argmax(dim=-1) == SEEN[1][:, None]).double().mean())


def test_its_interval_holds_the_size_of_many_more_points(found: Check) -> None:
    """Deterministic: another sample of 1,000 points."""
    many = check(nearest(), toy(1000, seed=11), points=1000, sigma=0.1, **ASK)
    few = found.trials[1]
    assert few.sigma == 0.1
    assert few.low <= many.best.size <= few.high
    assert many.best.high - many.best.low < few.high - few.low


def test_the_line_for_python_calibrates_what_was_promised(found: Check) -> None:
    assert found.useful
    names = {"keepcover": keepcover, "model": nearest(), "others": OTHERS, "checked": SEEN}
    exec(found.python, names)
    predictor = names["predictor"]
    assert predictor.noise == Gaussian(found.best.sigma)
    assert predictor.guarantee.epsilon == 0.1
    size = float(predictor.predict(toy(400, seed=9)[0]).size.double().mean())
    assert found.best.low - 0.2 < size < found.best.high + 0.2


@pytest.mark.parametrize("denoiser", [None, Perfect()])
def test_the_lines_for_a_smoother_run_it_as_it_is(denoiser: Denoiser | None) -> None:
    """With its settings: calibrate takes no sigma beside the noise of a smoother, and training takes the module alone."""
    model = nearest() if denoiser is None else Brittle()
    made = check(Smoother(model, 0.0, batch_size=7), SEEN, denoiser=denoiser, sigma=0.1, **ASK)
    names: dict[str, Any] = {"model": Smoother(model, 0.0, batch_size=7), "others": OTHERS, "checked": SEEN}
    names |= {"keepcover": keepcover, "denoiser": denoiser, "images": SEEN[0], "labels": SEEN[1]}
    exec(made.python, names)
    assert names["predictor"].noise == Gaussian(0.1)
    assert names["predictor"].running.batch_size == 7
    assert made.best.denoised == (denoiser is not None)
    exec(replace(made, useful=False).python, names)
    assert names["model"].batch_size == 7


@pytest.mark.parametrize("score", ["aps", APS()])
def test_the_lines_ask_for_the_score_that_was_checked(score: Any) -> None:
    made = check(nearest(), SEEN, sigma=0.1, score=score, **ASK)
    names = {"keepcover": keepcover, "model": nearest(), "others": OTHERS, "checked": SEEN, "score": score}
    exec(made.python, names)
    assert names["predictor"].guarantee.score == "aps"
    assert f"--score {'aps' if score == 'aps' else 'SCORE'}" in made.command


def test_a_denoiser_is_recommended_where_it_helps() -> None:
    made = check(Brittle(), SEEN, denoiser=Perfect(), sigma=(0.04, 0.1), **ASK)
    alone, front = ([t for t in made.trials if t.denoised is which] for which in (False, True))
    assert [t.sigma for t in front] == [0.1]  # the other sigma is none that it has seen
    assert min(t.size for t in front) < min(t.size for t in alone)
    assert made.best.denoised
    assert made.note == ""
    assert "with the denoiser before it" in made.recommendation
    assert "keepcover.denoised(model, denoiser)" in made.python
    assert "--model denoised@DENOISER:MODEL" in made.command
    # A denoiser that does not help is not recommended, and what it costs is not paid.
    idle = check(nearest(), SEEN, denoiser=Denoiser(1, widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1)), sigma=0.1, **ASK)
    assert any(t.denoised for t in idle.trials)
    assert not idle.best.denoised


def test_a_sigma_that_a_denoised_model_has_never_seen_is_tried_where_it_is_asked_for() -> None:
    """As sigma="auto" does: what is recommended must not be warned of."""
    model = keepcover.denoised(Brittle(), Perfect())
    assert [trial.sigma for trial in check(model, SEEN, **{**ASK, "epsilon": 0.5}).trials] == [0.25, 0.5, 1.0]
    with pytest.warns(KeepcoverWarning, match="has never seen sigma 2"):
        check(model, SEEN, sigma=2.0, **ASK)


def test_a_model_that_noise_ruins_is_to_be_tuned() -> None:
    made = check(Brittle(), SEEN, sigma=(0.1, 0.4), **ASK)
    assert not made.useful
    assert made.recommendation.startswith(
        "Fine-tune the model under noise of sigma 0.1, which takes images and no labels"
    )
    line = "from keepcover.training import fit_under_noise; model = fit_under_noise(model, images, sigma=0.1)"
    assert made.python == line
    names: dict[str, Any] = {"model": Brittle(), "images": SEEN[0]}
    exec(line, names)
    assert isinstance(names["model"], Brittle)
    assert made.command.startswith("keepcover train base --model MODEL --data DATA")


def test_a_model_that_is_poor_without_noise_needs_labels() -> None:
    """What it says of clean images is not worth imitating: noise takes nothing from it."""
    images, labels = toy(200, seed=5)
    made = check(nearest(), (images, labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]), **ASK)
    assert not made.useful
    assert not made.ruined
    assert made.recommendation.startswith("Train the model further with labels, or ask for a smaller epsilon: as it is")
    assert made.python.endswith("model = fit_under_noise(model, images, labels, sigma=0.1)")


def test_it_shows_how_far_it_is_and_warns_as_calibrate_does() -> None:
    steps: list[tuple[int, int]] = []
    model = nn.Sequential(nearest(), nn.Softmax(dim=1))
    with pytest.warns(KeepcoverWarning, match="seems to return probabilities"):
        check(Smoother(model, 0.0, progress=lambda *at: steps.append(at)), SEEN, **ASK)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_line_for_a_denoised_model_trains_what_is_behind_it() -> None:
    made = replace(check(Brittle(), SEEN, sigma=0.1, **ASK), model="denoised@mine.safetensors:own:net")
    assert made.command.startswith("keepcover train base --model own:net --data DATA --sigma 0.1 ")


def test_it_can_be_read_and_kept(found: Check) -> None:
    text = repr(found)
    for trial in found.trials:
        assert f"{trial.size:.2f} [{trial.low:.2f}, {trial.high:.2f}]" in text
    assert found.recommendation in text
    assert found.python in text
    assert f"A query: 4 model evaluations, {1000 * 4 * found.best.seconds:.3g} ms." in text
    assert "Calibration on 1000 points: 65000 model evaluations" in text
    kept = json.loads(json.dumps(found.to_dict()))
    assert kept["best"]["size"] == found.best.size
    assert kept["command"] == found.command


def test_what_is_not_an_image_gets_no_denoiser() -> None:
    vectors = SEEN[0].flatten(1), SEEN[1]
    assert check(nearest(), vectors, sigma=0.1, **ASK).note == "inputs are no images of 1 or 3 channels"
    assert check(lambda x: nearest()(x), SEEN, sigma=0.1, **ASK).note == "the model is no torch module"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"points": 5}, "at least 20 labelled points to look at for alpha = 0.1, got 5"),
        ({"points": -5}, "at least 20 labelled points .*, got -5"),
        ({"alpha": 0.001}, "at least 999 labelled points"),
        ({"alpha": 0.0}, "alpha strictly between 0 and 1, got 0"),
        ({"alpha": (0.1, 0.2)}, r"one alpha and one epsilon, got \(0.1, 0.2\) and 0.1; check each by itself"),
        ({"epsilon": (0.1, 0.2)}, "one alpha and one epsilon"),
        ({"epsilon": float("nan")}, "finite epsilon >= 0, the radius of the attack, got nan"),
        ({"sigma": 0.0}, "sigmas above 0"),
        ({"epsilon": 0.0}, "must be above 0"),
        ({"sigma": (0.1, 0.1)}, "distinct values of sigma"),
        ({"denoiser": "nowhere.safetensors"}, "nowhere"),
    ],
)
def test_bad_questions_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        inspect.unwrap(check)(nearest(), SEEN, **{**ASK, **changes})  # without the types that tests alone check


def make_nearest() -> nn.Module:
    return nearest()


def test_the_command_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the line it prints runs, on other points than those it looked at."""
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    images, labels = toy(600, seed=8)
    np.savez("my data.npz", images=images.numpy(), labels=labels.numpy())
    ask = [
        "check",
        "--model",
        "own:make_nearest",
        "--data",
        "my data.npz",
        "--epsilon",
        "0.1",
        "--sigma",
        "0.1",
        "--draws",
        "2",
    ]
    made = as_json(capsys, *ask, "--seed", "1")
    assert made["points"] == 150
    code, out, _ = run(capsys, *ask, "--seed", "1")
    assert code == 0
    assert made["command"] in out
    words = shlex.split(made["command"])
    data = ["--model", "own:make_nearest", "--data", "my data.npz"]
    assert words[:8] == ["keepcover", "calibrate", *data, "--part", "4/4"]
    assert run(capsys, *words[1:], "--method", "rcp1")[0] == 0
    assert Path("predictor.safetensors").is_file()
    more = ["--score", "aps", "--autocast", "bfloat16", "--channels-last"]  # which change sizes
    words = shlex.split(as_json(capsys, *ask, *more)["command"])
    assert as_json(capsys, *words[1:], "--method", "rcp1")["predictor"] == "predictor.safetensors"
    saved = as_json(capsys, "show", "predictor.safetensors")
    assert saved["levels"][0]["guarantee"]["score"] == "aps"
    assert saved["numerics"] == {"autocast": "bfloat16", "channels_last": True, "compile": False}


def test_a_part_that_is_all_leaves_nothing_to_calibrate_on(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["check", "--model", "own:make_nearest", "--data", "digits", "--epsilon", "0.1", "--part"]
    assert "a part that leaves others to calibrate on, for instance 1/2, got 1/1" in refused(capsys, *ask, "1/1")
    assert "expected a part k/m" in refused(capsys, *ask, "half")


@pytest.mark.parametrize(
    ("data", "trained", "others"),
    [
        (["digits"], [], "4/4"),  # train base takes the first half, and checking 3/4
        (["digits", "--part", "1/4"], ["--part", "3/4"], "2/4"),
        (["digits", "--part", "1/2"], ["--part", "1/2"], "2/2"),
        (["mnist", "--data-dir", "the files"], ["--data-dir", "the files"], "4/4"),
    ],
)
def test_no_point_is_both_trained_on_and_calibrated_on(
    data: list[str],
    trained: list[str],
    others: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lines name disjoint parts, and the folder of official files, whose training data are a part of their own."""
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    monkeypatch.setattr("keepcover.specs.load_data", lambda *_, **__: Labelled("toy", *toy(600, seed=8), tuple("abcd")))
    ask = ["--epsilon", "0.1", "--sigma", "0.1", "--draws", "2", "--seed", "1"]
    folder = data[1:] if "--data-dir" in data else []
    for model, command in (
        ("own:Brittle", ["train", "base", "--model", "own:Brittle", "--data", data[0], *trained, "--sigma"]),
        (
            "own:make_nearest",
            ["calibrate", "--model", "own:make_nearest", "--data", data[0], *folder, "--part", others],
        ),
    ):
        made = as_json(capsys, "check", "--model", model, "--data", *data, *ask)
        assert shlex.split(made["command"])[1 : len(command) + 1] == command

"""sigma="auto": what the holdout chooses, and that it alone chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover import Gaussian, InputError, KeepcoverWarning, Noise, Smoother, Stream
from keepcover.methods import Holdout
from keepcover.models.denoiser import Denoiser
from keepcover.prediction import calibrate
from keepcover.prediction.choosing import sigma_grid
from keepcover.prediction.collecting import Parts, chosen_rows
from tests.toys import nearest, toy

CAL, HELD = toy(120, seed=1), toy(40, seed=2)
AUTO: dict[str, Any] = {
    "epsilon": 0.1,
    "sigma": "auto",
    "draws": 2,
    "calibration_draws": 4,
    "method": "exact",
    "seed": 2,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


def test_auto_takes_the_sigma_whose_sets_are_smallest_on_the_holdout(model: nn.Module, tmp_path: Path) -> None:
    predictor = calibrate(model, CAL, holdout=HELD, **AUTO)
    grid = [0.05, 0.0707, 0.1, 0.141, 0.2, 0.3, 0.4]
    sizes = {}
    for sigma in grid:
        one = calibrate(model, CAL, holdout=HELD, **{**AUTO, "sigma": sigma})
        logits = one.running.logits(HELD[0], 4, Stream(2, "holdout"))
        holdout, asked = Holdout(one.task, logits, HELD[1]), one.rule.asked
        sizes[sigma] = one.rule.method.fit(asked, holdout).estimated_size(holdout)
    best = min(grid, key=sizes.__getitem__)
    assert predictor.noise == Gaussian(best)
    assert 0.05 < best < 0.4
    words = ", ".join(f"Gaussian noise sigma {sigma:g}" for sigma in grid)
    assert f"The holdout alone chose Gaussian noise sigma {best:g}, among {words}." in predictor.guarantee.assumptions
    predictor.save(tmp_path / "p.safetensors")
    assert keepcover.load(tmp_path / "p.safetensors", model).guarantee == predictor.guarantee
    # A smoother brings its numerics along, and its noise gives way.
    smoother = Smoother(model, 0.0, batch_size=7, channels_last=True)
    other = calibrate(smoother, CAL, holdout=HELD, **AUTO)
    assert (other.noise, other.running.batch_size, other.numerics["channels_last"]) == (Gaussian(best), 7, True)


def spoiled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The calibration points with labels that fit none of them, except in some rows."""
    labels = (CAL[1] + 1) % 4
    labels[rows] = CAL[1][rows]
    return CAL[0], labels


@pytest.mark.filterwarnings("ignore:.*can only return everything:keepcover.KeepcoverWarning")
@pytest.mark.parametrize("holdout", [HELD, 40], ids=["given", "drawn"])
def test_auto_looks_at_no_calibration_point(holdout: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calibration labels, the same choice; and a choice that looks at all the data would be told apart."""

    def chosen(data: Any) -> Noise:
        return calibrate(model, data, holdout=holdout, **AUTO).noise

    rows = chosen_rows(120, 40, AUTO["seed"])
    assert chosen(CAL) == chosen(spoiled(rows))
    every = Parts.batches

    def peeking(self: Parts, only_holdout: bool = False) -> Any:
        return (("holdout", batch) if only_holdout else (role, batch) for role, batch in every(self))

    monkeypatch.setattr(Parts, "batches", peeking)
    assert chosen(CAL) != chosen(spoiled(rows))


def test_auto_binds_a_denoised_model_to_the_sigma_it_chose(model: nn.Module) -> None:
    torch.manual_seed(0)
    small = Denoiser(channels=1, widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1))
    predictor = calibrate(keepcover.denoised(model, small), CAL, holdout=HELD, **AUTO)
    assert isinstance(predictor.noise, Gaussian)
    assert float(predictor.running.model.sigma) == predictor.noise.sigma  # type: ignore[union-attr]


def test_auto_leaves_out_what_a_denoiser_has_not_seen(model: nn.Module, recwarn: pytest.WarningsRecorder) -> None:
    small = Denoiser(channels=1, sigmas=(0.09, 0.25), widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1))
    predictor = calibrate(keepcover.denoised(model, small), CAL, holdout=HELD, **AUTO)
    among = next(str(one) for one in predictor.guarantee.assumptions if "holdout alone chose" in str(one))
    assert among.endswith(", among Gaussian noise sigma 0.1, Gaussian noise sigma 0.141, Gaussian noise sigma 0.2.")
    assert not any("has never seen" in str(one.message) for one in recwarn)
    with pytest.warns(KeepcoverWarning, match="has never seen sigma"):  # none of them is better than another
        calibrate(keepcover.denoised(model, small), CAL, holdout=HELD, **{**AUTO, "epsilon": 1.0})


def test_accuracy_without_noise_is_that_of_the_classifier(model: nn.Module) -> None:
    """Nothing is to be denoised then: check and calibrate say the same of a model, behind a denoiser or not."""
    torch.manual_seed(0)
    small = Denoiser(channels=1, widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1))
    asked = {**AUTO, "sigma": 0.5}
    alone, behind = (calibrate(one, CAL, holdout=HELD, **asked) for one in (model, keepcover.denoised(model, small)))
    assert alone.accuracy is not None
    assert behind.accuracy is not None
    assert behind.accuracy.clean == alone.accuracy.clean
    assert behind.accuracy.noisy != alone.accuracy.noisy


def test_auto_around_several_radii_and_in_other_norms() -> None:
    assert sigma_grid([0.05, 0.2]) == sigma_grid([0.1])
    assert sigma_grid([0.01], "linf", (3, 32, 32))[2] == 0.554  # 0.01 sqrt(3072)
    with pytest.raises(InputError, match="looked for around epsilon, which must be above 0"):
        sigma_grid([0.0])

"""A second member of every seam, one file each, through the whole library with no other file changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover import Classification, Gaussian, Promise
from keepcover.methods import get_method
from keepcover.testing import check_method, check_noise, check_promise, check_task
from tests.seams.halved import Halved
from tests.seams.logistic import Logistic
from tests.seams.reserve import Reserve
from tests.seams.residual import Residual

torch.manual_seed(1)  # the same models whatever was imported before
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
LINE = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))


@pytest.fixture(scope="module")
def labelled() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    MODEL[1].reset_parameters()
    nn.init.normal_(MODEL[1].weight, std=4.0)
    images = torch.rand(500, 1, 2, 2)
    return images, MODEL(images).argmax(dim=1)


@pytest.fixture(scope="module")
def measured() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    LINE[1].reset_parameters()
    images = torch.rand(500, 1, 2, 2)
    return images, LINE(images)[:, 0].detach() + 0.1 * torch.randn(500)


MEMBERS: dict[str, dict[str, Any]] = {
    "noise": {"noise": Logistic(0.1)},
    "promise, a quantile": {"sigma": 0.1, "promise": Promise(reserve=0.25), "method": "exact"},
    "promise, a risk": {"sigma": 0.1, "promise": Promise(reserve=0.25), "method": "exact_asymmetric"},
    "task": {"sigma": 0.1, "task": Residual()},
    "task by name": {"sigma": 0.1, "task": "residual", "method": "rcp1"},
    "method": {"sigma": 0.1, "method": Halved(share=0.25)},
    "all of them": {"noise": Logistic(0.1), "promise": Promise(reserve=0.1), "task": Residual(), "method": "halved"},
}


@pytest.mark.parametrize("member", MEMBERS)
def test_a_second_member_goes_through_the_whole_library(
    member: str, labelled: tuple[Tensor, Tensor], measured: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    options = MEMBERS[member]
    model, (images, truth) = (LINE, measured) if "task" in options else (MODEL, labelled)
    old, new = (images[:300], truth[:300]), (images[300:], truth[300:])
    predictor = keepcover.calibrate(model, old, epsilon=[0.02, 0.05], alpha=0.2, draws=8, seed=3, **options)
    sets = predictor.predict(new[0], seed=4)
    assert sets.measure(new[1]).coverage.high > 0.8
    predictor.save(tmp_path / "predictor.safetensors")
    loaded = keepcover.load(tmp_path / "predictor.safetensors", model)
    assert str(loaded.guarantee) == str(predictor.guarantee)
    assert loaded.predict(new[0], seed=4).rows() == sets.rows()
    for part in (predictor.noise, *predictor.guarantee.promise.clauses):
        words = str(part) if part is predictor.noise else part.sentence()
        assert words.lower() in str(predictor.guarantee).lower()
    outputs = predictor.running.logits(images, 16, keepcover.Stream(5, "test"))
    noise = predictor.noise
    rows = keepcover.evaluate(
        outputs,
        truth,
        epsilon=0.05,
        noise=noise,
        alpha=0.2,
        methods=[options.get("method", "exact")],
        draws=8,
        splits=5,
        holdout=60,
        task=options.get("task", "classification"),
        promise=options.get("promise"),
    )
    assert rows[0].coverage.mean > 0.8
    assert rows[0].guarantee.threat.noise == noise
    audit = keepcover.audit(predictor, new, attacks=["margin"], steps=3, draws=8, seed=6, progress=False)
    assert [row.verdict for row in audit.rows] == ["consistent", "consistent"]
    assert audit.rows[1].radius == 0.02


def test_the_suites_pass_the_members() -> None:
    check_noise(Logistic(0.3), 0.2)
    check_noise(Gaussian(0.3), 0.2)
    check_promise(Promise(reserve=0.05))
    check_promise(Promise())
    outputs = torch.randn(40, 6)
    check_task(Residual(), outputs, outputs.mean(dim=1))
    check_task(Classification(), torch.randn(40, 6, 3), torch.arange(40) % 3)
    check_method(Halved(), trials=500)


class Deaf(Logistic):
    """up forgets the attack."""

    def worst(self, q: Any, epsilon: float, norm: str, shape: Any) -> Any:
        return super().worst(q, 0.2 * epsilon, norm, shape)


class Hasty(Reserve):
    """One rank too low for any promise."""

    def rank(self, rank: int, n: int, level: Any) -> int:
        return rank - 1


class Short(Residual):
    """Intervals lose a tenth of their length."""

    def inside(self, summary: Tensor, rule: Any, threshold: Tensor) -> Tensor:
        return super().inside(summary, rule, 0.9 * threshold)


def test_the_suites_catch_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepcover.noise import NOISES
    from keepcover.promises import CLAUSES
    from keepcover.tasks import TASKS

    monkeypatch.setitem(NOISES, "logistic", Deaf)
    with pytest.raises(AssertionError, match="an attack lifts"):
        check_noise(Deaf(0.3), 0.2)
    monkeypatch.setitem(CLAUSES, "reserve", Hasty)
    with pytest.raises(AssertionError, match="below the marginal one"):
        check_promise(Promise(reserve=0.001))
    monkeypatch.setitem(TASKS, "residual", Short)
    outputs = torch.randn(40, 6)
    with pytest.raises(AssertionError, match="misses what its rule keeps"):
        check_task(Short(), outputs, outputs.mean(dim=1))
    with pytest.raises(AssertionError, match="covers"):
        check_method(Halved(share=2.5), trials=500)


@pytest.mark.parametrize(
    "name", ["cp", "exact", "exact_asymmetric", "rcp1", "bincp", "bincp_sharp", "rscp_plus_hoeffding"]
)
def test_the_library_passes_its_own_suite(name: str) -> None:
    check_method(get_method(name), trials=150)

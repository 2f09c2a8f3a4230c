"""A predictor knows its model again, and says by what it tells another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from keepcover.engine.fingerprint import CLASS, Identity, fingerprint, probe_logits, probes, structure, unwrapped
from keepcover.engine.inputs import InputRange
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.models import SmallCNN
from keepcover.prediction.artifact import load, read
from keepcover.prediction.calibration import calibrate
from tests.toys import toy

CAL = toy(120, seed=1)
ASK: dict[str, Any] = {"epsilon": 0.03, "sigma": 0.1, "draws": 4, "method": "rcp1", "seed": 1}


class Net(nn.Module):
    """A model that keeps in plain attributes what decides its logits."""

    scale = 1.0
    mask: Tensor

    def __init__(
        self, mean: Any = 0.5, activation: Any = functional.relu, gain: float = 1.0, shift: float = 0.0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.mean, self.activation, self.act = mean, activation, nn.ReLU()
        self.options = {"gain": gain, "sizes": (4, 4)}
        self.shift = torch.full((4,), shift)
        self.register_buffer("mask", torch.ones(16), persistent=False)
        self.cache: Tensor | None = None
        self.place = "cpu"
        self.folder = "/somewhere/else"
        self.name_or_path = "folder"

    def forward(self, images: Tensor) -> Tensor:
        self.cache = images.mean()
        hidden = self.activation(self.first((images.flatten(1) - torch.as_tensor(self.mean).sum()) * self.mask))
        return self.scale * self.options["gain"] * self.last(self.act(hidden)) + self.shift


class Negative(Net):
    def forward(self, images: Tensor) -> Tensor:
        return -super().forward(images)


class Scaled(Net):
    pass


def changed(change: Callable[[Net], Any], **options: Any) -> Net:
    model = Net(**options)
    change(model)
    return model


# Equal weights in every case, so that the state dict's digest is the same.
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (
        Negative,
        r"the model is a tests\.engine\.test_fingerprint\.Negative, expected tests\.engine\.test_fingerprint\.Net",
    ),
    "activation": (
        lambda: changed(lambda m: setattr(m, "act", nn.GELU())),
        r"module 'act' is a .*GELU, expected .*ReLU",
    ),
    "function": (lambda: Net(activation=functional.gelu), "attribute 'activation' of the model is gelu, expected relu"),
    "mean": (lambda: Net(mean=0.4), r"attribute 'mean' of the model is 0\.4, expected 0\.5"),
    "mean-type": (lambda: Net(mean=[0.5]), r"attribute 'mean' of the model is \[0\.5\], expected 0\.5"),
    "nested": (lambda: Net(gain=2.0), "attribute 'options' of the model is .*2.0.*, expected .*1.0"),
    "tensor": (lambda: Net(shift=0.01), "attribute 'shift' of the model"),
    "buffer": (lambda: changed(lambda m: m.mask.mul_(0.5)), "attribute 'mask' of the model"),
    "inside": (
        lambda: changed(lambda m: setattr(m.act, "inplace", True)),
        "attribute 'inplace' of module 'act' is True",
    ),
    "missing": (
        lambda: changed(lambda m: setattr(m, "activation", None) or m.add_module("more", nn.ReLU())),
        "another module 'more'",
    ),
    "class-attribute": (lambda: changed(lambda m: setattr(m, "scale", 3.0)), "attribute 'scale' of the model is 3.0"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "p.safetensors"
    with pytest.warns(KeepcoverWarning, match="right on only"):
        predictor = calibrate(Net(), CAL, **ASK)
    predictor.save(path)
    return path


@pytest.mark.parametrize("case", list(OTHERS))
def test_equal_weights_in_another_function_are_refused(case: str, saved: Path) -> None:
    make, words = OTHERS[case]
    other = make()
    assert fingerprint(other) == fingerprint(Net())
    with pytest.raises(InputError, match=f"the model differs from the one calibrated: .*{words}") as caught:
        load(saved, other)
    assert "\n" not in str(caught.value)


def test_the_same_model_comes_back(saved: Path) -> None:
    """Whether it ran before or not, on whatever device and from whatever folder its attributes say it is."""
    fresh, used = Net(), Net()
    used(CAL[0][:2])
    used.place, used.folder, used.name_or_path = "cuda:1", "/home", "copy"  # type: ignore[assignment]
    for model in (fresh, used, Net().train(), nn.DataParallel(Net())):
        assert load(saved, model).predict(CAL[0][:3], seed=1).mask.shape == (3, 4)
    stored = read(saved)[0]["model"]["structure"]
    assert "place" not in stored[""]
    assert "folder" not in stored[""]
    assert stored[""]["scale"] == 1.0
    assert stored["act"] == {CLASS: "torch.nn.modules.activation.ReLU", "inplace": False}


def test_what_no_structure_tells_the_logits_do(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a method changed between calibration and loading."""
    honest = Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, images: -honest(self, images))
    with pytest.raises(InputError, match=r"its logit of class \d on fixed input \d is .*, expected .* within"):
        load(saved, Net())
    monkeypatch.setattr(Net, "forward", lambda self, images: honest(self, images)[:, :3])
    with pytest.raises(InputError, match=r"it gives logits \[4, 3\], expected \[4, 4\]"):
        load(saved, Net())
    monkeypatch.setattr(Net, "forward", lambda self, images: honest(self, images) * torch.nan)
    with pytest.raises(InputError, match="it gives no finite logits"):
        load(saved, Net())


def test_a_callable_is_known_by_its_logits(tmp_path: Path) -> None:
    model, path = Net(), tmp_path / "p.safetensors"
    with pytest.warns(KeepcoverWarning, match="right on only"):
        calibrate(lambda x: model(x), CAL, **ASK, fingerprint="mine").save(path)
    load(path, lambda x: model(x), fingerprint="mine")
    load(path, model, fingerprint="mine")
    with pytest.raises(InputError, match="its logit of class"):
        load(path, lambda x: -model(x), fingerprint="mine")
    with pytest.raises(InputError, match="fingerprint yours, expected mine"):
        load(path, lambda x: model(x), fingerprint="yours")


def test_a_string_stands_for_a_module_too(tmp_path: Path) -> None:
    """For modules whose attributes remember their training: the structure is then left alone."""
    trained = changed(lambda m: setattr(m, "best_accuracy", 0.9))
    fresh = changed(lambda m: setattr(m, "best_accuracy", 0.0))
    for given in (None, "mine"):
        path = tmp_path / f"{given}.safetensors"
        with pytest.warns(KeepcoverWarning, match="right on only"):
            calibrate(trained, CAL, **ASK, fingerprint=given).save(path)
    load(tmp_path / "mine.safetensors", fresh, fingerprint="mine")
    with pytest.raises(InputError, match=r"attribute 'best_accuracy' of the model is 0\.0, expected 0\.9"):
        load(tmp_path / "None.safetensors", fresh)


def test_what_changes_as_a_model_runs_is_no_structure(tmp_path: Path) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(images)

    with pytest.warns(KeepcoverWarning, match="right on only"):
        calibrate(Counting(), CAL, **ASK).save(tmp_path / "p.safetensors")
    used = Counting()
    used(CAL[0])
    for model in (Counting(), used):
        load(tmp_path / "p.safetensors", model)


def test_a_model_that_takes_no_probes_is_known_by_the_rest(tmp_path: Path) -> None:
    model, path = Net(), tmp_path / "p.safetensors"
    known = {tuple(row.tolist()) for row in CAL[0].flatten(1)}

    def picky(images: Tensor) -> Tensor:
        if len(images) == 4 and tuple(images[0].flatten().tolist()) not in known:
            raise KeyError("never seen")
        return model(images)

    predictor = calibrate(picky, CAL, **{**ASK, "method": "cp", "sigma": 0.0}, fingerprint="mine")
    predictor.save(path)
    assert "probe_outputs" not in read(path)[1]
    load(path, picky, fingerprint="mine")


def test_wrappers_are_looked_through() -> None:
    model = Net()
    compiled = torch.compile(model)
    for wrapped in (nn.DataParallel(model), compiled, nn.DataParallel(compiled)):  # type: ignore[arg-type]
        assert unwrapped(wrapped) is model
        assert fingerprint(wrapped) == fingerprint(model)
        assert structure(wrapped) == structure(model)


def test_a_script_and_its_import_are_one(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """Calibrated by ``python net.py``, served by ``--model net:build``, or by ``--model package.net:build``."""
    for name in ("__main__", "test_fingerprint", "package.tests.engine.test_fingerprint"):
        monkeypatch.setattr(Net, "__module__", name)
        load(saved, Net())
    monkeypatch.setattr(Net, "__module__", "other.test_fingerprint")
    with pytest.raises(InputError, match=r"the model is a other\.test_fingerprint\.Net, expected tests"):
        load(saved, Net())


def test_a_network_of_ours_is_known_wherever_its_class_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = SmallCNN(1, 4).eval(), tmp_path / "predictor.safetensors"
    with monkeypatch.context() as before:
        before.setattr(SmallCNN, "__module__", "keepcover.models.small_cnn")
        calibrate(model, (torch.rand(120, 1, 8, 8), CAL[1]), **ASK).save(path)
    load(path, model)
    monkeypatch.setattr(SmallCNN, "__module__", "elsewhere.small_cnn")
    with pytest.raises(InputError, match=r"the model is a elsewhere\.small_cnn\.SmallCNN, expected keepcover"):
        load(path, model)


def test_rounding_of_another_machine_is_tolerated(saved: Path) -> None:
    """Logits that TF32 would give pass; a tenth more does not."""
    identity = load(saved, Net()).identity
    assert identity is not None
    assert identity.outputs is not None
    smoother, logits = Smoother(Net(), 0.1), identity.outputs
    spread = logits.max() - logits.min()
    for share, fits in ((1e-3, True), (0.1, False)):
        moved = logits + share * spread * torch.tensor([1.0, -1.0, 1.0, -1.0])
        known = Identity(identity.fingerprint, identity.structure, identity.inputs, moved)
        if fits:
            known.refuse_other(smoother)
        else:
            with pytest.raises(InputError, match="its logit of class"):
                known.refuse_other(smoother)


def test_tables_may_differ_in_their_last_bits() -> None:
    table = torch.arange(1000.0).sin()
    one, two = (
        changed(lambda m: setattr(m, "table", table)),
        changed(lambda m: setattr(m, "table", table.double().float() * (1 + 1e-7))),
    )
    inputs = InputRange.of(CAL[0])
    assert inputs.shape is not None
    known = Identity.of(Smoother(one, 0.1), probes(inputs.shape, inputs.low, inputs.high))
    known.refuse_other(Smoother(two, 0.1))
    with pytest.raises(InputError, match="attribute 'table'"):
        known.refuse_other(Smoother(changed(lambda m: setattr(m, "table", table.flip(0))), 0.1))


def test_probes_are_the_same_everywhere() -> None:
    """Of a shape and range, in it, all different, and the very numbers of every version."""
    for shape in ((3,), (1, 4, 4), (3, 32, 32)):
        found = probes(shape, -1.0, 3.0)
        assert found.shape == (4, *shape)
        assert found.min() >= -1
        assert found.max() <= 3
        assert len(found.flatten(1).unique(dim=0)) == 4
    expected = [0.14015752, 0.24865252, 0.12816352]
    assert probes((3,))[0].tolist() == pytest.approx(expected, abs=1e-7)


def test_probes_see_a_model_as_it_runs() -> None:
    """In eval mode, whatever mode it was left in, without a second warning."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4))
    first, second = (probe_logits(Smoother(model, 0.1), probes((1, 4, 4))) for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert all(module.training for module in model.modules())


def test_structure_is_json() -> None:
    model = Net()
    model.numbers = [float("inf"), float("nan"), 1j, None]  # type: ignore[assignment]
    model.kind = torch.float16  # type: ignore[assignment]
    model.anything = object()  # type: ignore[assignment]
    found = structure(model)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found[""]["kind"] == "torch.float16"
    assert "anything" not in found[""]
    assert set(found) == {"", "first", "last", "act"}

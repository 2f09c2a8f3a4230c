"""A denoiser of any size and colour, its file, its training, and a classifier behind it."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import keepcover
from keepcover import Gaussian, InputError, KeepcoverWarning, Laplace, Smoother, Stream
from keepcover.attacks import NoisyModel
from keepcover.models import Denoised, Denoiser, SmallCNN, load_denoiser
from keepcover.models.checkpoints import weights_bytes
from keepcover.models.denoiser import BUNDLED
from keepcover.specs import load_model
from keepcover.training.denoiser import DenoiserRecipe, read_images, train_denoiser
from tests.cli.runner import as_json, refused, run
from tests.toys import nearest, toy

SMALL: dict[str, Any] = {"widths": (8, 8, 8, 8), "blocks": (1, 1, 1, 1)}


@pytest.fixture(scope="module")
def small() -> Denoiser:
    """Random weights, all of which matter: a fresh network would begin as the identity of its shortcut."""
    torch.manual_seed(0)
    denoiser = Denoiser(**SMALL).eval()
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.normal_(std=0.2)
    return denoiser


# -- the network -------------------------------------------------------------------------------------------------------


def test_the_bundled_architecture_is_small_and_cheap() -> None:
    """At most 6 M parameters, which are 12 MB in float16, and little more arithmetic than a ResNet-50 (4.1 GMAC)."""
    denoiser, counted = Denoiser(), [0.0]

    def count(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        taps = layer.weight[0, 0].numel() * inputs[0].shape[1] * output.shape[1]
        counted[0] += taps * (inputs[0] if isinstance(layer, nn.ConvTranspose2d) else output)[0, 0].numel()

    for layer in denoiser.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.register_forward_hook(count)
    denoiser(torch.rand(1, 3, 32, 32), 0.25)
    assert sum(parameter.numel() for parameter in denoiser.parameters()) <= 6_000_000
    assert 4e9 < counted[0] * 7**2 < 4.6e9  # at 224 x 224


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (28, 28), (33, 50), (16, 64)])
def test_images_of_any_size(small: Denoiser, shape: tuple[int, int]) -> None:
    images = torch.rand(3, 3, *shape)
    found = small(images, 0.25)
    assert found.shape == images.shape
    # Filling up repeats the last pixel: the image that is filled up already has the same answer in its own part.
    filled = nn.functional.pad(images, (0, -shape[1] % 16, 0, -shape[0] % 16), mode="replicate")
    torch.testing.assert_close(found, small(filled, 0.25)[..., : shape[0], : shape[1]])


def test_every_image_has_its_sigma(small: Denoiser) -> None:
    images, sigmas = torch.rand(3, 3, 16, 16), torch.tensor([0.1, 0.25, 0.9])
    together = small(images, sigmas)
    for k, sigma in enumerate(sigmas):
        torch.testing.assert_close(together[k], small(images[k : k + 1], float(sigma))[0])
    assert not torch.allclose(small(images, 0.1), small(images, 0.9), atol=0.01)


def test_grey_is_three_equal_channels(small: Denoiser) -> None:
    grey = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(small(grey, 0.3), small(grey.expand(-1, 3, -1, -1), 0.3).mean(dim=1, keepdim=True))


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 2, 8, 8), (3, 8, 8)])
def test_other_channels_are_refused(small: Denoiser, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"3 channels, or 1 for grey.*train one on images of that kind"):
        small(torch.rand(shape), 0.25)
    with pytest.raises(InputError, match=r"images .* of 4 channels"):
        Denoiser(4, **SMALL)(torch.rand(2, 3, 8, 8), 0.25)


def test_a_file_says_which_network_it_holds(small: Denoiser, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(weights_bytes(small, small.about))
    read, images = load_denoiser(file), torch.rand(2, 3, 16, 16)
    assert (read.sigmas, read.widths) == (small.sigmas, small.widths)
    torch.testing.assert_close(read(images, 0.25), small(images, 0.25), atol=0.01, rtol=0.01)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"is not a readable denoiser .*checksum"):
        load_denoiser(file)
    file.write_bytes(weights_bytes(SmallCNN(), {}))
    with pytest.raises(InputError, match="holds no denoiser"):
        load_denoiser(file)
    with pytest.raises(
        InputError, match=r"^no denoiser at nowhere.safetensors; give a file that keepcover train denoiser wrote$"
    ):
        load_denoiser("nowhere.safetensors")


def test_the_bundled_denoiser_is_small_sound_and_removes_noise() -> None:
    """At most 12 MB, as its card says, and nearer to smooth pictures, in colour and grey, than the noisy ones are."""
    content, card = BUNDLED.read_bytes(), json.loads(BUNDLED.with_suffix(".json").read_text())
    assert len(content) <= 12_000_000
    assert hashlib.sha256(content).hexdigest() == card["sha256"]
    denoiser, clean = load_denoiser(), nn.functional.interpolate(photographs(4), (40, 50), mode="bilinear")
    assert list(denoiser.sigmas) == card["recipe"]["sigmas"]
    generator = torch.Generator().manual_seed(0)
    for sigma, least in ((0.1, 8), (0.25, 10), (0.5, 12)):  # decibels gained; 3 to 5 more were seen
        for images in (clean, clean[:, :1]):
            noisy = images + sigma * torch.randn(images.shape, generator=generator)
            with torch.no_grad():
                error = ((denoiser(noisy, sigma) - images) ** 2).mean() / sigma**2
            assert -10 * math.log10(float(error)) > least


# -- a classifier behind it --------------------------------------------------------------------------------------------


def test_a_smoother_binds_it_to_its_noise(small: Denoiser) -> None:
    classifier = SmallCNN(3, 4).eval()
    model, images = keepcover.denoised(classifier, small), torch.rand(5, 3, 12, 12)
    smoother, stream = Smoother(model, 0.3, progress=False), Stream(1, "test")
    noisy = Gaussian(0.3).noisy(images, stream, torch.arange(5), range(2))
    want = classifier(small(noisy.flatten(0, 1), 0.3)).view(5, 2, 4)
    torch.testing.assert_close(smoother.logits(images, 2, stream), want)
    with pytest.raises(InputError, match="must know the noise"):
        model(images)
    prints = {keepcover.fingerprint(m) for m in (model, smoother.model, Smoother(model, 0.5).model)}
    assert len(prints) == 3  # sigma is part of what is certified
    torch.testing.assert_close(Smoother(model, 0.0).logits(images, 1, stream)[:, 0], classifier(images))


def test_loaded_weights_are_bound_as_others_are(small: Denoiser) -> None:
    """They bring the sigma of the model that was saved, to one that was bound to nothing, or to no noise."""
    classifier, images = SmallCNN(3, 4).eval(), torch.rand(2, 3, 8, 8)
    tuned = keepcover.denoised(classifier, small).under_noise(Gaussian(0.25))
    for model in (
        keepcover.denoised(classifier, small),
        keepcover.denoised(classifier, small).under_noise(Gaussian(0)),
    ):
        model.load_state_dict(tuned.state_dict())
        torch.testing.assert_close(model.under_noise(Gaussian(0.25))(images), tuned(images))


def test_what_cannot_be_denoised(small: Denoiser) -> None:
    model = keepcover.denoised(SmallCNN(3, 4).eval(), small)
    with pytest.raises(InputError, match="denoises already"):
        keepcover.denoised(nn.Sequential(model), small)
    with pytest.raises(InputError, match="expected a torch module"):
        keepcover.denoised(lambda x: x, small)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected a denoiser or its file, got Conv2d; a network of your own"):
        inspect.unwrap(keepcover.denoised)(SmallCNN(3, 4), nn.Conv2d(3, 3, 1))
    with pytest.warns(KeepcoverWarning, match=r"trained at sigma 0.05 to 1 and has never seen sigma 2"):
        Smoother(model, 2.0)


# -- training ----------------------------------------------------------------------------------------------------------


def photographs(count: int = 60) -> torch.Tensor:
    """Smooth pictures: a denoiser has something to learn."""
    coarse = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(coarse, 16, mode="bicubic").clamp(0, 1)


def test_training_removes_noise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = DenoiserRecipe(steps=40, pixels=2**12, lr=4e-3)
    card = train_denoiser(
        photographs(), recipe, tmp_path / "own.safetensors", start=Denoiser(**SMALL), say=lambda _: None
    )
    assert json.loads((tmp_path / "own.json").read_text()) == json.loads(json.dumps(card))
    assert card["images"] == {"16 x 16": 54}
    assert card["held_out"] == 6
    # Noise alone leaves 12.0 dB at sigma 0.25 and 6.0 dB at 0.5.
    assert card["psnr_held_out"]["0.25"] > 15
    assert card["psnr_held_out"]["0.5"] > 12
    read = load_denoiser(tmp_path / "own.safetensors")
    clean = photographs()[:6]
    noisy = clean + 0.25 * torch.randn(clean.shape)
    assert ((read(noisy, 0.25) - clean) ** 2).mean() < 0.5 * 0.25**2
    assert ((read(noisy[:, :1], 0.25) - clean[:, :1]) ** 2).mean() < 0.25**2
    less, more = replace(recipe, steps=30, lr=3e-3), tmp_path / "more.safetensors"
    again = train_denoiser(photographs(), less, more, start=tmp_path / "own.safetensors", say=lambda _: None)
    assert again["psnr_held_out"]["0.25"] > card["psnr_held_out"]["0.25"]


def test_training_takes_the_steps_asked_for_and_leaves_the_global_generator(tmp_path: Path) -> None:
    assert [DenoiserRecipe(steps=steps).steps_per_epoch for steps in (7, 100, 150, 1500)] == [7, 100, 75, 100]
    small, before = Denoiser(**SMALL), torch.manual_seed(5).get_state()
    for start, steps in ((None, 2), (small, 102)):  # 102 are two epochs of 51
        recipe = DenoiserRecipe(steps=steps, pixels=2**9)
        card = train_denoiser(photographs(), recipe, tmp_path / f"{steps}.safetensors", start=start, say=str)
        assert card["steps"] == steps
        assert torch.equal(torch.get_rng_state(), before)


def test_training_by_minutes_takes_as_many_steps_as_fit(tmp_path: Path) -> None:
    recipe = DenoiserRecipe(minutes=1e-3, pixels=2**9)
    card = train_denoiser(
        photographs(), recipe, tmp_path / "own.safetensors", start=Denoiser(**SMALL), say=lambda _: None
    )
    assert card["steps"] == 100  # at least one epoch


def test_training_towards_a_classifier_keeps_its_outputs(tmp_path: Path) -> None:
    """Under the divergence alone the classifier's answers move towards its clean ones, and its weights stay."""
    torch.manual_seed(0)
    images, classifier = photographs(), nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(192, 5))
    with torch.no_grad():
        classifier[2].weight.mul_(8)
    before = keepcover.fingerprint(classifier)
    start = Denoiser(**SMALL)
    noisy = images + 0.5 * torch.randn(images.shape)

    def divergence(denoiser: Denoiser) -> float:
        with torch.no_grad():
            clean, said = (classifier(x).log_softmax(dim=1) for x in (images, denoiser(noisy, 0.5)))
        return float(nn.functional.kl_div(said, clean, reduction="batchmean", log_target=True))

    untrained = divergence(start)
    recipe = DenoiserRecipe((0.4, 0.6), steps=30, pixels=2**12, lr=4e-3, stability=1e3, grey=0.0)
    card = train_denoiser(
        images,
        recipe,
        tmp_path / "own.safetensors",
        start=start,
        classifier=classifier,
        towards="linear",
        say=lambda _: None,
    )
    assert card["towards"] == "linear"
    assert keepcover.fingerprint(classifier) == before
    assert divergence(load_denoiser(tmp_path / "own.safetensors")) < 0.7 * untrained


def test_what_cannot_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no images; expected files that end in"):
        read_images(tmp_path / "empty")
    with pytest.raises(InputError, match="size of at least 1 pixel, got 0"):
        read_images(tmp_path, size=0)
    with pytest.raises(InputError, match="FOLDER@SIDE"):
        read_images(f"{tmp_path}@many")
    for images, words in (
        (torch.rand(5, 8, 8), "images .n, c, h, w."),
        ([torch.rand(9, 3, 8, 8), torch.rand(9, 1, 8, 8)], "one number of channels"),
        (torch.rand(3, 3, 8, 8), "at least 10 images"),
        (255 * torch.rand(30, 3, 8, 8), "divide 8-bit pixels by 255"),
    ):
        with pytest.raises(InputError, match=words):
            train_denoiser(images, DenoiserRecipe(steps=1), tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"cannot take images of shape \(3, 8, 8\) .*number of channels"):
        train_denoiser(
            torch.rand(30, 3, 8, 8), DenoiserRecipe(steps=1), tmp_path / "x.safetensors", classifier=SmallCNN(1, 4)
        )
    with pytest.raises(InputError, match=r"expected logits .* got tuple from Sequential; wrap it"):
        train_denoiser(
            torch.rand(30, 3, 8, 8),
            DenoiserRecipe(steps=1),
            tmp_path / "x.safetensors",
            classifier=nn.Sequential(nn.Flatten(), nn.LSTM(192, 4)),
        )
    with pytest.raises(InputError, match=r"is for 3 channels, the images have 2; .*--channels 3"):
        train_denoiser(
            torch.rand(30, 2, 8, 8), DenoiserRecipe(steps=1), tmp_path / "x.safetensors", start=Denoiser(**SMALL)
        )
    bad: list[dict[str, Any]] = [{"sigmas": (0.5, 0.1)}, {"stability": -1.0}, {"stability": float("nan")}]
    for wrong in ({"steps": 1, "minutes": 1.0}, {}, {"steps": 0}, *({"steps": 1, **one} for one in bad)):
        with pytest.raises(InputError, match="expected"):
            DenoiserRecipe(**wrong)


def test_folders_and_mosaics(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(0, 256, (40, 60, 3), dtype=torch.uint8).numpy()
    (tmp_path / "deep").mkdir()
    image.fromarray(pixels).save(tmp_path / "deep" / "a.png")
    image.fromarray(pixels[:, :, 0]).save(tmp_path / "b.png")
    image.fromarray(pixels).resize((300, 200)).save(tmp_path / "c.png")
    (tmp_path / "notes.txt").write_text("no image")
    small, large = read_images(tmp_path)
    assert (small.shape, large.shape) == ((2, 3, 40, 40), (1, 3, 160, 160))
    assert torch.equal(small[1], torch.from_numpy(pixels[:, 10:50].transpose(2, 0, 1)))  # b.png is before deep/a.png
    (tiles,) = read_images(f"{tmp_path}/deep/*.png@20")
    assert tiles.shape == (6, 3, 20, 20)
    assert torch.equal(tiles[4], torch.from_numpy(pixels[20:, 20:40].transpose(2, 0, 1)))  # row by row
    # Grey images have one noise per pixel, and so a denoiser of one channel; the user may say otherwise.
    (grey,) = read_images(tmp_path / "b.png*")
    assert torch.equal(grey[0, 0], torch.from_numpy(pixels[:, 10:50, 0]))
    assert [group.shape[1] for group in read_images([f"{tmp_path}/b.png*", f"{tmp_path}/deep"])] == [3]
    assert read_images(f"{tmp_path}/b.png*", channels=3)[0].shape[1] == 3
    assert torch.equal(
        read_images(f"{tmp_path}/deep", channels=1)[0][0, 0],
        torch.from_numpy(pixels[:, 10:50].astype(float).mean(axis=2).round()).byte(),
    )
    with pytest.raises(InputError, match="1 channel for grey images or 3 for colour, got 2"):
        read_images(tmp_path, channels=2)


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_it_calibrates_saves_loads_is_audited_and_exported(small: Denoiser, tmp_path: Path) -> None:
    model, data, test = keepcover.denoised(nearest(), small), toy(300, seed=1), toy(60, seed=3)
    options = {"epsilon": 0.1, "sigma": 0.15, "draws": 8, "seed": 1}
    predictor = keepcover.calibrate(model, data, **options)
    predictor.save(tmp_path / "p.safetensors")
    loaded = keepcover.load(tmp_path / "p.safetensors", keepcover.denoised(nearest(), small))
    want = predictor.predict(test[0], seed=2).mask
    assert torch.equal(loaded.predict(test[0], seed=2).mask, want)
    for other in (nearest(), keepcover.denoised(nearest(), Denoiser(**SMALL))):
        with pytest.raises(InputError, match="fingerprint"):
            keepcover.load(tmp_path / "p.safetensors", other)
    with pytest.raises(InputError, match="takes Gaussian noise away"):
        keepcover.calibrate(model, data, epsilon=0.1, noise=Laplace(0.2))
    found = keepcover.audit(predictor, test, attacks=["softmax"], steps=3, draws=2, seed=0)
    assert {row.attack for row in found.rows} == {"none", "softmax"}
    # The attacker's model is the whole one, bound to the defender's sigma: a gradient reaches the image through both.
    bound = NoisyModel(model, 0.15, 2, Stream(0, "attack")).model
    assert isinstance(bound, Denoised)
    assert keepcover.fingerprint(bound) == keepcover.fingerprint(predictor.running.model)
    here = test[0][:2].clone().requires_grad_()
    (slope,) = torch.autograd.grad(bound(here)[:, 0].sum(), here)
    step = 1e-3 * torch.randn(here.shape)
    with torch.no_grad():
        moved = (bound(here + step) - bound(here - step))[:, 0].sum() / 2
    torch.testing.assert_close((slope * step).sum(), moved, rtol=0.05, atol=1e-5)
    pytest.importorskip("onnxruntime", reason="ONNX models run in onnxruntime: pip install '.[onnx]'")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript: pip install '.[test]'")
    dynamic = {"images": {0: torch.export.Dim.DYNAMIC}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(bound, (test[0],), tmp_path / "model.onnx", dynamic_shapes=dynamic, verbose=False)
    exported = keepcover.calibrate(load_model(str(tmp_path / "model.onnx")), data, **options)
    assert float((exported.predict(test[0], seed=2).mask == want).double().mean()) > 0.99


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A denoiser of one's own kind of images, then a model behind it, by its name alone."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for number, picture in enumerate((photographs(12) * 255).to(torch.uint8)):
        image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / "photos" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_denoised.py").write_text("from tests.toys import nearest as make\n")
    words = ["train", "denoiser", "--data", "photos", "--out", "own.safetensors", "--steps", "1", "--pixels", "512"]
    card = as_json(capsys, *words)
    assert card["steps"] == 1
    assert card["data"] == "photos"
    assert "holds no images" in refused(capsys, *words[:3], ".github", *words[4:])
    save_file(dict(zip(("images", "labels"), toy(200), strict=True)), tmp_path / "toy.safetensors")
    calibrate = ["calibrate", "--data", "toy.safetensors", "--epsilon", "0.1", "--sigma", "0.2", "--draws", "2"]
    calibrate += ["--calibration-draws", "2", "--out", "p.safetensors", "--model"]
    as_json(capsys, *calibrate, "denoised@own.safetensors:own_denoised:make")
    model = load_model("denoised@own.safetensors:own_denoised:make")
    assert isinstance(model, Denoised)
    loaded = keepcover.load(tmp_path / "p.safetensors", model)
    assert float(loaded.running.model.sigma) == 0.2  # type: ignore[union-attr]
    assert "denoises already" in refused(
        capsys, *calibrate, "denoised@own.safetensors:denoised@own.safetensors:own_denoised:make"
    )
    assert "needs trained weights" in refused(capsys, *calibrate, "denoised@own.safetensors:small-cnn")


def test_a_model_that_has_a_denoiser_is_not_told_to_get_one(
    small: Denoiser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"method": "rcp1", "epsilon": 0.1, "sigma": 1.0, "draws": 1, "seed": 0}
    data = toy(100, seed=1)
    with pytest.warns(
        KeepcoverWarning, match="is right on only .*; put a denoiser before it .*fine-tune it under this"
    ):
        keepcover.calibrate(nearest(), data, **asked)
    with pytest.warns(KeepcoverWarning, match="is right on only .* labels; fine-tune it under this noise"):
        predictor = keepcover.calibrate(keepcover.denoised(nearest(), small), data, **asked)
    predictor.save(tmp_path / "p.safetensors")  # which knows it without the model
    assert f"Warning: {predictor.warning}" in run(capsys, "show", tmp_path / "p.safetensors")[1].replace("\n", " ")

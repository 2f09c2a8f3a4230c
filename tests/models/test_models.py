"""Networks and their weights: normalisation inside, public parameter names, nothing executed on loading."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.models import CifarResNet, Denoiser, Normalize, ResNet50, SmallCNN, is_named, load_weights, network
from keepcover.models.checkpoints import weights_bytes
from keepcover.models.networks import CIFAR

MEAN, STD = CIFAR


def small(classes: int = 3, seed: int = 0) -> CifarResNet:
    torch.manual_seed(seed)
    return CifarResNet(8, classes)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds: everything but the normalisation constants."""
    return {k: v.clone() for k, v in model.state_dict().items() if not k.startswith("normalize.")}


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def refused(match: str, model: nn.Module, path: Path) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(InputError, match=match) as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# -- the networks ------------------------------------------------------------------------------------------------------


def test_normalisation_is_per_channel_and_inside() -> None:
    images = torch.rand(2, 3, 32, 32)
    normalised = Normalize(MEAN, STD)(images)
    for channel in range(3):
        torch.testing.assert_close(normalised[:, channel], (images[:, channel] - MEAN[channel]) / STD[channel])
    model = small().eval()
    x = torch.relu(model.bn1(model.conv1(normalised)))
    features = model.layer3(model.layer2(model.layer1(x))).mean(dim=(2, 3))
    torch.testing.assert_close(model(images), features @ model.fc.weight.T + model.fc.bias)


def test_a_small_cnn_normalises_inside() -> None:
    model, images = (
        SmallCNN(channels=2, classes=4, width=4, mean=(0.1, 0.2), std=(0.5, 2.0)).eval(),
        torch.rand(3, 2, 8, 8),
    )
    plain = SmallCNN(channels=2, classes=4, width=4, mean=(0.0, 0.0), std=(1.0, 1.0)).eval()
    plain.features, plain.head = model.features, model.head
    scaled = (images - torch.tensor([0.1, 0.2]).view(2, 1, 1)) / torch.tensor([0.5, 2.0]).view(2, 1, 1)
    torch.testing.assert_close(model(images), plain(scaled))


def test_an_image_does_not_see_its_neighbours() -> None:
    """In eval mode logits of one image do not depend on the batch."""
    for model, shape in ((small().eval(), (3, 32, 32)), (SmallCNN().eval(), (1, 8, 8))):
        images = torch.rand(4, *shape)
        torch.testing.assert_close(model(images)[2:3], model(images[2:3]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("depth", "blocks"), [(8, 1), (20, 3), (110, 18)])
def test_a_depth_of_6k_plus_2_has_3k_blocks(depth: int, blocks: int) -> None:
    model = CifarResNet(depth, 10)
    assert [len(model.layer1), len(model.layer2), len(model.layer3)] == [blocks] * 3
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in name]
    assert len(convolutions) + 1 == depth  # and the last linear layer


@pytest.mark.parametrize("depth", [2, 7, 18, 52])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(InputError, match=rf"depth of 6 k \+ 2 \(20, 56, 110\), got {depth}"):
        CifarResNet(depth)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "1.", "module.", "module.1.", "1.module."])
@pytest.mark.parametrize("form", ["safetensors", "plain", "wrapped"])
def test_every_form_of_a_checkpoint_loads(form: str, prefix: str, tmp_path: Path) -> None:
    source, target = small(seed=1), small(seed=2)
    assert not same(source, target)
    state = {prefix + name: value for name, value in weights(source).items()}
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    else:
        torch.save(state if form == "plain" else {"state_dict": state, "epoch": 90, "arch": "resnet"}, path)
    assert load_weights(target, path) is target
    assert same(source, target)
    assert not target.training


def test_half_precision_weights_are_loaded_in_float32(tmp_path: Path) -> None:
    source, target = small(seed=1), small(seed=2)
    halves = {k: v.half() if v.is_floating_point() else v for k, v in weights(source).items()}
    save_file(halves, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    for name, value in weights(target).items():
        assert value.dtype == source.state_dict()[name].dtype
        assert torch.equal(value, halves[name].to(value.dtype))


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), SmallCNN, small])
def test_a_models_own_state_comes_back(make: Any, tmp_path: Path) -> None:
    """Any module's own state dict is a plain one, also where its names begin with 1."""
    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    target = make()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    assert same(source, load_weights(target, tmp_path / "w.safetensors"))


class Malicious:
    """A pickle that runs code when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: {"state_dict": {"conv1.weight": bad}}])
def test_a_malicious_pickle_is_refused_and_not_run(wrap: Any, tmp_path: Path) -> None:
    touched, path = tmp_path / "touched", tmp_path / "w.pt"
    torch.save(wrap(Malicious(touched)), path)
    refused("holds more than tensors and is refused; save its state dict as safetensors", small(), path)
    path.write_bytes(pickle.dumps(wrap(Malicious(touched))))
    refused("refused|not a readable checkpoint", small(), path)
    assert not touched.exists()
    pickle.loads(pickle.dumps(Malicious(touched)))  # it would have worked
    assert touched.exists()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(small(classes=10)), path)
    refused(r"fc\.\w+ has shape \(10.*expects \(3.*is the number of classes right\?", small(classes=3), path)
    state = weights(small())
    first = state.pop("bn1.bias")
    save_file(state, path)
    refused(r"does not fit CifarResNet: 1 missing \(first bn1.bias\), 0 unknown", small(), path)
    save_file({**state, "bn1.bias": first, "head.weight": first.clone()}, path)
    refused(r"0 missing, 1 unknown \(first head.weight\)", small(), path)
    save_file(weights(CifarResNet(14, 3)), path)
    refused("0 missing, .* unknown", small(), path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    refused("no weights at", small(), tmp_path / "nothing.safetensors")
    for name in ("w.safetensors", "w.pt"):
        for content in (b"", b"garbage" * 20, b"PK\x03\x04garbage"):
            (tmp_path / name).write_bytes(content)
            refused("not a readable checkpoint|refused", small(), tmp_path / name)
    for value in ([1, 2], {"a": 1}, {"state_dict": [torch.zeros(2)]}, torch.zeros(3)):
        torch.save(value, tmp_path / "w.pt")
        refused("holds no state dict of tensors", small(), tmp_path / "w.pt")


def test_a_torch_file_that_is_compressed_is_refused_unread(tmp_path: Path) -> None:
    """torch stores bytes as they are; 30 kB of zeros, packed, would fill 30 MB, and so on without end."""
    model, path, packed = small(), tmp_path / "w.pt", tmp_path / "packed.pt"
    torch.save(weights(model), path)
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for info in plain.infolist():
            archive.writestr(info.filename, plain.read(info))
    load_weights(model, path)
    refused("holds compressed members, which torch never writes", model, packed)


# -- the public weights ------------------------------------------------------------------------------------------------


def test_parameter_names_are_those_of_the_public_checkpoints(assets: Path) -> None:
    files = [path for path in (assets / "models").glob("*resnet*.safetensors") if "logits" not in path.name]
    assert len(files) >= 5
    for path in files:
        card = json.loads(path.with_suffix(".json").read_text())
        own = weights(CifarResNet(110, card["num_classes"]))
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert shapes == {name: tuple(value.shape) for name, value in own.items()}
        assert card["normalization"]["mean"] == list(MEAN)
        assert card["normalization"]["std"] == list(STD)


def test_public_weights_load_and_answer(assets: Path) -> None:
    """Finite logits that differ between images; on a flat grey image and its noisy copy alike."""
    model = load_weights(CifarResNet(110, 10), assets / "models" / "cifar10-resnet110-sigma0.25.safetensors")
    images = torch.stack([torch.full((3, 32, 32), 0.5), torch.rand(3, 32, 32)])
    with torch.inference_mode():
        logits = model(images)
    assert logits.isfinite().all()
    assert float((logits[0] - logits[1]).abs().max()) > 0.1
    assert float(logits.std(dim=1).min()) > 0.1


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


def test_resnet50_has_torchvisions_names() -> None:
    """320 entries of its state dict; 25 557 032 parameters; a few names and shapes that pin the layout."""
    with torch.device("meta"):
        model = ResNet50()
    state = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.startswith("normalize")}
    assert len(state) == 320
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert state["conv1.weight"] == (64, 3, 7, 7)
    assert state["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert state["layer2.0.conv2.weight"] == (128, 128, 3, 3)
    assert state["layer3.5.bn3.running_var"] == (1024,)
    assert state["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    assert state["layer4.0.downsample.1.num_batches_tracked"] == ()
    assert state["fc.weight"] == (1000, 2048)
    assert {name.split(".")[0] for name in state} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}


def test_resnet50_halves_five_times_and_strides_in_the_middle(tmp_path: Path) -> None:
    """224 pixels become 7; the stride sits on the 3x3 convolution; a smoothing checkpoint with its prefixes loads."""
    torch.manual_seed(0)
    model = ResNet50(classes=5).eval()
    with torch.inference_mode():
        image = torch.rand(1, 3, 64, 64)
        stem = model.maxpool(torch.relu(model.bn1(model.conv1(model.normalize(image)))))
        deep = model.layer4(model.layer3(model.layer2(model.layer1(stem))))
        assert (stem.shape[-1], deep.shape[-1]) == (16, 2)
        assert torch.allclose(model(image), model.fc(deep.mean(dim=(2, 3))), atol=1e-5)
    first: Any = model.layer2[0]
    assert (first.conv1.stride, first.conv2.stride, first.conv3.stride) == ((1, 1), (2, 2), (1, 1))
    path = tmp_path / "checkpoint.pth.tar"
    state = {
        f"1.module.{name}": value for name, value in model.state_dict().items() if not name.startswith("normalize")
    }
    torch.save({"state_dict": state, "epoch": 90, "arch": "resnet50"}, path)
    loaded = load_weights(ResNet50(classes=5), path)
    with torch.inference_mode():
        assert torch.equal(loaded(image), model(image))


def test_wide_networks_have_names_and_bodies_that_move() -> None:
    """wrn-D-W by name; mirrored, equal for an image and its mirror image; a body with a new last layer for other classes."""
    torch.manual_seed(0)
    assert [name for name in ("wrn-10-1", "mirrored:wrn-10-1", "wrn-10", "wrn-10-1x") if is_named(name)] == [
        "wrn-10-1",
        "mirrored:wrn-10-1",
    ]
    with pytest.raises(InputError, match="depth D of 6 k"):
        network("wrn-11-1")
    images = torch.rand(2, 3, 32, 32)
    model = network("wrn-10-1", 10).eval()
    with torch.device("meta"):  # the count of the published WRN-28-10
        assert sum(p.numel() for p in network("wrn-28-10").parameters()) == 36_479_194
    mirrored = network("mirrored:wrn-10-1", 10, lambda _: model)
    both = (model(images).softmax(1) + model(images.flip(-1)).softmax(1)) / 2
    assert torch.allclose(mirrored(images).softmax(1), both, atol=1e-6)


def test_a_body_starts_another_task(tmp_path: Path) -> None:
    """Where the number of classes differs, and only where that was asked for, the last layer stays fresh."""
    torch.manual_seed(0)
    source, path = network("wrn-10-1", 10), tmp_path / "ten.safetensors"
    path.write_bytes(weights_bytes(source, {}))
    target = network("wrn-10-1", 3)
    fresh = target.get_parameter("fc.weight").detach().clone()
    with pytest.raises(InputError, match="is the number of classes right"):
        load_weights(target, path)
    load_weights(target, path, new_head=True)
    assert torch.equal(target.get_parameter("fc.weight"), fresh)
    assert torch.equal(target.get_parameter("conv1.weight"), source.get_parameter("conv1.weight").half().float())
    same = load_weights(network("wrn-10-1", 10), path, new_head=True)
    assert torch.equal(same.get_parameter("fc.weight"), source.get_parameter("fc.weight").half().float())


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (lambda: network("small-cnn"), "8b713cf114aeea8c"),
        (lambda: network("cifar-resnet8"), "1e8ee88898ec2cc0"),
        (lambda: network("wrn-10-1"), "1bdc965f6ba2deae"),
        (lambda: network("resnet50"), "b2b2694836a8d05d"),
        (lambda: network("efficientnet-lite0"), "6c7394ff5f610c26"),
        (lambda: network("unet-8"), "c11d55c785bfa3ed"),
        (Denoiser, "4580b52914596e20"),
    ],
)
def test_networks_keep_their_modules(make: Any, digest: str) -> None:
    """Predictors and stores know a network by them: one more that does nothing, and all that was saved is refused."""
    with torch.device("meta"):
        parts = [f"{path} {type(part).__name__}" for path, part in make().named_modules()]
    assert hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] == digest

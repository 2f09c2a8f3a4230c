"""The UNet for segmentation: any size, its name, its file, no mixing of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from keepcover.models import UNet, is_named, load_weights, network
from keepcover.models.checkpoints import weights_bytes


@pytest.fixture(scope="module")
def unet() -> UNet:
    """Random weights, all of which matter: a fresh network says zero of every pixel."""
    torch.manual_seed(0)
    model = UNet(5, 4).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (45, 60), (33, 50)])
def test_logits_of_every_pixel(unet: UNet, shape: tuple[int, int]) -> None:
    images = torch.rand(3, 3, *shape)
    found = unet(images)
    assert found.shape == (3, 5, *shape)
    filled = nn.functional.pad(images, (0, -shape[1] % 16, 0, -shape[0] % 16), mode="replicate")
    torch.testing.assert_close(found, unet(filled)[..., : shape[0], : shape[1]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], unet(images[1:2])[0], atol=1e-4, rtol=1e-4)


def test_a_pixel_is_answered_from_where_it_is(unet: UNet) -> None:
    """The gradient of one pixel's logits is largest around it: down and up again arrive at the same place."""
    images = torch.rand(1, 3, 64, 64, requires_grad=True)
    unet(images)[0, :, 40, 10].square().sum().backward()
    assert images.grad is not None
    near = images.grad[0, :, 32:48, 2:18].abs().mean()
    assert near > 2 * images.grad.abs().mean()


def test_it_has_a_name_and_a_file(unet: UNet, tmp_path: Path) -> None:
    assert is_named("unet-4")
    (tmp_path / "unet.safetensors").write_bytes(weights_bytes(unet, {"architecture": "unet-4"}))
    fresh = load_weights(network("unet-4", 5), tmp_path / "unet.safetensors").eval()
    images = torch.rand(2, 3, 20, 30)
    torch.testing.assert_close(fresh(images), unet(images), atol=0.05, rtol=0.05)
    assert 0.9e6 < sum(parameter.numel() for parameter in network("unet-16", 11).parameters()) < 1.1e6

"""What only a GPU can show. Run as a script where pytest is missing: ``PYTHONPATH=src python tests/noise/test_cuda.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parents[2] / "src"


def kernel_agrees_with_tensor_operations() -> None:
    """The words are the same, so the numbers differ by the rounding of log, sine and cosine: at most 1e-5 of 7.5.

    Noisy images are on the lattice on both sides. They differ only where a sum is that near to the middle between two points,
    about one in a thousand, and then by one step. Where images are float64 the sum is made in float64: above 2^30, float32 has
    steps of 128, and images rounded to them first would be further off.
    """
    from keepcover.noise.stream import Stream, fused, lattice

    assert fused(torch.device("cuda", 0)), "Triton is missing"
    for shape in ((3, 32, 32), (1, 5, 7), (4,), (3, 224, 224)):
        stream, ids = Stream(2**100 + 7, "test"), torch.tensor([5, 0, 2**40 + 1, 2**62])
        images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
        for draws in (range(3), range(5, 9), range(1, 7, 2), range(2**20, 2**20 + 2)):
            for given in (images, images.double() / 3, images.half()):
                there = stream.noisy(given.cuda(), ids.cuda(), draws, 0.25).cpu()
                here = stream.noisy(given, ids, draws, 0.25)
                assert there.dtype == torch.float32
                assert torch.equal(there, (there / lattice(0.25)).round() * lattice(0.25))
                assert float((there - here).abs().max()) <= lattice(0.25)
                assert float((there != here).double().mean()) < 0.01 + 3 / here.numel()
            far = 2.0**30 + 1 / 3 + 8 * images.double()
            there = stream.noisy(far.cuda(), ids.cuda(), draws, 32.0).cpu()
            exact = far[:, None] + 32 * stream.gaussian(ids, draws, shape).double()
            assert float((there.double() - exact).abs().max()) <= 64 + lattice(
                32.0
            )  # half a step of float32, one of the lattice
            plain = stream.gaussian(ids.cuda(), draws, shape).cpu()
            torch.testing.assert_close(plain, stream.gaussian(ids, draws, shape), rtol=0, atol=1e-5)
            radii = [
                noise.flatten(2).unfold(2, 2, 2).norm(dim=-1) for noise in (plain, stream.gaussian(ids, draws, shape))
            ]
            torch.testing.assert_close(*radii, rtol=1e-4, atol=0)  # small ones too


def a_stream_gives_what_logits_gives() -> None:
    """Prefetching, late checks and large copies to the host change nothing; a NaN is found before the stream ends."""
    from keepcover.engine.smoother import Smoother
    from keepcover.errors import InputError
    from keepcover.noise.stream import Stream

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 5)).cuda()
    smoother = Smoother(model, 0.5, batch_size=64, progress=False)
    images, stream = torch.rand(103, 3, 4, 4), Stream(3, "test")
    kept = smoother.reduce(images, 7, stream, lambda _, logits: logits)
    torch.testing.assert_close(kept, smoother.logits(images, 7, stream).cpu(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    seen = False
    try:
        smoother.reduce(images, 7, stream, lambda _, logits: logits)
    except InputError as error:
        seen = "NaN" in str(error)
    assert seen, "a NaN passed unseen"


def early_exit_gives_the_sets_of_full_drawing() -> None:
    from keepcover.engine.smoother import Smoother
    from keepcover.methods.early_exit import Vote
    from keepcover.prediction.calibration import calibrate

    torch.manual_seed(0)
    centres = torch.rand(6, 48)
    labels = torch.randint(6, (900,))
    images = (centres[labels] + 0.2 * torch.randn(900, 48)).clamp(0, 1).view(-1, 3, 4, 4)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6)).cuda().eval()
    with torch.no_grad():
        model[1].weight.copy_(8 * centres)
        model[1].bias.copy_(-4 * centres.square().sum(dim=1))
    smoother = Smoother(model, 0.25, progress=False)
    predictor = calibrate(smoother, (images[:600], labels[:600]), epsilon=0.125, draws=32, seed=1)
    full = predictor.predict(images[600:], seed=5)
    pays, Vote.pays = (
        Vote.pays,
        lambda *_: True,
    )  # of so small a network all draws at once are faster, and are asked for
    try:
        early = predictor.predict(images[600:], seed=5, early_exit=True)
    finally:
        Vote.pays = pays
    assert torch.equal(full.mask, early.mask)
    assert early.draws_used is not None
    assert float(early.draws_used.double().mean()) < 32


def the_host_never_waits_for_a_batch() -> None:
    """torch raises where an operation makes the host wait for the device; waiting for an event of a past batch is allowed."""
    from keepcover.engine.smoother import Smoother
    from keepcover.noise.stream import Stream
    from keepcover.prediction.calibration import calibrate

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6)).cuda().eval()
    images, labels = torch.rand(600, 3, 4, 4), torch.randint(6, (600,))
    smoother = Smoother(model, 0.25, batch_size=256, progress=False)
    for score, method in (("hps", "exact"), ("aps", "exact"), ("hps", "rscp_plus_bernstein")):
        predictor = calibrate(smoother, (images, labels), score=score, method=method, epsilon=0.125, draws=16, seed=1)
        expected = predictor.predict(images, seed=2).mask
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = predictor.predict(images, seed=2).mask
            smoother.reduce(images, 16, Stream(0, "test"), lambda batch, logits: logits.mean(dim=1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)


def one_compilation_serves_every_batch_size() -> None:
    """And the logits are those of the plain network, to rounding."""
    from torch._dynamo.utils import counters

    from keepcover.engine.smoother import Smoother
    from keepcover.models import SmallCNN
    from keepcover.noise.stream import Stream

    torch.manual_seed(0)
    model, images, stream = SmallCNN().cuda().eval(), torch.rand(300, 1, 8, 8), Stream(1, "test")
    compiled, plain = (Smoother(model, 0.25, compile=flag, progress=False) for flag in (True, False))
    counters.clear()
    for count in (300, 1, 17, 120, 33):
        found, expected = (one.logits(images[:count], 3, stream) for one in (compiled, plain))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def weights_in_8_bits_are_the_bytes_of_a_processor() -> None:
    """A GPU's division by a number is a multiplication, one step of float32 off in some rows."""
    from keepcover.models.checkpoints import as_bytes

    rows = {"weight": torch.randn(5000, 10, generator=torch.Generator().manual_seed(0))}
    here, there = as_bytes(rows), as_bytes({name: value.cuda() for name, value in rows.items()})
    assert all(torch.equal(value, there[name].cpu()) for name, value in here.items())


CHECKS = (
    kernel_agrees_with_tensor_operations,
    a_stream_gives_what_logits_gives,
    early_exit_gives_the_sets_of_full_drawing,
    the_host_never_waits_for_a_batch,
    one_compilation_serves_every_batch_size,
    weights_in_8_bits_are_the_bytes_of_a_processor,
)


def test_on_a_gpu() -> None:
    """In a process of its own: Triton reads kernels' source, which the run-time type checks of the tests would rewrite."""
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, __file__], check=True, env=environment, timeout=600)


if __name__ == "__main__":
    for check in CHECKS:
        check()
        print("passed:", check.__name__)

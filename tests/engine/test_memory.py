"""A smoother that remembers gives the network's own outputs, computes nothing twice, and bounds its memory."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from keepcover.engine.memory import CHUNK, RememberingSmoother
from keepcover.engine.smoother import Smoother
from keepcover.noise import Stream
from tests.toys import nearest, toy


def test_remembered_logits_are_those_of_the_network() -> None:
    """Fewer draws, or the same ones again, cost no pass; more cost the difference; other images, ids or roles cost all."""
    images, passes, model = toy(10)[0], [], nearest()

    def counted(inputs: Tensor) -> Tensor:
        passes.append(len(inputs))
        return model(inputs)

    remembering, plain = RememberingSmoother(counted, 0.2), Smoother(model, 0.2)
    for draws, cost in ((16, 160), (4, 0), (16, 0), (20, 40)):
        passes.clear()
        found = remembering.reduce(images, draws, Stream(0, "test"), lambda batch, logits: logits.flatten(1))
        torch.testing.assert_close(
            found.view(10, draws, 4), plain.logits(images, draws, Stream(0, "test")), rtol=0, atol=1e-5
        )
        assert sum(passes) == cost
    for other, stream, ids in (
        (images + 0.01, Stream(0, "test"), None),
        (images, Stream(0, "attack"), None),
        (images, Stream(0, "test"), torch.arange(10) + 1),
    ):
        passes.clear()
        found = remembering.logits(other, 4, stream, ids)
        torch.testing.assert_close(found, plain.logits(other, 4, stream, ids), rtol=0, atol=1e-5)
        assert sum(passes) == 40


def test_memory_is_bounded_and_what_was_dropped_is_computed_again() -> None:
    images, stream, model = toy(70)[0], Stream(3, "test"), nearest()
    seen: list[int] = []
    remembering = RememberingSmoother(model, 0.2, memory=10_000, look=seen.append, progress=False)
    plain = Smoother(model, 0.2, progress=False)
    for draws in (4, 16, 2, 16):
        want = plain.reduce(images, draws, stream, lambda batch, logits: logits)
        found = remembering.reduce(images, draws, stream, lambda batch, logits: logits)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
        held = sum(outputs.nbytes for outputs in remembering._seen.values())
        assert held <= 10_000
    # 70 images fill three chunks; 16 draws of 4 classes of a full one are 8192 bytes: the first is dropped for the second.
    assert sum(seen) > 70 * 16
    assert CHUNK * 16 * 4 * 4 < 10_000 < 2 * CHUNK * 16 * 4 * 4


def test_the_model_runs_in_one_thread_at_a_time() -> None:
    inside, most, layers = 0, 0, nearest()

    def model(x: Tensor) -> Tensor:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.005)
        inside -= 1
        return layers(x).detach()

    smoother = RememberingSmoother(model, 0.2, lock=threading.Lock(), batch_size=64)
    images, results = toy(64)[0], {}

    def work(i: int) -> None:
        results[i] = smoother.logits(images[i : i + 32], 16, Stream(0, "test"), torch.arange(64)[i : i + 32])

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 2, 3, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    plain = Smoother(layers, 0.2)
    for i, found in results.items():
        want = plain.logits(images[i : i + 32], 16, Stream(0, "test"), torch.arange(64)[i : i + 32])
        torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-5)

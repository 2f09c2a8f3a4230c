"""Smoothing is a pure function of images, ids and stream: how it is batched, ordered or fed cannot be seen."""

from __future__ import annotations

import io
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from keepcover.engine.arrivals import Gathered
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.inputs import Batch
from keepcover.engine.memory import RememberingSmoother
from keepcover.engine.progress import Bar
from keepcover.engine.smoother import Smoother, _held, evaluation_mode
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.noise import Stream
from tests.toys import SHAPE, Recorder, flags, half_trained, nearest, network, toy

patient = settings(deadline=None, derandomize=True, max_examples=30)

# -- one function, however it is run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 64, None])
def test_noise_does_not_depend_on_the_batch_size(batch_size: int | None) -> None:
    """The network sees noisy(x, id, draw), bit for bit, image by image and draw by draw."""
    images, ids, stream = toy(9)[0], torch.tensor([4, 17, 0, 2**35, 5, 6, 90, 8, 3]), Stream(3, "test")
    recorder = Recorder()
    Smoother(recorder, 0.25, batch_size=batch_size).logits(images, 5, stream, ids)
    expected = stream.noisy(images, ids, range(5), 0.25)
    assert torch.equal(recorder.inputs, expected.flatten(0, 1))
    assert max(len(part) for part in recorder.seen) <= (batch_size or 10**9)


@patient
@given(st.permutations(range(9)), st.sampled_from([1, 7, 64]), st.integers(1, 9))
def test_logits_do_not_depend_on_order_or_company(order: list[int], batch_size: int, count: int) -> None:
    images, ids, stream, model = toy(9)[0], 3 * torch.arange(9), Stream(1, "calibration"), network()
    everything = Smoother(model, 0.3).logits(images, 6, stream, ids)
    chosen = torch.tensor(order[:count])
    part = Smoother(model, 0.3, batch_size=batch_size).logits(images[chosen], 6, stream, ids[chosen])
    torch.testing.assert_close(part, everything[chosen], rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_more_draws_extend_fewer(batch_size: int) -> None:
    images, stream, model = toy(5)[0], Stream(0, "test"), network()
    many = Smoother(model, 0.5).logits(images, 20, stream)
    few = Smoother(model, 0.5, batch_size=batch_size).logits(images, 3, stream)
    torch.testing.assert_close(few, many[:, :3], rtol=0, atol=1e-5)
    assert not torch.equal(many[:, 0], many[:, 1])


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("span", [range(0, 3), range(3, 20), range(19, 20), range(2, 11)])
def test_a_range_of_draws_continues_where_others_ended(batch_size: int, span: range) -> None:
    """The network sees exactly those draws; what is streamed, reduced or remembered is cut the same way."""
    images, stream, recorder = toy(5)[0], Stream(0, "test"), Recorder()
    run = Smoother(recorder, 0.5, batch_size=batch_size)
    found = run.logits(images, span, stream)
    noisy = stream.noisy(images, torch.arange(5), span, 0.5)
    assert torch.equal(found, noisy.flatten(2)[..., :3])
    assert torch.equal(recorder.inputs, noisy.flatten(0, 1))
    assert torch.equal(run.reduce(images, span, stream, lambda batch, logits: logits), found)
    remembering = RememberingSmoother(Recorder(), 0.5, batch_size=batch_size)
    for _ in range(2):
        assert torch.equal(remembering.logits(images, span, stream), found)
    assert torch.equal(
        Smoother(Recorder(), 0.0).logits(images, span, stream), images.flatten(1)[:, None, :3].expand_as(found)
    )


@pytest.mark.parametrize("draws", [0, -1, range(0), range(4, 4), range(-1, 3), range(0, 8, 2)])
def test_draws_that_are_none_are_refused(draws: int | range) -> None:
    run, images = Smoother(network(), 0.5), toy(2)[0]
    with pytest.raises(InputError, match=r"expected at least 1 draw|of step 1 from 0 on"):
        run.logits(images, draws, Stream(0, "test"))
    with pytest.raises(InputError, match=r"expected at least 1 draw|of step 1 from 0 on"):
        next(run.stream(images, draws, Stream(0, "test")))


def test_without_noise_the_model_runs_as_it_is() -> None:
    images, model = toy(6)[0], network()
    logits = Smoother(model, 0.0).logits(images, 3, Stream(0, "test"))
    torch.testing.assert_close(logits, model(images)[:, None].expand(-1, 3, -1).detach(), rtol=0, atol=1e-6)


def test_modules_and_callables_are_the_same_function() -> None:
    images, model, stream = toy(6)[0], network(), Stream(8, "test")
    module, function = Smoother(model, 0.2), Smoother(lambda x: model(x), 0.2)
    assert torch.equal(module.logits(images, 4, stream), function.logits(images, 4, stream))
    assert function.device == torch.device("cpu")


def kinds(images: Tensor, labels: Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "tensor": lambda: images,
        "array": lambda: images.numpy(),
        "double": lambda: images.double(),
        "pair": lambda: (images, labels),
        "arrays": lambda: (images.numpy(), labels.numpy()),
        "dataset": lambda: TensorDataset(images, labels),
        "loader": lambda: DataLoader(TensorDataset(images, labels), batch_size=5),
        "batches": lambda: zip(images.split(4), labels.split(4)),
    }


@pytest.mark.parametrize("kind", list(kinds(torch.zeros(1), torch.zeros(1))))
def test_every_container_is_smoothed_alike(kind: str) -> None:
    images, labels = toy(13)
    smoother, stream = Smoother(network(), 0.25), Stream(5, "test")
    found = smoother.reduce(kinds(images, labels)[kind](), 4, stream, lambda batch, logits: logits.mean(dim=1))
    torch.testing.assert_close(found, smoother.logits(images, 4, stream).mean(dim=1), rtol=0, atol=1e-5)


def test_ids_key_the_noise_of_streamed_data() -> None:
    """Two orders of the same examples, with their ids: the same logits of each."""
    (images, labels), ids = toy(12), torch.arange(12) + 50
    smoother, stream, order = Smoother(network(), 0.25), Stream(5, "test"), torch.randperm(12)
    one = smoother.reduce((images, labels), 4, stream, lambda batch, logits: logits.mean(dim=1), ids)
    two = smoother.reduce(
        (images[order], labels[order]), 4, stream, lambda batch, logits: logits.mean(dim=1), ids[order]
    )
    torch.testing.assert_close(two, one[order], rtol=0, atol=1e-5)
    default = smoother.reduce(images, 4, stream, lambda batch, logits: logits.mean(dim=1))
    assert (default - one).abs().min() > 0  # other ids, other noise


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "draws"), [(1, 3), (8, 3), (16, 16), (10, 64)])
def test_a_stream_holds_one_chunk(batch_size: int, draws: int) -> None:
    """At most max(batch size, draws) rows of logits at once, whatever n is; the labels and ids come along."""
    images, labels = toy(21)
    smoother, at = Smoother(nearest(), 0.1, batch_size=batch_size), 0
    for batch, logits in smoother.stream((images, labels), draws, Stream(0, "test")):
        assert logits.shape == (len(batch), draws, 4)
        assert logits.shape[0] * draws <= max(batch_size, draws)
        assert batch.labels is not None
        assert torch.equal(batch.labels, labels[at : at + len(batch)])
        assert torch.equal(batch.ids, torch.arange(at, at + len(batch)))
        at += len(batch)
    assert at == 21


def test_a_reduction_lets_go_of_every_chunk() -> None:
    chunks: list[weakref.ref[Tensor]] = []

    def reduction(batch: Batch, logits: Tensor) -> Tensor:
        assert all(chunk() is None for chunk in chunks)
        chunks.append(weakref.ref(logits))
        return logits.mean(dim=1)

    mean = Smoother(nearest(), 0.1, batch_size=8).reduce(toy(30)[0], 4, Stream(0, "test"), reduction)
    assert len(chunks) == 15
    assert mean.shape == (30, 4)


def test_running_out_of_memory_halves_the_batch() -> None:
    model, largest = nearest(), 5

    def tight(inputs: Tensor) -> Tensor:
        if len(inputs) > largest:
            raise torch.cuda.OutOfMemoryError("too large")
        return model(inputs)

    images, stream = toy(9)[0], Stream(0, "test")
    smoother = Smoother(tight, 0.1, batch_size=64)
    roomy = Smoother(model, 0.1).logits(images, 3, stream)
    torch.testing.assert_close(smoother.logits(images, 3, stream), roomy, rtol=0, atol=1e-5)
    assert smoother.batch_size == 4
    largest = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        smoother.logits(images, 3, stream)


# -- modes -------------------------------------------------------------------------------------------------------------


def test_train_mode_is_warned_about_left_and_restored() -> None:
    model, images, stream = half_trained(), toy(5)[0], Stream(0, "test")
    before = flags(model)
    with pytest.warns(KeepcoverWarning, match=r"left in train mode.*Call model.eval\(\) first"):
        found = Smoother(model, 0.2).logits(images, 4, stream)
    assert flags(model) == before
    assert len(set(before)) == 2
    assert torch.equal(found, Smoother(network(), 0.2).logits(images, 4, stream))  # as if it had been in eval mode


def test_flags_are_restored_when_reading_stops_early_or_the_model_fails() -> None:
    model = half_trained()
    before = flags(model)
    with closing(Smoother(model, 0.2, batch_size=4).stream(toy(9)[0], 4, Stream(0, "test"))) as chunks:
        with pytest.warns(KeepcoverWarning, match="train mode"):
            next(chunks)
        assert not any(flags(model))
    assert flags(model) == before
    with (
        pytest.warns(KeepcoverWarning, match="train mode"),
        pytest.raises(InputError, match=r"fails on inputs \[4, 7, 4, 4\]"),
    ):
        Smoother(model, 0.2).logits(torch.zeros(2, 7, 4, 4), 2, Stream(0, "test"))
    assert flags(model) == before


def test_train_mode_that_changes_nothing_is_not_warned_about() -> None:
    model = nearest().train()
    Smoother(model, 0.2).logits(toy(2)[0], 2, Stream(0, "test"))
    assert all(flags(model))
    with evaluation_mode(lambda x: x):  # nothing to do for a callable
        pass


def test_images_without_an_id_are_no_fewer_results() -> None:
    """Nine ids for ten images are an error, whatever the size of a pass, not nine results."""
    for batch_size in (None, 2, 6):
        smoother = Smoother(network(), 0.3, batch_size=batch_size)
        with pytest.raises((RuntimeError, TypeError)):  # torch's, or that of the tests' own checks of shapes
            smoother._chunk(toy(10)[0], torch.arange(9), range(2), Stream(0, "test"))


@pytest.mark.parametrize("outer", [False, True], ids=["the same model", "a model around it"])
def test_the_last_to_leave_puts_the_modes_back(outer: bool) -> None:
    """Two calls that overlap, whichever ends first; train() between them is heard by neither of those that follow."""
    model = nearest().train()
    first = evaluation_mode(nn.Sequential(model, nn.Identity()).eval().train(True) if outer else model)
    second = evaluation_mode(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(flags(model))
    model.train()
    with evaluation_mode(model):
        assert not any(flags(model))
    assert not any(flags(model))
    second.__exit__(None, None, None)
    assert all(flags(model))
    assert not _held


@pytest.mark.filterwarnings("ignore:the model was left in train mode")
def test_threads_share_a_model_that_was_left_in_train_mode() -> None:
    """Four threads, calls of many lengths: every answer is that of eval mode, and batch norm has learned nothing."""
    model, images, stream = network().train(), toy(4)[0], Stream(0, "test")
    expected = Smoother(network(), 0.2).logits(images, 2, stream)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start, wrong = threading.Barrier(4), []

    def work(rows: int) -> None:
        start.wait()
        for k in range(120):
            some = 1 + (k + rows) % 4
            found = Smoother(model, 0.2).logits(images[:some], 2, stream)
            if not torch.allclose(found, expected[:some], atol=1e-5):
                wrong.append((rows, k))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(rows,)) for rows in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(flags(model))


# -- numerics ----------------------------------------------------------------------------------------------------------


def test_mixed_precision_runs_on_the_cpu() -> None:
    """Eight bits of mantissa: near the float32 logits, not equal to them, and in float32 afterwards."""
    images, model, stream = toy(6)[0], network(), Stream(0, "test")
    full, mixed = (Smoother(model, 0.2, autocast=dtype) for dtype in (None, torch.bfloat16))
    a, b = full.logits(images, 4, stream), mixed.logits(images, 4, stream)
    assert b.dtype == torch.float32
    assert 0 < float((a - b).abs().max()) < 0.05
    assert full.numerics == {"autocast": None, "channels_last": False, "compile": False}
    assert mixed.numerics["autocast"] == "bfloat16"


def test_channels_last_is_only_a_layout() -> None:
    images, stream, seen = torch.rand(3, 3, 4, 4), Stream(0, "test"), []

    def model(inputs: Tensor) -> Tensor:
        seen.append(inputs.is_contiguous(memory_format=torch.channels_last))
        return inputs.flatten(1)[:, :4].contiguous()

    one, two = (Smoother(model, 0.2, channels_last=last).logits(images, 4, stream) for last in (False, True))
    assert torch.equal(one, two)
    assert seen == [False, True]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda x: x.sum(), r"return outputs \[6, ...\], one per input, got \(\)"),
        (lambda x: x.flatten(1)[:-1], r"return outputs \[6, ...\], one per input, got \(5, 16\)"),
        (lambda x: (x.flatten(1), x), r"return outputs \[6, ...\], one per input, got tuple"),
        (lambda x: x.flatten(1) * float("nan"), "NaN or infinite logits under noise"),
        (lambda x: x.flatten(1) / 0, "NaN or infinite logits under noise"),
    ],
)
def test_outputs_that_belong_to_no_input_or_are_no_numbers_are_refused(
    model: Callable[[Tensor], Tensor], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        Smoother(model, 0.2).logits(torch.rand(2, *SHAPE), 3, Stream(0, "test"))


@pytest.mark.parametrize("sigma", [0.0, 0.2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_logit_of_many_is_refused(value: float, sigma: float) -> None:
    def model(x: Tensor) -> Tensor:
        logits = x.flatten(1).clone()
        logits[-1, 3] = value
        return logits

    images, stream = torch.rand(5, *SHAPE), Stream(0, "test")
    with pytest.raises(InputError, match="NaN or infinite logits"):
        Smoother(model, sigma).logits(images, 3, stream)
    with pytest.raises(InputError, match="NaN or infinite logits"):
        Smoother(model, sigma).reduce(images, 3, stream, lambda batch, logits: logits)


@pytest.mark.parametrize(
    ("images", "match"),
    [
        ((torch.rand(3, *SHAPE) * 255).byte(), "got torch.uint8; convert"),
        (torch.full((3, *SHAPE), torch.nan), "NaN or infinity, first in image 0"),
        (torch.rand(3), "add a batch dimension"),
        (torch.rand(0, *SHAPE), "at least one image, got none"),
    ],
)
def test_images_that_carry_no_guarantee_are_refused(images: Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Smoother(nearest(), 0.2).reduce(images, 3, Stream(0, "test"), lambda batch, logits: logits)


def test_images_in_other_units_are_warned_about() -> None:
    images = torch.rand(3, *SHAPE)
    for scaled, match in ((images * 255, "0-255"), ((images - 0.5) / 0.1, "normalised already")):
        with pytest.warns(KeepcoverWarning, match=match):
            Smoother(nearest(), 0.2).reduce(scaled, 3, Stream(0, "test"), lambda batch, logits: logits)


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_bad_sigma_is_refused(sigma: float) -> None:
    with pytest.raises(InputError, match="finite sigma >= 0, got"):
        Smoother(nearest(), sigma)


def test_bad_batch_sizes_draws_and_models_are_refused() -> None:
    for size in (0, -3):
        with pytest.raises(InputError, match=f"batch size of at least 1, got {size}"):
            Smoother(nearest(), 0.1, batch_size=size)
    for draws in (0, -1):
        with pytest.raises(InputError, match=f"at least 1 draw, got {draws}"):
            Smoother(nearest(), 0.1).logits(torch.rand(2, *SHAPE), draws, Stream(0, "test"))
        with pytest.raises(InputError, match=f"at least 1 draw, got {draws}"):
            Smoother(nearest(), 0.1).reduce(
                torch.rand(2, *SHAPE), draws, Stream(0, "test"), lambda batch, logits: logits
            )


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_weight_and_any_name() -> None:
    """Every parameter and buffer, the integer counter of batch norm included: one element, one new fingerprint."""
    model = network()
    original, found = fingerprint(model), set()
    for value in model.state_dict().values():
        before = value.clone()
        with torch.no_grad():
            value.view(-1)[-1] += 1
        found.add(fingerprint(model))
        with torch.no_grad():
            value.copy_(before)
    assert len(found | {original}) == len(model.state_dict()) + 1
    assert fingerprint(model) == original
    assert fingerprint(nn.Sequential(model)) != original  # the same weights under other names
    assert fingerprint(network().double()) != original


def test_the_fingerprint_sees_one_ulp_and_a_moved_value() -> None:
    linear = nn.Linear(4, 3)
    original = fingerprint(linear)
    with torch.no_grad():
        linear.weight[0, 0] = torch.nextafter(linear.weight[0, 0], torch.tensor(9.0))
    nudged = fingerprint(linear)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.flip(0))
    assert len({original, nudged, fingerprint(linear)}) == 3


def test_the_fingerprint_does_not_see_layout_mode_or_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    original = fingerprint(model)
    assert fingerprint(model.to(memory_format=torch.channels_last)) == original
    assert fingerprint(model.eval().requires_grad_(False)) == original
    assert not model[0].weight.is_contiguous()


def test_a_model_may_bring_its_own_fingerprint() -> None:
    """As adapters do with the SHA-256 of their file; what is no string is not one."""

    class Named(nn.Linear):
        fingerprint = "file-1"

    assert fingerprint(Named(2, 2)) == "file-1"
    function = Recorder()
    for own, expected in (("mine", "mine"), (3, None), (None, None), (lambda: "mine", None)):
        function.fingerprint = own  # type: ignore[attr-defined]
        assert fingerprint(function) == expected


def test_a_callable_has_no_fingerprint() -> None:
    model = nearest()
    assert fingerprint(lambda x: model(x)) is None


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_is_reported_in_examples() -> None:
    reports: list[tuple[int, int]] = []
    smoother = Smoother(nearest(), 0.1, batch_size=8, progress=lambda done, total: reports.append((done, total)))
    smoother.reduce(toy(21)[0], 4, Stream(0, "test"), lambda batch, logits: logits[:, 0])
    assert reports == [(min(2 * i, 21), 21) for i in range(1, 12)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("total", "text"), [(4, "75%"), (None, "3 done")])
def test_the_bar_waits_two_seconds_and_wipes_its_line(
    total: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, clock = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("keepcover.engine.progress.time.monotonic", lambda: clock[0])
    with Bar("smoothing", total) as bar:
        clock[0] = 1.9
        bar.advance(2)
        assert terminal.getvalue() == ""
        clock[0] = 2.1
        bar.advance()
        assert text in terminal.getvalue()
    assert terminal.getvalue().endswith("\r" + " " * 72 + "\r")


@pytest.mark.parametrize(
    ("total", "show", "each", "lines"),
    [
        (
            9,
            True,
            3.0,
            ["smoothing: 1 of 9, about 24 s left after 3 s", "smoothing: 5 of 9, about 12 s left after 15 s"],
        ),
        (9, False, 3.0, []),
        (9, True, 1.0, []),  # nine seconds in all: over before a line would help
        (None, True, 4.0, ["smoothing: 1 after 4 s", "smoothing: 4 after 16 s", "smoothing: 7 after 28 s"]),
    ],
)
def test_a_log_gets_the_estimate_and_a_line_every_ten_seconds(
    total: int | None,
    show: bool,
    each: float,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("keepcover.engine.progress.time.monotonic", lambda: clock[0])
    with Bar("smoothing", total, show) as bar:
        for _ in range(9):
            clock[0] += each
            bar.advance()
    written = capsys.readouterr().err.splitlines()
    assert written[: len(lines)] == lines
    assert bool(written) == bool(lines)


def test_a_notebook_gets_one_bar_that_is_redrawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shown = [0.0], []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Any:
        shown.append(data)
        return SimpleNamespace(update=lambda data, raw: shown.append(data))

    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("keepcover.engine.progress.time.monotonic", lambda: clock[0])
    with Bar("smoothing", 4) as bar:
        for _ in range(4):
            clock[0] += 1.5
            bar.advance()
    assert [data["text/plain"] for data in shown] == [
        "smoothing 50%, 3 s left",
        "smoothing 75%, 2 s left",
        "smoothing 100%, 0 s left",
    ]
    assert "<progress max='1' value='0.500'>" in shown[0]["text/html"]
    assert capsys.readouterr().err == ""


# -- batches by measurement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [16, 64, 1024])
def test_passes_take_the_size_that_was_fastest(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose time per row is least near one size; the clock is what the model says. Outputs are those of one size."""
    clock, sizes, model = [0.0], [], nearest()

    def timed(inputs: Tensor) -> Tensor:
        sizes.append(len(inputs))
        clock[0] += len(inputs) * (1 + abs(math.log2(len(inputs) / slow)))
        return model(inputs)

    monkeypatch.setattr("keepcover.engine.smoother.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(Smoother, "most_rows", 64)
    images, stream = toy(2500)[0], Stream(0, "test")
    found = Smoother(timed, 0.1).reduce(images, 4, stream, lambda batch, logits: logits)
    assert sizes[7:14] == [
        64,
        16,
        16,
        32,
        32,
        128,
        128,
    ]  # and 256, of which the images that are read together leave a rest
    assert Counter(sizes[17:]).most_common(1)[0][0] == min(256, slow)
    again = Smoother(model, 0.1, batch_size=100).reduce(images, 4, stream, lambda batch, logits: logits)
    torch.testing.assert_close(found, again, rtol=0, atol=1e-5)
    sizes.clear()
    asked = [(Batch(images, None, torch.arange(len(images))), range(4), stream)]
    for _ in Smoother(timed, 0.1).streams(asked, steady=True):
        pass
    assert set(sizes[:-1]) == {64}


@pytest.mark.parametrize("total", [None, 0, 3, 10, 25])
def test_pieces_are_put_together_whatever_their_number_was_said_to_be(total: int | None) -> None:
    kept, whole = Gathered(total), torch.arange(20.0).view(10, 2)
    for piece in whole.split([1, 4, 0, 3, 2]):
        kept.add(piece)
    assert torch.equal(kept.whole(), whole)
    assert kept.whole().untyped_storage().nbytes() == whole.nbytes  # no larger buffer hangs on behind it


def test_gathering_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="at least one image"):
        Gathered().whole()


def test_a_compiled_model_is_given_channels_last_memory_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change of layout belongs to the compiled function, and compiled code is kept by the model's class."""
    seen: list[tuple[str, bool]] = []

    class Flat(nn.Flatten):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(("model", input.is_contiguous(memory_format=torch.channels_last)))
            return super().forward(input)

    def compiled(model: Any) -> Any:
        def run(inputs: Tensor) -> Tensor:
            seen.append((type(model).forward.__code__.co_name, inputs.is_contiguous()))
            return model(inputs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    images, stream = torch.rand(3, 2, 4, 4), Stream(0, "test")
    smoother = Smoother(Flat(), 0.25, compile=True, channels_last=True, progress=False)
    found = smoother.logits(images, 16, stream)
    assert seen == [("forward_Flat", True), ("model", True)]
    assert torch.equal(found, Smoother(nn.Flatten(), 0.25, progress=False).logits(images, 16, stream))


def test_units_do_not_change_what_the_model_says_without_noise() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3) * torch.tensor([1.0, 10.0, 100.0])
    scaled = Smoother(model, 0.1, input_scale=(1.0, 10.0, 100.0))
    assert torch.allclose(scaled.clean(x), model(x), rtol=1e-4)

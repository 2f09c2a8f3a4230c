"""The only module on the inference path that runs a network: images and keyed noise in, noisy logits out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from keepcover.engine.arrivals import IN_FLIGHT, Gathered, to_host
from keepcover.engine.inputs import Batch, batches, length
from keepcover.engine.pace import Pace
from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError, reason, refusing, warn
from keepcover.noise import Noise, Stream, get_noise
from keepcover.noise.stream import widened

Classifier = nn.Module | Callable[[Tensor], Tensor]
Device = torch.device | str | None
Draws = int | range  # the first so many, or which
Asked = tuple[Batch, range, Stream]  # images, their draws and their noise
Reduction = Callable[[Batch, Tensor], Tensor]  # of a batch and its noisy outputs
AUTOCAST = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}

_held: Counter[int] = Counter()  # by id of a module left in train mode: how many run it in eval mode now
_holding = threading.RLock()  # reentrant: a generator that is collected may leave evaluation_mode inside of it

_MODE_DEPENDENT = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


@contextlib.contextmanager
def evaluation_mode(model: Classifier) -> Iterator[None]:
    """Run a module in eval mode and put every part back as it was; warn if it mattered.

    Threads may do so together, with one model or with models that share parts: the last to leave puts a part back. A call
    of ``model.train()`` in between is undone when the next one enters, and not before.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    if any(isinstance(module, _MODE_DEPENDENT) and module.training for module in model.modules()):
        why = "dropout and batch norm would change the certified function from call to call"
        warn(f"the model was left in train mode; {why}, so it is run in eval mode here. Call model.eval() first")
    with _holding:
        own = [module for module in model.modules() if module.training or id(module) in _held]
        _held.update(map(id, own))
    try:
        if any(module.training for module in own):  # after they are held: no other thread puts them back now
            model.eval()
        yield
    finally:
        with _holding:
            _held.subtract(map(id, own))
            for module in own:
                if not _held[id(module)]:
                    del _held[id(module)]
                    module.training = True


def bound(model: Classifier, noise: Noise) -> Classifier:
    """The model that runs under this noise: one that must know its noise (a denoiser) has a method ``under_noise``."""
    bind = getattr(model, "under_noise", None)
    return model if bind is None else bind(noise)


def checked_device(device: torch.device | str) -> torch.device:
    """A device that is there, or an error that says what to write instead.

    Example:
        >>> checked_device("cpu")
        device(type='cpu')
        >>> checked_device("gpu")
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: no device 'gpu' here (Expected one of cpu, cuda, ...); use cpu, or cuda where there is a GPU
    """
    with refusing(f"no device {str(device)!r} here", advice="use cpu, or cuda where there is a GPU"):
        return torch.empty(0, device=device).device


def as_range(draws: Draws) -> range:
    """``draws`` as the range it stands for: 16 means the first sixteen.

    Example:
        >>> as_range(16), as_range(range(256, 1024))
        (range(0, 16), range(256, 1024))
    """
    span = draws if isinstance(draws, range) else range(draws)
    if len(span) < 1:
        raise InputError(f"expected at least 1 draw, got {draws}")
    if span.start < 0 or span.step != 1:
        raise InputError(f"expected draws as a number or a range of step 1 from 0 on, got {draws}")
    return span


class Smoother:
    """A model under noise.

    Draws are a number, the first so many, or a range: noise is keyed by draw, so ``range(256, 1024)`` continues exactly
    where the first 256 ended.

    Args:
        model: ``images -> outputs``, an ``nn.Module`` or any callable; normalisation belongs inside it. One that must know
            the noise, such as :func:`keepcover.denoised`, is bound to it.
        noise: what is added; a number is the sigma of Gaussian noise in pixel units, and 0 runs the model as it is.
        batch_size: noisy images per forward pass; chosen from the image size and device when not given, and on a CPU by
            timing a few sizes once the work is long enough to gain by it. Noise is keyed by id and draw: sizes change outputs
            by rounding alone. Give a size where two runs shall agree bit by bit.
        device: where a plain callable expects its input; a module's own parameters decide for modules.
        autocast: dtype for mixed precision. Like the next two it changes the function that is certified, so it must be
            the same at calibration and prediction; saved predictors remember it.
        channels_last: memory format of the network's input.
        compile: run the module through ``torch.compile``, once for batches of any size. On a GPU, cuDNN times its
            algorithms for every size and keeps the fastest, so batches are filled up to one of eight sizes per octave.
        input_scale: one unit per feature, for inputs [n, features] of different units: noise, and the attack that it answers,
            are then measured in these units. It is one of the numerics too.
        progress: show a bar on a terminal; or a function called with (done, total).

    Example:
        >>> smoother = Smoother(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), 0.5)
        >>> smoother.logits(torch.zeros(2, 1, 2, 2), draws=5, stream=Stream(0, "test")).shape
        torch.Size([2, 5, 3])
    """

    measures = True  # whether passes may be timed to choose their size

    def __init__(
        self,
        model: Classifier,
        noise: Noise | str | float,
        *,
        batch_size: int | None = None,
        device: Device = None,
        autocast: torch.dtype | None = None,
        channels_last: bool = False,
        compile: bool = False,
        input_scale: Sequence[float] | None = None,
        progress: Progress = True,
    ) -> None:
        if not callable(model):
            raise InputError(f"expected a model that maps images to logits, got {type(model).__name__}")
        if batch_size is not None and batch_size < 1:
            raise InputError(f"expected a batch size of at least 1, got {batch_size}")
        self.noise, self.batch_size = get_noise(noise), batch_size
        self.model = model = bound(model, self.noise)
        first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        own = torch.device("cpu") if first is None else first.device
        self.device = own if device is None else checked_device(device)
        self.autocast, self.channels_last, self.compile, self.progress = autocast, channels_last, compile, progress
        self.input_scale = None if input_scale is None else check_scale(input_scale)
        self.scaled_model = model = model if self.input_scale is None else _Rescaled(model, self.input_scale)
        self._forward: Callable[[Tensor], Tensor] = model
        if compile:
            # Compiled, the change of layout is part of the network's first kernel; before it, a pass over memory of its own.
            self._forward = torch.compile(_laid_out(type(model))(model) if channels_last else model)  # type: ignore[assignment]

    @property
    def numerics(self) -> dict[str, Any]:
        """What changes the certified function besides the weights."""
        dtype = None if self.autocast is None else str(self.autocast).removeprefix("torch.")
        units = {} if self.input_scale is None else {"input_scale": list(self.input_scale)}
        return {"autocast": dtype, "channels_last": self.channels_last, "compile": self.compile, **units}

    def scaled(self, images: Tensor) -> Tensor:
        """Inputs in the units of :attr:`input_scale`, which ``scaled_model`` takes; as they are where there are none."""
        return images if self.input_scale is None else images.double() / _units(self.input_scale, images)

    def under(self, noise: Noise | str | float, model: Classifier | None = None, **changes: Any) -> Smoother:
        """The same model, or another, run in the same way, but for ``changes``, under another noise."""
        options = ("batch_size", "device", "autocast", "channels_last", "compile", "input_scale", "progress")
        how = {name: getattr(self, name) for name in options} | changes
        return Smoother(self.model if model is None else model, noise, **how)

    def logits(
        self, images: Shaped[Tensor, "n ..."], draws: Draws, stream: Stream, ids: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "n draws ..."]:
        """Noisy logits of a few images, all kept."""
        ids = torch.arange(len(images)) if ids is None else ids
        with evaluation_mode(self.model), torch.inference_mode():
            outputs = self._chunk(images, ids, as_range(draws), stream)
            _expect_finite(_all_finite(outputs))
            return outputs

    def clean(self, images: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Outputs of a few images as they are, without noise: a denoiser passes them on."""
        if self.noise.certifies and hasattr(self.model, "under_noise"):
            return self.under(0.0, compile=False).clean(images)
        with evaluation_mode(self.model), torch.inference_mode():
            images = self.scaled(images.to(self.device, non_blocking=True))
            return self._run(images.float() if images.is_floating_point() else images)

    def stream(
        self, data: Any, draws: Draws, stream: Stream, ids: Any = None, labelled: bool = False
    ) -> Iterator[tuple[Batch, Float[Tensor, "b draws ..."]]]:
        """Noisy logits of any data, chunk by chunk: memory does not grow with the number of images.

        On a GPU the host runs ahead: the next images are on their way while the network works, and a chunk's outputs are
        looked at for NaN two chunks later. The stream ends only when all of them are known to be finite. Images and ids
        of a batch are on the device; labels stay on the CPU.
        """
        span = as_range(draws)
        size = max(256, self.most_rows // len(span))
        asked = ((batch, span, stream) for batch in batches(data, ids, size=size, labelled=labelled))
        for batch, _, outputs in self.streams(asked, length(data)):
            yield batch, outputs

    def streams(
        self, asked: Iterable[Asked], total: int | None = None, progress: Progress | None = None, steady: bool = False
    ) -> Iterator[tuple[Batch, Stream, Tensor]]:
        """Noisy outputs of batches that each name their draws and their noise, in chunks of one forward pass each.

        ``progress`` is the smoother's own unless given; ``steady`` passes have the size that follows from the image alone, so
        that a machine computes the same bits again.
        """
        late: deque[Callable[[], Tensor]] = deque()
        pace = Pace(self.measures and self.batch_size is None and self.device.type == "cpu" and not steady)
        shown = self.progress if progress is None else progress
        with evaluation_mode(self.model), Bar("smoothing", total, shown) as bar:
            for part, span, stream in self._ahead(self._cut(asked, pace)):
                with torch.inference_mode():
                    began, full = time.perf_counter(), pace.share * self._rows(part.images)
                    outputs = self._chunk(part.images, part.ids, span, stream, pace.share)
                    pace.passed(len(part) * len(span), full, time.perf_counter() - began)
                    late.append(to_host(_all_finite(outputs)))
                while len(late) > (IN_FLIGHT if outputs.is_cuda else 0):
                    _expect_finite(late.popleft()())
                yield part, stream, outputs
                bar.advance(len(part))
            for finite in late:
                _expect_finite(finite())

    def _cut(self, asked: Iterable[Asked], pace: Pace) -> Iterator[Asked]:
        """Batches small enough for one forward pass."""
        for batch, span, stream in asked:
            at = 0
            while at < len(batch):
                part = batch[at : at + self.images_per_chunk(batch.images, len(span), pace.share)]
                at += len(part)
                yield part, span, stream

    def _ahead(self, parts: Iterable[Asked]) -> Iterator[Asked]:
        """Each part on the device: copied from pinned memory, beside the network's work on the one before."""
        if self.device.type != "cuda":
            yield from parts
            return
        aside, here = _copying(self.device), torch.cuda.current_stream(self.device)
        waiting: deque[tuple[Batch, range, Stream, Any]] = deque()  # with the event of the copy

        def arrived() -> Asked:
            part, span, stream, copied = waiting.popleft()
            here.wait_event(copied)
            for tensor in (part.images, part.ids):
                tensor.record_stream(here)
            return part, span, stream

        def sent(tensor: Tensor) -> Tensor:
            return (tensor if tensor.is_cuda else tensor.pin_memory()).to(self.device, non_blocking=True)

        for part, span, stream in parts:
            with torch.cuda.stream(aside):
                there = Batch(sent(part.images), part.labels, sent(part.ids))
                waiting.append((there, span, stream, aside.record_event()))
            if len(waiting) > 1:
                yield arrived()
        while waiting:
            yield arrived()

    def reduce(self, data: Any, draws: Draws, stream: Stream, reduction: Reduction, ids: Any = None) -> Tensor:
        """Stream ``data`` and keep only ``reduction(batch, noisy logits)`` of every chunk, on the CPU.

        Example:
            >>> smoother = Smoother(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), 0.5)
            >>> images, noise = torch.zeros(2, 1, 2, 2), Stream(0, "test")
            >>> mean = smoother.reduce(images, 5, noise, lambda batch, logits: logits.softmax(-1).mean(1))
            >>> mean.shape
            torch.Size([2, 3])
        """
        kept = Gathered(length(data))
        for batch, logits in self.stream(data, draws, stream, ids):
            kept.add(reduction(batch, logits))
        return kept.whole()

    @property
    def most_rows(self) -> int:
        """Never more noisy images than this in one forward pass."""
        return self.batch_size or (4096 if self.device.type == "cpu" else 16384)

    def _rows(self, images: Tensor) -> int:
        """Noisy images per forward pass."""
        if self.batch_size is not None:
            return self.batch_size
        budget = 2**17 if self.device.type == "cpu" else 2**26
        return max(16, min(self.most_rows, budget // max(1, images[0].numel())))

    def images_per_chunk(self, images: Tensor, draws: int, share: float = 1.0) -> int:
        """Images whose noisy copies fit into one forward pass of ``share`` of the usual size; at least one."""
        return max(1, int(share * self._rows(images)) // draws)

    def _chunk(self, images: Tensor, ids: Tensor, span: range, stream: Stream, share: float = 1.0) -> Tensor:
        images = self.scaled(widened(images)).to(self.device, non_blocking=True)
        ids = ids.to(self.device, non_blocking=True)
        if not self.noise.certifies:  # there is none: every draw is the same
            once = self._forward_all(images, ids, range(1), stream, self._rows(images), 1)
            return once.expand(-1, len(span), *once.shape[2:])
        while True:
            rows = max(1, int(share * self._rows(images)))
            try:
                return self._forward_all(images, ids, span, stream, max(1, rows // len(span)), min(len(span), rows))
            except torch.cuda.OutOfMemoryError:
                if rows <= 1:
                    raise
                self.batch_size = rows // 2
                torch.cuda.empty_cache()

    def _forward_all(
        self, images: Tensor, ids: Tensor, span: range, stream: Stream, per_step: int, draws_per_step: int
    ) -> Tensor:
        steps = []
        for at in range(0, len(images), per_step):  # a step without its ids fails; pairs of parts would end without it
            some, their = images[at : at + per_step], ids[at : at + per_step]
            parts = []
            for begin in range(0, len(span), draws_per_step):
                draws = span[begin : begin + draws_per_step]
                noisy = self.noise.noisy(some, stream, their, draws)
                out = self._run(noisy.reshape(-1, *noisy.shape[2:]))
                parts.append(out.view(len(some), len(draws), *out.shape[1:]))
            steps.append(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
        return torch.cat(steps) if len(steps) > 1 else steps[0]

    def _run(self, inputs: Tensor) -> Tensor:
        asked = len(inputs)
        if self.compile:
            inputs = _filled_up(inputs, self._rows(inputs))
            torch._dynamo.maybe_mark_dynamic(inputs, 0)  # else the second size would be compiled afresh, and the third
        elif self.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        cast = torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        try:
            with timed_algorithms(self.compile), cast:
                out = self._forward(inputs)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:  # what torch raises where shapes, types or tokens do not fit
            raise InputError(f"the model fails on inputs {list(inputs.shape)}: {reason(error)}") from error
        if not isinstance(out, Tensor) or out.ndim < 1 or len(out) != len(inputs):
            found = f"{tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            wanted = f"expected the model to return outputs [{len(inputs)}, ...], one per input"
            raise InputError(f"{wanted}, got {found}; return the logits alone")
        return out[:asked].float()


@cache
def _laid_out(kind: type) -> type[nn.Module]:
    """Models of this class with their input in channels-last memory. A class each: torch keeps compiled code by the function that
    runs, a few versions of each.
    """

    class LaidOut(nn.Module):
        def __init__(self, model: Classifier) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            return self.model(inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs)

    LaidOut.forward.__code__ = LaidOut.forward.__code__.replace(co_name=f"forward_{kind.__name__}")
    return LaidOut


class _Rescaled(nn.Module):
    """A model that takes inputs in units of ``scale``."""

    def __init__(self, model: Classifier, scale: tuple[float, ...]) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs * _units(self.scale, inputs).to(inputs.dtype))


def _units(scale: tuple[float, ...], inputs: Tensor) -> Tensor:
    if inputs.ndim != 2 or inputs.shape[1] != len(scale):
        raise InputError(
            f"input_scale has {len(scale)} units, one per feature of [n, {len(scale)}], got {list(inputs.shape)}"
        )
    return torch.tensor(scale, dtype=torch.float64, device=inputs.device)


def check_scale(given: Any) -> tuple[float, ...]:
    """One positive unit per feature, or an error.

    Example:
        >>> check_scale([1, 0.5])
        (1.0, 0.5)
    """
    try:
        scale = tuple(float(value) for value in given)
    except (TypeError, ValueError):
        raise InputError(f'expected input_scale="std" or one positive number per feature, got {given!r}') from None
    bad = [k for k, value in enumerate(scale) if not 0 < value < float("inf")]
    if bad or not scale:
        raise InputError(
            f"expected positive units in input_scale, got {scale[bad[0]] if bad else 'none'}"
            + (f" for feature {bad[0]}; a feature that never changes has no standard deviation: drop it" if bad else "")
        )
    return scale


def numeric_options(numerics: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a :class:`Smoother` with these :attr:`Smoother.numerics`; empty where none are known.

    Example:
        >>> numeric_options({"autocast": "bfloat16", "channels_last": True, "compile": False})
        {'autocast': torch.bfloat16, 'channels_last': True, 'compile': False}
    """
    if not numerics:
        return {}
    flags = [type(numerics.get(name)) is bool for name in ("channels_last", "compile")]
    known = 3 + ("input_scale" in numerics)
    if not all(flags) or len(numerics) != known or numerics.get("autocast", "") not in AUTOCAST:
        wanted = "autocast (bfloat16, float16 or none), channels_last and compile (true or false)"
        raise InputError(f"expected {wanted}, got {numerics}")
    return {**numerics, "autocast": AUTOCAST[numerics["autocast"]]}


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for copies to it: memory is pooled by stream, and a new one each time would begin with none."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def timed_algorithms(wanted: bool) -> Iterator[None]:
    """cuDNN's search for the fastest algorithm of each convolution: worth its time only where shapes recur."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _filled_up(inputs: Tensor, rows: int) -> Tensor:
    """The batch with blank images behind it: at least 16, then up to an eighth of the power of two below, at most ``rows``.

    Example:
        >>> [len(_filled_up(torch.ones(n, 1), 1000)) for n in (1, 16, 17, 300, 1000, 2000)]
        [16, 16, 18, 320, 1000, 2000]
    """
    step = max(2, 1 << max(0, len(inputs).bit_length() - 4))
    size = max(16, -(-len(inputs) // step) * step)
    missing = max(0, min(size, rows) - len(inputs))
    return torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]) if missing else inputs


def _expect_finite(flag: Tensor) -> None:
    if not flag:
        raise InputError("the model returned NaN or infinite logits under noise; no guarantee survives that")


def _all_finite(logits: Tensor) -> Tensor:
    """Whether they are, as a tensor: one pass, nothing kept, and the host does not wait. NaN is neither above nor below."""
    low, high = logits.aminmax()
    return (low > -torch.inf) & (high < torch.inf)

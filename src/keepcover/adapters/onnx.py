"""ONNX models through onnxruntime, as the images -> logits that keepcover runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.adapters.batching import in_batches
from keepcover.adapters.onnx_files import external_files
from keepcover.adapters.proba import log_probabilities
from keepcover.errors import InputError, install

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


class OnnxClassifier:
    """An ONNX file as a classifier: ``images [n, ...] -> logits [n, K]``.

    The model takes one float input, images in [0, 1] with normalisation inside, with a free or a fixed batch size (the
    last batch is padded). A model whose input has two dimensions gets flattened images. It has no gradients, so audits
    need black-box attacks.

    Args:
        path: the ``.onnx`` file; external data files are found beside it.
        output: what the model returns, ``logits`` or ``probabilities``. Probabilities enter as their logarithm, which leaves every score as it is.
        output_name: which output, where there are several of shape [n, K].
        device: ``cpu``, or ``cuda`` with onnxruntime-gpu.

    Attributes:
        fingerprint: SHA-256 of the file (and of its external data, and of ``output`` and ``output_name`` where given).
        classes: outputs of the model, where the file says so.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        output: str = "logits",
        output_name: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if output not in ("logits", "probabilities"):
            raise InputError(f"expected output logits or probabilities, got {output!r}")
        self.path, self.output = Path(path), output
        self.fingerprint = _fingerprint(self.path, output, output_name)
        self._session = _session(self.path, torch.device(device or "cpu"))
        self._input = self._find_input()
        self._output = self._find_output(output_name)
        shape = self._input.shape
        self._fixed: list[int | None] = [size if isinstance(size, int) else None for size in shape]
        classes = self._output.shape[-1] if self._output.shape else None
        self.classes = classes if isinstance(classes, int) else None
        self._alone = False

    def __call__(self, images: Tensor) -> Tensor:
        inputs = images.detach().cpu()
        if len(self._fixed) == 2:
            inputs = inputs.flatten(1)
        expected = self._fixed
        if expected and (
            inputs.ndim != len(expected)
            or any(want not in (None, got) for want, got in zip(expected[1:], inputs.shape[1:], strict=True))
        ):
            raise InputError(
                f"{self.path.name} takes images [n, {', '.join('any' if e is None else str(e) for e in expected[1:])}], "
                f"got [n, {', '.join(map(str, inputs.shape[1:]))}]"
            )
        batch = expected[0] if expected else None
        if not self._alone and len(inputs):
            self._refuse_train_mode(inputs[:1], batch)
        return in_batches(self._run, inputs, least=batch or 1, most=batch).to(images.device)

    def _refuse_train_mode(self, image: Tensor, batch: int | None) -> None:
        """An image's logits must not depend on its neighbours in the batch, nor on chance: both void every promise."""
        if batch == 1:
            first, second = self._run(image), self._run(image)
        else:
            others = (batch or 2) - 1
            first = self._run(torch.cat([image, image.repeat_interleave(others, dim=0)]))
            second = self._run(torch.cat([image, (1 - image).repeat_interleave(others, dim=0)]))
        rows = batch or 2
        if len(first) == len(second) == rows and not torch.allclose(first[0], second[0], rtol=1e-3, atol=1e-3):
            raise InputError(
                f"{self.path.name}: the logits of an image change with its neighbours in the batch or from run to run; export the "
                "model in eval mode (batch norm and dropout included)"
            )
        self._alone = True

    def _run(self, inputs: Tensor) -> Tensor:
        array = inputs.numpy().astype(_DTYPES[self._input.type], copy=False)
        try:
            (out,) = self._session.run([self._output.name], {self._input.name: array})
        except Exception as error:  # onnxruntime has exception types of its own, without a common base
            raise InputError(f"{self.path.name} fails on inputs {tuple(array.shape)}: {_reason(error)}") from None
        result = torch.from_numpy(np.asarray(out))
        if result.ndim != 2:
            raise InputError(f"{self.path.name}: expected outputs [n, classes], got shape {tuple(result.shape)}")
        if self.output == "probabilities":
            return log_probabilities(result, self.path.name)
        return result.float()

    def _find_input(self) -> Any:
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in _DTYPES:
            found = ", ".join(f"{i.name}: {i.type} {i.shape}" for i in inputs) or "none"
            raise InputError(f"{self.path.name}: expected one float input, the images; the model has {found}")
        if inputs[0].shape is not None and len(inputs[0].shape) == 1:
            raise InputError(f"{self.path.name}: expected an input [n, ...], the model takes shape {inputs[0].shape}")
        return inputs[0]

    def _find_output(self, name: str | None) -> Any:
        outputs = self._session.get_outputs()
        fit = [o for o in outputs if o.type in _DTYPES and (not o.shape or len(o.shape) == 2)]
        chosen = [o for o in fit if name in (None, o.name)]
        if len(chosen) == 1:
            return chosen[0]
        found = ", ".join(f"{o.name}: {o.type} {o.shape}" for o in outputs)
        if name is not None:
            raise InputError(f"{self.path.name}: no float output {name!r} of shape [n, classes]; the model has {found}")
        if chosen:
            raise InputError(
                f"{self.path.name}: choose one of several outputs with output_name=; the model has {found}"
            )
        raise InputError(
            f"{self.path.name}: expected a float output [n, classes], the model has {found}; a converted scikit-learn "
            "classifier needs the option zipmap=False"
        )

    def __repr__(self) -> str:
        return f"OnnxClassifier({self.path.name!r}, {self._input.name}: {self._input.shape} -> {self.output})"


def _fingerprint(path: Path, output: str, output_name: str | None) -> str:
    if not path.is_file():
        raise InputError(f"no ONNX model at {path}")
    content = path.read_bytes()
    digest = hashlib.sha256(content)
    try:
        others = external_files(content)
    except ValueError as error:
        raise InputError(f"{path} is not an ONNX model ({error})") from None
    for name in others:
        other = path.parent / name
        # onnxruntime reads its own memory under a name with stars, and cuts a name at a zero byte.
        if not name or any(mark in name for mark in "\0*\\"):
            raise InputError(
                f"{path} keeps weights in {name!r}, which is no name of a file; save its weights beside it"
            )
        if not other.resolve().is_relative_to(path.parent.resolve()):
            raise InputError(f"{path} reads {name!r}, outside its own folder; save its weights beside it")
        if not other.is_file():
            raise InputError(f"{path} keeps weights in {name!r}, which is not beside it; copy that file too")
        digest.update(f"\n{name}\n".encode() + hashlib.sha256(other.read_bytes()).digest())
    if output != "logits" or output_name is not None:
        digest.update(f"\n{output} {output_name}".encode())
    return digest.hexdigest()


def _session(path: Path, device: torch.device) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"ONNX models need onnxruntime: {install('onnx')}") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.load_model_format", "ONNX"
    )  # whatever the name ends in: what was read above
    provider: str | tuple[str, dict[str, int]] = "CPUExecutionProvider"
    if device.type != "cpu":
        if device.type != "cuda" or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise InputError(
                f"this onnxruntime cannot run on {device}: it offers {', '.join(onnxruntime.get_available_providers())}; "
                "use the cpu, or install onnxruntime-gpu for cuda"
            )
        provider = ("CUDAExecutionProvider", {"device_id": device.index or 0})
    try:
        return onnxruntime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime has exception types of its own, without a common base
        raise InputError(f"{path} is not a model that onnxruntime can run: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

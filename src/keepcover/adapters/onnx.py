"""ONNX models through onnxruntime, as the images -> logits that keepcover runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.adapters.batching import check_sizes, in_batches
from keepcover.adapters.proba import log_probabilities
from keepcover.engine.smoother import Device
from keepcover.errors import InputError, optional, refusing

NEEDS = "ONNX models need onnx and onnxruntime"
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
        self, path: str | Path, *, output: str = "logits", output_name: str | None = None, device: Device = None
    ) -> None:
        if output not in ("logits", "probabilities"):
            raise InputError(f"expected output logits or probabilities, got {output!r}")
        self.path, self.output = Path(path), output
        content, self.fingerprint = _read(self.path)
        if output != "logits" or output_name is not None:
            self.fingerprint = hashlib.sha256(f"{self.fingerprint} {output} {output_name}".encode()).hexdigest()
        self._session = _session(content, self.path, torch.device(device or "cpu"))
        self._input, self._output = self._find_input(), self._find_output(output_name)
        self._sizes: list[int | None] = [size if isinstance(size, int) else None for size in self._input.shape]
        classes = self._output.shape[-1] if self._output.shape else None
        self.classes = classes if isinstance(classes, int) else None
        self._alone = False

    def __call__(self, images: Tensor) -> Tensor:
        inputs, batch = images.detach().cpu(), self._sizes[0] if self._sizes else None
        inputs = inputs.flatten(1) if len(self._sizes) == 2 else inputs
        if self._sizes:
            check_sizes(self.path.name, inputs, self._sizes[1:])
        if not self._alone and len(inputs):
            self._refuse_train_mode(inputs[:1], batch)
        return in_batches(self._run, inputs, least=batch or 1, most=batch).to(images.device)

    def _refuse_train_mode(self, image: Tensor, batch: int | None) -> None:
        """An image's logits must not depend on its neighbours in the batch, nor on chance: both void every promise."""
        rows = batch or 2
        first, second = (self._run(torch.cat([image, *[other] * (rows - 1)])) for other in (image, 1 - image))
        if len(first) == len(second) == rows and not torch.allclose(first[0], second[0], rtol=1e-3, atol=1e-3):
            what = "the logits of an image change with its neighbours in the batch or from run to run"
            advice = "export the model in eval mode (batch norm and dropout included)"
            raise InputError(f"{self.path.name}: {what}; {advice}")
        self._alone = True

    def _run(self, inputs: Tensor) -> Tensor:
        array = inputs.numpy().astype(_DTYPES[self._input.type], copy=False)
        with refusing(f"{self.path.name} fails on inputs {tuple(array.shape)}"):
            (out,) = self._session.run([self._output.name], {self._input.name: array})
        result = torch.from_numpy(np.asarray(out))
        if result.ndim != 2:
            raise InputError(f"{self.path.name}: expected outputs [n, classes], got shape {tuple(result.shape)}")
        return log_probabilities(result, self.path.name) if self.output == "probabilities" else result.float()

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
        tables = [o for o in outputs if o.type in _DTYPES and (not o.shape or len(o.shape) == 2)]
        fit = [o for o in tables if name in (None, o.name)]
        if len(fit) == 1:
            return fit[0]
        none = "expected a float output [n, classes]; a converted scikit-learn classifier needs the option zipmap=False"
        problem = "choose one of several outputs with output_name=" if fit else none
        if name is not None:
            problem = f"no float output {name!r} of shape [n, classes]"
        found = ", ".join(f"{o.name}: {o.type} {o.shape}" for o in outputs)
        raise InputError(f"{self.path.name}: {problem}; the model has {found}")

    def __repr__(self) -> str:
        return f"OnnxClassifier({self.path.name!r}, {self._input.name}: {self._input.shape} -> {self.output})"


def _read(path: Path) -> tuple[bytes, str]:
    """A model as onnxruntime gets it, and the SHA-256 of the file and of those that it names.

    The model is parsed and written again, so that onnxruntime cannot read fields, and through them files, that were not seen here.
    """
    if not path.is_file():
        raise InputError(f"no ONNX model at {path}")
    onnx = optional("onnx", NEEDS, "onnx")
    content = path.read_bytes()
    digest = hashlib.sha256(content)
    with refusing(f"{path} is not an ONNX model"):
        model = onnx.ModelProto.FromString(content)
    model.DiscardUnknownFields()
    for name in sorted(external_files(model)):
        other = path.parent / name
        # onnxruntime reads its own memory under a name with stars, and cuts a name at a zero byte.
        if not name or any(mark in name for mark in "\0*\\"):
            raise InputError(f"{path} keeps weights in {name!r}, which is no name of a file; save them beside it")
        if not other.resolve().is_relative_to(path.parent.resolve()):
            raise InputError(f"{path} reads {name!r}, outside its own folder; save its weights beside it")
        if not other.is_file():
            raise InputError(f"{path} keeps weights in {name!r}, which is not beside it; copy that file too")
        digest.update(f"\n{name}\n".encode() + hashlib.sha256(other.read_bytes()).digest())
    return model.SerializeToString(), digest.hexdigest()


def external_files(message: Any) -> set[str]:
    """Names of the external data files of all tensors in a protobuf message: initialisers, attributes, functions, ...

    onnx's own helper looks into graphs and their attributes, not everywhere that onnxruntime does.
    """
    if message.DESCRIPTOR.name == "TensorProto":
        return {entry.value for entry in message.external_data if entry.key == "location"}
    values = [value for field, value in message.ListFields() if field.message_type]
    parts = [part for value in values for part in ([value] if hasattr(value, "DESCRIPTOR") else value)]
    return {name for part in parts for name in external_files(part)}


def _session(content: bytes, path: Path, device: torch.device) -> Any:
    onnxruntime = optional("onnxruntime", NEEDS, "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Not in onnxruntime's own format, which was not checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    provider: str | tuple[str, dict[str, int]] = "CPUExecutionProvider"
    if device.type != "cpu":
        offers = onnxruntime.get_available_providers()
        if device.type != "cuda" or "CUDAExecutionProvider" not in offers:
            what = f"this onnxruntime cannot run on {device}: it offers {', '.join(offers)}"
            raise InputError(f"{what}; use the cpu, or install onnxruntime-gpu for cuda")
        provider = ("CUDAExecutionProvider", {"device_id": device.index or 0})
    with refusing(f"{path} is not a model that onnxruntime can run"):
        return onnxruntime.InferenceSession(content, options, providers=[provider])

"""ONNX files are the classifiers they were exported from, and a file that is not one says so."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepcover import calibrate, fingerprint, load
from keepcover.adapters import OnnxClassifier
from keepcover.adapters.onnx import _read, external_files
from keepcover.attacks import audit, transfer
from keepcover.errors import InputError
from keepcover.models import SmallCNN
from keepcover.scores.scores import APS, HPS
from keepcover.specs import load_model
from keepcover.training import fit_under_noise
from tests.toys import SHAPE, nearest, toy

onnx = pytest.importorskip("onnx", reason="ONNX models are built with onnx: pip install '.[test]'")
pytest.importorskip("onnxruntime", reason="ONNX models run in onnxruntime: pip install '.[onnx]'")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto

CAL, TEST = toy(300, seed=1), toy(200, seed=3)
FLOATS = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, np.float64: TensorProto.DOUBLE}


def linear(
    path: Path, *, batch: int | str = "n", dtype: type = np.float32, softmax: bool = False, flat: bool = False
) -> Path:
    """The nearest-prototype classifier as an ONNX file."""
    torch_model = nearest()
    weight, bias = (p.detach().numpy().astype(dtype) for p in torch_model[1].parameters())
    kind = FLOATS[dtype]
    nodes = [] if flat else [helper.make_node("Flatten", ["images"], ["flat"])]
    nodes.append(helper.make_node("Gemm", ["images" if flat else "flat", "weight", "bias"], ["logits"], transB=1))
    if softmax:
        nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("images", kind, [batch, 16] if flat else [batch, *SHAPE])],
        [helper.make_tensor_value_info("probabilities" if softmax else "logits", kind, [batch, 4])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    return write(graph, path)


def write(graph: Any, path: Path, **options: Any) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **options)
    return path


def identity(path: Path, inputs: list[Any], outputs: list[Any], nodes: list[Any] | None = None) -> Path:
    nodes = nodes or [helper.make_node("Identity", [inputs[0].name], [o.name]) for o in outputs]
    return write(helper.make_graph(nodes, "g", inputs, outputs), path)


def info(name: str, kind: int = TensorProto.FLOAT, shape: list[Any] | None = None) -> Any:
    return helper.make_tensor_value_info(name, kind, ["n", 4] if shape is None else shape)


@pytest.fixture(scope="module")
def cnn() -> nn.Module:
    torch.manual_seed(0)
    return fit_under_noise(
        SmallCNN(classes=4, width=8), *toy(400, seed=5), sigma=0.15, epochs=25, progress=False
    ).eval()


@pytest.fixture(scope="module")
def exported(cnn: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small CNN as torch exports it today: weights in a second file, a free batch size."""
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript: pip install '.[test]'")
    path = tmp_path_factory.mktemp("onnx") / "cnn.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            cnn, (torch.rand(2, *SHAPE),), path, dynamic_shapes={"images": {0: torch.export.Dim.DYNAMIC}}, verbose=False
        )
    return path


# -- end to end --------------------------------------------------------------------------------------------------------


def test_the_small_cnn_exported_calibrates_saves_loads_predicts_and_is_audited(
    exported: Path, cnn: nn.Module, tmp_path: Path
) -> None:
    model = load_model(str(exported))
    torch.testing.assert_close(model(TEST[0]), cnn(TEST[0]).detach(), rtol=1e-4, atol=1e-5)
    options: dict[str, Any] = {"epsilon": 0.1, "sigma": 0.15, "draws": 8, "seed": 1, "class_names": list("abcd")}
    predictor, reference = calibrate(model, CAL, **options), calibrate(cnn, CAL, **options)
    for level, calibrated in predictor.levels.items():  # the same function, so nearly the same threshold
        torch.testing.assert_close(calibrated.threshold, reference.levels[level].threshold, rtol=0, atol=1e-3)
    predictor.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", OnnxClassifier(exported))
    sets = loaded.predict(TEST[0], seed=2)
    assert torch.equal(sets.mask, predictor.predict(TEST[0], seed=2).mask)
    assert float((sets.mask == reference.predict(TEST[0], seed=2).mask).double().mean()) > 0.99
    assert sets.measure(TEST[1]).coverage.mean > 0.85
    found = audit(
        loaded, TEST, attacks={"random": "random", "transfer": transfer(cnn, 0.15, 8)}, steps=10, draws=8, seed=4
    )
    assert [row.attack for row in found.rows] == ["none", "random", "transfer"]
    assert not found.broken


def test_gradient_attacks_say_what_remains(exported: Path) -> None:
    predictor = calibrate(OnnxClassifier(exported), CAL, epsilon=0.1, sigma=0.15, draws=4, seed=1)
    with pytest.raises(InputError, match=r"no gradients.*attacks=\['random'\].*--attack random.*transfer.*--surrogate"):
        audit(predictor, TEST, steps=2, draws=2)


def test_another_file_is_refused(exported: Path, tmp_path: Path) -> None:
    """One bit of the weights, which are not even in the .onnx file itself."""
    for name in ("cnn.onnx", "cnn.onnx.data"):
        (tmp_path / name).write_bytes((exported.parent / name).read_bytes())
    calibrate(OnnxClassifier(exported), CAL, epsilon=0.1, sigma=0.15, draws=4).save(tmp_path / "p.safetensors")
    load(tmp_path / "p.safetensors", OnnxClassifier(tmp_path / "cnn.onnx"))  # a copy is the same model
    data = bytearray((tmp_path / "cnn.onnx.data").read_bytes())
    data[1000] ^= 1
    (tmp_path / "cnn.onnx.data").write_bytes(bytes(data))
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        load(tmp_path / "p.safetensors", OnnxClassifier(tmp_path / "cnn.onnx"))


# -- one function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["n", 1, 3, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batches_free_or_fixed_give_the_same_rows(batch: int | str, count: int, tmp_path: Path) -> None:
    model, images = OnnxClassifier(linear(tmp_path / "m.onnx", batch=batch)), TEST[0][:count]
    torch.testing.assert_close(model(images), nearest()(images).detach(), rtol=1e-5, atol=1e-5)
    assert model.classes == 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 0.02), (np.float64, 1e-5)])
def test_every_float_type_goes_in_and_float32_comes_out(dtype: type, tolerance: float, tmp_path: Path) -> None:
    out = OnnxClassifier(linear(tmp_path / "m.onnx", dtype=dtype))(TEST[0])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, nearest()(TEST[0]).detach(), rtol=tolerance, atol=10 * tolerance)


def test_images_are_flattened_for_a_model_of_vectors(tmp_path: Path) -> None:
    model = OnnxClassifier(linear(tmp_path / "m.onnx", flat=True))
    assert torch.equal(model(TEST[0]), model(TEST[0].flatten(1)))


def test_probabilities_give_the_scores_and_sets_that_logits_give(tmp_path: Path) -> None:
    logits = OnnxClassifier(linear(tmp_path / "l.onnx"))
    probs = OnnxClassifier(linear(tmp_path / "p.onnx", softmax=True), output="probabilities")
    for score in (HPS(), APS()):
        torch.testing.assert_close(score(probs(TEST[0]), 0.3), score(logits(TEST[0]), 0.3), rtol=1e-4, atol=1e-5)
    options: dict[str, Any] = {"epsilon": 0.1, "sigma": 0.1, "draws": 4, "seed": 1, "method": "exact"}
    masks = [calibrate(model, CAL, **options).predict(TEST[0], seed=3).mask for model in (logits, probs)]
    assert float((masks[0] == masks[1]).double().mean()) > 0.995


def test_probabilities_taken_for_logits_are_noticed(tmp_path: Path) -> None:
    model = OnnxClassifier(linear(tmp_path / "p.onnx", softmax=True))
    with pytest.warns(UserWarning, match="seems to return probabilities where logits are expected"):
        calibrate(model, CAL, epsilon=0.05, sigma=0.1, draws=4, seed=1)
    with pytest.raises(
        InputError, match=r"to return probabilities, rows that sum to 1, got values in .*are they logits\?"
    ):
        OnnxClassifier(linear(tmp_path / "l.onnx"), output="probabilities")(TEST[0])
    with pytest.raises(InputError, match="expected output logits or probabilities, got 'scores'"):
        OnnxClassifier(tmp_path / "p.onnx", output="scores")


def test_the_fingerprint_is_that_of_the_file_and_of_what_is_read_from_it(tmp_path: Path) -> None:
    path = linear(tmp_path / "p.onnx", softmax=True)
    plain = OnnxClassifier(path)
    assert plain.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest() == fingerprint(plain) == fingerprint(path)
    others = [
        OnnxClassifier(path, output="probabilities").fingerprint,
        OnnxClassifier(path, output_name="probabilities").fingerprint,
        OnnxClassifier(linear(tmp_path / "q.onnx")).fingerprint,
    ]
    assert len({plain.fingerprint, *others}) == 4


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 5, 4), (3, 4, 4), (4, 4), (16,)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m\.onnx takes images \[n, 1, 4, 4\], got \[n, "):
        OnnxClassifier(linear(tmp_path / "m.onnx"))(torch.rand(2, *shape))


@pytest.mark.parametrize(
    ("inputs", "outputs", "match"),
    [
        ([info("a"), info("b")], [info("o")], r"one float input, the images; the model has a: .*, b: "),
        ([info("a", TensorProto.INT64)], [info("o", TensorProto.INT64)], "one float input"),
        ([info("a", shape=[4])], [info("o", shape=[4])], r"an input \[n, \.\.\.\]"),
        ([info("a")], [info("o"), info("p")], r"one of several outputs with output_name=; the model has o: .*, p: "),
        (
            [info("a", shape=["n", 2, 2])],
            [info("o", shape=["n", 2, 2])],
            r"a float output \[n, classes\].*zipmap=False",
        ),
    ],
    ids=["two-inputs", "integers", "no-batch", "two-outputs", "rank-3"],
)
def test_signatures_that_are_no_classifier_are_refused(
    inputs: list[Any], outputs: list[Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=match):
        OnnxClassifier(identity(tmp_path / "m.onnx", inputs, outputs))


def test_one_of_several_outputs_can_be_named(tmp_path: Path) -> None:
    """As converted scikit-learn classifiers have them: labels that are integers beside probabilities."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0),
        helper.make_node("Softmax", ["x"], ["p"]),
        helper.make_node("Identity", ["x"], ["raw"]),
    ]
    label, p, raw = info("label", TensorProto.INT64, ["n"]), info("p"), info("raw")
    images = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    only = OnnxClassifier(identity(tmp_path / "one.onnx", [info("x")], [label, p], nodes[:2]), output="probabilities")
    torch.testing.assert_close(only(images), images.log_softmax(dim=1))
    path = identity(tmp_path / "two.onnx", [info("x")], [label, p, raw], nodes)
    assert torch.equal(OnnxClassifier(path, output_name="raw")(images), images)
    for name in ("label", "nothing"):
        with pytest.raises(InputError, match=f"no float output '{name}'"):
            OnnxClassifier(path, output_name=name)


def test_outputs_without_a_declared_shape_are_checked_as_they_come(tmp_path: Path) -> None:
    vague = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    fine = OnnxClassifier(identity(tmp_path / "a.onnx", [info("x", shape=["n", "k"])], [vague]))
    assert fine.classes is None
    assert torch.equal(fine(torch.ones(2, 4)), torch.ones(2, 4))
    summed = helper.make_node("ReduceSum", ["x"], ["o"], keepdims=0)
    with pytest.raises(InputError, match=r"expected outputs \[n, classes\], got shape \(\)"):
        OnnxClassifier(identity(tmp_path / "b.onnx", [info("x")], [vague], [summed]))(torch.ones(2, 4))


def test_rows_that_are_lost_inside_the_model_are_noticed(tmp_path: Path) -> None:
    pooled = helper.make_node("ReduceMean", ["x"], ["o"], axes=[0], keepdims=1)
    model = OnnxClassifier(identity(tmp_path / "m.onnx", [info("x")], [info("o", shape=[1, 4])], [pooled]))
    with pytest.raises(InputError, match="one row of outputs per image, got 1 rows for 3 images"):
        model(torch.rand(3, 4))


def test_a_failure_inside_the_model_is_one_line(tmp_path: Path) -> None:
    """A free image size that the weights do not fit."""
    weight = numpy_helper.from_array(np.ones((16, 4), dtype=np.float32), "weight")
    nodes = [helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("MatMul", ["flat", "weight"], ["o"])]
    graph = helper.make_graph(nodes, "g", [info("x", shape=["n", 1, "h", "w"])], [info("o")], [weight])
    model = OnnxClassifier(write(graph, tmp_path / "m.onnx"))
    assert model(torch.rand(2, *SHAPE)).shape == (2, 4)
    with pytest.raises(InputError, match=r"m\.onnx fails on inputs \(2, 1, 5, 5\)") as caught:
        model(torch.rand(2, 1, 5, 5))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no ONNX model at"):
        OnnxClassifier(tmp_path / "nothing.onnx")
    content = linear(tmp_path / "m.onnx").read_bytes()
    for damaged in (b"", b"garbage", content[:-40], content[:100], b"\x00" * 64, b"PK\x03\x04" + content):
        (tmp_path / "m.onnx").write_bytes(damaged)
        with pytest.raises(InputError, match=r"is not an ONNX model|not a model that onnxruntime can run") as caught:
            OnnxClassifier(tmp_path / "m.onnx")
        assert "\n" not in str(caught.value)


def test_only_devices_that_there_are(tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx")
    assert OnnxClassifier(path, device="cpu")(TEST[0]).shape == (200, 4)
    for device in ("cuda", "meta"):
        with pytest.raises(InputError, match=f"cannot run on {device}: it offers .*CPUExecutionProvider"):
            OnnxClassifier(path, device=device)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linear(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"pip install '.\[onnx\]'"):
        OnnxClassifier(path)


# -- files beside the file ---------------------------------------------------------------------------------------------


def tensor(name: str, location: str | None) -> Any:
    made = numpy_helper.from_array(np.ones(4, dtype=np.float32), name)
    if location is not None:
        made.ClearField("raw_data")
        made.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            made.external_data.add(key=key, value=value)
    return made


def test_external_data_are_found_wherever_a_tensor_can_be() -> None:
    """Initialisers, attributes, subgraphs, sparse tensors, functions and training graphs."""
    inner = helper.make_graph([], "inner", [], [], [tensor("i", "subgraph")])
    node = helper.make_node(
        "X", [], ["y"], value=tensor("v", "attribute"), then=inner, many=[tensor("m", "attributes")]
    )
    sparse = onnx.SparseTensorProto(values=tensor("s", "sparse values"), indices=tensor("s", "sparse indices"))
    graph = helper.make_graph(
        [node], "g", [], [], [tensor("w", "weights"), tensor("own", None), tensor("w2", "weights")]
    )
    graph.sparse_initializer.append(sparse)
    model = helper.make_model(graph)
    function = helper.make_node("X", [], ["y"], value=tensor("v", "function"))
    model.functions.append(helper.make_function("d", "f", [], ["y"], [function], []))
    model.training_info.add().algorithm.initializer.append(tensor("t", "training"))
    expected = {
        "attribute",
        "attributes",
        "function",
        "sparse indices",
        "sparse values",
        "subgraph",
        "training",
        "weights",
    }
    assert external_files(model) == expected


@given(st.binary(max_size=200))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        assert _read(path)[1]


def test_external_data_must_be_there_and_beside(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for location, match in (
        ("weights.bin", "keeps weights in 'weights.bin', which is not beside it"),
        ("../secret", "reads '../secret', outside its own folder"),
    ):
        (tmp_path / "secret").write_bytes(b"\x00" * 16)
        nodes = [helper.make_node("Add", ["x", "w"], ["o"])]
        graph = helper.make_graph(nodes, "g", [info("x")], [info("o")], [tensor("w", location)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match=match):
            OnnxClassifier(folder / "m.onnx")
    graph.initializer[0].CopyFrom(tensor("w", "weights.bin"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    (folder / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    assert OnnxClassifier(folder / "m.onnx")(torch.zeros(1, 4)).tolist() == [[0, 1, 2, 3]]


def field(number: int, content: bytes, above: int = 0, padding: int = 0) -> bytes:
    """A field of a protobuf message, its tag with bits ``above`` the 32 that protobuf keeps, its length with needless bytes."""
    length = varint(len(content))
    if padding:
        length = length[:-1] + bytes([length[-1] | 128]) + b"\x80" * (padding - 1) + b"\x00"
    return varint(number << 3 | 2 | above << 32) + length + content


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize("level", ["entries", "tensor", "graph", "length"])
def test_weights_do_not_escape_the_fingerprint_through_odd_tags(level: str, tmp_path: Path) -> None:
    """Bit 32 of a tag: one protobuf cuts it off and reads the field, another sees another field and passes on.

    onnxruntime gets what was seen here alone, so what it reads is in the fingerprint, or it reads nothing.
    """
    whole = tensor("w", "weights.bin")
    entries = [entry.SerializeToString() for entry in whole.external_data]
    whole.ClearField("external_data")
    odd = {name: int(level == name) for name in ("entries", "tensor", "graph")}
    parts = b"".join(field(13, e, odd["entries"], 2 if level == "length" else 0) for e in entries)
    nodes = [helper.make_node("Add", ["x", "w"], ["o"])]
    graph = helper.make_graph(nodes, "g", [info("x")], [info("o")]).SerializeToString()
    graph += field(5, whole.SerializeToString() + parts, odd["tensor"])
    model = helper.make_model(onnx.GraphProto(), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString() + field(7, graph, odd["graph"]))
    (tmp_path / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    found = []
    for weights in (np.arange(4, dtype=np.float32), np.ones(4, dtype=np.float32)):
        (tmp_path / "weights.bin").write_bytes(weights.tobytes())
        with contextlib.suppress(InputError):
            model = OnnxClassifier(path)
            assert model(torch.zeros(1, 4)).tolist() == [weights.tolist()]
            found.append(model.fingerprint)
    assert len(set(found)) == len(found) == (2 if level == "length" else 0)
    (tmp_path / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    session = pytest.importorskip("onnxruntime").InferenceSession(path)  # the same file, and the weights are read
    assert session.run(None, {"x": np.zeros((1, 4), np.float32)})[0].tolist() == [[0, 1, 2, 3]]


def test_onnxruntime_gets_what_was_seen_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that onnx.proto does not have is not handed on: another reader may take it for one that names a file."""
    path = linear(tmp_path / "m.onnx")
    honest = path.read_bytes()
    path.write_bytes(honest + field(1000, b"location"))
    runtime, seen = pytest.importorskip("onnxruntime"), []
    session = runtime.InferenceSession
    monkeypatch.setattr(
        runtime, "InferenceSession", lambda content, *a, **o: seen.append(content) or session(content, *a, **o)
    )
    OnnxClassifier(path)
    assert seen == [onnx.ModelProto.FromString(honest).SerializeToString()]


@pytest.mark.parametrize("location", ["*/_ORT_MEM_ADDR_/*", "weights.bin\0", "", "a\\b"])
def test_names_that_mean_something_else_to_onnxruntime_are_refused(location: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["o"])]
    graph = helper.make_graph(nodes, "g", [info("x")], [info("o")], [tensor("w", location)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "*" / "_ORT_MEM_ADDR_").mkdir(parents=True)
    for name in ("*/_ORT_MEM_ADDR_/*", "weights.bin", "a\\b"):
        (tmp_path / name).write_bytes(b"\x00" * 16)
    with pytest.raises(InputError, match="which is no name of a file"):
        OnnxClassifier(tmp_path / "m.onnx")


def test_names_of_the_model_are_as_it_says(tmp_path: Path) -> None:
    assert (
        repr(OnnxClassifier(linear(tmp_path / "m.onnx")))
        == "OnnxClassifier('m.onnx', images: ['n', 1, 4, 4] -> logits)"
    )


def test_gradients_of_the_input_do_not_disturb(tmp_path: Path) -> None:
    images: Tensor = TEST[0][:3].clone().requires_grad_(True)
    assert not OnnxClassifier(linear(tmp_path / "m.onnx"))(images).requires_grad


def test_a_model_in_train_mode_is_refused(tmp_path: Path) -> None:
    """Batch norm that looks at its batch: an attacker who fills the rest of it would move the logits."""
    ones, zeros = np.ones(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
    constants = [numpy_helper.from_array(a, n) for a, n in ((ones, "s"), (zeros, "b"), (zeros, "m"), (ones, "v"))]
    for training, refused in ((1, True), (0, False)):
        outputs = ["y", "m2", "v2"] if training else ["y"]
        node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], outputs, training_mode=training)
        graph = helper.make_graph([node], "g", [info("x")], [info("y")], constants)
        model = OnnxClassifier(write(graph, tmp_path / f"{training}.onnx"))
        if refused:
            with pytest.raises(
                InputError, match=r"change with its neighbours in the batch .* export the model in eval mode"
            ):
                model(torch.rand(5, 4))
        else:
            assert model(torch.rand(5, 4)).shape == (5, 4)

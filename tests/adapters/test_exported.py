"""torch.export programs are the modules they came from; opening one runs no code that is in it."""

from __future__ import annotations

import contextlib
import io
import json
import operator
import pickle
import re
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepcover import calibrate, fingerprint, load
from keepcover.adapters import ExportedClassifier
from keepcover.adapters.exported import check_calls
from keepcover.adapters.program import _is_arithmetic, checked_copy
from keepcover.attacks import audit
from keepcover.errors import InputError
from keepcover.models import CifarResNet, SmallCNN
from keepcover.specs import load_model
from keepcover.training import fit_under_noise
from tests.toys import SHAPE, nearest, toy

CAL, TEST = toy(300, seed=1), toy(200, seed=3)
BATCHES: dict[str, Any] = {
    "free": {0: torch.export.Dim("batch", min=1, max=4096)},
    "at-least-2": {0: torch.export.Dim.AUTO},
    "at-most-16": {0: torch.export.Dim("batch", min=1, max=16)},
    "fixed": None,
}


def export(model: nn.Module, path: Path, batch: str = "free", shape: tuple[int, ...] = (2, *SHAPE)) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = None if BATCHES[batch] is None else (BATCHES[batch],)
        torch.export.save(torch.export.export(model, (torch.rand(shape),), dynamic_shapes=dynamic), path)
    return path


class Mixed(nn.Module):
    """Operators with string arguments, dropout, batch norm, attention and sizes computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.gelu(self.drop(self.norm(self.conv(images))), approximate="tanh")
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        x = x.reshape(images.shape[0], 4, -1).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


@pytest.fixture(scope="module")
def cnn() -> nn.Module:
    torch.manual_seed(0)
    return fit_under_noise(
        SmallCNN(classes=4, width=8), *toy(400, seed=5), sigma=0.15, epochs=25, progress=False
    ).eval()


@pytest.fixture(scope="module")
def program(cnn: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(cnn, tmp_path_factory.mktemp("pt2") / "cnn.pt2")


# -- end to end --------------------------------------------------------------------------------------------------------


def test_the_small_cnn_exported_calibrates_saves_loads_predicts_and_is_audited(
    program: Path, cnn: nn.Module, tmp_path: Path
) -> None:
    model = load_model(str(program))
    assert fingerprint(model) == fingerprint(program)
    options: dict[str, Any] = {"epsilon": 0.1, "sigma": 0.15, "draws": 8, "seed": 1, "class_names": list("abcd")}
    predictor, reference = calibrate(model, CAL, **options), calibrate(cnn, CAL, **options)
    predictor.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", ExportedClassifier(program))
    sets = loaded.predict(TEST[0], seed=2)
    assert torch.equal(sets.mask, predictor.predict(TEST[0], seed=2).mask)
    assert float((sets.mask == reference.predict(TEST[0], seed=2).mask).double().mean()) > 0.99
    attacks = [audit(p, TEST, steps=5, draws=8, seed=4, attacks=["softmax"]) for p in (loaded, reference)]
    key = ("exact_asymmetric" if "asym" in predictor.guarantee.method else predictor.guarantee.method, "softmax", 0.1)
    torch.testing.assert_close(*(found.attacked[key] for found in attacks), rtol=0, atol=1e-3)  # gradients too
    assert not attacks[0].broken
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        load(tmp_path / "p.safetensors", cnn)  # the weights are the same, the file is not


# -- one function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", list(BATCHES))
def test_batches_free_or_fixed_give_the_same_rows(batch: str, tmp_path: Path) -> None:
    original = nearest()
    model = ExportedClassifier(export(original, tmp_path / "m.pt2", batch))
    assert model.classes == 4
    for count in (1, 2, 7, 40):
        torch.testing.assert_close(model(TEST[0][:count]), original(TEST[0][:count]), rtol=1e-5, atol=1e-5)


def test_values_and_gradients_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Mixed().eval()
    model = ExportedClassifier(export(original, tmp_path / "m.pt2"), device="cpu")
    images = TEST[0][:6].clone().requires_grad_(True)
    wanted, found = original(images), model(images)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(out[:, 0].sum(), images)[0] for out in (found, wanted)))


def test_modes_are_those_of_the_export(tmp_path: Path) -> None:
    model = ExportedClassifier(export(nearest(), tmp_path / "m.pt2"))
    assert not model.eval().training
    assert model.train().training
    assert torch.equal(model.eval()(TEST[0]), model.train()(TEST[0]))


class Noisy(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return torch.rand_like(images.flatten(1)) + images.flatten(1)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4)).train(), "dropout"),
        (lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 4)).train(), "updates its|batch_norm"),
        (lambda: Mixed().train(), "batch_norm|updates|dropout|attention"),
        (Noisy, "rand_like"),
    ],
    ids=["dropout", "batch-norm", "mixed", "random"],
)
def test_programs_in_train_mode_are_refused(make: Callable[[], nn.Module], what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"exported in train mode \(.*({what}).*\).*call model.eval\(\) first"):
        ExportedClassifier(export(make(), tmp_path / "m.pt2"))


class Two(nn.Module):
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images.flatten(1), images.flatten(1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Two, r"one output, logits \[n, classes\]"),
        (nn.Identity, r"one output, logits \[n, classes\]"),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(32, 4)), r"one output, logits"),
    ],
    ids=["two-outputs", "images-out", "no-batch"],
)
def test_signatures_that_are_no_classifier_are_refused(
    make: Callable[[], nn.Module], match: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=match):
        ExportedClassifier(export(make(), tmp_path / "m.pt2", "fixed"))


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a + b).flatten(1)

    for inputs in ((torch.rand(2, 4), torch.rand(2, 4)), (torch.rand(2, 4).double(),), (torch.zeros(2, 4).long(),)):
        module = Sum() if len(inputs) == 2 else nn.Flatten()
        torch.export.save(torch.export.export(module, inputs), tmp_path / "m.pt2")
        with pytest.raises(InputError, match=r"one float32 input \[n, \.\.\.\], the images; it takes "):
            ExportedClassifier(tmp_path / "m.pt2")
    model = ExportedClassifier(export(nearest(), tmp_path / "m.pt2"))
    for shape in ((2, 1, 5, 4), (2, 4, 4), (2, 16)):
        with pytest.raises(InputError, match=r"m\.pt2 takes images \[n, 1, 4, 4\], got \[n, "):
            model(torch.rand(shape))


# -- no code -----------------------------------------------------------------------------------------------------------


class Touch:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


Records = dict[str, bytes]


def rewrite(path: Path, change: Callable[[Records], None]) -> bytes:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    change(records)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"m/{name}", content)
    return buffer.getvalue()


def in_program(change: Callable[[Any], None]) -> Callable[[Records], None]:
    def apply(records: Records) -> None:
        program = json.loads(records["models/model.json"])
        change(program)
        records["models/model.json"] = json.dumps(program).encode()

    return apply


def first(value: Any, key: str) -> Any:
    """The first dictionary with a key, anywhere inside."""
    if isinstance(value, dict):
        if key in value:
            return value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        found = first(inner, key)
        if found is not None:
            return found
    return None


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((Touch(marker), {}), buffer)
    return buffer.getvalue()


def use_pickle(records: Records, marker: Path) -> None:
    config = json.loads(records["data/weights/model_weights_config.json"])
    next(iter(config["config"].values()))["use_pickle"] = True
    records["data/weights/model_weights_config.json"] = json.dumps(config).encode()
    records["data/weights/weight_0"] = pickled(marker)


def opaque(records: Records, marker: Path) -> None:
    config = {
        "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
    }
    records["data/constants/model_constants_config.json"] = json.dumps(config).encode()
    records["data/constants/opaque_obj_0"] = pickle.dumps(Touch(marker))


def code(marker: Path) -> str:
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"


def call_the_shell(program: Any, marker: Path) -> None:
    node = program["graph_module"]["graph"]["nodes"][0]
    node.update(target="torch.os.system", inputs=[{"name": "", "arg": {"as_string": f"touch {marker}"}, "kind": 1}])


def rename_input(program: Any, marker: Path) -> None:
    text = json.dumps(program).replace('"images"', json.dumps(f"images={code(marker)}"))
    program.clear()
    program.update(json.loads(text))


ATTACKS: dict[str, Callable[[Path], Callable[[Records], None]]] = {
    "weights-pickle": lambda marker: lambda records: use_pickle(records, marker),
    "old-weights": lambda marker: lambda records: records.update({"data/weights/model.pt": pickled(marker)}),
    "old-constants": lambda marker: lambda records: records.update({"data/constants/model.pt": pickled(marker)}),
    "opaque-constant": lambda marker: lambda records: opaque(records, marker),
    "size-expression": lambda marker: in_program(lambda p: first(p, "expr_str").update(expr_str=code(marker))),
    "operator": lambda marker: in_program(lambda p: call_the_shell(p, marker)),
    "input-name": lambda marker: in_program(lambda p: rename_input(p, marker)),
    "argument-name": lambda marker: in_program(
        lambda p: first(p, "forward_arg_names").update(forward_arg_names=[f"images={code(marker)}"])
    ),
    "file-operator": lambda marker: in_program(
        lambda p: p["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.from_file.default")
    ),
    "library": lambda marker: lambda records: records.update({"data/aotinductor/model/a.so": b"\x7fELF"}),
    "other": lambda marker: lambda records: records.update({"surprise.bin": b""}),
}
REASONS = "stored as a pickle|may be a pickle or compiled code|not arithmetic|not among the operators|is not a name"
DROPPED: dict[str, Callable[[Path], Callable[[Records], None]]] = {
    "samples": lambda marker: lambda records: records.update({"data/sample_inputs/model.pt": pickled(marker)}),
    "guards": lambda marker: in_program(lambda p: p.update(guards_code=[code(marker)])),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_programs_that_would_run_code_are_refused(attack: str, program: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "bad.pt2").write_bytes(rewrite(program, ATTACKS[attack](marker)))
    with pytest.raises(InputError, match=rf"bad\.pt2.*({REASONS})") as caught:
        ExportedClassifier(tmp_path / "bad.pt2")(TEST[0])
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "attack", ["weights-pickle", "old-weights", "opaque-constant", "size-expression", "input-name", *DROPPED]
)
@pytest.mark.filterwarnings("ignore")
def test_the_payloads_above_do_run_in_torch(attack: str, program: Path, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    marker = tmp_path / "marker"
    with contextlib.suppress(Exception):  # whatever happens after the code has run
        torch.export.load(io.BytesIO(rewrite(program, {**ATTACKS, **DROPPED}[attack](marker)))).module()(TEST[0])
    assert marker.exists()


def test_what_is_not_needed_is_left_unopened(program: Path, cnn: nn.Module, tmp_path: Path) -> None:
    """Example inputs are always a pickle, guards are Python, stack traces are anything: the program runs without them."""
    marker = tmp_path / "marker"

    def change(records: Records) -> None:
        for drop in DROPPED.values():
            drop(marker)(records)
        records["extra/notes.txt"] = b"hello"
        config = json.loads(records["models/model.json"])
        config["graph_module"]["graph"]["nodes"][0]["metadata"] = {"stack_trace": f"\n{code(marker)}", "custom": "{"}
        records["models/model.json"] = json.dumps(config).encode()

    (tmp_path / "m.pt2").write_bytes(rewrite(program, change))
    model = ExportedClassifier(tmp_path / "m.pt2")
    torch.testing.assert_close(model(TEST[0]), cnn(TEST[0]))
    assert not marker.exists()


def test_expressions_are_arithmetic_or_refused() -> None:
    good = [
        "s0",
        "4*s77 + 1",
        "Max(1, s0)",
        "FloorDiv(s0, 2) >= 3",
        "-u3",
        "Symbol('s34', positive=True, integer=True)",
        "2.5",
        "s0**2",
        "512*(FloorDiv(s0 - 1, 2) + 1)**2*(FloorDiv(s1 - 1, 2) + 1)",
        "PowByNatural(s0, 3)",
    ]
    bad = [
        "",
        "x",
        "open('f')",
        "s0.real",
        "s0[0]",
        "lambda: s0",
        "'s0'",
        "f'{s0}'",
        "(s0 := 1)",
        "eval(s0)",
        "Max(a=1)",
        "Symbol('x y')",
        "Symbol('s0', a=open('f'))",
        "__import__('os')",
        "s0 if s1 else s2",
        "[s0 for s0 in s1]",
        "*s0",
        "Max(*s0)",
        "exec",
        "s0 and s1",
        "(" * 500 + "s0" + ")" * 500,
        "9**9**9",
        "9**99999999",
        "s0**s0",
        "((9**9)**9)**9",
        "Pow(9, 9**9)",
        "PowByNatural(9, 999999999)",
        "1 << 999999999",
        "s0 | 1",
        "9" * 100,
        "*".join(["(s0 + s1)"] * 20),
        "(s0 + s1 + s2 + s3)**16",
        "Max(" + "s0," * 999 + "s1)",
        "+".join(["s0"] * 1000),
        "1/s0**-99999999",
    ]
    assert [text for text in good if not _is_arithmetic(text)] == []
    assert [text for text in bad if _is_arithmetic(text)] == []


# -- no end of memory, no crash ----------------------------------------------------------------------------------------


def zipped(records: Records, kind: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in records.items():
            archive.writestr(f"m/{name}", content)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused_unread(kind: int, program: Path, tmp_path: Path) -> None:
    """Otherwise a thousandth of the memory that they take would do for a file."""
    path, records = tmp_path / "m.pt2", dict[str, bytes]()
    rewrite(program, records.update)
    records["data/weights/weight_0"] = bytes(1 << 24)
    path.write_bytes(zipped(records, kind))
    tracemalloc.start()
    with pytest.raises(InputError, match="holds compressed members, which torch never writes"):
        ExportedClassifier(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_members_that_share_bytes_are_refused(program: Path, tmp_path: Path) -> None:
    """Many names for one place in the file: stored as they are, and yet more than the file."""
    records = dict[str, bytes]()
    rewrite(program, records.update)
    records |= {f"data/weights/weight_{k}": bytes(1 << 16) for k in range(100, 110)}
    content = bytearray(zipped(records, zipfile.ZIP_STORED))
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        for info in archive.infolist():
            at = content.rindex(info.filename.encode()) - 46  # its entry in the list at the end
            content[at + 42 : at + 46] = (0).to_bytes(4, "little")
            content[at + 20 : at + 28] = (1 << 20).to_bytes(4, "little") * 2
    (tmp_path / "m.pt2").write_bytes(bytes(content))
    with pytest.raises(InputError, match="holds compressed members"):
        ExportedClassifier(tmp_path / "m.pt2")


def big_weight(records: Records, sizes: list[int], content: bytes) -> None:
    config = json.loads(records["data/weights/model_weights_config.json"])
    meta = next(iter(config["config"].values()))
    meta["tensor_meta"].update(
        sizes=[{"as_int": size} for size in sizes], strides=[{"as_int": 0} for _ in sizes], storage_offset={"as_int": 0}
    )
    records["data/weights/model_weights_config.json"] = json.dumps(config).encode()
    records[f"data/weights/{meta['path_name']}"] = content


@pytest.mark.parametrize(("sizes", "content"), [([1 << 38], b""), ([1 << 20, 1 << 20], bytes(4)), ([-1], b"")])
def test_tensors_are_not_larger_than_their_bytes(
    sizes: list[int], content: bytes, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "m.pt2").write_bytes(rewrite(program, lambda records: big_weight(records, sizes, content)))
    with pytest.raises(InputError, match="more than it has bytes"):
        ExportedClassifier(tmp_path / "m.pt2")


@pytest.mark.parametrize(
    "name",
    [
        "aten.as_strided.default",
        "aten._unsafe_index.Tensor",
        "aten.view.dtype",
        "aten.remainder.default",
        "aten.set_.source_Tensor",
        "aten._native_batch_norm_legit.no_stats",
        "aten.add.out",
        "aten.empty.memory_format",
        "aten.item.default",
        "prims.iota.default",
        "higher_order.cond",
        "aten.conv2d",
    ],
)
def test_other_operators_are_refused_by_name(name: str, program: Path, tmp_path: Path) -> None:
    def change(config: Any) -> None:
        config["graph_module"]["graph"]["nodes"][0]["target"] = f"torch.ops.{name}"

    (tmp_path / "m.pt2").write_bytes(rewrite(program, in_program(change)))
    with pytest.raises(InputError, match=rf"calls 'torch\.ops\.{re.escape(name)}', which is not among.* give package"):
        ExportedClassifier(tmp_path / "m.pt2")


class Cast(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.to(torch.float64).flatten(1).to(torch.float32)


def test_an_integer_is_no_dtype(tmp_path: Path) -> None:
    """torch takes one for a dtype, and the process ends."""
    path = export(Cast(), tmp_path / "m.pt2")
    assert ExportedClassifier(path)(TEST[0]).shape == (200, 16)

    def change(config: Any) -> None:
        given = first(config, "as_scalar_type")
        given.clear()
        given["as_int"] = 100_000

    path.write_bytes(rewrite(path, in_program(change)))
    with pytest.raises(InputError, match=r"aten\..* gets 100000 as dtype"):
        ExportedClassifier(path)


class Wide(nn.Module):
    """Sizes that an exported program may well have, and a file of 10 kB may as well."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.how == "repeat":
            return x.repeat(1, 1 << 23)
        if self.how == "outer":
            for _ in range(3):
                x = (x[:, :, None] * x[:, None, :]).flatten(1)
            return x[:, :4]
        return x + torch.zeros(1 << 15, 1 << 15, 16).mean((0, 1))


@pytest.mark.parametrize("how", ["repeat", "outer", "zeros"])
def test_programs_that_would_fill_the_memory_are_refused_unrun(how: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m\.pt2: \w+ would take \d+\.\d GiB for 2 images"):
        ExportedClassifier(export(Wide(how), tmp_path / "m.pt2"))


def test_numbers_beyond_reason_are_refused(program: Path, tmp_path: Path) -> None:
    def change(config: Any) -> None:
        first(config, "as_ints")["as_ints"][0] = 1 << 40

    (tmp_path / "m.pt2").write_bytes(rewrite(program, in_program(change)))
    with pytest.raises(InputError, match=r"gets 1099511627776 as \w+, more than"):
        ExportedClassifier(tmp_path / "m.pt2")


def test_sizes_that_double_their_digits_are_refused() -> None:
    """Forty products of a size with itself have 2^40 digits; sums and one product of sizes are what programs need."""
    for steps in (2, 40):
        graph = torch.fx.Graph()
        size = graph.call_function(torch.ops.aten.sym_size.int, (graph.placeholder("images"), 0))
        for _ in range(steps):
            size = graph.call_function(operator.add, (size, 1))
        size = graph.call_function(operator.mul, (size, 4))
        if steps == 2:
            check_calls(graph, "m.pt2")
            continue
        for _ in range(steps):
            size = graph.call_function(operator.mul, (size, size))
        with pytest.raises(InputError, match=r"computes sizes of \d+ bits"):
            check_calls(graph, "m.pt2")


def test_what_a_program_states_about_itself_is_computed_again(program: Path, tmp_path: Path) -> None:
    def lie(config: Any) -> None:
        graph = config["graph_module"]["graph"]
        output = graph["outputs"][0]["as_tensor"]["name"]
        graph["tensor_values"][output]["sizes"][1] = {"as_int": 77}

    (tmp_path / "m.pt2").write_bytes(rewrite(program, in_program(lie)))
    assert ExportedClassifier(tmp_path / "m.pt2").classes == 4


def test_weights_that_do_not_fit_are_noticed_before_a_run(program: Path, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(rewrite(program, lambda records: big_weight(records, [1], bytes(64))))
    with pytest.raises(InputError, match=r"m\.pt2 fails on inputs \(2, 1, 4, 4\)") as caught:
        ExportedClassifier(tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)


def test_a_failure_inside_the_program_is_one_line(program: Path) -> None:
    model = ExportedClassifier(program)
    with torch.no_grad():
        weight = next(model.parameters())
        weight.set_(weight[:1])
    with pytest.raises(InputError, match=r"cnn\.pt2 fails on inputs \(3, 1, 4, 4\)") as caught:
        model(TEST[0][:3])
    assert "\n" not in str(caught.value)


class Counter(nn.Module):
    """In eval mode, and yet another function with every call."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("seen", torch.zeros(1, 16))

    def forward(self, images: Tensor) -> Tensor:
        (self.seen[:, :4] if self.view else self.seen).add_(1)
        return images.flatten(1) + self.seen


@pytest.mark.parametrize("view", [False, True])
def test_programs_that_change_their_buffers_are_refused(view: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"add_\.Tensor updates its weights or buffers.*another function"):
        ExportedClassifier(export(Counter(view).eval(), tmp_path / "m.pt2"))


class Usual(nn.Module):
    """What classifiers are made of, besides what is in Mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.GroupNorm(2, 8), nn.Hardswish(), nn.ReLU6()
        )
        self.excite, self.position = nn.Conv2d(8, 8, 1), nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 5)
        self.register_buffer("index", torch.arange(16).flip(0))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norms(nn.functional.pad(self.conv(images), (1, 1, 1, 1)))
        x = x * torch.sigmoid(self.excite(nn.functional.adaptive_avg_pool2d(x, 1)))
        x = nn.functional.max_pool2d(nn.functional.mish(torch.roll(x, (1, -1), (2, 3))), 2)
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, nn.functional.relu(right)], dim=1)
        x = nn.functional.interpolate(x, size=(4, 4), mode="nearest").flatten(2).transpose(1, 2)
        x = x[:, self.index] + self.position(torch.arange(16, device=x.device))
        x = torch.cat([self.token.expand(images.shape[0], -1, -1), x], dim=1)
        x = nn.functional.normalize(self.block(x), dim=-1)
        return self.head(torch.where(x > 0, x, 0.1 * x)[:, 0]).clamp(-50, 50)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("make", [Usual, Mixed, lambda: CifarResNet(20, 4)], ids=["usual", "mixed", "resnet"])
def test_usual_classifiers_run_exported_or_decomposed(
    make: Callable[[], nn.Module], decomposed: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    original = make().eval()
    shape = (3, 3, 32, 32) if isinstance(original, CifarResNet) else (3, *SHAPE)
    images = torch.rand(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(original, (images,), dynamic_shapes=(BATCHES["free"],))
        torch.export.save(program.run_decompositions() if decomposed else program, tmp_path / "m.pt2")
    model = ExportedClassifier(tmp_path / "m.pt2")
    torch.testing.assert_close(model(images), original(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(images[:1]), original(images[:1]), rtol=1e-4, atol=1e-5)


HOSTILE = """
import random, sys, torch
from keepcover.adapters.operators import _ATEN
torch.set_num_threads(1)

def tensor(pick):
    shape = [pick.choice([0, 1, 1, 2, 3, 4, 8]) for _ in range(pick.choice([0, 1, 2, 3, 4, 4, 5]))]
    made = pick.choice([torch.randn, torch.randn, torch.randn, lambda s: torch.randint(-3, 99, s), lambda s: torch.rand(s) > 0.5])(shape)
    return made.transpose(0, -1) if shape and pick.random() < 0.2 else made

def value(kind, pick):
    if kind.startswith("Optional["):
        return None if pick.random() < 0.4 else value(kind[9:-1], pick)
    if kind.startswith("List["):
        return [value(kind[5:-1], pick) for _ in range(pick.choice([0, 1, 2, 2, 2, 3, 4]))]
    return {
        "Tensor": lambda: tensor(pick), "int": lambda: pick.choice([0, 0, 1, 1, 2, 3, 4, -1, -2, 8, 64]), "bool": lambda: pick.random() < 0.5,
        "float": lambda: pick.choice([0.0, 1.0, -1.0, 0.5, float("nan"), 8.0]), "number": lambda: pick.choice([0, 1, -1, 2, 0.5, float("nan")]),
        "str": lambda: pick.choice(["none", "tanh", "constant", "reflect", "same", "valid", "ij", "ij,jk->ik", "floor", ""]),
        "ScalarType": lambda: pick.choice([torch.float32, torch.int64, torch.bool]), "Layout": lambda: torch.strided,
        "Device": lambda: torch.device("cpu"), "MemoryFormat": lambda: torch.contiguous_format,
    }[kind]()

ran = 0
for name in sorted(_ATEN):
    packet, overload = name.split(".")
    call = getattr(getattr(torch.ops.aten, packet), overload)
    for seed in range(60):
        pick = random.Random(f"{name} {seed}")
        torch.manual_seed(seed)
        given = [(a, value(str(a.real_type), pick)) for a in call._schema.arguments if not (a.has_default_value() and pick.random() < 0.5)]
        print(name, seed, file=sys.stderr)
        try:
            call(**{a.name: v for a, v in given})
            ran += 1
        except Exception:
            pass
print(ran)
"""


def test_no_allowed_operator_ends_the_process() -> None:
    """Arguments of every wrong kind, in a process of its own: errors are well, a signal is not."""
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.returncode} in {done.stderr.splitlines()[-1:]}"
    assert int(done.stdout) > 1000


# -- damage ------------------------------------------------------------------------------------------------------------


def test_files_that_are_no_program_are_refused(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with pytest.raises(InputError, match="no program at"):
        ExportedClassifier(path)
    content = program.read_bytes()
    for damaged in (b"", b"garbage", content[:-30], content[30:], content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"m\.pt2 (is not a program|holds)") as caught:
            ExportedClassifier(path)
        assert "\n" not in str(caught.value)
    for name in ("models/model.json", "data/weights/model_weights_config.json"):
        path.write_bytes(rewrite(program, lambda records, name=name: records.pop(name) and None))
        with pytest.raises(InputError, match=f"no '{name}'"):
            ExportedClassifier(path)
    path.write_bytes(rewrite(program, in_program(lambda p: p["graph_module"]["graph"]["nodes"].pop())))
    with pytest.raises(InputError, match=r"torch .* can load"):
        ExportedClassifier(path)


def test_a_record_may_not_come_twice(program: Path, tmp_path: Path) -> None:
    """Readers disagree on which of two records counts; that is how checks are evaded."""
    path = tmp_path / "m.pt2"
    path.write_bytes(program.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("cnn/models/model.json", b"{}")
    with pytest.raises(InputError, match=r"'models/model\.json' twice"):
        ExportedClassifier(path)


def test_flipped_bytes_are_refused_or_another_model(program: Path, cnn: nn.Module, tmp_path: Path) -> None:
    """120 positions: an error in one line, or a program with another fingerprint that a saved predictor refuses."""
    content, path = program.read_bytes(), tmp_path / "m.pt2"
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(content), (120,), generator=generator).tolist()
    survivors = 0
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1 << (place % 8)
        try:
            copy = checked_copy(bytes(altered), "m.pt2")
        except InputError:
            continue
        survivors += 1
        if survivors <= 8:  # opening is slow
            path.write_bytes(bytes(altered))
            assert copy
            assert fingerprint(ExportedClassifier(path)) != fingerprint(program)
    assert survivors < 100

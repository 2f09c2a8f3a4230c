"""A saved predictor comes back the same or not at all."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import keepcover
from keepcover.bounds import hull_level, majorant_gap
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import CAS, Exact, RSCPPlus, get_method
from keepcover.methods.exact import HullRule, MajorantRule
from keepcover.noise import Gaussian, Stream
from keepcover.prediction import Predictor, calibrate, calibrate_outputs
from keepcover.prediction.artifact import digest, load, read
from keepcover.scores import HPS, PTT, RAPS, CustomScore, Draws
from keepcover.tasks import Classification
from tests.prediction.saved import contents, rewrite
from tests.toys import nearest, toy

CAL, HELD, TEST = toy(120, seed=1), toy(40, seed=2), toy(60, seed=3)
ASK: dict[str, Any] = {"epsilon": 0.03, "sigma": 0.1, "draws": 8, "calibration_draws": 8, "seed": 1, "holdout": HELD}


pytestmark = pytest.mark.usefixtures("untyped")


def margin(logits: Tensor) -> Tensor:
    return -logits


CASES: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "exact-randomised": {"method": Exact(randomize=True), "draws": 2, "calibration_draws": 2},
    "exact_asymmetric": {"method": "exact_asymmetric", "draws": 2},
    "auto": {"method": "auto", "draws": 2},
    "rcp1": {"method": "rcp1"},
    "bernstein-ptt": {"method": "rscp_plus_bernstein", "draws": 256, "calibration_draws": 256},
    "hoeffding-plain": {"method": RSCPPlus("hoeffding", transform=None), "draws": 256, "calibration_draws": 256},
    "rscp-ptt-levels": {"method": "rscp", "alpha": (0.1, 0.3), "epsilon": (0.02, 0.0)},
    "cp": {"method": "cp", "sigma": 0.0, "draws": 1, "calibration_draws": 1},
    "cp_smoothed": {"method": "cp_smoothed"},
    "bincp": {"method": "bincp", "draws": 128, "calibration_draws": 128},
    "bincp_sharp": {"method": "bincp_sharp", "draws": 64, "calibration_draws": 64},
    "bincp_threshold": {"method": "bincp_threshold", "draws": 128, "calibration_draws": 128},
    "cas": {"method": CAS(transform=None), "draws": 256, "calibration_draws": 256, "alpha": 0.2},
    "aps": {"method": "exact", "score": "aps"},
    "raps": {"method": "rscp", "score": RAPS(penalty=0.3, k_reg=2), "alpha": 0.2},
    "custom": {"method": "exact", "score": CustomScore(margin)},
    "levels-and-names": {"method": "exact", "alpha": (0.2, 0.1), "epsilon": (0.05, 0.0), "class_names": list("abcd")},
    "numerics": {"method": "exact"},
    "outputs": {},
}


def make(case: str, model: nn.Module) -> Predictor:
    ask = {**ASK, **CASES[case]}
    numerics: dict[str, Any] = {"autocast": torch.bfloat16, "channels_last": True} if case == "numerics" else {}
    if case == "outputs":
        logits = Smoother(model, ask["sigma"]).logits(CAL[0], 32, Stream(1, "calibration"))
        made = calibrate_outputs(logits, CAL[1], epsilon=0.03, sigma=0.1, draws=8, seed=1, method="exact")
        return made.with_model(model)
    return calibrate(Smoother(model, ask.pop("sigma"), **numerics), CAL, **ask)


def same(one: Predictor, two: Predictor, seed: int = 5) -> bool:
    """Every promise, threshold, score and set."""
    a, b = (predictor.predict_all(TEST[0], seed=seed) for predictor in (one, two))
    promises, others = (
        [(key, sets.guarantee, sets.class_names, sets.guarantee.assumptions) for key, sets in found.items()]
        for found in (a, b)
    )
    return (
        promises == others
        and [c.rule for c in one.levels.values()] == [c.rule for c in two.levels.values()]
        and all(torch.equal(one.levels[key].threshold, two.levels[key].threshold) for key in one.levels)
        and all(torch.equal(a[key].mask, b[key].mask) for key in a)
        and torch.equal(one.items.draws.values, two.items.draws.values)
        and one.numerics == two.numerics == two.running.numerics
        and (one.noise, one.holdout_size, one.items.points) == (two.noise, two.holdout_size, two.items.points)
        and one.inputs == two.inputs
        and one.task.config() == two.task.config()
    )


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


@pytest.fixture(scope="module")
def predictor(model: nn.Module) -> Predictor:
    return make("levels-and-names", model)


@pytest.fixture
def saved(predictor: Predictor, tmp_path: Path) -> Path:
    predictor.save(tmp_path / "predictor.safetensors")
    return tmp_path / "predictor.safetensors"


def refused(match: str, path: Path, model: Any, **options: Any) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load(path, model, **options)
    assert "\n" not in str(caught.value)


# -- the same again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(CASES))
def test_a_loaded_predictor_gives_the_same_sets(case: str, model: nn.Module, tmp_path: Path) -> None:
    original, path = make(case, model), tmp_path / "p.safetensors"
    original.save(path)
    loaded = load(path, nearest(), score=margin if case == "custom" else None)  # equal weights in another object
    assert same(original, loaded)
    assert repr(original) == repr(loaded)
    again = tmp_path / "again.safetensors"
    loaded.save(again)
    assert read(again)[0] == read(path)[0]  # checksums of the tensors included


def test_full_sets_survive_too(model: nn.Module, tmp_path: Path) -> None:
    with pytest.warns(KeepcoverWarning, match="can only return everything"):
        original = calibrate(model, CAL, **{**ASK, "method": "rcp1", "epsilon": 0.9})
    original.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", model)
    assert float(loaded.threshold) == math.inf
    assert loaded.predict(TEST[0]).trivial.all()


def test_options_of_loading_change_no_set(saved: Path, model: nn.Module, predictor: Predictor) -> None:
    reports: list[int] = []
    loaded = load(saved, model, batch_size=7, device="cpu", progress=lambda done, total: reports.append(done))
    assert same(predictor, loaded)
    assert loaded.running.batch_size == 7
    assert reports[-1] == 60


def test_the_file_is_safetensors_with_its_promise_in_words(saved: Path, predictor: Predictor) -> None:
    manifest, tensors = read(saved)
    assert torch.equal(tensors["calibration"], predictor.items.draws.values)
    assert manifest["levels"][0]["guarantee"]["statement"] == str(predictor.guarantee)
    assert manifest["levels"][0]["guarantee"]["assumptions"] == list(predictor.guarantee.assumptions)
    assert manifest["task"]["class_names"] == list("abcd")


def test_the_public_name() -> None:
    assert keepcover.load is load


# -- the model ---------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(saved: Path, model: nn.Module) -> None:
    """One weight by one unit in the last place is another model."""
    other = nearest()
    with torch.no_grad():
        other[1].bias[3] = torch.nextafter(other[1].bias[3], torch.tensor(9.0))
    refused("the model differs from the one calibrated: fingerprint .*; load the model that was", saved, other)
    refused("the model differs", saved, nn.Sequential(model))
    refused("the model differs", saved, lambda x: model(x), fingerprint="my-model-2")


def test_a_callable_needs_a_fingerprint_of_its_own(model: nn.Module, tmp_path: Path) -> None:
    def function(images: Tensor) -> Tensor:
        return model(images)

    named = calibrate(function, CAL, **{**ASK, "method": "exact"}, fingerprint="my-model-1")
    named.save(tmp_path / "named.safetensors")
    assert same(named, load(tmp_path / "named.safetensors", function, fingerprint="my-model-1"))
    refused("the model differs", tmp_path / "named.safetensors", function, fingerprint="my-model-2")
    refused('has no fingerprint: give fingerprint="..."', tmp_path / "named.safetensors", function)
    nameless = calibrate(function, CAL, **{**ASK, "method": "exact"})
    with pytest.raises(
        InputError, match=r'a plain function has no fingerprint: give fingerprint="..." \(--fingerprint\)'
    ):
        nameless.save(tmp_path / "nameless.safetensors")
    assert not (tmp_path / "nameless.safetensors").exists()
    nameless.save(tmp_path / "nameless.safetensors", fingerprint="my-model-3")
    assert same(nameless, load(tmp_path / "nameless.safetensors", function, fingerprint="my-model-3"))


# -- the score ---------------------------------------------------------------------------------------------------------


def test_a_custom_score_is_code_and_must_be_given(model: nn.Module, tmp_path: Path) -> None:
    path, original = tmp_path / "p.safetensors", make("custom", model)
    original.save(path)
    refused(r"uses the custom score 'margin'; pass it: load\(path, model, score=", path, model)
    for other in ("hps", CustomScore(margin, "other")):  # another name is another score
        refused("calibrated with score .*'margin'.*, not ", path, model, score=other)
    for score in (margin, CustomScore(margin), lambda logits: -logits):
        assert same(original, load(path, model, score=score))


def test_a_score_that_was_not_calibrated_is_refused(saved: Path, model: nn.Module, predictor: Predictor) -> None:
    refused("calibrated with score .*'hps'.*, not .*'aps'", saved, model, score="aps")
    refused("calibrated with score .*'hps'.*, not .*'margin'", saved, model, score=margin)
    assert same(predictor, load(saved, model, score="hps"))


# -- damage ------------------------------------------------------------------------------------------------------------


def test_no_file_and_foreign_files_are_refused(saved: Path, model: nn.Module, tmp_path: Path) -> None:
    refused("no predictor at", tmp_path / "nothing.safetensors", model)
    refused("no predictor at", tmp_path, model)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.rand(3)}, foreign)
    refused("not a keepcover predictor; make one with Predictor.save", foreign, model)
    save_file({"calibration": torch.rand(3)}, foreign, {"format": "pt"})
    refused("not a keepcover predictor", foreign, model)
    for content in (b"", b"PK", b"\x00" * 64, b"{}", b"\xff" * 9):
        foreign.write_bytes(content)
        refused("not a complete safetensors file", foreign, model)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(share: float, saved: Path, model: nn.Module) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    refused("not a complete safetensors file .*save the predictor again", saved, model)


def test_longer_files_are_refused(saved: Path, model: nn.Module) -> None:
    saved.write_bytes(saved.read_bytes() + b"\x00")
    refused("not a complete safetensors file", saved, model)


def test_no_flipped_byte_changes_a_predictor(saved: Path, model: nn.Module, predictor: Predictor) -> None:
    """150 positions, most of them in the header: refused, or the very same predictor (white space)."""
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    generator = torch.Generator().manual_seed(0)
    places = torch.cat(
        [
            torch.arange(8),
            torch.randint(8, header, (92,), generator=generator),
            torch.arange(header - 8, header),
            torch.randint(header, len(content), (42,), generator=generator),
        ]
    )
    flips = torch.randint(1, 256, (len(places),), generator=generator)
    survivors = 0
    for place, flip in zip(places.tolist(), flips.tolist()):
        altered = bytearray(content)
        altered[place] ^= flip
        saved.write_bytes(bytes(altered))
        try:
            loaded = load(saved, model)
        except InputError:
            continue
        survivors += 1
        assert same(predictor, loaded)
    assert survivors < 10


def test_every_single_bit_of_the_keys_matters(saved: Path, model: nn.Module, predictor: Predictor) -> None:
    """Names, types and shapes of the header, bit by bit."""
    content = saved.read_bytes()
    for word in (b'"__metadata__"', b'"sha256"', b'"keepcover"', b'"calibration"', b'"F32"', b'"shape"'):
        start = content.index(word)
        for place in range(start, start + len(word)):
            altered = bytearray(content)
            altered[place] ^= 1 << (place % 7)
            saved.write_bytes(bytes(altered))
            with pytest.raises(InputError):
                load(saved, model)


# A file small enough to try every byte of it.
TINY: dict[str, Any] = {
    "epsilon": 0.03,
    "sigma": 0.1,
    "draws": 1,
    "calibration_draws": 1,
    "method": "rcp1",
    "alpha": 0.3,
    "seed": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, bytes]:
    predictor = calibrate(nearest(), toy(20, seed=1), **TINY, class_names=list("abcd"))
    path = tmp_path_factory.mktemp("tiny") / "p.safetensors"
    predictor.save(path)
    return predictor, path.read_bytes()


def test_every_byte_of_a_file_counts(tiny: tuple[Predictor, bytes], tmp_path: Path, model: nn.Module) -> None:
    """Every byte flipped in one bit, every bit in turn: refused, or the very same predictor (white space of the header)."""
    predictor, content = tiny
    path, survivors = tmp_path / "p.safetensors", []
    for place in range(len(content)):
        altered = bytearray(content)
        altered[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(altered))
        try:
            loaded = load(path, model)
        except InputError:
            continue
        survivors.append(place)
        assert same(predictor, loaded)
    header = 8 + int.from_bytes(content[:8], "little")
    assert all(chr(content[place]).isspace() and place < header for place in survivors)


def test_every_truncation_and_extension_is_refused(
    tiny: tuple[Predictor, bytes], tmp_path: Path, model: nn.Module
) -> None:
    _, content = tiny
    path = tmp_path / "p.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refused("not a complete safetensors file", path, model)
    for more in (b"\x00", b" ", b"{}", b"\x00" * 64, content):
        path.write_bytes(content + more)
        refused("not a complete safetensors file", path, model)
        path.write_bytes(more + content)
        refused("not a complete safetensors file", path, model)


def test_bytes_removed_or_swapped_inside_are_refused(
    tiny: tuple[Predictor, bytes], tmp_path: Path, model: nn.Module
) -> None:
    """Also with the length of the header corrected, so that only its content is wrong."""
    predictor, content = tiny
    path = tmp_path / "p.safetensors"
    size = int.from_bytes(content[:8], "little")
    for place in range(8, 8 + size, 3):
        for altered, header in (
            (content[8:place] + content[place + 1 :], size - 1),
            (content[8:place] + bytes([content[place]]) + content[place:], size + 1),
        ):
            path.write_bytes(header.to_bytes(8, "little") + altered)
            try:
                loaded = load(path, model)
            except InputError:
                continue
            assert same(predictor, loaded)


NONSENSE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"no-{key}": lambda m, key=key: m.pop(key)
        for key in (
            "task",
            "noise",
            "numerics",
            "model",
            "points",
            "holdout_size",
            "inputs",
            "history",
            "levels",
            "checksums",
        )
    },
    "no-promise": lambda m: m.update(levels=[]),
    "twice": lambda m: m["levels"].append(m["levels"][0]),
    "more": lambda m: m.update(unknown=1),
    **{f"no-task-{key}": lambda m, key=key: m["task"].pop(key) for key in ("name", "score", "classes", "open_labels")},
    **{
        f"no-level-{key}": lambda m, key=key: m["levels"][0].pop(key)
        for key in ("method", "options", "asked", "parameters", "threshold", "guarantee")
    },
    **{
        f"no-model-{key}": lambda m, key=key: m["model"].pop(key) for key in ("fingerprint", "structure", "probe_shape")
    },
    "no-noise-number": lambda m: m["noise"].pop("sigma"),
    "huge": lambda m: m["levels"][0]["asked"].update(draws=10**400),
    "huge-classes": lambda m: m["task"].update(classes=10**12, class_names=None),
    "unknown-noise": lambda m: m["noise"].update(name="magic"),
    "unknown-task": lambda m: m["task"].update(name="magic"),
    "unknown-clause": lambda m: m["levels"][0]["asked"]["promise"].update(magic=1),
    "unknown-option": lambda m: m["levels"][0]["options"].update(magic=1),
    "model-null": lambda m: m.update(model=None),
    "model-and-numerics-null": lambda m: m.update(model=None, numerics={}),
    "some-numerics": lambda m: m["numerics"].pop("compile"),
    "compile": lambda m: m["numerics"].update(compile=1),
    "infinite-range": lambda m: m["inputs"].update(high=math.inf),
    "points": lambda m: m.update(points=121),
    "thresholds": lambda m: m["levels"][0]["threshold"].append("0.0"),
    "no-thresholds": lambda m: m["levels"][0].update(threshold=[]),
    "no-inputs": lambda m: m.update(inputs=None),
    "method": lambda m: m["levels"][0].update(method="magic"),
    "asked": lambda m: m["levels"][0]["asked"].update(unknown=1),
    "asked-type": lambda m: m["levels"][0].update(asked=None),
    "parameters": lambda m: m["levels"][0]["parameters"].update(unknown=1),
    "threshold": lambda m: m["levels"][0].update(threshold=["high"]),
    "transform": lambda m: m["levels"][0].update(method="rscp", options={"transform": {"T": 0.0025}}),  # of no holdout
    "levels-type": lambda m: m.update(levels=3),
    "checksums-type": lambda m: m.update(checksums=3),
    "score": lambda m: m["task"]["score"].update(name="magic"),
    "score-type": lambda m: m["task"].update(score=None),
    "autocast": lambda m: m["numerics"].update(autocast="load"),
    "inputs-type": lambda m: m.update(inputs=3),
    "inputs-shape": lambda m: m["inputs"].pop("shape"),
    "sigma-negative": lambda m: m["noise"].update(sigma=-1.0),
    "draws": lambda m: m["levels"][0]["asked"].update(calibration_draws=99),
}


@pytest.mark.parametrize("case", list(NONSENSE))
def test_a_signed_manifest_that_makes_no_sense_is_refused(case: str, saved: Path, model: nn.Module) -> None:
    """An error in one line, whoever wrote the file."""
    rewrite(saved, NONSENSE[case])
    refused(".", saved, model)


@pytest.mark.parametrize("text", ["3", "[]", '"x"', "null", "{", "", "[" * 3000])
def test_a_signed_manifest_that_is_no_object_is_refused(text: str, saved: Path, model: nn.Module) -> None:
    _, tensors = contents(saved)
    save_file(tensors, saved, {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    refused(r"makes no sense|has format None", saved, model)


def test_inputs_and_origin_are_remembered(predictor: Predictor, saved: Path, model: nn.Module, tmp_path: Path) -> None:
    loaded = load(saved, model)
    assert loaded.inputs == predictor.inputs
    assert loaded.inputs is not None
    assert loaded.inputs.shape == (1, 4, 4)
    assert (loaded.inputs.low, loaded.inputs.high) == (
        min(float(CAL[0].min()), float(HELD[0].min())),
        max(float(CAL[0].max()), float(HELD[0].max())),
    )
    assert set(loaded.provenance) == {"how", "created", "keepcover", "torch", "points", "unknown", "scores", "of"}
    assert loaded.provenance == predictor.provenance
    loaded.provenance["note"] = "mine"
    loaded.save(tmp_path / "noted.safetensors")
    assert load(tmp_path / "noted.safetensors", model).provenance["note"] == "mine"


def test_another_format_is_refused(saved: Path, model: nn.Module) -> None:
    rewrite(saved, lambda manifest: manifest.update(format=1))
    refused("has format 1, this version reads 3; calibrate again", saved, model)
    rewrite(saved, lambda manifest: manifest.pop("format"))
    refused("has format None", saved, model)


def test_an_altered_manifest_is_refused(saved: Path, model: nn.Module) -> None:
    rewrite(saved, lambda manifest: manifest["noise"].update(sigma=9.0), seal=False)
    refused("manifest of .* does not match its checksum: the file was altered", saved, model)


def test_a_signed_threshold_that_does_not_follow_is_refused(saved: Path, model: nn.Module) -> None:
    """Whoever signs again still cannot promise what the calibration scores do not give."""
    saved_threshold = float(read(saved)[0]["levels"][0]["threshold"][0])
    rewrite(saved, lambda manifest: manifest["levels"][0].update(threshold=[repr(saved_threshold - 0.01)]))
    refused("does not follow from the calibration scores", saved, model)


def test_a_signed_other_rule_or_level_is_refused(saved: Path, model: nn.Module, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for key, value in (("epsilon", 0.0), ("alpha", 0.15)):
        saved.write_bytes(content)

        def change(manifest: dict[str, Any], key: str = key, value: float = value) -> None:
            asked = manifest["levels"][0]["asked"]
            (asked if key == "alpha" else asked["threat"])[key] = value

        rewrite(saved, change)
        refused(f"it states guarantee.{key} .*, the rest of it gives {value}; save the predictor again", saved, model)


def test_altered_or_missing_tensors_are_refused(saved: Path, model: nn.Module) -> None:
    metadata, tensors = contents(saved)
    assert set(tensors) == {"calibration", "probe_scores", "probe_outputs"}
    for name, tensor in tensors.items():
        moved = tensor.clone()
        moved.view(-1)[0] += 1
        for other in (moved, tensor.double()):
            save_file({**tensors, name: other}, saved, metadata)
            refused(f"tensor '{name}' does not match its checksum", saved, model)
        save_file({other: value for other, value in tensors.items() if other != name}, saved, metadata)
        refused(f"tensor '{name}' does not match its checksum", saved, model)
    save_file({**tensors, "more": tensors["calibration"].clone()}, saved, metadata)
    refused("tensor 'more' does not match its checksum", saved, model)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_saving_leaves_one_file(predictor: Predictor, saved: Path) -> None:
    before = read(saved)[0]
    predictor.save(str(saved))  # over the old one
    assert read(saved)[0] == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_failed_write_leaves_the_old_file(
    moment: str, saved: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, honest = saved.read_bytes(), Path.write_bytes

    def half(self: Path, content: bytes) -> int:
        honest(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def never(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, *(("write_bytes", half) if moment == "writing" else ("replace", never)))
    with pytest.raises(InputError, match=r"cannot write .*predictor.safetensors \((No space left|Read-only)"):
        predictor.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_numerics_come_from_the_file(model: nn.Module, tmp_path: Path) -> None:
    make("numerics", model).save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", model)
    assert (loaded.running.autocast, loaded.running.channels_last) == (torch.bfloat16, True)
    with pytest.raises(InputError, match="expected the numerics of calibration"):
        load(tmp_path / "p.safetensors").with_model(Smoother(model, 0.1))


# -- forged files ------------------------------------------------------------------------------------------------------

# Leaves that promise nothing: what sets are read as and where the file says it comes from. Nothing in it could tell.
DESCRIPTIVE = ("accuracy", "history", "holdout_size", "numerics")
FORGED = (
    "exact-randomised",
    "exact_asymmetric",
    "rcp1",
    "bernstein-ptt",
    "rscp-ptt-levels",
    "bincp",
    "cas",
    "cp",
    "raps",
    "outputs",
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Every number, string, truth value and null of a manifest, with the way to it."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in inner for leaf in leaves(item, (*path, key))]
    return [(path, value)]


def mutations(value: Any) -> list[Any]:
    """A little more and less, other orders of magnitude, other types; JSON's infinities too."""
    if isinstance(value, bool) or value is None:
        return [not value, 1, "x"]
    if isinstance(value, int):
        return [value + 1, value - 1, -value - 1, 2 * value + 3, 10**12, float(value), str(value), True]
    if isinstance(value, float):
        return [value + 0.25, value / 2, -value - 1, value * (1 + 1e-7), math.inf, math.nan, int(value), str(value)]
    others = [value + "x", value[:-1], "", 0]
    try:  # a threshold
        return [*others, repr(float(value) + 0.25), repr(float(value) - 1e-6), "-inf", "inf", "nan"]
    except ValueError:
        return others


def put(manifest: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    inner: Any = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("case", FORGED)
def test_no_forged_leaf_changes_a_promise_or_a_set(case: str, model: nn.Module, tmp_path: Path) -> None:
    """Every leaf in turn, resealed: refused in one line, or the predictor is the same in every respect that counts."""
    original, path = make(case, model), tmp_path / "p.safetensors"
    original.save(path)
    content = path.read_bytes()
    sets = {level: found.mask for level, found in original.predict_all(TEST[0], seed=5).items()}
    survivors: set[str] = set()
    found = leaves(read(path)[0])
    assert len(found) > 40
    # Some values of a majorant and one assumption stand for all, and the first levels for the others.
    many = {"g": (0, 1, 8), "assumptions": (0,), "levels": (0, 1)}
    some = [leaf for leaf in found if all(at in many.get(key, (at,)) for key, at in itertools.pairwise(leaf[0]))]
    for way, value in some:
        for other in [one for one in mutations(value) if json.dumps(one) != json.dumps(value)]:
            path.write_bytes(content)
            rewrite(path, lambda manifest, way=way, other=other: put(manifest, way, other))
            try:
                loaded = load(path, model)
            except InputError:
                continue
            if way[0] in DESCRIPTIVE or "class_names" in way or way[-1] == "size":
                continue
            survivors.add(".".join(map(str, way)))
            assert loaded.levels.keys() == original.levels.keys()
            for level in loaded.levels:
                one, two = loaded.at(*level), original.at(*level)
                assert (str(one.guarantee), one.guarantee.assumptions) == (
                    str(two.guarantee),
                    two.guarantee.assumptions,
                )
                assert float(one.threshold) == pytest.approx(float(two.threshold), rel=1e-11)
            assert loaded.running.noise == loaded.noise == original.noise
            if "parameters" in way:  # another rule, which must be as good: its threshold follows from its own theorem
                assert all(certifies(loaded.at(*level)) for level in loaded.levels), (way, value, other)
                continue
            for level, some in loaded.predict_all(TEST[0], seed=5).items():
                assert torch.equal(some.mask, sets[level]), (way, value, other)
    # What may differ without a word: numbers that a method does not read, and changes below rounding.
    unread = ("asked.draws", "asked.calibration_draws", "options.randomize", "parameters.")
    below = ("inputs.", "model.structure", "threshold", "score.penalty", "transform.T", "options.p", "options.eta")
    assert [found for found in survivors if not any(name in found for name in unread + below)] == []


def certifies(predictor: Predictor) -> bool:
    """Whether a count rule's threshold keeps its promise on the calibration points, from the theorems alone."""
    rule, t, alpha = predictor.rule, float(predictor.threshold), predictor.guarantee.alpha
    scores, n = predictor.items.draws.values[:, : rule.calibration_draws], predictor.items.points
    above = (scores > t).sum(dim=1)
    if isinstance(rule, MajorantRule):
        risk = (float(torch.tensor(rule.g, dtype=torch.float64)[above].sum()) + rule.g[-1]) / (n + 1)
        return majorant_gap(rule.g, rule.counts, rule.kappa, rule.gamma) <= 0 and risk <= alpha + 1e-12
    assert isinstance(rule, HullRule)  # no other rule has parameters that a file could change
    level = hull_level(rule.counts, rule.c, rule.kappa, alpha, rule.gamma)
    return (int((above > rule.c).sum()) + 1) / (n + 1) <= level


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["levels"][0]


FORGERIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no-majorant": (
        "exact_asymmetric",
        lambda m: first(m).update(threshold=["-inf"]) or first(m)["parameters"].update(g=[0.0] * 9),
        "g is no majorant",
    ),
    "smaller-majorant": (
        "exact_asymmetric",
        lambda m: first(m)["parameters"].update(g=[0.9 * g for g in first(m)["parameters"]["g"]]),
        "g is no majorant",
    ),
    "other-sigma": ("exact", lambda m: m["noise"].update(sigma=0.4), "noise.sigma 0.1, the rest of it gives 0.4"),
    "classes": ("exact", lambda m: m["task"].update(classes=5), "score 'hps' gives other values"),
    "candidates": ("exact", lambda m: first(m)["asked"].update(candidates=9), "states candidates 9, .* gives 4"),
    "open": ("exact", lambda m: m["task"].update(open_labels=True), "it states guarantee.assumptions"),
    "names": ("exact", lambda m: m["task"].update(class_names=list("abcde")), "expected 4 class names, .*got 5"),
    "names-type": ("exact", lambda m: m["task"].update(class_names=[0, 1, 2, 3]), "it states task.class_names"),
    "kappa": ("rcp1", lambda m: first(m)["parameters"].update(kappa=3), "0 <= kappa < 1 draws"),
    "gamma": ("exact", lambda m: first(m)["parameters"].update(gamma=1.0), "0 <= gamma < 1"),
    "c": ("rcp1", lambda m: first(m)["parameters"].update(c=-1), "expected 0 <= c < 1 calibration draws, got -1"),
    "eta": ("cas", lambda m: first(m)["options"].update(eta=0.5), "spend all of alpha = 0.2"),
    "beta": ("bernstein-ptt", lambda m: first(m)["options"].update(beta=1e-9), "it states guarantee.statement"),
    "temperature": (
        "bernstein-ptt",
        lambda m: first(m)["options"]["transform"].update(T=1.0),
        "does not follow from the calibration",
    ),
    "count": ("exact", lambda m: first(m)["parameters"].update(kappa=1.5), "expected int for kappa, got 1.5"),
    "points": (
        "exact",
        lambda m: first(m)["asked"].update(n=900) or first(m)["guarantee"].update(n=900),
        "it states n 900, the rest of it gives 120",
    ),
    "statement": (
        "exact",
        lambda m: first(m)["guarantee"].update(statement="With probability 1 ..."),
        "it states guarantee.statement",
    ),
    "assumptions": ("outputs", lambda m: first(m)["guarantee"]["assumptions"].pop(), "it states guarantee.assumptions"),
    "penalty": (
        "raps",
        lambda m: m["task"]["score"].update(penalty=0.4),
        "score 'raps' gives other values than it did",
    ),
    "holdout": ("rscp-ptt-levels", lambda m: m.update(holdout_size=50), "it states holdout_size 50, .* gives 40"),
    "holdout-type": ("exact", lambda m: m.update(holdout_size="many"), "expected points and holdout_size as numbers"),
    "shape": ("exact", lambda m: m["model"].update(probe_shape=[1, 2, 8]), r"it states probe_shape \[1, 2, 8\]"),
    "range": ("exact", lambda m: m["inputs"].update(high=300.0), "its logit of class"),
    "format-of-inputs": ("exact", lambda m: m["inputs"].update(low="0"), "it states inputs.low"),
    "no-inputs": ("exact", lambda m: m.update(inputs=None), "it states probe_shape"),
    "layout": (
        "exact",
        lambda m: m["numerics"].update(channels_last="yes"),
        "expected autocast .*channels_last and compile",
    ),
}


@pytest.mark.parametrize("case", list(FORGERIES))
def test_a_forged_file_is_told_what_is_wrong_with_it(case: str, model: nn.Module, tmp_path: Path) -> None:
    name, change, words = FORGERIES[case]
    make(name, model).save(tmp_path / "p.safetensors")
    rewrite(tmp_path / "p.safetensors", change)
    refused(words, tmp_path / "p.safetensors", model)


FORGED_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "nan": (lambda t: t["calibration"][3].fill_(torch.nan), "without NaN"),
    "flat": (lambda t: t.update(calibration=t["calibration"].flatten()), r"calibration scores \[items, draws\]"),
    "unsorted": (lambda t: t.update(reference=t["reference"].flip(0).contiguous()), "not sorted"),
    "few": (lambda t: t.update(calibration=t["calibration"][:100].contiguous()), "states points 120, .* gives 100"),
    "fewer-draws": (lambda t: t.update(calibration=t["calibration"][:, :4].contiguous()), "asked for 8 draws, only 4"),
    "weights": (lambda t: t.update(weight=torch.full((120,), 0.5)), "states weights of several things true"),
    "no-probes": (lambda t: t.pop("probe_scores"), "makes no sense"),
}


@pytest.mark.parametrize("spoilt", list(FORGED_TENSORS))
def test_forged_tensors_are_refused(spoilt: str, model: nn.Module, tmp_path: Path) -> None:
    """With checksums that fit."""
    path = tmp_path / "p.safetensors"
    make("rscp-ptt-levels", model).save(path)
    metadata, tensors = contents(path)
    change, match = FORGED_TENSORS[spoilt]
    change(tensors)
    manifest = json.loads(metadata["keepcover"])
    manifest["checksums"] = {name: digest(tensor) for name, tensor in tensors.items()}
    text = json.dumps(manifest)
    save_file(tensors, path, {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    refused(match, path, model)


# -- code that a file cannot hold --------------------------------------------------------------------------------------


class Backwards(HPS):
    """A built-in score's name over other code."""

    def __call__(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return 1 - super().__call__(logits, u)


@pytest.mark.parametrize("method", ["exact", "cp_smoothed"])
def test_a_subclass_of_a_built_in_score_is_not_the_built_in_score(
    method: str, model: nn.Module, tmp_path: Path
) -> None:
    original, path = (
        calibrate(model, CAL, **{**ASK, "method": method, "score": Backwards()}),
        tmp_path / "p.safetensors",
    )
    assert original.task.config()["score"] == {"name": "hps", "custom": True}
    original.save(path)
    refused("uses the custom score 'hps'; pass it", path, model)
    refused("calibrated with score .*'custom': True.*, not ", path, model, score="hps")
    refused("score 'hps' gives other values than it did at calibration", path, model, score=CustomScore(margin, "hps"))
    assert same(original, load(path, model, score=Backwards()))


def test_a_subclass_of_a_built_in_score_is_looked_at(model: nn.Module) -> None:
    """It does not inherit the promise to lie in [0, 1] and to be no NaN."""

    class Undefined(HPS):
        def __call__(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
            return super().__call__(logits, u) * torch.nan

    class Large(HPS):
        def __call__(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
            return 7 * super().__call__(logits, u)

    for method in ("exact", get_method("rscp", transform=None)):
        with pytest.raises(InputError, match="returned NaN"):
            calibrate(model, CAL, **{**ASK, "method": method, "score": Undefined()})
    with pytest.raises(InputError, match=r"rscp expects scores in \[0, 1\]"):
        calibrate(model, CAL, **{**ASK, "method": get_method("rscp", transform=None), "score": Large()})


class MyRule(HullRule):
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return -super().test_statistic(draws, v)


class MyMethod(Exact):
    """The name of exact over another theorem."""


class MyNoise(Gaussian):
    """The name of Gaussian noise over another up."""


class MyTask(Classification):
    """The name of classification over other sets."""


class MyTransform(PTT):
    """The name of PTT over another table."""


class MySmoother(Smoother):
    def logits(self, images: Tensor, draws: Any, stream: Any, ids: Any = None) -> Tensor:
        return super().logits(images, draws, stream, ids) + 1


class Same(Smoother):
    """Other code that does the same, as a smoother that remembers does."""


MINE: dict[str, dict[str, Any]] = {
    "MyMethod": {"method": MyMethod()},
    "MyTask": {"method": "exact", "task": MyTask()},
    "MyTransform": {"method": get_method("rscp", transform=MyTransform())},
}


@pytest.mark.parametrize("name", list(MINE))
def test_parts_of_your_own_are_not_saved_as_others(name: str, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name} is code of yours, which a file cannot hold"):
        calibrate(model, CAL, **{**ASK, **MINE[name]}).save(tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_rule_noise_or_smoother_of_your_own_is_not_saved_as_another(model: nn.Module, tmp_path: Path) -> None:
    predictor, path = make("exact", model), tmp_path / "p.safetensors"
    own = {level: replace(c, rule=MyRule(**vars(c.rule))) for level, c in predictor.levels.items()}
    with pytest.raises(InputError, match="MyRule is code of yours, which a file cannot hold"):
        replace(predictor, levels=own).save(path)
    ask = {**ASK, "method": "exact"}
    del ask["sigma"]
    with pytest.raises(InputError, match="MyNoise is code of yours"):
        calibrate(model, CAL, noise=MyNoise(0.1), **ask).save(path)
    with pytest.raises(InputError, match="MySmoother is code of yours"):
        calibrate(MySmoother(model, 0.1), CAL, **ask).save(path)
    assert list(tmp_path.iterdir()) == []
    calibrate(Same(model, 0.1), CAL, **ask).save(path)
    assert load(path, model).guarantee == predictor.guarantee

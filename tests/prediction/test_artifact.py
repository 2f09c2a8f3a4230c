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
from keepcover.bounds.bounds import hull_level, majorant_gap
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import keepcover
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import CAS, BinCP, Exact, ExactAsymmetric
from keepcover.prediction.artifact import load, read
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.scores.draws import Draws
from keepcover.scores.scores import HPS, RAPS, CustomScore
from tests.toys import nearest, toy

CAL, HELD, TEST = toy(120, seed=1), toy(40, seed=2), toy(60, seed=3)
ASK: dict[str, Any] = {"epsilon": 0.03, "sigma": 0.1, "draws": 8, "calibration_draws": 8, "seed": 1, "holdout": HELD}


def margin(logits: Tensor) -> Tensor:
    return -logits


CASES: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "exact-randomised": {"method": "exact", "randomize": True, "draws": 2, "calibration_draws": 2},
    "exact_asymmetric": {"method": "exact_asymmetric", "draws": 2},
    "auto": {"method": "auto", "draws": 2},
    "rcp1": {"method": "rcp1"},
    "bernstein-ptt": {"method": "rscp_plus_bernstein", "draws": 256, "calibration_draws": 256},
    "hoeffding-plain": {"method": "rscp_plus_hoeffding", "transform": "none", "draws": 256, "calibration_draws": 256},
    "rscp-ptt-levels": {"method": "rscp", "alpha": (0.1, 0.3), "epsilon": (0.02, 0.0)},
    "cp": {"method": "cp", "sigma": 0.0, "draws": 1, "calibration_draws": 1},
    "cp_smoothed": {"method": "cp_smoothed"},
    "bincp": {"method": "bincp", "draws": 128, "calibration_draws": 128},
    "bincp_sharp": {"method": "bincp_sharp", "draws": 64, "calibration_draws": 64},
    "bincp_threshold": {"method": "bincp_threshold", "draws": 128, "calibration_draws": 128},
    "cas": {"method": "cas", "transform": "none", "draws": 256, "calibration_draws": 256, "alpha": 0.2},
    "aps": {"method": "exact", "score": "aps"},
    "raps": {"method": "rscp", "score": RAPS(penalty=0.3, k_reg=2), "alpha": 0.2},
    "custom": {"method": "exact", "score": CustomScore(margin)},
    "levels-and-names": {"method": "exact", "alpha": (0.2, 0.1), "epsilon": (0.05, 0.0), "class_names": list("abcd")},
    "numerics": {"method": "exact", "autocast": torch.bfloat16, "channels_last": True},
}


def make(case: str, model: nn.Module) -> Predictor:
    return calibrate(model, CAL, **{**ASK, **CASES[case]})


def same(one: Predictor, two: Predictor, seed: int = 5) -> bool:
    """Every promise, threshold, score and set."""
    a, b = (predictor.predict_all(TEST[0], seed=seed) for predictor in (one, two))
    return (
        one.levels == two.levels
        and [(key, sets.guarantee, sets.class_names) for key, sets in a.items()]
        == [(key, sets.guarantee, sets.class_names) for key, sets in b.items()]
        and all(torch.equal(a[key].mask, b[key].mask) for key in a)
        and torch.equal(one.calibration, two.calibration)
        and one.smoother.numerics == two.smoother.numerics
        and (one.smoother.sigma, one.holdout_size) == (two.smoother.sigma, two.holdout_size)
        and one.image_shape == two.image_shape == TEST[0].shape[1:]
        and one.score.config() == two.score.config()
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


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], sign: bool = True) -> None:
    """Change the manifest; sign it again like somebody who knows the format."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    manifest = json.loads(metadata["keepcover"])
    change(manifest)
    metadata["keepcover"] = json.dumps(manifest, sort_keys=True)
    if sign:
        metadata["sha256"] = hashlib.sha256(metadata["keepcover"].encode()).hexdigest()
    save_file(tensors, path, metadata)


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
    with pytest.warns(KeepcoverWarning, match="full label set"):
        original = calibrate(model, CAL, **{**ASK, "method": "rcp1", "epsilon": 0.9})
    original.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", model)
    assert next(iter(loaded.levels.values())).threshold == math.inf
    assert loaded.predict(TEST[0]).trivial.all()


def test_options_of_loading_change_no_set(saved: Path, model: nn.Module, predictor: Predictor) -> None:
    reports: list[int] = []
    loaded = load(saved, model, batch_size=7, device="cpu", progress=lambda done, total: reports.append(done))
    assert same(predictor, loaded)
    assert loaded.smoother.batch_size == 7
    assert reports[-1] == 60


def test_the_file_is_safetensors_with_its_promise_in_words(saved: Path, predictor: Predictor) -> None:
    manifest, tensors = read(saved)
    assert torch.equal(tensors["calibration"], predictor.calibration)
    assert manifest["levels"][0]["guarantee"]["statement"] == str(predictor.guarantee)
    assert manifest["levels"][0]["guarantee"]["assumptions"] == list(predictor.guarantee.assumptions)
    assert manifest["class_names"] == list("abcd")


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
            "classes",
            "class_names",
            "sigma",
            "numerics",
            "score",
            "model_fingerprint",
            "model_structure",
            "probe_shape",
            "holdout_size",
            "inputs",
            "provenance",
            "levels",
            "checksums",
        )
    },
    "no-promise": lambda m: m.update(levels=[]),
    "twice": lambda m: m["levels"].append(m["levels"][0]),
    "more": lambda m: m.update(unknown=1),
    "huge": lambda m: m["levels"][0]["setting"].update(draws=10**400),
    "no-inputs": lambda m: m.update(inputs=None),
    "method": lambda m: m["levels"][0].update(method="magic"),
    "setting": lambda m: m["levels"][0]["setting"].update(unknown=1),
    "no-setting": lambda m: m["levels"][0].pop("setting"),
    "parameters": lambda m: m["levels"][0]["parameters"].update(unknown=1),
    "threshold": lambda m: m["levels"][0].update(threshold="high"),
    "transform": lambda m: m["levels"][0].update(transform="ptt"),  # and there is no holdout
    "levels-type": lambda m: m.update(levels=3),
    "checksums-type": lambda m: m.update(checksums=3),
    "score": lambda m: m["score"].update(name="magic"),
    "score-type": lambda m: m.update(score=None),
    "autocast": lambda m: m["numerics"].update(autocast="load"),
    "inputs-type": lambda m: m.update(inputs=3),
    "inputs-shape": lambda m: m["inputs"].pop("shape"),
    "sigma-negative": lambda m: m.update(sigma=-1.0),
    "draws": lambda m: m["levels"][0]["setting"].update(calibration_draws=99),
}


@pytest.mark.parametrize("case", list(NONSENSE))
def test_a_signed_manifest_that_makes_no_sense_is_refused(case: str, saved: Path, model: nn.Module) -> None:
    """An error in one line, whoever wrote the file."""
    rewrite(saved, NONSENSE[case])
    refused(".", saved, model)


@pytest.mark.parametrize("text", ["3", "[]", '"x"', "null", "{", "", "[" * 3000])
def test_a_signed_manifest_that_is_no_object_is_refused(text: str, saved: Path, model: nn.Module) -> None:
    with safe_open(saved, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
    assert set(loaded.provenance) == {"created", "keepcover", "torch"}
    assert loaded.provenance == predictor.provenance
    loaded.provenance["note"] = "mine"
    loaded.save(tmp_path / "noted.safetensors")
    assert load(tmp_path / "noted.safetensors", model).provenance["note"] == "mine"


def test_another_format_is_refused(saved: Path, model: nn.Module) -> None:
    rewrite(saved, lambda manifest: manifest.update(format=1))
    refused("has format 1, this version reads 2; calibrate again", saved, model)
    rewrite(saved, lambda manifest: manifest.pop("format"))
    refused("has format None", saved, model)


def test_an_altered_manifest_is_refused(saved: Path, model: nn.Module) -> None:
    rewrite(saved, lambda manifest: manifest.update(sigma=9.0), sign=False)
    refused("manifest of .* does not match its checksum: the file was altered", saved, model)


def test_a_signed_threshold_that_does_not_follow_is_refused(saved: Path, model: nn.Module) -> None:
    """Whoever signs again still cannot promise what the calibration scores do not give."""
    saved_threshold = float(read(saved)[0]["levels"][0]["threshold"])
    rewrite(saved, lambda manifest: manifest["levels"][0].update(threshold=repr(saved_threshold - 0.01)))
    refused("does not follow from the calibration scores", saved, model)


def test_a_signed_other_rule_or_level_is_refused(saved: Path, model: nn.Module, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for key, value in (("epsilon", 0.0), ("alpha", 0.01)):
        saved.write_bytes(content)
        rewrite(saved, lambda manifest, k=key, v=value: manifest["levels"][0]["setting"].update({k: v}))
        refused(f"it states guarantee.{key} .*, the rest of it gives {value}; save the predictor again", saved, model)


def test_altered_or_missing_tensors_are_refused(saved: Path, model: nn.Module) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(tensors) == {"calibration", "probe_scores", "probe_logits"}
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
    assert isinstance(loaded.smoother, Smoother)
    assert (loaded.smoother.autocast, loaded.smoother.channels_last) == (torch.bfloat16, True)


# -- forged files ------------------------------------------------------------------------------------------------------

# Leaves that promise nothing: what sets are read as and where the file says it comes from. Nothing in it could tell.
DESCRIPTIVE = ("class_names", "provenance", "holdout_size", "numerics")
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


@pytest.mark.parametrize("case", FORGED)
def test_no_forged_leaf_changes_a_promise_or_a_set(case: str, model: nn.Module, tmp_path: Path) -> None:
    """Every leaf in turn, resealed: refused in one line, or the predictor is the same in every respect that counts."""
    original, path = make(case, model), tmp_path / "p.safetensors"
    original.save(path)
    content = path.read_bytes()
    sets = {level: found.mask for level, found in original.predict_all(TEST[0], seed=5).items()}
    survivors: set[str] = set()
    found = leaves(read(path)[0])
    assert len(found) > 60
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
            if way[0] in DESCRIPTIVE:
                continue
            survivors.add(".".join(map(str, way)))
            assert [str(loaded.guarantee_for(*level)) for level in loaded.levels] == [
                str(original.guarantee_for(*level)) for level in original.levels
            ]
            assert [c.threshold for c in loaded.levels.values()] == pytest.approx(
                [c.threshold for c in original.levels.values()], rel=1e-11
            )
            assert loaded.smoother.sigma == original.smoother.sigma
            if "parameters" in way:  # another rule, which must be as good: its threshold follows from its own theorem
                assert all(certifies(loaded, level) for level in loaded.levels), (way, value, other)
                continue
            for level, some in loaded.predict_all(TEST[0], seed=5).items():
                assert torch.equal(some.mask, sets[level]), (way, value, other)
    # What may differ without a word: settings that a method does not read, and changes below rounding.
    unread = ("setting.beta", "setting.draws", "setting.calibration_draws", "parameters.")
    below = ("inputs.", "model_structure.", "threshold", "score.penalty")
    assert [found for found in survivors if not any(name in found for name in unread + below)] == []


def certifies(predictor: Predictor, level: tuple[float, float]) -> bool:
    """Whether a count rule's threshold keeps its promise on the calibration points, from the theorems alone."""
    rule, t = predictor.levels[level].rule, predictor.levels[level].threshold
    scores, n, s = predictor.calibration[:, : rule.calibration_draws], len(predictor.calibration), rule.setting
    above = (scores > t).sum(dim=1)
    if isinstance(rule, ExactAsymmetric):
        g = torch.tensor(rule.g, dtype=torch.float64)
        risk = (float(g[above].sum()) + rule.g[-1]) / (n + 1)
        return majorant_gap(rule.g, rule.test_draws, rule.kappa, s.r, rule.gamma) <= 0 and risk <= s.alpha + 1e-12
    if isinstance(rule, Exact):
        law = (rule.calibration_draws, rule.c, rule.test_draws, rule.kappa, s.r, s.alpha, rule.gamma)
        return (int((above > rule.c).sum()) + 1) / (n + 1) <= hull_level(*law)
    assert isinstance(rule, BinCP | CAS)
    return 0 < rule.eta < s.alpha


FORGERIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no-majorant": (
        "exact_asymmetric",
        lambda m: m["levels"][0].update(threshold="-inf") or m["levels"][0]["parameters"].update(g=[0.0] * 9),
        "g is no majorant",
    ),
    "smaller-majorant": (
        "exact_asymmetric",
        lambda m: m["levels"][0]["parameters"].update(g=[0.9 * g for g in m["levels"][0]["parameters"]["g"]]),
        "g is no majorant",
    ),
    "other-sigma": ("exact", lambda m: m.update(sigma=0.4), "setting.sigma 0.1, the rest of it gives 0.4"),
    "classes": ("exact", lambda m: m.update(classes=5), "it states classes 5, the rest of it gives 4"),
    "names": ("exact", lambda m: m.update(class_names=list("abcde")), "it states number of class_names 5"),
    "names-type": ("exact", lambda m: m.update(class_names=[0, 1, 2, 3]), "expected class names as strings"),
    "kappa": ("rcp1", lambda m: m["levels"][0]["parameters"].update(kappa=3), "0 <= kappa < 1 draws"),
    "gamma": ("exact", lambda m: m["levels"][0]["parameters"].update(gamma=1.0), "0 <= gamma < 1"),
    "c": ("rcp1", lambda m: m["levels"][0]["parameters"].update(c=-1), "expected int for c, got -1"),
    "eta": ("cas", lambda m: m["levels"][0]["parameters"].update(eta=0.5), "expected eta between 0 and alpha"),
    "count": ("exact", lambda m: m["levels"][0]["parameters"].update(kappa=1.5), "expected int for kappa, got 1.5"),
    "points": (
        "exact",
        lambda m: m["levels"][0]["setting"].update(n=900) or m["levels"][0]["guarantee"].update(n=900),
        "it states setting.n 900, the rest of it gives 120",
    ),
    "statement": (
        "exact",
        lambda m: m["levels"][0]["guarantee"].update(statement="With probability 1 ..."),
        "it states guarantee.statement",
    ),
    "penalty": ("raps", lambda m: m["score"].update(penalty=0.4), "score 'raps' gives other values than it did"),
    "holdout": ("rscp-ptt-levels", lambda m: m.update(holdout_size=50), "it states holdout_size 50, .* gives 40"),
    "shape": ("exact", lambda m: m.update(probe_shape=[1, 2, 8]), r"it states probe_shape \[1, 2, 8\]"),
    "range": ("exact", lambda m: m["inputs"].update(high=300.0), "its logit of class"),
    "format-of-inputs": ("exact", lambda m: m["inputs"].update(low="0"), "it states inputs.low"),
}


@pytest.mark.parametrize("case", list(FORGERIES))
def test_a_forged_file_is_told_what_is_wrong_with_it(case: str, model: nn.Module, tmp_path: Path) -> None:
    name, change, words = FORGERIES[case]
    make(name, model).save(tmp_path / "p.safetensors")
    rewrite(tmp_path / "p.safetensors", change)
    refused(words, tmp_path / "p.safetensors", model)


@pytest.mark.parametrize("spoilt", ["nan", "flat", "unsorted", "few"])
def test_forged_tensors_are_refused(spoilt: str, model: nn.Module, tmp_path: Path) -> None:
    """With checksums that fit."""
    path = tmp_path / "p.safetensors"
    make("rscp-ptt-levels", model).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if spoilt == "nan":
        tensors["calibration"][3, 1] = torch.nan
    elif spoilt == "flat":
        tensors["calibration"] = tensors["calibration"].flatten()
    elif spoilt == "unsorted":
        tensors["holdout"] = tensors["holdout"].flip(0).contiguous()
    else:
        tensors["calibration"] = tensors["calibration"][:100].contiguous()
    from keepcover.prediction.artifact import _digest

    manifest = json.loads(metadata["keepcover"])
    manifest["checksums"] = {name: _digest(tensor) for name, tensor in tensors.items()}
    text = json.dumps(manifest)
    save_file(tensors, path, {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    refused(r"without NaN|not sorted|setting\.n 120, the rest of it gives 100", path, model)


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
    assert original.score.config() == {"name": "hps", "custom": True}
    assert not original.score.sound
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

    for method in ("exact", "rscp"):
        with pytest.raises(InputError, match="returned NaN"):
            calibrate(model, CAL, **{**ASK, "method": method, "transform": "none", "score": Undefined()})
    with pytest.raises(InputError, match=r"rscp expects scores in \[0, 1\]"):
        calibrate(model, CAL, **{**ASK, "method": "rscp", "transform": "none", "score": Large()})


def test_a_method_or_smoother_of_your_own_is_not_saved_as_another(model: nn.Module, tmp_path: Path) -> None:
    class Mine(Exact):
        def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
            return -super().test_statistic(draws, v)

    class MySmoother(Smoother):
        def logits(self, images: Tensor, draws: Any, stream: Any, ids: Any = None) -> Tensor:
            return super().logits(images, draws, stream, ids) + 1

    class Same(Smoother):
        pass

    predictor = make("exact", model)
    for level, calibrated in predictor.levels.items():
        rule = Mine(**vars(calibrated.rule))
        predictor.levels[level] = replace(calibrated, rule=rule)
    with pytest.raises(InputError, match="Mine is code of yours, which no file can hold"):
        predictor.save(tmp_path / "p.safetensors")
    ask = {**ASK, "method": "exact"}
    with pytest.raises(InputError, match="MySmoother is code of yours"):
        calibrate(MySmoother(model, ask.pop("sigma")), CAL, **ask).save(tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []
    calibrate(Same(model, 0.1), CAL, **ask).save(tmp_path / "p.safetensors")

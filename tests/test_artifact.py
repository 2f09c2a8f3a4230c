"""A saved predictor comes back the same or not at all."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import keepcover
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.prediction.artifact import load, read, write_atomically
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.scores.scores import RAPS, CustomScore

from .test_smoothing import nearest, toy

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


def test_a_file_that_does_not_know_the_shape_still_loads(saved: Path, model: nn.Module) -> None:
    rewrite(saved, lambda manifest: manifest.update(inputs=None))
    assert load(saved, model).image_shape is None


def test_the_public_name() -> None:
    assert keepcover.load is load


# -- the model ---------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(saved: Path, model: nn.Module) -> None:
    """One weight by one unit in the last place is another model."""
    other = nearest()
    with torch.no_grad():
        other[1].bias[3] = torch.nextafter(other[1].bias[3], torch.tensor(9.0))
    refused("the model differs from the one calibrated: fingerprint .*; load the weights that were", saved, other)
    refused("the model differs", saved, nn.Sequential(model))
    refused("the model differs", saved, lambda x: model(x), fingerprint="my-model-2")


def test_a_callable_needs_a_fingerprint_of_its_own(model: nn.Module, tmp_path: Path) -> None:
    def function(images: Tensor) -> Tensor:
        return model(images)

    named = calibrate(function, CAL, **{**ASK, "method": "exact"}, fingerprint="my-model-1")
    named.save(tmp_path / "named.safetensors")
    assert same(named, load(tmp_path / "named.safetensors", function, fingerprint="my-model-1"))
    refused("the model differs", tmp_path / "named.safetensors", function, fingerprint="my-model-2")
    with pytest.warns(KeepcoverWarning, match=r"no fingerprint\. Give a callable one with fingerprint="):
        load(tmp_path / "named.safetensors", function)
    nameless = calibrate(function, CAL, **{**ASK, "method": "exact"})
    nameless.save(tmp_path / "nameless.safetensors")
    with pytest.warns(KeepcoverWarning, match="no fingerprint"):
        assert same(nameless, load(tmp_path / "nameless.safetensors", function))


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
            "holdout_size",
            "inputs",
            "provenance",
            "levels",
            "checksums",
        )
    },
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
    rewrite(saved, lambda manifest: manifest.update(format=2))
    refused("has format 2, this version reads 1; calibrate again", saved, model)
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
        refused("does not follow from the calibration scores", saved, model)


def test_altered_or_missing_tensors_are_refused(saved: Path, model: nn.Module) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata, calibration = file.metadata(), file.get_tensor("calibration")
    calibration[0, 0] += 1
    save_file({"calibration": calibration}, saved, metadata)
    refused("tensor 'calibration' does not match its checksum", saved, model)
    calibration[0, 0] -= 1
    save_file({"calibration": calibration, "more": calibration.clone()}, saved, metadata)
    refused("tensor 'more' does not match its checksum", saved, model)
    save_file({"other": calibration}, saved, metadata)
    refused("does not match its checksum", saved, model)
    save_file({"calibration": calibration.double()}, saved, metadata)
    refused("does not match its checksum", saved, model)


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
        raise OSError("disk full")

    def never(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, *(("write_bytes", half) if moment == "writing" else ("replace", never)))
    with pytest.raises(OSError, match="disk full"):
        predictor.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_atomic_writes_replace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"another", b""):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_numerics_come_from_the_file(model: nn.Module, tmp_path: Path) -> None:
    make("numerics", model).save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", model)
    assert isinstance(loaded.smoother, Smoother)
    assert (loaded.smoother.autocast, loaded.smoother.channels_last) == (torch.bfloat16, True)

"""The explorer without a browser: its sets are the library's, they are nested, and nothing a client sends breaks it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from keepcover.cli import main
from keepcover.engine.memory import RememberingSmoother
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.explore.answers import Explorer
from keepcover.explore.app import LIMITS, STATIC, create_app, run
from keepcover.explore.attacking import Job, attack_one
from keepcover.explore.images import Images, Shown, amplified, read_upload
from keepcover.explore.lineup import Lineup, bars, nested, own_sets, radii
from keepcover.explore.subject import Subject, own_subject, saved_subject
from keepcover.methods import get_method
from keepcover.models import Filled
from keepcover.noise import Ablation, Bands, Laplace, Noise, Stream, get_norm
from keepcover.pages.plots import pixels as as_png
from keepcover.prediction.artifact import load
from keepcover.prediction.calibration import calibrate
from keepcover.promises import Promise
from keepcover.web.requests import Problem

from .exploring import EPSILONS, NAMES, SIGMA, toy_data, toy_explorer, toy_model, toy_subject

METHODS = ("vanilla", "rscp", "exact")
LEVELS = {"alpha": 0.1, "draws": 4, "epsilon": 0.2}


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return toy_explorer()


@pytest.fixture(scope="module")
def client(explorer: Explorer) -> Iterator[TestClient]:
    with TestClient(create_app(explorer), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def refused(response: Any, status: int, *words: str) -> None:
    """A refusal in words for people, without a trace of the program."""
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert all(word in message for word in words), message
    assert "Traceback" not in response.text
    assert ".py" not in response.text


# -- the sets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [4, 64])
@pytest.mark.parametrize("key", METHODS)
def test_sets_are_the_librarys_on_the_same_noise_and_nested(explorer: Explorer, key: str, draws: int) -> None:
    lineup, some = explorer.lineup, torch.arange(40)
    images = explorer.subject.gallery.images[some]
    predictor = lineup.predictor(key, 0.1, draws)
    own = own_sets(predictor, images, some, 0.1, EPSILONS, lineup.stream)
    for step, epsilon in enumerate(EPSILONS):
        for union, mask in ((False, own[step]), (True, nested(own)[step])):
            expected = predictor.predict(images, alpha=0.1, epsilon=epsilon, nested=union, ids=some, seed=lineup.seed)
            assert torch.equal(mask, expected.mask)
    assert (nested(own)[1:] | ~nested(own)[:-1]).all()
    answers = [explorer.sets(f"g{i}", 0.1, draws)["methods"][key] for i in range(8)]
    for i, answer in enumerate(answers):
        inside = torch.tensor(
            [[at is not None and at <= step for at in answer["enters"]] for step in range(len(EPSILONS))]
        )
        assert torch.equal(inside, nested(own)[:, i])
        assert answer["sizes"] == inside.sum(1).tolist()
        assert torch.equal(torch.tensor(answer["own"]).bool(), own[:, i])


def test_unions_are_needed_and_made(explorer: Explorer) -> None:
    """Rules are chosen anew for every epsilon, so sets as such are not nested: the union does something here."""
    lineup, every = explorer.lineup, torch.arange(150)
    predictor = lineup.predictor("exact", 0.1, 4)
    own = own_sets(predictor, explorer.subject.gallery.images, every, 0.1, EPSILONS, lineup.stream)
    assert (own[:-1] & ~own[1:]).any()


def test_looking_again_shows_the_same_and_other_images_have_other_noise(explorer: Explorer) -> None:
    assert explorer.sets("g3", 0.1, 4) == explorer.sets("g3", 0.1, 4)
    same = explorer.images.add(explorer.subject.gallery.images[3:4])
    one, other = explorer.sets("g3", 0.1, 64)["methods"]["exact"], explorer.sets(same, 0.1, 64)["methods"]["exact"]
    assert one["support"] != other["support"]


@pytest.mark.parametrize(
    ("method", "draws", "score", "options"),
    [
        ("cp", 1, "hps", {}),
        ("cp_smoothed", 8, "hps", {}),
        ("rscp", 8, "hps", {}),
        ("rscp", 8, "hps", {"transform": None}),
        ("rscp_plus_hoeffding", 64, "hps", {}),
        ("rscp_plus_bernstein", 256, "hps", {}),
        ("exact", 4, "hps", {}),
        ("exact", 4, "hps", {"randomize": True}),
        ("exact_asymmetric", 4, "hps", {}),
        ("rcp1", 1, "hps", {}),
        ("bincp", 64, "hps", {}),
        ("bincp_sharp", 64, "hps", {}),
        ("bincp_threshold", 64, "hps", {}),
        ("cas", 64, "hps", {}),
        ("cas_test_time", 64, "hps", {}),
        ("exact", 4, "aps", {}),
        ("cp", 1, "aps", {}),
    ],
)
@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_bars_explain_every_method(method: str, draws: int, score: str, options: dict[str, Any]) -> None:
    """A label is in the set exactly where its bar reaches the line, whatever the method of a saved predictor."""
    holdout, calibration, gallery = toy_data().split(60, 250, 150)
    chosen = get_method(method, **options)
    predictor = calibrate(
        Smoother(toy_model(), SIGMA, progress=False),
        calibration.pair,
        epsilon=(0.05, 0.2),
        method=chosen,
        score=score,
        draws=draws,
        seed=1,
        holdout=holdout.pair if chosen.needs_holdout else None,
    )
    stream, decided = Stream(0, "test"), set()
    for i in range(30):
        image, id = gallery.images[i : i + 1], torch.tensor([i])
        own = own_sets(predictor, image, id, 0.1, (0.05, 0.2), stream)[:, 0]
        shown = bars(predictor, image, id, 0.1, (0.05, 0.2), stream)
        for mask, bar in zip(own, shown, strict=True):
            reached = bar.support >= bar.needed - 1e-12
            assert torch.equal(reached, mask), (bar, mask)
        for epsilon, bar in zip((0.05, 0.2), shown, strict=True):
            assert bar.words.startswith("every label") == predictor.at(0.1, epsilon).full
        for mask in own:
            decided |= set(mask.tolist())
    assert True in decided


def test_the_promise_in_words(explorer: Explorer) -> None:
    words = explorer.sets("g0", 0.1, 4)["methods"]
    said = str(explorer.lineup.predictor("exact", 0.1, 4).at(0.1, 0.2).guarantee)
    assert words["exact"]["promises"][2] == said
    assert "With probability at least 90 %, the set contains the true label" in said
    assert "under attack cp promises nothing" in words["vanilla"]["promises"][3]
    assert [words[key]["certified"] for key in METHODS] == [False, True, True]
    assert words["rscp"]["full"] == [True] * len(EPSILONS)  # four draws cannot pay the Monte Carlo budget
    assert words["rscp"]["sizes"] == [4] * len(EPSILONS)


def test_a_promise_per_class_is_made_by_every_method_that_can_and_bars_follow_its_thresholds() -> None:
    promise = Promise(per="class", delta=0.1, calibration_epsilon=0.02)
    lineup = Lineup(replace(toy_subject(), promise=promise), alphas=(0.2,), draws=(16,), epsilons=(0.0, 0.1))
    assert [one.key for one in lineup.contenders] == ["rscp", "exact"]  # vanilla CP does not offer calibration_epsilon
    predictor = lineup.predictor("exact", 0.2, 16)
    assert len(predictor.threshold.unique()) == 4
    answer = Explorer(lineup).sets("g0", 0.2, 16)["methods"]["exact"]
    assert "for each class on its own, with probability at least 80 % for every true class" in answer["promises"][0]
    for step in range(2):
        reached = [support >= needed for support, needed in zip(answer["support"][step], answer["needed"][step])]
        assert [int(one) for one in reached] == answer["own"][step]
    with pytest.raises(InputError, match="the promise is per group, and images on the page have none"):
        Lineup(replace(toy_subject(), promise=Promise(per=["a", "b"])))


def test_many_classes_are_cut_to_the_likeliest_and_the_true_one(explorer: Explorer) -> None:
    probabilities = torch.arange(100, 0, -1).double().softmax(0)
    assert explorer._shown_labels(probabilities, 5) == list(range(20))
    assert explorer._shown_labels(probabilities, 77) == [*range(19), 77]


# -- the smoother ------------------------------------------------------------------------------------------------------


def test_remembered_logits_are_those_of_a_plain_smoother_and_memory_is_bounded() -> None:
    model, stream, images = toy_model(), Stream(3, "test"), toy_data().images[:70]
    shared = RememberingSmoother(model, SIGMA, lock=threading.Lock(), memory=10_000)
    plain = Smoother(model, SIGMA)
    ids = torch.arange(70)
    for draws in (4, 16, 2, 16):
        for at in range(0, 70, 32):
            part = slice(at, at + 32)
            assert torch.allclose(
                shared.logits(images[part], draws, stream, ids[part]),
                plain.logits(images[part], draws, stream, ids[part]),
                atol=1e-5,
            )
    assert sum(logits.nbytes for logits in shared._seen.values()) <= 10_000


def test_the_model_runs_in_one_thread_at_a_time() -> None:
    inside, most = 0, 0
    layers = toy_model()

    def model(x: torch.Tensor) -> torch.Tensor:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.005)
        inside -= 1
        return layers(x).detach()

    smoother = RememberingSmoother(model, SIGMA, lock=threading.Lock(), batch_size=64)
    images, results = toy_data().images[:64], {}

    def work(i: int) -> None:
        ids = torch.arange(64)
        results[i] = smoother.logits(images[i : i + 32], 16, Stream(0, "test"), ids[i : i + 32])

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 2, 3, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert len(results) == 4


# -- attacks -----------------------------------------------------------------------------------------------------------


def test_attacks_stay_in_the_ball_and_sets_after_them_are_the_librarys(explorer: Explorer) -> None:
    lineup, gallery = explorer.lineup, explorer.subject.gallery
    lost = dict.fromkeys(METHODS, 0)
    for i in range(6):
        image, label = gallery.images[i : i + 1], int(gallery.labels[i])
        for one in attack_one(lineup, image, label, i, 0.1, 4, 0.3):
            assert float((one.attacked.double() - image.double()).norm()) <= 0.3
            assert 0 <= float(one.attacked.min()) <= float(one.attacked.max()) <= 1
            for key in METHODS:
                for pixels, found in ((image, one.before), (one.attacked, one.after)):
                    expected = lineup.predictor(key, 0.1, 4).predict(
                        pixels, alpha=0.1, epsilon=0.3, nested=True, ids=[i], seed=lineup.seed
                    )
                    assert found[key] == expected.mask[0].nonzero()[:, 0].tolist()
                fate = {(1, 1): "kept", (1, 0): "lost", (0, 0): "missed", (0, 1): "gained"}
                assert one.fates(label)[key] == fate[label in one.before[key], label in one.after[key]]
                lost[key] += one.fates(label)[key] == "lost"
    assert lost["vanilla"] > 6  # of 18: this model is linear, and vanilla CP has no margin
    assert lost["rscp"] == 0


def test_the_three_attacks_are_shown_with_pictures(client: TestClient) -> None:
    answer = client.post("/api/attack", json={**LEVELS, "image": "g1"}).json()
    assert [one["aim"] for one in answer["attempts"]] == ["plain", "smoothed", "margin"]
    assert answer["label_source"] == "its true label"
    for one in answer["attempts"]:
        assert 0.1 < one["distance"] <= 0.2
        for name in ("attacked", "difference"):
            assert one[name].startswith("data:image/png;base64,")


def test_the_image_that_is_found_is_the_first_that_is_lost(client: TestClient, explorer: Explorer) -> None:
    start = 0
    for _ in range(3):
        found = client.post("/api/find", json={**LEVELS, "after": start}).json()
        index, tried = found["index"], found["tried"]
        assert index == (start + tried) % 150
        for i in range(start + 1, start + tried + 1):
            fates = client.post("/api/attack", json={**LEVELS, "image": f"g{i % 150}"}).json()["attempts"][0]["fates"]
            assert (fates["vanilla"] == "lost") == (i == start + tried)
        start = index


def test_nothing_is_found_where_nothing_is_lost(explorer: Explorer) -> None:
    lineup = Lineup(explorer.subject, alphas=(0.1,), draws=(4,), epsilons=(1e-6,))
    assert Explorer(lineup).find(0.1, 4, 1e-6, 0) == {"index": None, "tried": 150}


# -- curves ------------------------------------------------------------------------------------------------------------


def finished(client: TestClient, alpha: float, draws: int) -> dict[str, Any]:
    for _ in range(600):
        answer = client.post("/api/curves", json={"alpha": alpha, "draws": draws}).json()
        if answer["state"] != "running":
            return answer
        assert 0 <= answer["done"] <= answer["total"]
        time.sleep(0.05)
    raise AssertionError("the curves never came")


def test_curves_are_what_the_library_measures(client: TestClient, explorer: Explorer) -> None:
    answer = finished(client, 0.1, 4)
    assert answer["state"] == "done"
    assert answer["images"] == answer["attacked_images"] == 150
    gallery, lineup = explorer.subject.gallery, explorer.lineup
    for key in METHODS:
        row = answer["methods"][key]
        assert [one["radius"] for one in row["attacked"]] == [0.1, 0.2, 0.3]
        for step, epsilon in enumerate(EPSILONS):
            sets = lineup.predictor(key, 0.1, 4).predict(
                gallery.images, alpha=0.1, epsilon=epsilon, nested=True, seed=lineup.seed
            )
            expected = sets.measure(gallery.labels)
            assert row["size"][step]["mean"] == pytest.approx(expected.size)
            assert row["clean"][step] == expected.coverage.__dict__
    means = {key: [one["mean"] for one in answer["methods"][key]["attacked"]] for key in METHODS}
    assert means["vanilla"][-1] < 0.3
    assert min(means["exact"]) > 0.85
    assert all(
        a["mean"] <= b["mean"]
        for a, b in zip(answer["methods"]["exact"]["size"], answer["methods"]["exact"]["size"][1:])
    )


def test_curves_come_piece_by_piece(explorer: Explorer) -> None:
    """Methods one by one, then the attacked radii; what was given is never taken back."""
    curves = Explorer(explorer.lineup).curves
    seen: list[dict[str, Any]] = []
    job = Job(0.1, 4)
    step = job.step

    def watched(count: int = 1) -> None:
        if job.so_far and (not seen or seen[-1] is not job.so_far):
            seen.append(job.so_far)
        step(count)

    job.step = watched  # type: ignore[method-assign]
    curves.images = 20
    curves._attacked = lambda *_: explorer.subject.gallery.images[:20]  # type: ignore[method-assign]
    curves.compute(job)
    seen.append(job.so_far)
    assert [list(one["methods"]) for one in seen[:3]] == [list(METHODS[:n]) for n in (1, 2, 3)]
    assert [len(one["methods"]["exact"]["attacked"]) for one in seen[2:]] == list(range(len(curves.radii) + 1))
    assert seen[2]["methods"]["exact"]["size"] == seen[-1]["methods"]["exact"]["size"]


def test_asking_for_other_curves_stops_the_first(explorer: Explorer) -> None:
    curves = Explorer(explorer.lineup).curves
    assert curves.ask(0.2, 64)["state"] == "running"
    first = curves._job
    curves.ask(0.2, 4)
    assert first.cancelled.is_set()
    assert curves.busy
    curves.stop()
    deadline = time.monotonic() + 60
    while curves.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not curves.busy


def test_curves_that_fail_say_so(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InputError("the model returned NaN")

    curves = Explorer(explorer.lineup).curves
    monkeypatch.setattr(explorer.lineup, "predictor", broken)
    answer = curves.ask(0.2, 4)
    for _ in range(200):
        if answer["state"] != "running":
            break
        time.sleep(0.02)
        answer = curves.ask(0.2, 4)
    assert answer == {"state": "failed", "message": "the model returned NaN"}


# -- uploads -----------------------------------------------------------------------------------------------------------


def image_file(mode: str = "L", size: tuple[int, int] = (4, 4), kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    picture = Image.fromarray(values)
    (picture.convert("RGB") if mode == "P" else picture).convert(mode).save(out, kind, **options)
    return out.getvalue()


def send(client: TestClient, content: bytes, **fields: str) -> Any:
    return client.post("/api/uploads", files={"file": ("image.png", content)}, data=fields)


def test_a_fitting_upload_is_taken_as_it_is(client: TestClient, explorer: Explorer) -> None:
    pixels = (explorer.subject.gallery.images[7:8] * 255).round() / 255
    answer = send(client, as_png(pixels[0])).json()
    assert answer["notices"] == []
    assert torch.equal(explorer.images.get(answer["image"]).pixels, pixels)
    shown = client.get(f"/api/images/{answer['image']}.png")
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(shown.content))), (pixels[0, 0] * 255).round().byte().numpy()
    )
    sets = client.post("/api/sets", json={"image": answer["image"], "alpha": 0.1, "draws": 4}).json()
    assert sets["label"] is None
    assert sets["no_promise"].startswith("No promise for this image")
    of_the_gallery = client.post("/api/sets", json={"image": "g7", "alpha": 0.1, "draws": 4}).json()
    assert of_the_gallery["no_promise"] is None
    attack = {**LEVELS, "image": answer["image"]}
    guessed = client.post("/api/attack", json=attack).json()
    assert guessed["label"] == sets["prediction"]
    assert client.post("/api/attack", json={**attack, "label": 2}).json()["label"] == 2
    refused(client.post("/api/attack", json={**attack, "label": 4}), 422, "between 0 and 3")


@pytest.mark.parametrize(
    ("mode", "size", "words"),
    [
        ("RGB", (4, 4), ["turned from colour into greyscale"]),
        ("L", (9, 5), ["cropped and resized from 9 x 5 to 4 x 4 pixels"]),
        ("RGBA", (4, 4), ["transparency laid on white", "turned from colour into greyscale"]),
        (
            "LA",
            (8, 8),
            [
                "transparency laid on white",
                "turned from colour into greyscale",
                "cropped and resized from 8 x 8 to 4 x 4 pixels",
            ],
        ),
        ("P", (4, 4), ["turned from colour into greyscale"]),
        ("1", (4, 4), []),
        ("I;16", (4, 4), ["brought to 8 bits per channel"]),
    ],
)
def test_what_is_done_to_an_upload_is_said(
    client: TestClient, mode: str, size: tuple[int, int], words: list[str]
) -> None:
    if mode == "I;16":
        out = io.BytesIO()
        Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000).save(out, "PNG")
        content = out.getvalue()
    else:
        content = image_file(mode, size)
    assert send(client, content).json()["notices"] == words


def test_inverting_and_colour() -> None:
    plain, _ = read_upload(image_file("RGB"), (3, 4, 4))
    inverted, words = read_upload(image_file("RGB"), (3, 4, 4), invert=True)
    assert torch.allclose(inverted, 1 - plain)
    assert words == ["inverted: dark became light"]
    grey, words = read_upload(image_file("L"), (3, 4, 4))
    assert words == ["turned from greyscale into colour"]
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_what_is_no_image_is_refused(client: TestClient) -> None:
    whole = image_file("RGB", (64, 64))
    refused(send(client, b""), 422, "not a readable image")
    refused(send(client, b"GIF89a" + bytes(50)), 422, "PNG, JPEG, WEBP")
    refused(send(client, whole[: len(whole) // 2]), 422, "not a readable image")
    frames = [Image.new("L", (4, 4), v) for v in (0, 255)]
    animated = io.BytesIO()
    frames[0].save(animated, "WEBP", save_all=True, append_images=frames[1:])
    refused(send(client, animated.getvalue()), 422, "animation")
    refused(client.post("/api/uploads", data={"file": "words"}, files={"other": b"x"}), 422, "form field file")
    refused(client.post("/api/uploads", json={}), 415, "multipart/form-data")
    broken = client.post("/api/uploads", content=b"x", headers={"content-type": "multipart/form-data; boundary=y"})
    assert broken.status_code in (400, 422)


@pytest.mark.parametrize(("side", "words"), [(5000, "at most 16777216 are read"), (30_000, "far more pixels")])
def test_a_bomb_is_refused_by_its_header(client: TestClient, side: int, words: str) -> None:
    """A few bytes that claim many pixels: nothing is decoded."""
    header = bytearray(image_file("L", (4, 4)))
    header[16:24] = side.to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    refused(send(client, bytes(header)), 422, words)


def test_a_body_too_large_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(send(client, bytes(LIMITS.max_body + 1)), 413, "exceeds")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_any_bytes_are_an_image_or_a_refusal(noise: bytes, at: int, whole: bool) -> None:
    content = noise if not whole else image_file()[:at] + noise + image_file()[at + len(noise) :]
    try:
        pixels, _ = read_upload(content, (1, 4, 4))
    except Problem as problem:
        if problem.status != 422:
            raise
    else:
        assert pixels.shape == (1, 1, 4, 4)
        assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1


def test_only_so_many_uploads_are_kept(explorer: Explorer) -> None:
    images = Explorer(explorer.lineup).images
    names = [images.add(torch.full((1, 1, 4, 4), i / 100)) for i in range(images.kept + 3)]
    for name in names[:3]:
        with pytest.raises(Problem, match="upload the image again"):
            images.get(name)
    assert len({images.get(name).id for name in names[3:]}) == images.kept
    assert all(images.get(name).id >= 2**50 for name in names[3:])  # no upload shares noise with the gallery


def test_the_difference_is_stretched_around_grey() -> None:
    change = torch.zeros(1, 2, 2)
    assert torch.equal(amplified(change)[0], torch.full((1, 2, 2), 0.5))
    change[0, 0, 0], change[0, 1, 1] = 0.1, -0.05
    shown, gain = amplified(change)
    assert gain == pytest.approx(5)
    assert shown.flatten().tolist() == pytest.approx([1.0, 0.5, 0.5, 0.25])


# -- the application ---------------------------------------------------------------------------------------------------


def test_the_page_and_what_it_loads_stay_on_this_machine(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert loaded
    for address in loaded:
        assert client.get(address).status_code == 200, address
    for path in STATIC.iterdir():
        outside = [a for a in re.findall(r"https?://[^\s\"'`)]+", path.read_text()) if "www.w3.org" not in a]
        assert outside == [], path.name
        imports = re.findall(r'from "\./([\w.]+)"', path.read_text())
        assert all(client.get(f"/static/{name}").status_code == 200 for name in imports)


def test_the_description_is_whole(client: TestClient) -> None:
    facts = client.get("/api/subject").json()
    assert facts["class_names"] == list(NAMES)
    assert facts["points"] == {"holdout": 60, "calibration": 250, "gallery": 150}
    assert facts["default"]["alpha"] == 0.1
    assert facts["default"]["epsilon"] in facts["epsilons"]
    assert [m["key"] for m in facts["methods"]] == list(METHODS)
    assert len(facts["labels"]) == 150
    assert client.get("/api/progress").json() == {}


def test_wrong_questions_are_refused(client: TestClient) -> None:
    def sets(**parameters: Any) -> Any:
        return client.post("/api/sets", json={"image": "g0", "alpha": 0.1, "draws": 4} | parameters)

    refused(sets(alpha=0.15), 422, "among 0.1, 0.2")
    refused(sets(draws=5), 422, "among 4, 64")
    refused(sets(alpha="nan"), 422)
    refused(sets(alpha="many"), 422, "alpha")
    for name in ("g150", "g-1", "u123456789abc", "../secrets", "g" + "9" * 30, ""):
        refused(sets(image=name), 404)
    refused(client.get("/api/images/g999.png"), 404)
    refused(client.get("/static/app.py"), 404)
    refused(client.get("/static/..%2fapp.py"), 404)
    refused(client.get("/api/nothing"), 404)
    refused(client.delete("/api/sets"), 405)
    attack = {**LEVELS, "image": "g0"}
    refused(client.post("/api/attack", json={**attack, "epsilon": 0.0}), 422, "epsilon is 0")
    refused(client.post("/api/find", json={**LEVELS, "epsilon": 0.0}), 422, "epsilon is 0")
    refused(client.post("/api/attack", json={**attack, "epsilon": 0.21}), 422, "among")
    refused(client.post("/api/attack", json={**attack, "draws": "4"}), 422, "draws")
    refused(client.post("/api/attack", json={**attack, "seed": 4}), 422, "seed")
    refused(client.post("/api/attack", json=[1]), 422)
    js = {"content-type": "application/json"}
    refused(client.post("/api/attack", content=b"{", headers=js), 400)
    refused(client.post("/api/attack", content=b"[" * 4000, headers=js), 400)
    refused(client.post("/api/attack", content=json.dumps(attack), headers={"content-type": "text/plain"}), 415)


def test_pages_of_other_sites_are_not_answered(client: TestClient) -> None:
    refused(client.get("/api/subject", headers={"origin": "http://evil.example"}), 400, "other sites")
    refused(client.get("/api/subject", headers={"host": "evil.example"}), 400, "other sites")
    assert client.get("/api/subject", headers={"origin": "http://127.0.0.1"}).status_code == 200
    assert client.get("/api/subject", headers={"host": "[::1]:7860"}).status_code == 200
    for site in ("cross-site", "same-site"):
        refused(client.get("/api/images/g0.png", headers={"sec-fetch-site": site}), 400, "other sites")
        assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200  # a link to the page
    assert client.get("/api/subject", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_an_upload_that_is_sent_again_is_always_there() -> None:
    """Two pages with one image: while it is put in its new place, the other page may ask for it."""
    images, pixels, found = Images(toy_data()), torch.rand(1, 1, 4, 4), list[Shown]()
    name = images.add(pixels)
    reader = threading.Thread(target=lambda: found.append(images.get(name)))

    class Asked(dict[str, Shown]):
        def pop(self, *given: Any) -> Any:
            taken = super().pop(*given)
            reader.start()
            reader.join(0.3)
            return taken

    images._uploads = Asked(images._uploads)
    assert images.add(pixels) == name
    reader.join()
    assert [shown.label for shown in found] == [None]


def test_no_answer_is_kept_and_files_are_asked_for_again(client: TestClient) -> None:
    """Answers hold the pictures of who asked: neither a browser nor a proxy may write them down."""
    attack = {**LEVELS, "image": "g0"}
    answers = [client.get("/api/subject"), client.get("/api/progress"), client.get("/api/nothing")]
    answers += [client.post("/api/attack", json=attack), send(client, image_file())]
    assert [answer.headers["cache-control"] for answer in answers] == ["no-store"] * 5
    for path in ("/", "/static/main.js"):
        assert client.get(path).headers["cache-control"] == "no-cache"


def test_no_address_starts_or_stops_a_computation(client: TestClient, explorer: Explorer) -> None:
    """A picture on another site's page is a GET without an origin."""
    before = explorer.curves._job
    for path in ("curves", "sets", "attack", "find", "uploads"):
        refused(client.get(f"/api/{path}", params={"alpha": 0.1, "draws": 64, "image": "g0"}), 405)
    assert explorer.curves._job is before


def test_large_questions_are_not_parsed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "{" + ",".join(f'"{k:x}":0' for k in range(500_000)) + "}"
    for path in ("curves", "sets", "attack", "find"):
        response = client.post(f"/api/{path}", content=names, headers={"content-type": "application/json"})
        refused(response, 413, "at most 4096 bytes")
    assert len(client.post("/api/curves", json={"x" * 4000: 1}).text) < 300


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined"])
def test_no_charset_of_an_upload_is_a_failure(client: TestClient, charset: str) -> None:
    part = b'--x\r\ncontent-disposition: form-data; name="invert"\r\n\r\n%s\r\n--x--\r\n'
    part %= b"xn--a" if charset == "idna" else b"x-999999999"
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    refused(client.post("/api/uploads", content=part, headers=headers), 400, "UTF-8")


def test_what_goes_wrong_inside_stays_inside(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepcover.explore.answers.find_lost", lambda *_: 1 / 0)
    refused(client.post("/api/find", json=LEVELS), 500, "ZeroDivisionError")
    say = lambda *_: (_ for _ in ()).throw(InputError("say this"))  # noqa: E731
    monkeypatch.setattr("keepcover.explore.answers.find_lost", say)
    refused(client.post("/api/find", json=LEVELS), 422, "say this")


def test_many_at_once_get_what_one_gets(client: TestClient) -> None:
    alone = [client.post("/api/sets", json={"image": f"g{i}", "alpha": 0.1, "draws": 4}).json() for i in range(6)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        if i % 3 == 0:
            client.post("/api/attack", json={**LEVELS, "image": f"g{i % 6}"})
        found[i] = client.post("/api/sets", json={"image": f"g{i % 6}", "alpha": 0.1, "draws": 4}).json()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i] == alone[i % 6] for i in range(18))


# -- subjects ----------------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own_is_split_and_named() -> None:
    subject = own_subject(toy_model(), toy_data()[:200], SIGMA, gallery=30)
    assert [len(part) for part in (subject.holdout, subject.calibration, subject.gallery) if part] == [20, 90, 30]
    assert subject.gradients
    assert subject.clip == (0.0, 1.0)
    for sizes in ({"calibration": 190}, {"calibration": 0}, {"gallery": -1}):
        with pytest.raises(InputError):
            own_subject(toy_model(), toy_data()[:200], SIGMA, **sizes)
    with pytest.raises(InputError, match="at least 100 labelled images"):
        own_subject(toy_model(), toy_data()[:99], SIGMA)


def test_a_black_box_is_attacked_by_queries() -> None:
    model = toy_model()
    subject = own_subject(lambda x: model(x).detach(), toy_data(), SIGMA)
    assert not subject.gradients
    lineup = Lineup(subject, alphas=(0.1,), draws=(4,), epsilons=(0.3,))
    image, label = subject.gallery.images[:1], int(subject.gallery.labels[0])
    for one in attack_one(lineup, image, label, 0, 0.1, 4, 0.3):
        assert 0.05 < one.distance <= 0.3


def test_outputs_without_a_name_get_one_and_odd_channels_are_refused() -> None:
    data = toy_data()
    few = type(data)("few", data.images[data.labels < 2], data.labels[data.labels < 2], NAMES[:2])
    assert own_subject(toy_model(), few, SIGMA).gallery.class_names == ("circle", "square", "class 2", "class 3")
    with pytest.raises(InputError, match="between 0 and 1"):
        own_subject(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), data, SIGMA)
    two = type(data)("two", data.images.expand(-1, 2, -1, -1), data.labels, NAMES)
    with pytest.raises(InputError, match="1, 3 or 4 channels"):
        own_subject(toy_model(), two, SIGMA)


def saved(tmp_path: Path, **options: Any) -> Any:
    """A predictor through its file, as a user would bring it."""
    settings: dict[str, Any] = {"alpha": (0.1, 0.3), "epsilon": (0.2, 0.1), "draws": 4, "seed": 1} | options
    smoother = Smoother(toy_model(), settings.pop("sigma", SIGMA), progress=False)
    calibrate(smoother, toy_data(300, seed=5).pair, **settings).save(tmp_path / "p.safetensors")
    return load(tmp_path / "p.safetensors", toy_model())


def test_a_saved_predictor_is_shown_at_its_own_levels(tmp_path: Path) -> None:
    predictor = saved(tmp_path, class_names=NAMES)
    expected = predictor.predict(toy_data().images[:5], alpha=0.3, epsilon=0.2, nested=True, seed=0)
    subject = saved_subject(predictor, toy_data())
    lineup = Lineup(subject, alphas=(0.05,), draws=(256,))
    assert (lineup.alphas, lineup.epsilons, lineup.draws) == ((0.1, 0.3), (0.1, 0.2), (4,))
    assert [c.key for c in lineup.contenders] == ["vanilla", "rscp", "saved"]
    own = own_sets(predictor, toy_data().images[:5], torch.arange(5), 0.3, lineup.epsilons, lineup.stream)
    assert torch.equal(nested(own)[-1], expected.mask)
    facts = Explorer(lineup).sets("g0", 0.3, 4)
    assert facts["methods"]["saved"]["draws"] == 4
    assert any("calibrated beside it" in note for note in lineup.notes)


def test_a_saved_predictor_stands_alone_where_the_data_are_few(tmp_path: Path) -> None:
    lineup = Lineup(saved_subject(saved(tmp_path), toy_data()[:60]))
    assert [c.key for c in lineup.contenders] == ["saved"]
    assert any("too few" in note for note in lineup.notes)
    explorer = Explorer(lineup)
    explorer.prepare()
    assert explorer.attack("g0", 0.1, 4, 0.2)["attempts"][-1]["aim"] == "margin"
    vanilla = saved_subject(saved(tmp_path, method="cp", sigma=0.0, draws=1), toy_data())
    assert any("adds no noise" in note for note in vanilla.notes)
    alone = Explorer(Lineup(vanilla))
    alone.prepare()
    assert [one["aim"] for one in alone.attack("g0", 0.1, 1, 0.2)["attempts"]] == ["plain"]


def test_what_calibration_warns_of_is_told_on_the_page() -> None:
    holdout, calibration, gallery = toy_data().split(60, 250, 150)
    hopeless = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    with torch.no_grad():
        hopeless[1].weight.zero_()
    lineup = Lineup(
        Subject("hopeless", Smoother(hopeless, SIGMA), gallery, holdout, calibration),
        alphas=(0.1,),
        draws=(4,),
        epsilons=(0.0, 0.1),
    )
    lineup.predictor("exact", 0.1, 4)
    assert any("train it further with labels" in note for note in lineup.notes)
    assert not any("return everything" in note for note in lineup.notes)


def test_the_slider_is_made_of_short_decimals() -> None:
    assert radii(0.375)[:3] == (0.0, 0.025, 0.05)
    assert radii(0.375)[-1] == 0.375
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError):
            radii(wrong)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "small-cnn"], "both --model and --data"),
        (["--data", "digits"], "both --model and --data"),
        (["--sigma", "0.5"], "expected --model and --data"),
        (["--model", "small-cnn", "--data", "digits", "--sigma", "0.5"], "needs trained weights: --weights"),
        (["--model", "torch.nn:Identity", "--data", "digits"], "--sigma above 0"),
        (["p.safetensors", "--sigma", "0.5"], "its own noise"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "python_multipart", "PIL"])
def test_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["explore"]) == 2
    assert f"the explorer needs {missing}: pip install '.[explore]'" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    data = toy_data()
    np.savez(tmp_path / "corners.npz", images=data.images.numpy(), labels=data.labels.numpy())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "keepcover",
        "explore",
        "--model",
        "tests.explore.exploring:toy_model",
        "--data",
        str(tmp_path / "corners.npz"),
        "--sigma",
        "0.5",
        "--draws",
        "1",
        "--alpha",
        "0.1",
        "--epsilon",
        "0.5",
        "--port",
        "0",
        "--no-open",
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            address = json.loads("".join(process.stdout.readline() for _ in range(4)))["address"]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}api/subject") as answer:
                assert json.loads(answer.read())["name"] == "corners"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) in (0, 130)
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_busy_port_is_said(capsys: pytest.CaptureFixture[str], explorer: Explorer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="choose another --host or --port"):
            run(explorer, host="127.0.0.1", port=taken.getsockname()[1], open_page=False, tell=lambda _: None)


@pytest.mark.parametrize(
    ("noise", "norm", "reach"), [(Ablation(8), "l0", 2.0), (Bands(2), "patch", 1.0), (Laplace(0.3), "l1", 0.4)]
)
def test_other_threats_are_shown_in_their_own_units(noise: Noise, norm: str, reach: float) -> None:
    """Whole numbers on the slider where the norm counts; methods whose theorems do not hold are left out."""
    model: nn.Module = toy_model()
    subject = own_subject(Filled(model, 0.0) if noise.hides else model, toy_data(), noise, norm=norm, reach=reach)
    explorer = Explorer(Lineup(subject, alphas=(0.2,), draws=(8,)))
    facts = explorer.describe()
    counts = norm != "l1"
    assert facts["epsilons"] == ([float(k) for k in range(int(reach) + 1)] if counts else list(radii(reach)))
    assert [one["key"] for one in facts["methods"]] == (
        ["vanilla", "exact"] if noise.deterministic else ["vanilla", "rscp", "exact"]
    )
    assert facts["draws"] == [4 if noise.deterministic else 8]
    shown = explorer.sets("g0", 0.2, facts["draws"][0])
    assert get_norm(norm).deed(reach, subject.shape) in shown["methods"]["exact"]["promises"][-1]
    found = explorer.attack("g0", 0.2, facts["draws"][0], reach)
    for one in found["attempts"]:
        assert one["distance"] <= reach * (1 + 1e-6)
    with pytest.raises(InputError, match="expected --epsilon, the largest radius on show"):
        own_subject(model, toy_data(), noise, norm=norm)

"""A promise per group over HTTP: every image says its group, each group has its own sets, and outcomes count where they belong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from keepcover import Monitor, Promise
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Settings, create_app

from .client import IMAGES, LABELS, ask, client, refused
from .serving import file_of, make_predictor

GROUPS: list[str | int] = ["north", "south", 7]
ASKED = ["north", "south", 7, "south", "north"]


def grouped(**options: Any) -> Predictor:
    """Thresholds that tell groups apart: of the south every set is full, of 7 every set is empty."""
    made = make_predictor(promise=Promise(per=[GROUPS[i % 3] for i in range(300)]), **options)
    place = made.rule.asked.promise.groups.per
    wide = {"south": torch.inf, 7: -torch.inf}
    levels = {
        level: replace(
            one, threshold=torch.tensor([[wide.get(name, one.threshold[at, 0])] for at, name in enumerate(place)])
        )
        for level, one in made.levels.items()
    }
    return replace(made, levels=levels)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return grouped()


SIZES = [1, 4, 0, 4, 1]


def sizes(response: Any) -> list[int]:
    assert response.status_code == 200, response.text
    return [one["size"] for one in response.json()["sets"]]


def test_every_image_gets_the_set_of_its_group(predictor: Predictor) -> None:
    app = create_app(predictor)
    assert sizes(ask(app, "POST", "/v1/predict", json={"images": IMAGES.tolist(), "groups": ASKED})) == SIZES
    pixels = (IMAGES[:, 0] * 255).round().byte().numpy()
    files = [("images", ("a.png", file_of(one), "image/png")) for one in pixels]
    # A form has text alone: the group 7 is a whole number at calibration.
    form = {"groups": [str(name) for name in ASKED], "alpha": "0.1"}
    assert sizes(ask(app, "POST", "/v1/predict", data=form, files=files)) == SIZES
    described = ask(app, "GET", "/v1/predictor").json()
    assert set(described["groups"]) == set(GROUPS)
    assert "for every group" in described["guarantees"][0]["statement"]


def test_requests_that_share_a_call_keep_their_groups(predictor: Predictor) -> None:
    """Two requests, one batch: the groups of the one do not go to the images of the other."""

    async def both() -> list[list[int]]:
        async with client(create_app(predictor, Settings(batch_wait=0.5))) as caller:
            asked = [{"images": IMAGES[:2].tolist(), "groups": names} for names in (["south", "north"], [7, "south"])]
            return [sizes(one) for one in await asyncio.gather(*(caller.post("/v1/predict", json=a) for a in asked))]

    assert asyncio.run(both()) == [[4, 1], [0, 4]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "expected the field groups: the group of every image"),
        (["north"], "expected the group of each of 2 images in the field groups, got 1"),
        (["north", "west"], "the group 'west' was not among the calibration points"),
        (["north", 7.5], "as names of at most 200 characters or whole numbers"),
        (["north", "s" * 201], "as names of at most 200 characters or whole numbers"),
        (["north", None], "expected the field groups"),
        ("north", "expected the field groups"),
    ],
)
def test_groups_that_are_missing_or_wrong_are_refused(predictor: Predictor, groups: Any, message: str) -> None:
    body = {"images": IMAGES[:2].tolist(), **({} if groups is None else {"groups": groups})}
    refused(ask(create_app(predictor), "POST", "/v1/predict", json=body), 422, "invalid", message)


def test_a_promise_without_groups_takes_none() -> None:
    body = {"images": IMAGES[:1].tolist(), "groups": ["north"]}
    response = ask(create_app(make_predictor()), "POST", "/v1/predict", json=body)
    refused(
        response, 422, "invalid", "unknown field 'groups'; the promise is not per group; the fields are images, alpha"
    )


def test_unknown_groups_get_the_widest_sets_where_the_operator_says_so_and_count_for_nothing(
    predictor: Predictor,
) -> None:
    """No promise is made to them, so their outcomes are no evidence."""
    groups = ["north", "west", "north", "west", "south"]

    async def told() -> tuple[Any, Any, Any]:
        async with client(create_app(predictor, Settings(unknown="widest"))) as caller:
            answer = await caller.post("/v1/predict", json={"images": IMAGES.tolist(), "groups": groups})
            wrong = ((LABELS + 1) % 4).tolist()
            body = {"ticket": answer.json()["ticket"], "labels": wrong}
            counted = await caller.post("/v1/outcomes", json=body)
            return answer, counted.json(), (await caller.get("/v1/monitor")).json()

    answer, counted, monitor = asyncio.run(told())
    assert sizes(answer) == [1, 4, 1, 4, 4]
    assert counted == {"counted": 3, "missed": 2}
    assert monitor["levels"][0]["promise"]["outcomes"] == 3


def test_outcomes_count_at_the_level_of_their_group() -> None:
    """Group by group: a monitor that took another group's level would bet otherwise."""
    predictor = grouped()
    app = create_app(predictor)
    watch = app.state.service.watch
    found: list[Any] = []

    def counted(_: Any, missed: Any, cell: Any = 0, now: Any = None) -> list[str]:
        found.append((list(missed), list(cell)))
        return []

    place = {name: at for at, name in enumerate(predictor.rule.asked.promise.groups.per)}
    group = predictor.grouped(ASKED, 5)
    ticket = watch.ticket((0.1, 0.1), predictor.predict(IMAGES, groups=ASKED), group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "add_outcomes", counted)
        watch.outcomes(ticket, [None, *LABELS.tolist()[1:]])
    assert found == [([False, True, False, False], [place[name] for name in ASKED[1:]])]

"""A predictor in production: renew its thresholds, compare its versions, tell auditors all that is known of it."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.cli.predictor import Saved
from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError, reason
from keepcover.files import check_place
from keepcover.pages.evidence import evidence as gather
from keepcover.prediction.artifact import restore
from keepcover.prediction.report import compare
from keepcover.store import data_fingerprint

NO_MODEL, NO_DATA = opt.Model(""), opt.Data("")
MOST = 8  # thresholds or batches that are printed
LARGEST = 2**20  # bytes of what a service says of its monitor


@opt.command
def recalibrate(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    save: Annotated[Path, "--out", check_place],
    *,
    how: Literal["replace", "add", "window"] = "replace",
    window: int | None = None,
    groups: Path | None = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Secret = None,
) -> ui.Answer:
    """Renew the thresholds of a saved predictor from new labelled data; everything else stays, and only these data run.

    The data must be like the queries to come, and none of them may have been used in training, tuning or an earlier batch.

    Args:
        save: Where the renewed predictor goes (safetensors).
        how: `replace` the calibration points, `add` to them, or keep a rolling `window` of batches.
        window: With `--how window`: how many batches stay, the new one included.
        groups: The group of every input, one per line, where the promise is per group.
    """
    old, points = using.predictor(saved, batch_size), given.inputs(labelled=True)
    digest = data_fingerprint(points.pair)
    for at, batch in enumerate(old.history):
        if batch.get("data_sha256") == digest:
            void = "points that count twice, or that the holdout has seen, void the promise; give new ones"
            raise InputError(f"these are the data of batch {at} ({batch['created']}): {void}")
    known = None if groups is None else opt.read_groups(groups, points.rows)
    new = old.recalibrate(points.pair, how=how, window=window, groups=known, seed=seed, fingerprint=using.fingerprint)
    new.provenance.update(model=Path(using.model).name, data=str(given), data_sha256=digest)
    new.save(save)
    return _answer(compare(old, new), {"predictor": str(save)})


@opt.command
def diff(
    saved: Annotated[Path, typer.Argument(metavar="A")], other: Annotated[Path, typer.Argument(metavar="B")]
) -> ui.Answer:
    """What differs between two saved predictors: promise, thresholds, expected size, rule, model, history. Needs no model.

    Args:
        saved: A saved predictor.
        other: Another, such as a renewed one.
    """
    return _answer(compare(restore(saved), restore(other)), {"a": str(saved), "b": str(other)})


def _answer(found: dict[str, Any], about: dict[str, str]) -> ui.Answer:
    files = [f"{name:<10} {path}" for name, path in about.items()]
    # Below each other: two promises may differ in their last word.
    differing = [f"{name}\n  a  {_words(a, b)}\n  b  {_words(b, a)}" for name, (a, b) in found["differences"].items()]
    rest = f"same: {', '.join(found['same'])}" if differing else "nothing differs"
    return ui.Answer({**about, **found}, [*files, *differing, rest])


def _words(value: Any, other: Any) -> str:
    """A value; of a long list the first few that are not those of the other."""
    if not isinstance(value, list):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    against = other if isinstance(other, list) and len(other) == len(value) > MOST else [None] * len(value)
    own = [(at, one) for at, (one, two) in enumerate(zip(value, against, strict=True)) if one != two]
    said = [f"{f'{at}: ' if len(value) > MOST else ''}{_words(one, None)}" for at, one in own[:MOST]]
    return ", ".join(said) + (f" and {len(own) - MOST} more" if len(own) > MOST else "")


@opt.command
def evidence(
    saved: Saved,
    using: opt.Model = NO_MODEL,
    given: opt.Data = NO_DATA,
    *,
    audit: list[Path] | None = None,
    monitor: str | None = None,
    level: opt.Level,
    to: Annotated[Path, "--out", check_place] = Path("evidence.html"),
    card: Annotated[Path | None, check_place] = None,
) -> ui.Answer:
    """One self-contained page and JSON for auditors: threat model, epsilon in pictures and units, promise, every assumption and
    how it is checked, calibration data with hashes, audits, monitor, budgets, what is not covered, what to do.

    The file alone will do. With `--data` epsilon is shown on some of the inputs, with `--model` too they are attacked. A service
    with a token is asked with that of `KEEPCOVER_TOKEN`.

    Args:
        audit: What `keepcover audit --predictor ...` wrote or printed as JSON; repeat.
        monitor: State of a monitor: a JSON file, or the address of a service, such as http://localhost:8000.
        to: The page; the JSON goes beside it.
        card: Also write a robustness section for a model card, in Markdown.
    """
    predictor = using.predictor(saved) if using.model else restore(saved)
    files = {"predictor": saved, **{f"audit {at}": one for at, one in enumerate(audit or (), 1) if one.is_file()}}
    origin = {name: f"{one.name}, SHA-256 {fingerprint(one)}" for name, one in files.items()}
    data: Any = None
    watched: Any = monitor
    if given.data:
        inputs, origin["inputs shown"] = given.inputs(), str(given)
        data = inputs.images if inputs.labels is None else inputs.pair
    if monitor is not None:
        service = "://" in monitor
        origin["monitor"], watched = (monitor, _asked(monitor)) if service else (Path(monitor).name, monitor)
    origin["command"] = ui.command_line()
    found = gather(predictor, data=data, audits=audit or (), monitor=watched, origin=origin, **vars(level))
    page = found.write(to, card=card)
    shown = [str(found.predictor.guarantee), found.verdict, f"page  {page}", f"json  {page.with_suffix('.json')}"]
    shown += [] if card is None else [f"card  {card}"]
    return ui.Answer({**found.to_dict(), "page": str(page), "card": None if card is None else str(card)}, shown)


class _Stays(urllib.request.HTTPRedirectHandler):
    """No redirects: the token is for the service that was named."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:  # noqa: ARG002
        return None


def _asked(address: str) -> Any:
    """What a service says of its monitor."""
    place = address.rstrip("/").removesuffix("/v1/monitor") + "/v1/monitor"
    if not place.startswith(("http://", "https://")) or "@" in place:
        raise InputError(f"expected the address of a service, http://HOST:PORT or https://HOST, got {address}")
    token = os.environ.get("KEEPCOVER_TOKEN")
    request = urllib.request.Request(place, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(_Stays).open(request, timeout=10) as answer:
            return json.loads(answer.read(LARGEST))
    except urllib.error.HTTPError as error:
        hint = "; set KEEPCOVER_TOKEN" if error.code == 401 else ""
        raise InputError(f"{place} answers {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"cannot ask {place} ({reason(error)}); is the service running?") from None

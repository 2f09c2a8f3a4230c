"""``keepcover evidence``: all that is known of a predictor, for auditors."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.cli.predictor import Saved
from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError, reason
from keepcover.files import check_place
from keepcover.pages.evidence import evidence as gather
from keepcover.prediction.artifact import restore

NO_MODEL, NO_DATA, LEVEL = opt.Model(""), opt.Data(""), opt.Level()
MOST = 2**20  # bytes of what a service says of its monitor


@opt.command
def evidence(
    saved: Saved,
    using: opt.Model = NO_MODEL,
    given: opt.Data = NO_DATA,
    audit: list[Path] | None = None,
    monitor: str | None = None,
    level: opt.Level = LEVEL,
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
    data: Any = None
    if given.data:
        inputs = given.inputs()
        data = inputs.images if inputs.labels is None else inputs.pair
    files = {"predictor": saved, **{f"audit {at}": one for at, one in enumerate(audit or (), 1) if one.is_file()}}
    origin = {name: f"{one.name}, SHA-256 {fingerprint(one)}" for name, one in files.items()}
    watched: Any = monitor
    if given.data:
        origin["inputs shown"] = str(given)
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
            return json.loads(answer.read(MOST))
    except urllib.error.HTTPError as error:
        hint = "; set KEEPCOVER_TOKEN" if error.code == 401 else ""
        raise InputError(f"{place} answers {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"cannot ask {place} ({reason(error)}); is the service running?") from None

"""The sections of an evidence page, each from values that its JSON has too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keepcover.attacks.audit import AuditRow
from keepcover.guarantee import Guarantee
from keepcover.noise import Noise, get_norm
from keepcover.noise.norms import Norm
from keepcover.pages.audit_page import audit_section
from keepcover.pages.report import Cell, Example, Section, Table
from keepcover.pages.sections import picturable
from keepcover.prediction import Predictor

Monitors = Sequence[Mapping[str, Any]]  # their reports
MOST_FEATURES = 30
NEVER = (
    "What was done to the network before calibration: the promise holds for the network as it is, and a poor one has large sets.",
    "Those who can write to this machine: checksums refuse a file that was altered, and are no signature.",
    "Anything but misses: not which wrong labels a set holds, not confidentiality, not fairness, not availability.",
)
SITUATIONS = {
    "the alarm on the promise": "Take sets as unpromised and let people decide. Find what changed. Label a fresh random sample, not "
    "the cases that raised the alarm; keepcover recalibrate --how replace; put the new file and a new monitor in place.",
    "the alarm on queries alone": "No breach: queries differ from those before. Look at them, label a random sample and compare "
    "its coverage; recalibrate if the population has changed, look for an attack if it has not.",
    "an audit says violated": "Do not deploy. Check every assumption above, first that all data are of one kind; audit on fresh data.",
    "a set that holds everything": "It is right and says nothing: ask a person or take the safe action. Where most sets are so, "
    "keepcover check says what would help: another sigma, more draws, a denoiser, training under noise, a smaller epsilon.",
    "an empty set": "It counts as a miss: no label fits. Hand the case to a person; look for queries that are unlike the data.",
    "a file, model or input that is refused": "Answer nothing in its place. Load the model that was calibrated, or calibrate again.",
}


@dataclass(frozen=True)
class Moved:
    """One input and what attacks within epsilon make of it, by name; the last is the strongest.

    Attributes:
        norm, units: how far they are, and in which units of the features.
        seen: one noisy draw of the input, where it is a picture.
    """

    image: Tensor
    versions: Mapping[str, Tensor]
    norm: Norm
    units: Any = None
    seen: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """How far every version is from the input, as the attack is measured, and its largest change."""
        found = {}
        for name, one in self.versions.items():
            change = one.double() - self.image.double()
            scaled = change if self.units is None else change / change.new_tensor(self.units)
            found[name] = {"length": float(self.norm.length(scaled[None])), "largest_change": float(change.abs().max())}
        return found

    def example(self, number: int) -> Example:
        """The versions beside each other, the difference to the strongest, and what the model is shown."""
        shown, change = [(self.image, "as it is")], list(self.versions.values())[-1] - self.image
        for (name, image), measured in zip(self.versions.items(), self.to_dict().values(), strict=True):
            shown.append((image, f"{name}: {self.norm.reach(round(measured['length'], 6))}"))
        times = max(1, round(0.5 / max(float(change.abs().max()), 1e-9)))
        shown.append((0.5 + times * change, f"the difference, {times} times as large"))
        if self.seen is not None:
            shown.append((self.seen.nan_to_num(nan=0.5), "one draw of the noise: what the model sees"))
        return Example(f"input {number}", shown)


def threat(promise: Guarantee, noise: Noise) -> Section:
    """Who attacks, with what knowledge, how far."""
    if not promise.certified:
        none = f"None is defended against: {promise.method} promises something for clean queries only."
        return Section("Threat model", none)
    secret = "nothing" if noise.deterministic else "the noise that is drawn for the query, after the attack"
    rows = [
        ["goal", "that the set misses the truth"],
        ["reach", f"before the model sees the query, the attacker {promise.threat}"],
        ["knows", "model, weights, noise law, thresholds, calibration points, and every earlier answer"],
        ["does not know", secret],
        ["tries", "one attack per query, as strong as can be; the best of many answers to one query is not covered"],
        ["defence", f"{noise}, {promise.draws} model evaluations per query; method {promise.method}"],
    ]
    return Section("Threat model", table=Table(["what", "the attacker"], rows, facts=True))


def meaning(predictor: Predictor, moved: Sequence[Moved]) -> Section:
    """Epsilon in units of the inputs, and in pictures."""
    promise, seen = predictor.guarantee, predictor.inputs
    norm, scale = get_norm(str(promise.threat.norm)), predictor.numerics.get("input_scale")
    rows = [["epsilon", promise.threat.reach]]
    if seen is not None and seen.shape is not None:
        pixels = len(seen.shape) == 3 and not seen.tokens and seen.low >= 0 and seen.high <= 1
        for how, value in norm.spent(promise.epsilon, seen.shape).items():
            levels = f", {255 * value:.3g} of 255 levels of a pixel" if pixels and not norm.replaces else ""
            rows.append([how, f"{value:.2%}" if norm.replaces else f"{value:.4g}{levels}"])
        rows.append(["inputs at calibration", str(seen)])
    for at, unit in enumerate((scale or ())[:MOST_FEATURES]):
        rows.append([f"feature {at}, alone", f"{promise.epsilon * unit:.4g} in its own unit"])
    examples = [one.example(at) for at, one in enumerate(moved, 1) if picturable(one.image[None])]
    text = "What an attack within epsilon can change. The promise is for every such change, not only for those that are shown."
    note = "" if examples else "These inputs are no pictures; the numbers say how far they may move."
    if not moved:
        note = "No inputs were given to show it on: keepcover evidence --data DATA."
    table = Table(["how it is spent", "amount"], rows, facts=True)
    return Section("What epsilon means", text, table, examples=examples, note=note)


def promises(predictor: Predictor) -> Section:
    """Every level in a line."""
    rows = []
    for (alpha, epsilon), one in predictor.levels.items():
        size = Cell("everything, always", "bad") if one.full else "unknown" if one.size is None else f"{one.size:.3g}"
        rows.append([f"alpha {alpha:g}, epsilon {epsilon:g}", size, str(predictor.promised(one))])
    note = "Each promise holds on its own, not all of them at once, and not for one picked after seeing sets."
    table = Table(["level", "expected size", "promise"], rows, facts=True)
    return Section("What is promised", table=table, note=note if len(rows) > 1 else "")


def calibration(predictor: Predictor) -> Section:
    """Where thresholds come from: every batch with its hashes."""
    used, rows = predictor.provenance["of"], []
    for at, entry in enumerate(predictor.history):
        points = f"{entry['points']}" + (f", {entry['unknown']} without a known label" if entry["unknown"] else "")
        data = [entry.get("data", "not named"), entry.get("data_sha256", "not kept: calibrated from Python")]
        batch = f"{at}: {entry['how']}, {entry['created']}"
        rows.append([batch, points, "yes" if at in used else "no", *data, entry["scores"]])
    head = ["batch", "points", "in use", "data", "SHA-256 of the data", "SHA-256 of the scores"]
    points, held = predictor.items.points, predictor.holdout_size
    text = f"{points} points are in use; {held} more were set aside for tuning. The file holds their scores, never the points."
    return Section("Calibration data", text, Table(head, rows, facts=True))


def audits(rows: Sequence[AuditRow]) -> Section:
    if not rows:
        words = "None was given: keepcover audit --predictor FILE ... --out FOLDER attacks this predictor."
        return Section("Audits", words)
    return audit_section(rows, "Audits", f"{len(rows)} observations of this predictor, clean and attacked.")


def production(monitors: Monitors) -> Section:
    """What monitors have seen."""
    if not monitors:
        return Section("In production", "No monitor was given: keepcover.monitor, or GET /v1/monitor of the service.")
    rows = []
    for one in monitors:
        for kind, counted in (("promise", ("outcomes", "misses")), ("queries", ("queries",))):
            own, state = one[kind], Cell("quiet", "good")
            if own["since"] is not None:
                state = Cell(time.strftime("alarm since %Y-%m-%d %H:%M UTC", time.gmtime(own["since"])), "bad")
            seen = ", ".join(f"{own[name]:,} {name}" for name in counted)
            level = f"{kind}, alpha {one['alpha']:g}, epsilon {one['epsilon']:g}"
            rows.append([level, state, seen, f"{own['evidence']:.4g}", f"{own['alarm_at']:.4g}"])
    text = "Labels are tested against the promise, queries against those before them. Quiet is no proof: nothing contradicts it so far."
    return Section("In production", text, Table(["watched", "state", "counted", "evidence", "alarm at"], rows))


def budgets(promise: Guarantee) -> Section:
    """What the promise has room for, and what not."""
    said = {clause.keyword for clause in promise.promise.clauses}
    rows = [
        [name.replace("_", " "), Cell("yes", "good") if name in said else "no", words]
        for name, words in promise.promise.budgets.items()
    ]
    text = "What may have gone wrong before or since calibration without breaking the promise."
    table = Table(["budget", "there is one", "what it allows for"], rows, facts=True)
    return Section("Poisoning and drift", text, table)


def uncovered(promise: Guarantee) -> Section:
    """What must not be read into the promise."""
    said, reach = {clause.keyword for clause in promise.promise.clauses}, promise.threat.reach
    points = [f"Attacks of any kind: {promise.method} promises nothing under attack."]
    if promise.certified:
        others = "another photograph, a rotation, a new object"
        points = [f"Attacks beyond {reach}, and changes that this does not measure: {others}."]
        if not promise.threat.noise.deterministic:
            points.append(
                "An attacker who can read, guess or set the noise of a query, or keeps the best of many answers to it."
            )
    points += [f"{words[0].upper()}{words[1:]}." for name, words in promise.promise.budgets.items() if name not in said]
    return Section("What is not covered", points=[*points, *NEVER])


def _fired(monitors: Monitors) -> set[str]:
    """Which alarms are raised."""
    return {kind for one in monitors for kind in ("promise", "queries") if one[kind]["since"] is not None}


def situations(predictor: Predictor, rows: Sequence[AuditRow], monitors: Monitors) -> dict[str, str]:
    """What may happen and what to do then; what is the case now says so."""
    fired = _fired(monitors)
    now = {
        "the alarm on the promise": "promise" in fired,
        "the alarm on queries alone": "queries" in fired,
        "an audit says violated": any(row.verdict == "violated" for row in rows),
        "a set that holds everything": any(one.full for one in predictor.levels.values()),
    }
    return {f"{name} (the case now)" if now.get(name) else name: words for name, words in SITUATIONS.items()}


def advice(predictor: Predictor, rows: Sequence[AuditRow], monitors: Monitors) -> Section:
    lines = [list(one) for one in situations(predictor, rows, monitors).items()]
    return Section("What to do", table=Table(["where there is", "do this"], lines, facts=True))


def verdict(predictor: Predictor, rows: Sequence[AuditRow], monitors: Monitors) -> str:
    """What is known in two sentences; never more than that."""
    audited, watched = "The promise has not been audited here.", "What happens in production was not given."
    broken, fired = [row for row in rows if row.verdict == "violated"], _fired(monitors)
    if broken:
        audited = f"An audit found a promise violated: {broken[0].attack} at {broken[0].radius:g}."
    elif rows:
        audited = f"{sum(row.promised for row in rows)} audited observations are consistent with the promise."
    if "promise" in fired:
        watched = "In production an alarm is raised: misses are more frequent than promised."
    elif fired:
        watched = "In production queries have changed, which is a warning and no breach."
    elif monitors:
        watched = f"In production {sum(one['promise']['outcomes'] for one in monitors):,} outcomes raise no alarm."
    return f"{audited} {watched}" + ("" if predictor.warning is None else f" Note: {predictor.warning}.")

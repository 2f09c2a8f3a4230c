"""Write what the docs derive from code and results: tables, a figure, the CLI reference. ``--check`` only compares.

python docs/generate.py [--check]
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIGURE = ROOT / "docs" / "figures" / "attack-cifar10.svg"
INDEX = ROOT / "docs" / "index.md"
WHY = ROOT / "docs" / "figures" / "why.svg"
CLI = ROOT / "docs" / "cli.md"
REPRODUCING = ROOT / "docs" / "reproducing.md"
FIGURES = (
    "motivation",
    "temperature",
    "inverse-cdf",
    "densities",
    "overhead",
    "draws-cifar100",
    "accuracy-imagenet-5k",
)
CHOOSING = ROOT / "docs" / "methods.md"
TRAINING = ROOT / "docs" / "training.md"
MULTILABEL = ROOT / "docs" / "multilabel.md"
REGRESSION = ROOT / "docs" / "regression.md"
SEGMENTATION = ROOT / "docs" / "segmentation.md"
COMBINATIONS = ROOT / "docs" / "combinations.md"
PRETRAINED = ROOT / "docs" / "pretrained.md"
DENOISER = ROOT / "docs" / "denoiser.md"
THREATS = ROOT / "docs" / "threats.md"
SPEED = ROOT / "docs" / "speed.md"
PROMISES = ROOT / "docs" / "promises.md"
DEPLOYING = ROOT / "docs" / "deploying.md"
MONITORING = ROOT / "docs" / "monitoring.md"
LIFE = ROOT / "docs" / "figures" / "life.svg"
ATTACKS = ("attack-cifar10.json", "attack-cifar10-margin-rscp.json", "attack-cifar10-margin-exact.json")


def attack_rows() -> list[dict[str, Any]]:
    """One row per predictor of the CIFAR-10 attack runs, with the worse of the attacks."""
    rows = [row for name in ATTACKS for row in json.loads((ROOT / "results" / name).read_text())["rows"]]
    summary = []
    for name in dict.fromkeys(row["name"] for row in rows):
        clean = next(row for row in rows if row["name"] == name and row["attack"] == "none")
        worst = min(
            (r for r in rows if r["name"] == name and r["attack"] != "none"), key=lambda r: r["coverage"]["mean"]
        )
        summary.append(
            {
                **clean,
                "attacked_coverage": worst["coverage"],
                "attacked_size": worst["size"],
                "verdict": worst["verdict"],
                "paper": worst["paper_attacked_coverage"],
            }
        )
    return summary


def attack_table() -> str:
    manifest = json.loads((ROOT / "results" / ATTACKS[0]).read_text())["manifest"]
    config = manifest["config"]
    lines = [
        "| method | certified | draws per query | size, clean | coverage, clean | coverage, attacked | paper, attacked | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in attack_rows():
        cov, hit = row["coverage"], row["attacked_coverage"]
        bold = "**" if row["name"].startswith("exact HPS") else ""
        lines.append(
            f"| {bold}{row['name']}{bold} | {'yes' if row['certified'] else 'no'} | {row['draws']} | {bold}{row['size']:.2f}{bold} | "
            f"{cov['mean']:.3f} | {hit['mean']:.3f} [{hit['low']:.3f}, {hit['high']:.3f}] | "
            f"{'' if row['paper'] is None else format(row['paper'], '.3f')} | {row['verdict']} |"
        )
    lines.append("")
    lines.append(
        f"CIFAR-10, ResNet-110 trained at sigma {config['sigma']:g}, alpha 0.1, epsilon {config['epsilon']:g}; one split of the test "
        f"set (seed {config['seed']}): 500 holdout, 4750 calibration, {config['images']} attacked images; {config['steps']} L2 "
        f"steps, {config['attack_draws']} attacker draws; the worse of two attacks, 95 % Clopper-Pearson interval; the paper's column is for its own weights; "
        f"{manifest['hardware']['gpu']}, rows and commands in `results/attack-cifar10*.json`."
    )
    return "\n".join(lines)


def heading(rows: Any) -> str:
    """The first line of a figure that was drawn from these rows."""
    return f"<!-- rows {hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()}, two schemes -->"


def figures() -> dict[Path, tuple[str, Callable[[], Any]]]:
    """Every drawing of the docs: its first line, and what draws it."""
    from tools import life, why

    from keepcover.pages import plots
    from keepcover.paper.reproduce.figures import DRAWINGS

    drawn: dict[Path, tuple[str, Callable[[], Any]]] = {
        WHY: (heading([why.ALPHA, why.R]), why.draw),
        LIFE: (
            heading(results("life")["rows"]),
            lambda: life.draw(results("life")["rows"], results("life")["manifest"]["config"]["images per request"]),
        ),
        FIGURE: (heading(attack_rows()), lambda: plots.clean_and_attacked(attack_rows(), 0.1)),
    }
    for name in FIGURES:
        rows, _ = reproduced(name)
        path = ROOT / "docs" / "figures" / f"{name}.svg"
        drawn[path] = (heading(rows), lambda name=name, rows=rows: DRAWINGS[name](rows))
    return drawn


def cli_reference() -> str:
    """The help of every command, as plain text."""
    os.environ.update(COLUMNS="100", NO_COLOR="1", TERM="dumb")
    import contextlib
    import io

    import typer.main

    from keepcover.cli import app, every_command

    parts = ["# Command line", "", "Generated by `make docs` from the commands' own help.", ""]
    group = typer.main.get_command(app)
    for path, _ in every_command():
        buffer = io.StringIO()
        with contextlib.redirect_stdout(buffer), contextlib.suppress(SystemExit):
            group.main([*path, "--help"], prog_name="keepcover", standalone_mode=True)
        text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")
        parts += [f"## keepcover {' '.join(path)}", "", "```text", text, "```", ""]
    return "\n".join(parts)


Rows = list[dict[str, Any]]
HEADS = ("base", "ConfTr", "RCT", "exact-matched")


def reproduced(name: str) -> tuple[Rows, dict[str, Any]]:
    """Rows and manifest of one table of ``keepcover reproduce``."""
    content = json.loads((ROOT / "results" / "reproduce" / f"{name}.json").read_text())
    return content["rows"], content["manifest"]


def cell(rows: Rows, row: str, column: str) -> dict[str, Any]:
    (found,) = [one for one in rows if one["row"] == row and one["column"] == column]
    return found


def size(row: dict[str, Any]) -> str:
    """Mean size and deviation over splits; every label where that is all there was."""
    mean, std, full = row["size"]["mean"], row["size"]["std"], row["trivial_splits"]
    if full == row["splits"]:
        return "every label"
    text = f"{mean:.1f} ± {std:.1f}" if mean >= 10 else f"{mean:.3f} ± {std:.3f}"
    return f"{text} ({full} of {row['splits']} splits full)" if full else text


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def presets_table() -> str:
    """The hyper-parameters of conformal training, from the code."""
    from keepcover.training.heads import PRESETS

    rows = [
        [
            f"`{name}`",
            str(recipe.epochs),
            str(recipe.batch_size),
            f"{recipe.lr:g}",
            f"{one.temperature:g}",
            f"{one.size_weight:g}",
            f"{one.free_size:g}",
            str(recipe.copies),
            f"{recipe.momentum:g}",
            f"{recipe.weight_decay:g}",
        ]
        for name, one in PRESETS.items()
        for recipe in [one.recipe]
    ]
    head = ["preset", "epochs", "batch", "first rate", "T", "λ", "s", "noisy copies", "momentum", "weight decay"]
    return table(head, rows)


def cards_table() -> str:
    """What every head cost, and the set size that training saw."""
    rows = []
    for path in sorted((ROOT / "weights").glob("*.json")):
        card = json.loads(path.read_text())
        if "base" not in card:
            continue
        last, recipe = card["history"][-1], card["request"]["recipe"]
        rows.append(
            [
                f"`{path.stem}`",
                str(recipe["epochs"]),
                f"{card['bank_seconds']:.1f}" if card["noise"] == "bank" else "no bank",
                f"{card['seconds']:.1f}",
                f"{last['hard_size']:.2f}",
                f"{last['coverage']:.3f}",
            ]
        )
    head = ["head", "epochs", "bank, s", "in all, s", "size in training", "coverage in training"]
    return table(head, rows)


def bank_table() -> str:
    """Heads from a bank beside one trained under fresh noise."""
    rows, manifest = reproduced("bank")
    columns = list(dict.fromkeys(row["column"] for row in rows))
    names = list(dict.fromkeys(row["row"] for row in rows))
    lines = [[name, *(size(cell(rows, name, column)) for column in columns)] for name in names]
    banks = [name for name in names if name.startswith("bank")]
    (fresh,) = [name for name in names if name not in banks]
    mean = {(row["row"], row["column"]): row["size"]["mean"] for row in rows}
    gap = max(min(abs(mean[fresh, column] - mean[bank, column]) for bank in banks) for column in columns)
    spread = max(abs(mean[one, column] - mean[other, column]) for one in banks for other in banks for column in columns)
    return table(["trained from", *columns], lines) + (
        f"\n\n{manifest['title']}; {rows[0]['splits']} splits. The head trained under fresh noise is never further than "
        f"{gap:.3f} labels from the nearest bank; banks differ by up to {spread:.3f} from each other."
    )


def ablation_table() -> str:
    """Which training helps RSCP, beside the paper."""
    rows, manifest = reproduced("ablation")
    lines = []
    for score in ("HPS", "APS"):
        for name in ("Baseline", *HEADS[1:]):
            one = cell(rows, name, score)
            paper = one["paper"]["size"]
            printed = ["", ""] if paper is None else [f"{paper:.3f}", f"{one['paper']['coverage']:.3f}"]
            lines.append([score, name, size(one), f"{one['coverage']['mean']:.3f}", *printed])
    head = ["score", "last layer", "size", "coverage, attacked", "paper: size", "paper: coverage"]
    return table(head, lines) + f"\n\n{manifest['title']}; plain RSCP, no PTT, {rows[0]['draws']} draws."


def ptt_table() -> str:
    """RCT after PTT: certified RSCP+, and RSCP under attack."""
    lines = []
    for name, method in (
        ("table1", "RSCP+, certified"),
        ("smoothadv-cifar10", "RSCP, attacked"),
        ("smoothadv-cifar100", "RSCP, attacked"),
    ):
        rows, _ = reproduced(name)
        for column in dict.fromkeys(row["column"] for row in rows):
            before, after = (cell(rows, kind, column) for kind in ("PTT", "PTT + RCT"))
            data = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[before["dataset"]]
            lines.append(
                [
                    method,
                    data,
                    before["score"].upper(),
                    size(before),
                    size(after),
                    f"{before['paper']['size']:g}",
                    f"{after['paper']['size']:g}",
                ]
            )
    head = ["method", "data", "score", "PTT", "PTT + RCT", "paper: PTT", "paper: PTT + RCT"]
    return table(head, lines)


def smallest_in_bold(rows: Rows) -> list[str]:
    """Sizes side by side, the smallest in bold unless it is every label."""
    best = min(rows, key=lambda row: row["size"]["mean"])
    return [f"**{size(row)}**" if row is best and row["trivial_splits"] < row["splits"] else size(row) for row in rows]


def setting(column: str) -> tuple[str, str]:
    """The rule, and the sigma and epsilon it was used at."""
    rule, at = column.split(", sigma ")
    return rule, "σ = " + at.replace("epsilon", "ε =")


def heads_table(name: str, chosen: bool) -> str:
    """Sizes with every head, at sigma 0.25 (``chosen``) or elsewhere."""
    rows, manifest = reproduced(name)
    lines = []
    for column in dict.fromkeys(row["column"] for row in rows):
        rule, at = setting(column)
        if ("σ = 0.25," in at) == chosen:
            lines.append([at, rule, *smallest_in_bold([cell(rows, head, column) for head in HEADS])])
    return table(["at", "rule", *HEADS], lines) + f"\n\n{manifest['title']}; {rows[0]['splits']} splits, clean images."


def best_table() -> str:
    """The exact certificates with the number of draws that suits each head best."""
    lines = []
    for name, data in (("heads-cifar10", "CIFAR-10"), ("heads-cifar100", "CIFAR-100")):
        rows = [row for row in reproduced(name)[0] if row["column"].startswith("exact")]
        for at in dict.fromkeys(setting(row["column"])[1] for row in rows):
            mine = [row for row in rows if setting(row["column"])[1] == at]
            best = [min((r for r in mine if r["row"] == h), key=lambda r: r["size"]["mean"]) for h in HEADS]
            lines.append([data, at, *smallest_in_bold(best)])
    return table(["data", "at", *HEADS], lines)


WIDE = (  # data, network, sigma, beginning of the names of its files
    ("CIFAR-10", "ResNet-110", "0.25", "evaluate-cifar10-"),
    ("CIFAR-10", "WRN-28-6", "0.25", "evaluate-cifar10-wrn-28-6-sigma0.25-"),
    ("CIFAR-10", "the same, mirrored", "0.25", "evaluate-cifar10-mirrored-wrn-28-6-sigma0.25-"),
    ("CIFAR-10", "WRN-28-6, as trained", "0.25", "evaluate-cifar10-wrn-28-6-sigma0.25-as-trained-"),
    ("CIFAR-10", "the same, mirrored", "0.25", "evaluate-cifar10-mirrored-wrn-28-6-sigma0.25-as-trained-"),
    ("CIFAR-10", "WRN-28-6, as trained", "0.125", "evaluate-cifar10-wrn-28-6-sigma0.125-"),
    ("CIFAR-10", "WRN-28-6, as trained", "0.5", "evaluate-cifar10-wrn-28-6-sigma0.5-"),
    ("CIFAR-100", "ResNet-110", "0.25", ""),
    ("CIFAR-100", "WRN-28-6", "0.25", "evaluate-cifar100-wrn-28-6-sigma0.25-"),
    ("CIFAR-100", "WRN-28-6, as trained", "0.25", "evaluate-cifar100-wrn-28-6-sigma0.25-as-trained-"),
    ("CIFAR-100", "the same, mirrored", "0.25", "evaluate-cifar100-mirrored-wrn-28-6-sigma0.25-as-trained-"),
)


def width_table() -> str:
    """Certified sizes of wide networks beside those of the paper's ResNet-110."""
    files = sorted((ROOT / "results").glob("evaluate-cifar*-draw*.json"))
    found = [(path.name, json.loads(path.read_text())) for path in files]
    old = [row for row in reproduced("table1")[0] if row["dataset"] == "cifar100" and row["score"] == "hps"]
    lines = []
    for data, network, sigma, start in WIDE:
        mine = [one for name, one in found if start and re.match(re.escape(start) + r"\d+-draw", name)]
        rows = [row for one in mine for row in one["rows"]] if start else old
        if not rows:
            continue
        sizes = {row["draws"]: row["size"] for row in rows if row["method"] == "exact_asymmetric"}
        images = mine[0]["manifest"]["config"]["images"] if mine else 10_000
        cells = [f"{sizes[n]['mean']:.2f} ± {sizes[n]['std']:.2f}" if n in sizes else "" for n in (1, 4, 16, 64)]
        lines.append([data, network, sigma, f"{images:,}", *cells])
    head = ["data", "network", "σ", "test images", "1 draw", "4 draws", "16 draws", "64 draws"]
    return table(head, lines)


def training_page(text: str) -> str:
    sections = {
        "width": width_table(),
        "presets": presets_table(),
        "bank": bank_table(),
        "ablation": ablation_table(),
        "ptt": ptt_table(),
        "heads cifar10": heads_table("heads-cifar10", chosen=True),
        "heads cifar100": heads_table("heads-cifar100", chosen=True),
        "best": best_table(),
        "heads elsewhere": heads_table("heads-cifar10", chosen=False),
        "cards": cards_table(),
    }
    for name, body in sections.items():
        text = with_section(text, name, body, TRAINING.name)
    return text


def _on_fewer_images(epsilon: float) -> list[str]:
    """The denoised network by rules as they are chosen now, on as many of the images as a CPU had time for."""
    names = [
        f"evaluate-imagenet-denoised-sigma0.25-epsilon{epsilon:g}-{draws}"
        for draws in ("1-draw", "16-draws", "64-draws")
    ]
    found = [results(name) for name in names]
    sizes = [one["rows"][0]["size"] for one in found]
    images = found[0]["manifest"]["config"]["images"]
    return [f"denoised, {images:,} images", "", *(f"{size['mean']:.1f} ± {size['std']:.1f}" for size in sizes)]


def denoiser_table() -> str:
    """Accuracy under noise and certified size on ImageNet, alone and denoised."""
    from keepcover.paper.reproduce.run import facts

    seen, _ = reproduced("accuracy-imagenet-5k")
    rows, manifest = reproduced("imagenet-5k")
    right = {(row["network"], row["sigma"]): f"{row['accuracy']:.1%} ± {row['half_width']:.1%}" for row in seen}
    lines = []
    for sigma, epsilon in ((0.25, 0.125), (0.25, 0.25), (0.5, 0.25)):
        for network in ("alone", "denoised"):
            at = f"sigma {sigma:g}, epsilon {epsilon:g}"
            sizes = [size(cell(rows, network, f"exact, {draws}, {at}")) for draws in ("1 draw", "16 draws", "64 draws")]
            lines.append([f"{sigma:g}", f"{epsilon:g}", network, right[network, sigma], *sizes])
        if sigma == 0.25:
            lines.append([f"{sigma:g}", f"{epsilon:g}", *_on_fewer_images(epsilon)])
    head = [
        "sigma",
        "epsilon",
        "EfficientNet-lite0",
        "accuracy of one noisy draw",
        "size, 1 draw",
        "16 draws",
        "64 draws",
    ]
    return f"{table(head, lines)}\n\n`imagenet-5k`: {facts(manifest)} alpha 0.1, HPS."


def reproduced_tables() -> str:
    """Every result of ``keepcover reproduce`` in results/, in the order of the paper's list."""
    from keepcover.paper.reproduce import show
    from keepcover.paper.reproduce.run import catalogue, facts

    parts = []
    for name, item in catalogue().items():
        if name.startswith("heads") or not (ROOT / "results" / "reproduce" / f"{name}.json").is_file():
            continue  # the heads have a page of their own
        rows, manifest = reproduced(name)
        head, body = show.any_grid(rows)
        parts += [f"### {item.title}", "", f"`{name}`: {item.where}. {facts(manifest)} {item.note}".strip(), ""]
        if head:
            parts += [show.markdown(head, body), ""]
        better = show.improvements(rows) if name == "table1" else []
        parts += [*(f"- Baseline over size, {line}" for line in better), ""] if better else []
        if name in FIGURES:
            parts += [f"![{item.title}](figures/{name}.svg)", ""]
    return "\n".join(parts).rstrip()


def hardware(manifest: dict[str, Any]) -> str:
    """One measurement's machine, versions, date and commit."""
    where, versions = manifest["hardware"], manifest["versions"]
    machine = where["gpu"] if manifest["config"]["device"] != "cpu" else where.get("cpu", where["machine"])
    commit = f", commit {manifest['commit'][:12]}" if manifest["commit"] else ""
    load = where.get("load_before", 0.0)
    busy = f", busy with other work (load {load:g}): ratios, not seconds" if load > where.get("cores", 1) / 2 else ""
    return f"{machine}, {where['threads']} threads, torch {versions['torch']}, {manifest['date']}{commit}{busy}"


def speed_results() -> str:
    """Every measurement in results/benchmarks, those on a GPU first; absent ones leave nothing behind."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.run import MEASUREMENTS
    from benchmarks.table import as_markdown

    parts: list[str] = []
    for device, title in (("cuda", "On a GPU"), ("cpu", "On a CPU")):
        paths = [(name, ROOT / "results" / "benchmarks" / f"{name}-{device}.json") for name in MEASUREMENTS]
        found = {name: json.loads(path.read_text()) for name, path in paths if path.is_file()}
        if not found:
            continue
        machines: dict[str, list[str]] = {}
        for name, content in found.items():
            machines.setdefault(hardware(content["manifest"]), []).append(name)
        parts += [f"### {title}", ""]
        parts += [f"- {', '.join(f'`{name}`' for name in names)}: {machine}." for machine, names in machines.items()]
        parts += ["", as_markdown([row for content in found.values() for row in content["rows"]]), ""]
    return "\n".join(parts).rstrip()


def choosing_page(text: str) -> str:
    from tools import choosing

    for name, body in choosing.sections(ROOT / "results", size).items():
        text = with_section(text, name, body, CHOOSING.name)
    return text


def promises_page(text: str) -> str:
    from tools import promises

    for name, body in promises.sections(ROOT / "results").items():
        text = with_section(text, name, body, PROMISES.name)
    return text


def collapse() -> str:
    """What an attack does to a promise that was made for clean images."""
    row = next(row for row in attack_rows() if row["name"] == "vanilla CP HPS")
    clean, hit = row["coverage"], row["attacked_coverage"]
    return (
        f"On CIFAR-10, ordinary conformal sets that cover {clean['mean']:.1%} of clean images cover {hit['mean']:.1%} "
        f"[{hit['low']:.1%}, {hit['high']:.1%}] of the same images attacked within a radius of {row['epsilon']:g}. They promised 90 %, "
        "for images that no attacker has touched."
    )


def headline() -> str:
    """What the exact certificate is worth, beside what was there before."""
    rows = {row["name"]: row for row in attack_rows()}
    vanilla, before, exact = (
        rows[name] for name in ("vanilla CP HPS", "RSCP+ Hoeffding HPS + PTT", "exact HPS, 16 draws")
    )
    return (
        f"**On CIFAR-10, asked for 90 % within an L2 radius of {exact['epsilon']:g}:** the exact certificate needs {exact['draws']} evaluations of the "
        f"model per query for {exact['size']:.2f} labels; attacked, they cover {exact['attacked_coverage']['mean']:.3f}. The certified method of the "
        f"paper needs {before['draws']} evaluations for {before['size']:.2f} labels. Ordinary conformal prediction promises nothing under attack, "
        f"and covers {vanilla['attacked_coverage']['mean']:.3f}."
    )


def pretrained_tables() -> str:
    """An ordinary network, helped in several ways: accuracy of one noisy draw and certified size, at two sigmas."""
    parts = []
    for path in sorted((ROOT / "results").glob("pretrained-*.json")):
        found = json.loads(path.read_text())
        about, rows = found["manifest"], found["rows"]
        own, first = about["config"], rows[0]
        lines = [
            f"{about['data']['name']}, ε = {own['epsilon']:g}, α = {first['alpha']:g}, {first['draws']} draws, a network that is right on "
            f"{about['clean_accuracy']:.1%} without noise; mean ± standard deviation over {first['splits']} splits",
            "",
            "| | σ = 2ε: accuracy | size | σ chosen on the holdout | accuracy | size |",
            "|---|---|---|---|---|---|",
        ]
        for name in dict.fromkeys(row["help"] for row in rows):
            fixed, chosen = (
                next(r for r in rows if (r["help"], r["way"]) == (name, w)) for w in ("2 epsilon", "chosen")
            )
            cells = [
                f"{row['accuracy']:.1%} | {row['size']['mean']:.2f} ± {row['size']['std']:.2f}"
                for row in (fixed, chosen)
            ]
            lines.append(f"| {name} | {cells[0]} | {chosen['sigma']:g} | {cells[1]} |")
        machine = about["hardware"]["gpu"] or f"{about['hardware']['threads']} CPU thread"
        lines += ["", f"`{about['command']}`, {machine}, {about['seconds']:.0f} s (`results/{path.name}`)."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def housing_table() -> str:
    """Certified intervals on California housing, beside one draw and plain split conformal prediction."""
    found = json.loads((ROOT / "results" / "regression-housing.json").read_text())
    about, rows = found["manifest"], found["rows"]
    first, own = rows[0], about["config"]
    lines = [
        f"α = {first['alpha']:g}, σ = ε, in standard deviations of the {len(own['features'])} features; a network of two hidden layers trained under that "
        f"noise (without, for cp) on {own['training_rows']:,} rows. Mean ± standard deviation over {first['splits']} random halves of the rest into "
        f"calibration and test, after a holdout of {own['holdout']}. The attack climbs the mean score of the truth, 20 steps, 32 draws.",
        "",
        "| score | ε | method | draws | mean length, $1000 | coverage | attacked coverage |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size, clean, hit = row["size"], row["coverage"], row["attacked_coverage"]
        lines.append(
            f"| {row['score']} | {row['epsilon']:g} | {row['method']} | {row['draws']} | {size['mean'] / 1000:.0f} ± {size['std'] / 1000:.0f} "
            f"| {clean['mean']:.3f} ± {clean['std']:.3f} | {hit['mean']:.3f} ± {hit['std']:.3f} |"
        )
    machine = f"{about['hardware']['threads']} CPU thread, {about['seconds']:.0f} s"
    return "\n".join([*lines, "", f"`{about['command']}`, {machine} (`results/regression-housing.json`)."])


def several_table(name: str) -> str:
    """Lists of labels by draws, beside one-draw control, from results/multilabel-NAME.json."""
    found = json.loads((ROOT / "results" / f"multilabel-{name}.json").read_text())
    about, rows = found["manifest"], found["rows"]
    first, own = rows[0], about["config"]
    sigma = "ε" if all(row["sigma"] == row["epsilon"] for row in rows) else f"{first['sigma']:g}"
    empty = own["images_without_labels"]
    crafted = "once per ε, for the first method, and every method meets the same images" if own.get("once") else ""
    lines = [
        f"α = {first['alpha']:g}, σ = {sigma}; {own['images']:,} images with {own['labels_per_image']:.2f} labels on average"
        f"{f', {empty} of them without any' if empty else ''}. Mean ± standard deviation over {first['splits']} random halves into "
        f"calibration and test, after a holdout of {own['holdout']}. The attack raises the margins of all true labels, "
        f"{own.get('steps', 20)} steps, {own.get('draws', 32)} draws, on {first['attacked_points']} images"
        f"{f', {crafted}' if crafted else ''}.",
        "",
        "| ε | method | draws | labels per list | risk, clean | risk, attacked | audit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size, clean, hit = row["size"], row["risk"], row["attacked_risk"]
        lines.append(
            f"| {row['epsilon']:g} | {row['method']} | {row['draws']} | {size['mean']:.2f} ± {size['std']:.2f} | {clean['mean']:.3f} ± "
            f"{clean['std']:.3f} | {hit['mean']:.3f} ± {hit['std']:.3f} | {row['audit'][-1]['verdict']} |"
        )
    machine = f"{about['hardware']['threads']} CPU thread, {about['seconds']:.0f} s"
    return "\n".join([*lines, "", f"`{about['command']}`, {machine} (`results/multilabel-{name}.json`)."])


LETTERS = {
    "marginal": "M",
    "delta": "δ",
    "per class": "C",
    "per group": "G",
    "clusters": "K",
    "poisoned": "P",
    "calibration_epsilon": "E",
    "drift": "D",
    "label_weights": "W",
}


def combinations_table() -> str:
    """Which promises every task and method keep under every noise and norm, and what refuses the others."""
    from keepcover.combinations import combinations

    cells = [cell for cell in combinations() if cell.norm in cell.noise.norms]
    pairs = list(dict.fromkeys((cell.noise.name, cell.norm) for cell in cells))
    kept: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    reasons: dict[str, set[str]] = {}
    for cell in cells:
        row = kept.setdefault((cell.task.name, cell.method.name), dict.fromkeys(pairs, ""))
        if not cell.why_not:
            row[cell.noise.name, cell.norm] += LETTERS[cell.promise]
        else:
            said = cell.why_not.replace(str(cell.noise), "NOISE").replace(f"and {cell.task.name} has", "and TASK has")
            reasons.setdefault(said.replace(f"{cell.method.name} ", "METHOD ", 1), set()).add(cell.method.name)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (task, method), row in kept.items():
        if any(row.values()):
            alike.setdefault((task, tuple(row.values())), []).append(f"`{method}`")
    lines = [[task, ", ".join(methods), *(text or "–" for text in row)] for (task, row), methods in alike.items()]
    order = list(dict.fromkeys(cell.task.name for cell in cells))
    lines.sort(key=lambda line: order.index(line[0]))
    head = ["task", "method", *(f"{noise}, {norm}" for noise, norm in pairs)]
    why = [[said.replace("|", "\\|"), ", ".join(f"`{name}`" for name in sorted(who))] for said, who in reasons.items()]
    legend = ", ".join(f"**{letter}** {promise}" for promise, letter in LETTERS.items())
    return "\n\n".join(
        [f"{legend}.", table(head, lines), "## Why not", table(["reason, as users are told", "methods"], why)]
    )


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def by(about: dict[str, Any], name: str) -> str:
    """The command, the machine and the file of a table."""
    threads = about["hardware"]["threads"]
    machine = f"{threads} CPU thread{'s' if threads > 1 else ''}, {about['seconds']:.0f} s"
    return f"`{about['command']}`, {machine} (`results/{name}.json`)."


def monitoring_page(text: str) -> str:
    sections = {"false alarms": false_alarm_table(), "days": days_table(), "life": life_table()}
    for name, body in sections.items():
        text = with_section(text, name, body, MONITORING.name)
    return text


def load_table() -> str:
    """The service under load, and what monitoring costs it."""
    found = results("serve-load")
    rows = {row["name"]: row for row in found["rows"]}
    steady, crowd, watched = (rows[name] for name in ("steady", "overload", "monitor"))
    memory = f"{steady['MiB_before']:.1f} → {steady['MiB_after']:.1f} MiB"
    lines = []
    for name, row, more in (("steady", steady, memory), ("overload: a queue of 8 images, 20 ms per call", crowd, "")):
        answered, refused = row["statuses"]["200"], row["statuses"].get("503", 0)
        rate, times = f"{row['answers_per_second']:.0f}", [f"{row[f'p{q}_ms']:.0f} ms" for q in (50, 99)]
        lines.append([name, str(row["connections"]), f"{answered:,}", f"{refused:,}", rate, *times, more])
    head = ["", "connections", "answered", "refused with 503", "answers per second", "p50", "p99", "memory"]
    plain, cores = watched["without"], found["manifest"]["config"]["cores"]
    return (
        f"{table(head, lines)}\n\nOne worker on {cores} shared CPU cores, the client on the same; one image per request. The monitor is on; beside one that has it "
        f"switched off, in turns under the same load, the service answers {watched['answers_per_second']:.0f} and {plain['answers_per_second']:.0f} requests per second "
        f"and spends {watched['cpu_ms']:.2f} and {plain['cpu_ms']:.2f} ms of processor time on each: {watched['ratios']['cpu_ms']:.3f} times as much. "
        f"{by(found['manifest'], 'serve-load')}"
    )


def false_alarm_table() -> str:
    """Streams that ever raised an alarm though the promise was kept."""
    found = results("monitor")
    rows = [
        [
            row["stream"],
            row["kind"],
            f"{row['streams']:,}",
            f"{row['looks']:,}",
            f"{row['alarms']:,}",
            f"{row['rate']:.4%} [{row['low']:.4%}, {row['high']:.4%}]",
            f"{row['stated']:g}",
            f"{row['p_value']:.2g}",
        ]
        for row in found["rows"]
        if row["table"] == "false alarms"
    ]
    head = ["stream", "alarm", "streams", "looks", "false alarms", "rate, 95 % interval", "stated", "p"]
    return table(head, rows)


def days_table() -> str:
    """How many days a drift takes to be found, with labels and without."""
    found = results("monitor")
    about, config = found["manifest"], found["manifest"]["config"]
    listed = [row for row in found["rows"] if row["table"] == "days"]

    def days(one: dict[str, Any]) -> str:
        middle, late = ("never" if one[name] is None else f"{one[name]:g}" for name in ("days_50", "days_90"))
        return f"{middle} / {late} ({one['found']})"

    rows = [
        [
            row["data"],
            row["drift"],
            f"{row['coverage']:.3f}",
            f"{row['size']:.2f}",
            days(row["promise"]),
            days(row["queries"]),
        ]
        for row in listed
    ]
    head = ["data", "drift or attack", "coverage", "size", "days to `promise`", "days to `queries`"]
    levels = ", ".join(f"{data}: {level:.3f}" for data, level in {row["data"]: row["level"] for row in listed}.items())
    return (
        f"{table(head, rows)}\n\nDays until half / nine tenths of {config['streams']} streams had the alarm (how many had it within "
        f"{config['days']} days); {config['per day']} labelled queries a day, {config['quiet days']} quiet days before the change, false alarms "
        f"1 in 100. The level that misses are tested against is above α = {config['alpha']:g} because calibration luck is allowed for: {levels}. "
        f"{by(about, 'monitor')}"
    )


def life_table() -> str:
    """What happened in the recorded run."""
    found = results("life")
    rows, about = found["rows"], found["manifest"]
    phases = {
        name: [row for row in rows if row["phase"] == name] for name in dict.fromkeys(row["phase"] for row in rows)
    }
    per = about["config"]["images per request"]
    lines = [
        [
            {"quiet": "as calibrated", "drift": about["config"]["drift"], "renewed": "the same, recalibrated"}[name],
            f"{len(own) * per:,}",
            f"{1 - sum(row['missed'] for row in own) / (per * len(own)):.3f}",
            f"{sum(row['size'] for row in own) / len(own):.2f}",
            f"{own[-1]['promise']['evidence']:.3g}",
            f"{own[-1]['queries']['evidence']:.3g}",
            " and ".join(f"`{kind}`" for kind in ("promise", "queries") if own[-1][kind]["alarm"]) or "none",
        ]
        for name, own in phases.items()
    ]
    head = ["queries", "answered", "coverage", "size", "evidence, labels", "evidence, queries", "alarm"]
    return f"{table(head, lines)}\n\n{by(about, 'life')}"


def with_section(text: str, name: str, body: str, page: str = README.name) -> str:
    """Replace what stands between two markers."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(\n<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page} has no section {name!r}")
    return pattern.sub(lambda match: match[1] + body + match[2], text)


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    from tools import camvid, threats
    from tools.reference import reference

    wanted = {
        **{ROOT / "docs" / "api" / name: text for name, text in reference().items()},
        README: with_section(README.read_text(), "attack table", attack_table()),
        INDEX: with_section(
            with_section(INDEX.read_text(), "headline", headline(), INDEX.name), "collapse", collapse(), INDEX.name
        ),
        CHOOSING: choosing_page(CHOOSING.read_text()),
        TRAINING: training_page(TRAINING.read_text()),
        PROMISES: promises_page(PROMISES.read_text()),
        DENOISER: with_section(DENOISER.read_text(), "sizes", denoiser_table(), DENOISER.name),
        MULTILABEL: with_section(
            with_section(MULTILABEL.read_text(), "digits", several_table("digits"), MULTILABEL.name),
            "mosaics",
            several_table("mosaics"),
            MULTILABEL.name,
        ),
        REPRODUCING: with_section(REPRODUCING.read_text(), "results", reproduced_tables(), REPRODUCING.name),
        SPEED: with_section(SPEED.read_text(), "results", speed_results(), SPEED.name),
        PRETRAINED: with_section(PRETRAINED.read_text(), "pretrained", pretrained_tables(), PRETRAINED.name),
        THREATS: with_section(
            with_section(THREATS.read_text(), "costs", threats.costs(), THREATS.name),
            "families",
            threats.families(),
            THREATS.name,
        ),
        COMBINATIONS: with_section(COMBINATIONS.read_text(), "table", combinations_table(), COMBINATIONS.name),
        REGRESSION: with_section(REGRESSION.read_text(), "housing", housing_table(), REGRESSION.name),
        SEGMENTATION: with_section(
            SEGMENTATION.read_text(), "camvid", camvid.section(ROOT / "results"), SEGMENTATION.name
        ),
        DEPLOYING: with_section(DEPLOYING.read_text(), "load", load_table(), DEPLOYING.name),
        MONITORING: monitoring_page(MONITORING.read_text()),
        CLI: cli_reference(),
    }
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    # Fonts differ between machines: a figure is current when it was drawn from these rows.
    for path, (first, draw) in figures().items():
        if not path.exists() or path.read_text().splitlines()[0] != first:
            stale.append(path.relative_to(ROOT))
            if not check:
                from keepcover.pages import plots

                path.write_text(f"{first}\n{plots.adaptive_svg(draw(), path.stem)}\n")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(map(str, stale))}; run `make docs` and commit")
    print("docs are current" if not stale else f"wrote {', '.join(map(str, stale))}")


if __name__ == "__main__":
    main()

"""Training: base models under noise, and conformal training of their last layer or of all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from keepcover.cli.console import Alpha, DataDir, DataSpec, Epsilon, Json, Seed, Sigma, app, err, out, print_json
from keepcover.errors import InputError

train = typer.Typer(
    help="Train base models under noise, or last layers for small prediction sets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(train, name="train")

ModelSpec = Annotated[
    str, typer.Option("--model", help="`small-cnn`, `cifar-resnet20/56/110`, `resnet50`, or `package.module:function`.")
]
Weights = Annotated[str | None, typer.Option(help="Weights to start from: a file, or the name of committed ones.")]
Part = Annotated[
    str | None,
    typer.Option(
        help="k/m: train on the k-th of m random disjoint parts, where there is no official training part; 1/2 by default, which "
        "leaves 3/4 and 4/4 for calibration and for judging."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Where weights go (.safetensors); a card is written beside them.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Flip = Annotated[bool | None, typer.Option(help="Mirror images at random; by default for photographs only.")]
Pad = Annotated[int | None, typer.Option(help="Pixels of random shift; an eighth of the image by default.")]
Resume = Annotated[
    bool, typer.Option("--resume/--restart", help="Go on from the checkpoint of a run that was stopped.")
]


def _augmentation(data: Any, pad: int | None, flip: bool | None) -> dict[str, Any]:
    """Shifts of an eighth; mirrors for photographs, not for digits."""
    return {
        "pad": data.images.shape[2] // 8 if pad is None else pad,
        "flip": data.images.shape[1] == 3 if flip is None else flip,
    }


def _network(model: str, weights: str | None, classes: int) -> Any:
    """A module to train; a plain function has nothing to change."""
    import torch

    from keepcover.specs import load_model

    network = load_model(model, weights, classes)
    if not isinstance(network, torch.nn.Module):
        raise InputError(f"training needs a torch module; {model} gave {type(network).__name__}")
    return network


def _say(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True)


@train.command()
def base(
    sigma: Sigma,
    out_path: Out,
    model: ModelSpec = "small-cnn",
    weights: Weights = None,
    data: DataSpec = "digits",
    data_dir: DataDir = None,
    part: Part = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 80,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 256,
    lr: Annotated[float, typer.Option(help="Highest learning rate: linear warm-up, then cosine.")] = 0.1,
    pad: Pad = None,
    flip: Flip = None,
    resume: Resume = True,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Renew the checkpoint at the end of an epoch that finds it this old.")
    ] = 30.0,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a classifier under Gaussian noise, or fine-tune one from its own weights.

    An ordinary classifier collapses under noise, and its certified sets with it. Stop it at any moment: the same command
    goes on where it was.
    """
    import torch

    from keepcover.engine.devices import checked_device
    from keepcover.specs import load_parts
    from keepcover.training.base import Recipe, train_base

    checked_device(device)
    training, test = load_parts(data, data_dir, part, seed)
    recipe = Recipe(
        sigma, epochs, batch_size, lr, warmup_epochs=min(2, epochs - 1), seed=seed, **_augmentation(training, pad, flip)
    )
    torch.manual_seed(seed)
    network = _network(model, weights, len(training.class_names))
    card = train_base(
        network,
        training,
        test,
        recipe,
        out_path,
        architecture=model,
        device=device,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        say=_say,
    )
    if as_json:
        print_json(card)
        return
    accuracy = card["top1_accuracy_one_noisy_draw_test"]
    out.print(
        f"noisy accuracy {accuracy:.4f} at sigma {sigma:g} on {len(test)} images, {card['seconds']:.0f} s on {card['hardware']}\n"
        f"weights  {out_path}\ncard     {out_path.with_suffix('.json')}",
        highlight=False,
        soft_wrap=True,
    )


def _conformal(kind: str) -> Any:
    def command(
        sigma: Sigma,
        epsilon: Epsilon,
        out_path: Out,
        weights: Annotated[
            str | None,
            typer.Option(help="Base weights: a file, or the name of committed ones; your own function loads its own."),
        ] = None,
        model: ModelSpec = "small-cnn",
        data: DataSpec = "digits",
        data_dir: DataDir = None,
        part: Part = None,
        alpha: Alpha = 0.1,
        preset: Annotated[
            str | None, typer.Option(help="`cifar10` or `cifar100`: whose hyper-parameters; by the data by default.")
        ] = None,
        epochs: Annotated[int | None, typer.Option(help="Passes over the data; the preset's by default.")] = None,
        batch_size: Annotated[int | None, typer.Option(help="Images per step; the preset's by default.")] = None,
        lr: Annotated[float | None, typer.Option(help="First learning rate; the preset's by default.")] = None,
        keep_head: Annotated[
            bool, typer.Option("--keep-head", help="Go on from the last layer there is instead of a fresh one.")
        ] = False,
        views: Annotated[int, typer.Option(help="Random crops and flips of every image in the feature bank.")] = 4,
        validation: Annotated[int, typer.Option(help="Training images set aside to log set sizes on.")] = 1000,
        whole: Annotated[bool, typer.Option("--whole", help="Train the whole network under fresh noise.")] = False,
        fresh: Annotated[
            bool, typer.Option("--fresh-noise", help="Train the last layer without a bank: much slower.")
        ] = False,
        pad: Pad = None,
        flip: Flip = None,
        resume: Resume = True,
        device: Device = "cpu",
        seed: Seed = 0,
        as_json: Json = False,
    ) -> None:
        from keepcover.engine.devices import checked_device
        from keepcover.models import find_weights
        from keepcover.specs import MODELS, load_parts
        from keepcover.training.heads import PRESETS
        from keepcover.training.run import ConformalRequest, train_conformal

        checked_device(device)
        if model in MODELS:
            if weights is None:
                raise InputError(f"a last layer is trained over a trained {model}: give its --weights")
            if find_weights(weights).resolve() == out_path.resolve():
                raise InputError(f"--out would replace the base weights {weights}; give another name")
        training, _ = load_parts(data, data_dir, part, seed)
        preset = preset or (training.name if training.name in PRESETS else "cifar10")
        request = ConformalRequest(
            kind,
            sigma,
            epsilon,
            alpha,
            preset,
            views=views,
            validation=min(validation, len(training) // 10),
            whole=whole,
            fresh=fresh,
            **_augmentation(training, pad, flip),
        )
        asked = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed, "reset": not keep_head}
        recipe = replace(request.settings, **{name: value for name, value in asked.items() if value is not None})
        network = _network(model, weights, len(training.class_names))
        card = train_conformal(
            network,
            training,
            replace(request, recipe=recipe),
            out_path,
            base=find_weights(weights).stem if weights else model,
            device=device,
            resume=resume,
            say=_say,
        )
        if as_json:
            print_json(card)
            return
        last = card["history"][-1]
        out.print(
            f"set size {last['hard_size']:.3f} (soft {last['soft_size']:.3f}) on validation images, "
            f"{card['seconds']:.0f} s on {card['hardware']}\n"
            f"{card['trains']}  {out_path}\ncard  {out_path.with_suffix('.json')}",
            highlight=False,
            soft_wrap=True,
        )

    command.__doc__ = _DOCS[kind]
    return command


_DOCS = {
    "rct": """Robust conformal training: a last layer trained for small sets of RSCP under attack (the paper, Section 4.2).

    The backbone is frozen, its features of noisy images are computed once, and every epoch is served from that bank.
    """,
    "conftr": """Conformal training (Stutz et al. 2022): a last layer for small sets of vanilla conformal prediction.

    No noise and no attack: the paper's comparison, and the reason for RCT.
    """,
    "exact": """Conformal training matched to the exact certificate: its order statistic and its level in place of RSCP's.

    Beyond the paper. The rule is the one that the base model's own scores call for.
    """,
}
for _kind in _DOCS:
    train.command(_kind)(_conformal(_kind))

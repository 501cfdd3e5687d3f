"""Options that several commands share. Their defaults stand in vit_edge/recipe.py."""

from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/NAME.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
Device = Annotated[
    str | None, typer.Option("--device", help="Where torch computes: cuda, mps or cpu; default: the best there is.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs of every training in this command.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Images of a training step.")]
ImageSize = Annotated[int | None, typer.Option("--image-size", min=1, help="Side of the input in pixels.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that named data sets are kept in.")]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="digits, fashion-mnist, cifar10, cifar100, folder:PATH, hf:NAME (or a directory) or wds:SHARDS (a folder or a pattern).",
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad-images", help="Leave out images that cannot be read, and count them.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of the recipe; repeatable.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="A run, or a folder with model.json; default: the newest run.")
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write the metrics of training for TensorBoard too, beside metrics.jsonl.")
]
TeacherCache = Annotated[
    Path | None,
    typer.Option("--teacher-cache", help="Where the teacher's logits are kept; default: teacher_cache in the run."),
]


def overrides(given: list[str] | None) -> dict[str, Any]:
    """What `--set` gives: dotted key → value."""
    from vit_edge.recipe import parse_override

    return dict(parse_override(text) for text in given or [])


def normalisation(
    mean: str | None, std: str | None
) -> tuple[tuple[float, float, float], tuple[float, float, float]] | None:
    """What `--mean` and `--std` give together. Raises UserError for one alone, and for anything but three numbers."""
    from vit_edge.errors import UserError

    if (mean is None) != (std is None):
        raise UserError("--mean and --std belong together, found one of them", "give both, or neither")
    return None if mean is None or std is None else (_triple("--mean", mean), _triple("--std", std))


def _triple(option: str, text: str) -> tuple[float, float, float]:
    from vit_edge.errors import UserError

    try:
        red, green, blue = map(float, text.split(","))
    except ValueError as err:
        raise UserError(f"{option}: expected three numbers, found {text!r}", f"{option} 0.485,0.456,0.406") from err
    return red, green, blue

"""Commands that look inside models and weight files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vit_edge.cli import options

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, a folder with model.json, or a name with --weights.")
]
Weights = Annotated[str | None, typer.Option("--weights", help="For a name: pretrained, none, or a file of weights.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
ModelSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="For a name: mean, std, patch_size or another setting; repeatable."
    ),
]
Shots = Annotated[str | None, typer.Option("--shots", metavar="N,N,…", help="Training images of each class.")]
Draws = Annotated[int | None, typer.Option("--draws", help="Random choices of the training images.")]
Penalty = Annotated[
    float | None, typer.Option("--ridge", metavar="λ", help="Weight of the penalty ‖W‖², on standardised features.")
]


def inspect(
    model: ModelArgument,
    data: options.Data = None,
    weights: Weights = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the figures; default: inspect/MODEL.")] = None,
    as_json: AsJson = False,
    image_size: options.ImageSize = None,
    set_: ModelSet = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Draw a model's filters, the similarity of its positions, and how far its heads look."""
    from vit_edge.stages import inspect as stage
    from vit_edge.stages import subject

    folder = out or Path("inspect") / Path(model).resolve().name
    found = subject.load(
        model, weights=weights, data=data, image_size=image_size, data_dir=data_dir,
        settings=options.overrides(set_),
    )  # fmt: skip
    numbers = stage.run(folder, found, device)
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    for name in [*numbers["figures"], "numbers.json"]:
        typer.echo(folder / name)


def probe(
    model: ModelArgument,
    data: options.Data = None,
    shots: Shots = None,
    draws: Draws = None,
    penalty: Penalty = None,
    weights: Weights = None,
    as_json: AsJson = False,
    image_size: options.ImageSize = None,
    seed: options.Seed = None,
    set_: ModelSet = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Judge a model's features by few-shot ridge regression, trained on the train split, tested on the tune split."""
    from vit_edge.report import console
    from vit_edge.settings import parse
    from vit_edge.stages import probe as stage
    from vit_edge.stages import subject

    given = {"shots": _counts(shots), "draws": draws, "penalty": penalty, "seed": seed}
    config = parse(stage.ProbeConfig, {key: value for key, value in given.items() if value is not None}, "command line")
    found = subject.load(
        model, weights=weights, data=data, image_size=image_size, data_dir=data_dir,
        settings=options.overrides(set_),
    )  # fmt: skip
    table = stage.run(found, config, device)
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    cells = [
        (str(row["shots"]), f"{row['top1_mean']:.4f}", f"{row['top1_spread']:.4f}", f"{min(row['top1']):.4f}",
         f"{max(row['top1']):.4f}") for row in table["rows"]
    ]  # fmt: skip
    console.show_table(("shots", "top-1", "spread", "least", "most"), cells)
    typer.echo(
        f"{config.draws} draws, ridge {config.penalty:g}, {table['features']} features, {table['test_images']} test images"
    )
    typer.echo(f"{table['model']} on {table['data']}")


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="safetensors, a torch pickle, or a NumPy archive.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
) -> None:
    """Rewrite a weight file as safetensors: same tensors, same names, no code."""
    from vit_edge.models.convert import convert as write
    from vit_edge.progress import say

    tensors = write(source, out, say)
    typer.echo(f"{out}: {len(tensors)} tensors, {out.stat().st_size / 1e6:.1f} MB")


def _counts(text: str | None) -> list[int] | None:
    from vit_edge.errors import UserError

    if text is None:
        return None
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise UserError(
            f"--shots {text!r}: expected positive numbers with commas between", "for example --shots 1,5,10,25"
        )
    return [int(part) for part in text.split(",")]

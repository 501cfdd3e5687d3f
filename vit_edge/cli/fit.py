"""The command that finds students for a device. Results go to stdout, progress and messages to stderr."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from vit_edge import fitting


def fit(
    target: Annotated[str, typer.Option("--target", help="A runtime, or a device profile: the machine that this runs on.")],
    max_p90_ms: Annotated[float, typer.Option("--max-p90-ms", metavar="MS", min=1e-3, help="What an inference may take.")],
    family: Annotated[Literal["vit", "cnn"], typer.Option("--family", help="Kind of student.")] = "vit",
    image_size: Annotated[int, typer.Option("--image-size", min=4, max=4096, help="Side of the input in pixels.")] = fitting.IMAGE_SIZE,
    classes: Annotated[int, typer.Option("--classes", min=2, max=1_000_000, help="Classes that it will tell apart.")] = fitting.CLASSES,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=3600, help="Time to search for.")] = fitting.SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:  # fmt: skip
    """Propose the largest students that this device runs in int8 within a latency; nothing is trained."""
    import json

    from vit_edge import target as profiles
    from vit_edge.report import console
    from vit_edge.runtimes import machine
    from vit_edge.stages import fit as stage

    found = stage.fit(
        profiles.load(target), max_p90_ms, family=family, image_size=image_size, classes=classes, seconds=seconds
    )
    if as_json:
        given = {"target": target, "max_p90_ms": max_p90_ms, "image_size": image_size, "classes": classes}
        told = {
            "schema": "vit-edge/fit/1", **given, "device": machine.machine(), "runtime": found.runtime,
            "complete": found.complete, "measured": [_plain(trial) for trial in found.trials],
            "proposals": [
                _plain(trial) | {"command": command(trial.candidate.settings, image_size)} for trial in found.proposals
            ],
        }  # fmt: skip
        typer.echo(json.dumps(told, indent=2))
        return
    head = ("student", "parameters", "mult-adds", "p50 ms", "p90 ms", "")
    console.show_table(head, [_row(trial, max_p90_ms) for trial in _by_capacity(found.trials)])
    if not found.complete:
        typer.echo("the time was up before every line was searched: --seconds gives more", err=True)
    for trial in found.proposals:
        typer.echo(
            f"\n{stage.words(trial.candidate)}: p90 {trial.p90_ms:.3g} ms ± {trial.noise:.1%}, timed again\n"
            f"{command(trial.candidate.settings, image_size)}\n"
            f"student: {{model: {_yaml(trial.candidate.settings)}}}"
        )


def command(settings: Mapping[str, Any], image_size: int) -> str:
    """What makes a proposal a student."""
    name, *rest = settings.items()
    changes = " ".join(f"--set student.model.{key}={value}" for key, value in rest)
    return f"vit-edge distill --student {name[1]} --image-size {image_size} {changes}".rstrip()


def _yaml(settings: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in settings.items()) + "}"


def _by_capacity(trials: Sequence[Any]) -> list[Any]:
    return sorted(trials, key=lambda trial: trial.candidate.capacity, reverse=True)


def _row(trial: Any, max_p90_ms: float) -> tuple[str, ...]:
    from vit_edge.report import words
    from vit_edge.stages.fit import words as in_words

    candidate = trial.candidate
    return (
        in_words(candidate), words.count(candidate.parameters), words.count(candidate.multiply_adds),
        words.ms(trial.p50_ms), f"{words.ms(trial.p90_ms)} ± {trial.noise:.0%}",
        "fits" if trial.fits(max_p90_ms) else "",
    )  # fmt: skip


def _plain(trial: Any) -> dict[str, Any]:
    candidate = trial.candidate
    sizes = {"parameters": candidate.parameters, "multiply_adds": candidate.multiply_adds}
    return {"settings": dict(candidate.settings), **sizes, "p50_ms": trial.p50_ms, "p90_ms": trial.p90_ms, "noise": trial.noise}  # fmt: skip

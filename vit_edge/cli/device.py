"""Commands that run on a device: no torch needed. Results go to stdout, progress and messages to stderr."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

BundlePath = Annotated[Path, typer.Argument(help="A bundle: the folder or zip that `vit-edge export` wrote.")]
Reference = Annotated[
    Path | None,
    typer.Option(
        "--reference", help="What `vit-edge reference` wrote, when it is not in the bundle or was taken on a GPU since."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0.01, max=3600, help="Time to measure for; default: the first target's."),
]
ExpectSha256 = Annotated[
    str | None, typer.Option("--expect-sha256", metavar="HEX", help="Refuse a bundle with another digest.")
]
RequireSignature = Annotated[
    Path | None,
    typer.Option(
        "--require-signature", metavar="PUB", help="Refuse a bundle that this public key's owner did not sign."
    ),
]


def gate(
    bundle: BundlePath,
    reference: Reference = None,
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="DIR", help="Image files, when the evaluation travels without them."),
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option("--max-drop", metavar="POINTS", min=0, help="Largest top-1 drop, percentage points.")
    ] = None,
    min_relative_top1: Annotated[
        float | None, typer.Option("--min-relative-top1", min=0, max=1, help="Least share of the reference's top-1.")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option("--min-agreement", min=0, max=1, help="Least share of images answered as the reference does."),
    ] = None,
    min_top1: Annotated[float | None, typer.Option("--min-top1", min=0, max=1, help="Least top-1, a fraction.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="mlperf-99, mlperf-99.9, mobile-98: at least 99, 99.9, 98 % of the reference's top-1, in place of every "
            "limit on accuracy that the bundle brings or that stands by default.",
        ),
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option("--min-speedup", metavar="X", min=0, help="Least p50 of float over p50 of int8.")
    ] = None,
    max_p90_ms: Annotated[float | None, typer.Option("--max-p90-ms", metavar="MS", min=0)] = None,
    max_vs_reference: Annotated[
        float | None, typer.Option("--max-vs-reference", metavar="X", min=0, help="Largest p50 over the reference's.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="JSON", help="An earlier gate's report, to be compared with: same images."),
    ] = None,
    max_slowdown: Annotated[
        float | None, typer.Option("--max-slowdown", metavar="X", min=0, help="Largest p50 over the baseline's.")
    ] = None,
    undecided: Annotated[
        Literal["fail", "pass"] | None, typer.Option("--undecided", help="What an undecided check counts as.")
    ] = None,
    seconds: Seconds = None,
    official: Annotated[
        bool, typer.Option("--official", help="Time every artefact for 1,024 queries and 60 s at least.")
    ] = False,
    expect_sha256: ExpectSha256 = None,
    require_signature: RequireSignature = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; `-`: to stdout alone.")
    ] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", metavar="FILE")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", metavar="FILE")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE")] = None,
) -> None:
    """Prove on this device that a bundle's accuracy and latency hold. Exit 0 pass, 1 fail, 3 undecided or unmeasured."""
    from vit_edge.bundle import Trust
    from vit_edge.errors import UserError
    from vit_edge.gate import preset as presets
    from vit_edge.stages.gate import gate_bundle

    given = {
        "max_drop_points": max_drop,
        "min_relative_top1": min_relative_top1,
        "min_agreement": min_agreement,
        "min_top1": min_top1,
        "min_speedup": min_speedup,
        "max_p90_ms": max_p90_ms,
        "max_vs_reference": max_vs_reference,
        "max_slowdown": max_slowdown,
        "undecided": undecided,
    }
    if max_slowdown is not None and baseline is None:
        raise UserError(
            "--max-slowdown has no effect without --baseline", "give an earlier gate's JSON with --baseline"
        )
    if official and seconds is not None:
        raise UserError("--official and --seconds exclude each other", "give one of them")
    _check_writable(json_file, junit_file, markdown_file, html_file)
    layers = [] if preset is None else [presets(preset)]
    overrides = {name: value for name, value in given.items() if value is not None}
    report = gate_bundle(
        bundle, limits=[*layers, ("command line", overrides)], reference=reference, images=images, seconds=seconds,
        official=official, trust=Trust(expect_sha256, require_signature), baseline=baseline,
    ).report  # fmt: skip
    from vit_edge.report import console, html, junit, markdown

    _write(json_file, report.to_json)
    _write(junit_file, lambda: junit.of_report(report))
    _write(markdown_file, lambda: markdown.of_report(report))
    _write(html_file, lambda: html.page(reports=[report]))
    if Path("-") not in (json_file, junit_file, markdown_file, html_file):
        console.show_report(report)
    raise typer.Exit(report.exit_code)


def bundle(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An .onnx file, or OpenVINO's .xml beside its .bin, made elsewhere.")
    ],
    reference: Annotated[
        Path,
        typer.Option("--reference", help="The run, or the folder of `vit-edge reference`, that it is held against."),
    ],
    target: Annotated[str, typer.Option("--target", help="Runtime or device profile that it is for.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder; default: MODEL's name and the target's.")
    ] = None,
    float_model: Annotated[
        Path | None, typer.Option("--float", metavar="MODEL", help="The same in float, to compare latency with.")
    ] = None,
    layout: Annotated[
        Literal["uint8-nhwc", "float-nchw"] | None,
        typer.Option("--input", help="What the graph takes; default: read from the graph."),
    ] = None,
    mean: Annotated[
        str | None, typer.Option("--mean", metavar="R,G,B", help="A float graph's; default: the student's of the run.")
    ] = None,
    std: Annotated[str | None, typer.Option("--std", metavar="R,G,B")] = None,
) -> None:
    """Bundle a model that another tool made, so that `vit-edge gate` can hold it to the same reference."""
    from vit_edge import target as profiles
    from vit_edge.cli import options
    from vit_edge.stages import foreign

    aimed = profiles.load(target)
    place = foreign.bundle_of(
        model, out or Path(f"{model.stem}-{aimed.name}"), reference=reference, target=aimed, float_model=float_model,
        normalisation=options.normalisation(mean, std), layout=layout,
    )  # fmt: skip
    typer.echo(place)


def bench(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles to time side by side.")],
    reference: Reference = None,
    seconds: Seconds = None,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Time several bundles, int8 and float, in turn on this machine."""
    from vit_edge.bundle import Trust
    from vit_edge.report import console, words
    from vit_edge.stages.bench import bench_bundles

    rows = bench_bundles(bundles, reference=reference, seconds=seconds, trust=Trust(public_key=require_signature))
    if as_json:
        _print_json({"schema": "vit-edge/bench/1", "rows": [row.model_dump() for row in rows]})
    else:
        console.show_table(words.BENCH_HEAD, words.bench_rows(rows))


def predict(
    bundle: BundlePath,
    images: Annotated[list[Path] | None, typer.Argument(metavar="IMAGE...", help="Image files.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Classes to name for each image.")] = 5,
    snippet: Annotated[
        bool, typer.Option("--snippet", help="Print a program that runs the model without vit-edge.")
    ] = False,
    language: Annotated[
        Literal["python", "cpp"] | None, typer.Option("--language", help="The program's; default: python.")
    ] = None,
    expect_sha256: ExpectSha256 = None,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Classify image files with a bundle's int8 model."""
    from vit_edge.bundle import Trust
    from vit_edge.errors import UserError
    from vit_edge.stages.predict import predict_images
    from vit_edge.stages.snippet import program

    if snippet:
        typer.echo(program(bundle, Trust(expect_sha256, require_signature), language or "python"), nl=False)
        return
    if language:
        raise UserError("--language has no effect without --snippet", "give --snippet too, or leave it out")
    if not images:
        raise UserError("predict needs at least one image", "name image files after the bundle, or give --snippet")
    answers = predict_images(bundle, images, top, Trust(expect_sha256, require_signature))
    if as_json:
        _print_json([{"image": str(path), "classes": found} for path, found in zip(images, answers, strict=True)])
        return
    for path, found in zip(images, answers, strict=True):
        typer.echo(f"{path}\t" + "\t".join(f"{name} {share:.1%}" for name, share in found.items()))


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="JSON...", help="Reports of gates, on any devices; a run's ledger.json may be among them."
        ),
    ],
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="One page that needs no network.")
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", metavar="FILE")] = None,
) -> None:
    """Show many gates side by side: devices × checks. Exit 0, whatever they found."""
    from vit_edge.report import console, html, markdown, reading

    _check_writable(html_file, markdown_file)
    reports, ledger = reading.reports(files)
    _write(html_file, lambda: html.page(reports=reports, ledger=ledger))
    _write(markdown_file, lambda: markdown.of_reports(reports))
    if Path("-") not in (html_file, markdown_file):
        console.show_reports(reports)


def sign(
    bundle: BundlePath,
    key: Annotated[
        Path,
        typer.Option(
            "--key", metavar="KEY", help="Ed25519 private key in PEM form: openssl genpkey -algorithm ed25519."
        ),
    ],
) -> None:
    """Sign a bundle, so that `gate --require-signature PUB` can tell who made it and that nothing was changed."""
    from vit_edge import bundle as bundles

    bundles.sign(bundle, key)
    typer.echo(f"signed {bundle} with {key}")


def doctor(as_json: AsJson = False) -> None:
    """Say which runtimes and devices work here, what this CPU has for int8, and how to get what is missing."""
    from vit_edge.report import console
    from vit_edge.runtimes.doctor import findings

    found = findings()
    if as_json:
        _print_json(found)
    else:
        console.show_doctor(found)


def targets(as_json: AsJson = False) -> None:
    """List the device profiles that bundles can be exported for."""
    from vit_edge import target
    from vit_edge.report import console

    profiles = [target.load(name) for name in target.known() if name not in target.ALIASES]
    if as_json:
        _print_json([profile.model_dump(mode="json") for profile in profiles])
        return
    head = ("target", "runtime", "device", "threads", "description")
    console.show_table(head, [(p.name, p.runtime, p.device, str(p.threads or "all"), p.description) for p in profiles])


def _check_writable(*files: Path | None) -> None:
    """Makes the folders of the reports, so that a gate of minutes does not end in a path that cannot be written."""
    from vit_edge.errors import UserError

    for file in files:
        if file is None or file == Path("-"):
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
        except OSError as err:
            raise UserError(f"cannot write {file}: {err.strerror}", "give a path that can be written") from err


def _write(file: Path | None, text: Callable[[], str]) -> None:
    """Writes what `text()` gives, to stdout for `-`."""
    if file == Path("-"):
        typer.echo(text(), nl=False)
    elif file is not None:
        file.write_text(text(), encoding="utf-8")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))

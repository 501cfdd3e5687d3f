"""Commands that build: each makes a recipe out of its options and runs the pipeline up to its own stage."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from vit_edge.cli import finding, options


def run(
    pipeline: Annotated[str, typer.Argument(help="A recipe: a path, or a name that `vit-edge pipelines` lists.")],
    out: options.Out = None,
    set_: options.Set = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Redo this stage and what follows.")
    ] = None,
    until: Annotated[str, typer.Option("--until", metavar="STAGE", help="The last stage to run.")] = "gate",
    teacher_cache: options.TeacherCache = None,
    tensorboard: options.TensorBoard = False,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Run a recipe: teacher, student, reference, int8, export, gate. Finished stages are not run again."""
    from vit_edge import recipe as recipes

    recipe = recipes.load(finding.recipe_path(pipeline), options.overrides(set_))
    pipeline = _run(
        recipe, out, until, device, data_dir, start=from_, teacher_cache=teacher_cache, tensorboard=tensorboard
    )
    if until == "gate":
        _finish(pipeline)


def train(
    model: Annotated[
        str, typer.Option("--model", help="vit_b16, any timm architecture, or a folder with model.json.")
    ] = "vit_b16",
    data: options.Data = None,
    weights: Annotated[str | None, typer.Option("--weights", help="pretrained, none, or a file of weights.")] = None,
    out: options.Out = None,
    seed: options.Seed = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    image_size: options.ImageSize = None,
    skip_bad_images: options.SkipBad = False,
    set_: options.Set = None,
    tensorboard: options.TensorBoard = False,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Train or fine-tune one model on labels alone. `quantize`, `export` and `distill --teacher RUN` go on from it."""
    values = _base(data, seed, image_size, skip_bad_images)
    values |= {
        "teacher": None,
        "student": _part(model, weights, epochs, batch_size, image_size) | {"distillation": None},
    }
    recipe = _recipe(values, [model], set_)
    pipeline = _run(recipe, out, "student", device, data_dir, tensorboard=tensorboard)
    _report_model(pipeline, "student")


def distill(
    teacher: Annotated[
        str, typer.Option("--teacher", help="A model's name, a run, or a folder with model.json.")
    ] = "vit_b16",
    teacher_weights: Annotated[
        str | None, typer.Option("--teacher-weights", help="pretrained, none (trained here), or a file.")
    ] = None,
    student: Annotated[str, typer.Option("--student", help="A model's name.")] = "vit_ti16",
    data: options.Data = None,
    out: options.Out = None,
    seed: options.Seed = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    image_size: options.ImageSize = None,
    skip_bad_images: options.SkipBad = False,
    set_: options.Set = None,
    teacher_cache: options.TeacherCache = None,
    tensorboard: options.TensorBoard = False,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Distil a teacher into a small student. A teacher without weights is trained first."""
    values = _base(data, seed, image_size, skip_bad_images)
    values["teacher"] = _part(teacher, teacher_weights, epochs, batch_size)
    if values["teacher"]["model"].get("weights", "none") not in ("none", "pretrained"):
        values["teacher"]["training"] = None
    values["student"] = _part(student, None, epochs, batch_size, image_size)
    recipe = _recipe(values, [teacher, student], set_)
    pipeline = _run(recipe, out, "student", device, data_dir, teacher_cache=teacher_cache, tensorboard=tensorboard)
    _report_model(pipeline, "teacher")
    _report_model(pipeline, "student")


def quantize(
    model: options.Model = None,
    data: options.Data = None,
    search_seconds: Annotated[
        float | None,
        typer.Option("--search-seconds", min=0, help="Time to look for what to give back to float; 0: do not look."),
    ] = None,
    search_trials: Annotated[
        int | None, typer.Option("--search-trials", min=1, help="Int8 models to try, the plain one included.")
    ] = None,
    qat: Annotated[bool, typer.Option("--qat", help="Train the int8 model on, on the training images.")] = False,
    set_: options.Set = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Quantize a student to int8, calibrated on its training images; what loses too much on the tune split stays float."""
    from vit_edge.errors import UserError
    from vit_edge.report import console, quantization

    changes = options.overrides(set_)
    if search_seconds == 0 and search_trials is not None:
        raise UserError("--search-trials has no effect with --search-seconds 0", "leave out one of the two")
    if search_seconds == 0:
        changes["int8.search"] = None
    elif search_seconds is not None:
        changes["int8.search.seconds"] = search_seconds
    if search_trials is not None:
        changes["int8.search.trials"] = search_trials
    if qat and data is None and model is not None and (Path(model) / "model.json").is_file():
        problem = f"--qat trains on the model's images, and {model} does not say which they are"
        raise UserError(problem, "add --data SPEC, or give the run that made the model")
    pipeline = _continue(model, data, "int8", device, data_dir, changes=changes, qat=qat)
    searched = quantization.search(pipeline.done["int8"])
    if searched is not None:
        console.show_search(searched)
    typer.echo(f"int8 model: {pipeline.done['int8']}")


def reference(
    model: options.Model = None,
    data: options.Data = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Take the float reference: the student's logits on the gate's images, in PyTorch, on a GPU where there is one."""
    pipeline = _continue(model, data, "reference", device, data_dir)
    metrics = pipeline.metrics("reference")
    typer.echo(f"reference: {pipeline.done['reference'] / 'evaluation'}")
    typer.echo(
        f"top-1 {metrics['student']['top1']:.4f} on {metrics['device']}, p50 {metrics['latency_ms']['p50']:.2f} ms"
    )
    for precision, one in metrics["beside"].items():
        typer.echo(f"{precision}: top-1 {one['top1']:.4f} on {one['n']} images, p50 {one['latency_ms']['p50']:.2f} ms")


def export(
    target: Annotated[list[str], typer.Option("--target", help="A runtime, a device profile, or `all`; repeatable.")],
    model: options.Model = None,
    data: options.Data = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Measure the runtime's lowerings on this device, keep the fastest that answers as well."
        ),
    ] = False,
    dynamic_batch: Annotated[
        bool | None,
        typer.Option("--dynamic-batch/--static-batch", help="Leave the batch open in the files, or fix it."),
    ] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the bundles, as `vit-edge sign --key KEY` does.")
    ] = None,
    zipped: Annotated[
        Path | None,
        typer.Option("--zip", metavar="FOLDER", help="Write each bundle as FOLDER/TARGET.zip too, to take along."),
    ] = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
) -> None:
    """Export a bundle per target: quantizes first where that has not been done."""
    from vit_edge import bundle as bundles
    from vit_edge.safety import signature

    if sign is not None:
        signature.sign(b"", sign)  # that a key is none is better known before the work
    if zipped is not None:
        zipped.mkdir(parents=True, exist_ok=True)
    names = ["onnxruntime", "openvino", "tensorrt"] if "all" in target else target
    asked: dict[str, Any] = {"tune": True} if tune else {}
    if dynamic_batch is not None:
        asked["dynamic_batch"] = dynamic_batch
    pipeline = _continue(model, data, "export", device, data_dir, targets=names, asked=asked)
    for name in pipeline.only or ():
        path = pipeline.done[f"export/{name}"] / "bundle"
        if sign is not None:
            bundles.sign(path, sign)
        if zipped is not None:
            bundles.pack(path, zipped / f"{name}.zip")
        made = path if zipped is None else zipped / f"{name}.zip"
        typer.echo(f"bundle: {made}{', signed' if sign else ''}")


def models(
    query: Annotated[str, typer.Argument(help="Part of a name, or a pattern such as 'resnet*'.")] = "",
    image_size: options.ImageSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the architectures that can be teacher or student: ours, or all with QUERY in their name."""
    from vit_edge.models import catalogue
    from vit_edge.progress import progress
    from vit_edge.report import console

    rows = []
    names = catalogue.names(query.lower() or None)
    with progress("models", len(names), unit="models") as advance:
        for name in names:
            rows.append(catalogue.listed(name, image_size))
            advance()
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    head = ("name", "family", "parameters", "mult-adds", "input", "int8 proven")
    console.show_table(head, [_listed_cells(row) for row in rows])
    for row in rows:
        if row.problem:
            typer.echo(f"{row.name}: {row.problem}", err=True)


def pipelines() -> None:
    """List the recipes that come with vit-edge."""
    from vit_edge import recipe as recipes
    from vit_edge.shipped import shipped

    for name, path in shipped("pipelines").items():
        typer.echo(f"{name:24} {recipes.load(path).description}")


def _listed_cells(row: Any) -> tuple[str, ...]:
    unknown = row.parameters is None
    parameters = "–" if unknown else f"{row.parameters / 1e6:.1f} M"
    cost = "–" if unknown else f"{row.multiply_adds / 1e9:.2f} G"
    return row.name, row.family, parameters, cost, f"{row.image_size} px", ", ".join(row.int8_proven)


def _run(
    recipe: Any, out: Path | None, until: str, device: str | None, data_dir: Path | None, start: str | None = None,
    **ways: Any,
) -> Any:  # fmt: skip
    """Runs the pipeline up to a stage; a process that does not lead ends here. ways: as for `Pipeline`."""
    from vit_edge import processes
    from vit_edge.pipeline import Pipeline

    pipeline = Pipeline(recipe, out or finding.RUNS / recipe.name, device, data_dir, **ways)
    pipeline.run(until, start=start)
    if not processes.leads():
        raise typer.Exit(0)
    if not pipeline.ran:
        typer.echo(f"nothing to do: every stage is finished in {pipeline.folder}", err=True)
    return pipeline


def _finish(pipeline: Any) -> None:
    """Ledger, verdicts, report; exits with the worst verdict of the targets that the recipe requires."""
    from vit_edge.stages import summary

    raise typer.Exit(summary.write_and_print(pipeline))


def _continue(
    model: str | None,
    data: str | None,
    until: str,
    device: str | None,
    data_dir: Path | None,
    targets: list[str] | None = None,
    asked: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    qat: bool = False,
) -> Any:
    """Goes on from a run, or from a model's folder, up to `until`.

    targets: to export to, which the recipe need not name. asked: of them, whatever the recipe says. changes: of the
    recipe, dotted key → value. qat: train the int8 model on, as the recipe says or by the defaults.
    """
    from vit_edge import recipe as recipes
    from vit_edge.errors import UserError
    from vit_edge.pipeline import Pipeline

    folder = Path(model) if model else finding.newest_run()
    if (folder / "recipe.yaml").is_file():
        recipe = recipes.load(folder / "recipe.yaml", changes)
        if data is not None and data != recipe.data.spec:
            raise UserError(f"the run {folder} was made from {recipe.data.spec}, not from {data}", "leave --data out")
    elif not (folder / "model.json").is_file():
        raise UserError(
            f"{folder} is no run and no model", "give a folder with recipe.yaml or model.json, such as runs/NAME"
        )
    else:
        values = _base(data, None, None, False)
        values |= {
            "teacher": None,
            "student": _part(str(folder), None, None, None) | {"training": None, "distillation": None},
        }
        recipe = _recipe(recipes.laid_over(values, changes or {}), [str(folder)])
        folder = finding.RUNS / recipe.name
    typer.echo(f"run: {folder}", err=True)
    if qat and recipe.int8.qat is None:
        recipe = recipe.model_copy(update={"int8": recipe.int8.model_copy(update={"qat": recipes.QatConfig()})})
    only = None
    if targets is not None:
        recipe, only = _with_targets(recipe, targets, asked or {})
    pipeline = Pipeline(recipe, folder, device, data_dir, only=only)
    pipeline.run(until)
    return pipeline


def _with_targets(recipe: Any, names: list[str], changes: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The recipe with the targets that are asked for among its own, changed as asked; and their profiles' names."""
    from vit_edge import target as profiles
    from vit_edge.recipe import TargetRequest

    asked = {profiles.load(name).name: TargetRequest(name=name) for name in names}
    requests = {profiles.load(request.name).name: request for request in recipe.targets}
    changed = {name: requests.get(name, asked[name]).model_copy(update=changes) for name in asked}
    return recipe.model_copy(update={"targets": tuple((requests | changed).values())}), tuple(asked)


def _base(data: str | None, seed: int | None, image_size: int | None, skip_bad_images: bool) -> dict[str, Any]:
    from vit_edge.recipe import DataConfig

    given: dict[str, Any] = {"spec": data or DataConfig().spec}
    if image_size is not None:
        given["image_size"] = image_size
    if skip_bad_images:
        given["skip_bad_images"] = True
    return {"data": given} | ({} if seed is None else {"seed": seed})


def _part(
    model: str, weights: str | None, epochs: int | None, batch_size: int | None, image_size: int | None = None
) -> dict[str, Any]:
    """The recipe's teacher or student: a model by name, or one that a run or a folder holds.

    image_size: the command's, which a saved model that is trained further takes; else it keeps its own.
    """
    training = {key: value for key, value in (("epochs", epochs), ("batch_size", batch_size)) if value is not None}
    part: dict[str, Any] = {"model": _model(model)}
    if image_size is not None:
        part["model"]["image_size"] = None
    if weights is not None:
        part["model"]["weights"] = weights
    return part | ({"training": training} if training else {})


def _model(name: str) -> dict[str, Any]:
    from vit_edge.models.card import read_card, saved_in

    found = saved_in(Path(name))
    if found is None:
        return {"name": name}
    card = read_card(found)
    own = {"weights": str(found / "model.safetensors"), "image_size": card.preprocessing.image_size}
    return card.model.model_dump(mode="json") | own


def _recipe(values: dict[str, Any], models: list[str], set_: list[str] | None = None) -> Any:
    """The recipe with what `--set` changes laid over it, called by its models and its data where nothing names it."""
    from vit_edge.recipe import Recipe, laid_over
    from vit_edge.settings import parse

    recipe = parse(Recipe, laid_over({"name": "unnamed"} | values, options.overrides(set_)), "command line")
    if recipe.name != "unnamed":
        return recipe
    return recipe.model_copy(update={"name": "-".join(map(_label, [*models, recipe.data.spec]))})


def _label(text: str) -> str:
    """A word for a model or a data set: the last part of its path, with the run's where that is but a stage."""
    path = Path(text.replace(":", "/")).resolve()
    parts = path.parts[-2:] if path.name in ("teacher", "student") else path.parts[-1:]
    return re.sub(r"[^\w.+-]+", "-", "-".join(parts))


def _report_model(pipeline: Any, stage: str) -> None:
    if stage not in pipeline.done:
        return
    top1 = pipeline.metrics(stage).get("tune_top1")
    measured = f", top-1 {top1:.4f} on the tune split" if top1 is not None else ""
    typer.echo(f"{stage}: {pipeline.done[stage]}{measured}")

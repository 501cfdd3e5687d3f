"""The gate: opens a bundle on its target and holds what it measures against the limits.

B images of a batch, N images of the evaluation, H×W pixels, C = 3 channels, K classes.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import accuracy, bundle, evaluation, gate, latency, metrics, regression
from vit_edge.bundle import Bundle, Trust
from vit_edge.errors import UserError
from vit_edge.evaluation import Evaluation
from vit_edge.progress import progress
from vit_edge.recipe import Limits
from vit_edge.regression import Baseline
from vit_edge.report import junit, markdown
from vit_edge.report.schema import Check, Parity, Report
from vit_edge.runtimes import machine, registry
from vit_edge.runtimes.base import Probe, Provable, Runtime
from vit_edge.stages import timing
from vit_edge.stages.artefacts import Known, Opened, check_logits, graph_input, int8_variant, open_sessions
from vit_edge.target import Protocol

# The float artefacts are run on so many of the images, which are in random order: all of them in most data sets.
PARITY_IMAGES = 10_000
KNOWN_IMAGES = 16  # to find a runtime's wrong fusions by, on opening
ANSWERS = "answers.npz"

Layers = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Gated:
    """A report, and the answers of int8 and of each float precision: class indices int64 (N,), -1 for none."""

    report: Report
    answers: dict[str, np.ndarray]


def run(folder: Path, *, bundle: Path, limits: Limits, reference: Path | None = None) -> dict[str, Any]:
    """Gates a bundle and writes gate.json, gate.md, gate.xml and answers.npz (int64 (N,) by artefact).

    limits: the recipe's. reference: the evaluation's folder, when it is not in the bundle. Returns what was found
    in short; the verdict is no error. Raises UserError for a bundle that has been changed.
    """
    gated = gate_bundle(bundle, limits=[("recipe", gate.changed(limits))], reference=reference)
    report = gated.report
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "gate.md").write_text(markdown.of_report(report), encoding="utf-8")
    (folder / "gate.xml").write_text(junit.of_report(report), encoding="utf-8")
    np.savez(folder / ANSWERS, **gated.answers)  # type: ignore[arg-type]
    return {
        "verdict": report.verdict,
        "blame": report.blame,
        "target_top1": report.accuracy and report.accuracy.target_top1,
        "drop_points": report.accuracy and report.accuracy.drop_points,
        "p50_ms": report.latency and report.latency.target_ms and report.latency.target_ms["p50"],
        "speedup_vs_float": report.latency and report.latency.speedup_vs_float,
    }


def gate_bundle(
    path: Path, *, limits: Layers = (), reference: Path | None = None, images: Path | None = None,
    trust: Trust = Trust(), seconds: float | None = None, official: bool = False, baseline: Path | None = None,
) -> Gated:  # fmt: skip
    """Gates the bundle in a folder or a zip.

    limits: (origin, values of recipe.Limits) laid over the bundle's own, later ones first in force.
    reference: the evaluation's folder, when it is not in the bundle. images: a folder of image files to make the
    evaluation's images from, when they are not in it. trust: what the bundle must show before it is read.
    seconds: time to measure latency for; default: as the bundle's target says. official: for as long as MLPerf asks.
    baseline: an earlier gate's report in JSON, to be compared with.
    """
    with bundle.opened(path, trust) as opened, ExitStack() as stack:
        measured_on = _evaluation(stack, opened, reference, images)
        _check_fit(opened, measured_on)
        before = regression.read(baseline, measured_on) if baseline else None
        held = gate.HeldLimits([("bundle", gate.changed(opened.manifest.limits)), *limits])
        runtime = registry.load(opened.manifest.target.runtime)
        probe = runtime.probe()
        if probe.version is None:
            raise UserError(probe.problem or f"{runtime.name} is not installed", probe.fix or "install it")
        if probe.problem:
            return _without_device(opened, measured_on, held, runtime, probe, before)
        protocol = timing.protocol(opened.manifest.target, seconds, official)
        return _on_device(opened, measured_on, held, runtime, protocol, before)


def _on_device(
    opened: Bundle, images: Evaluation, held: gate.HeldLimits, runtime: Runtime, protocol: Protocol,
    before: Baseline | None,
) -> Gated:  # fmt: skip
    manifest = opened.manifest
    with ExitStack() as stack:
        first_BHWC = np.array(images.images_NHWC[: manifest.target.batch])
        few_NHWC = graph_input(opened)(np.array(images.images_NHWC[:KNOWN_IMAGES]))
        known = Known(few_NHWC, np.array(images.logits_NK[:KNOWN_IMAGES]))
        int8, *floats = open_sessions(stack, opened, runtime, first_BHWC, known=known)
        described = int8.session.describe()
        parity, floats_NK = _parity(opened, images, floats)
        coverage = gate.covered(int8.session.coverage(), manifest.expected_int8)
        logits_NK = _logits(int8, opened, images, len(images.labels_N))
        parity = _with_int8(parity, floats_NK, logits_NK)
        found = accuracy.measured(
            images.labels_N, images.logits_NK, logits_NK, manifest.classes, images.names, held.values
        )
        timed = timing.measure(
            [int8, *floats], opened, images, protocol, reference_ms=_reference_ms(images),
            sound=[entry.precision for entry in parity.floats if entry.holds],
        )  # fmt: skip
    told = [f"{runtime.name} {described['version']} on {described['device']}", *filter(None, [int8_variant(opened)])]
    checks = [
        _integrity(opened, images, "; ".join(told)),
        gate.check_parity(parity),
        gate.check_coverage(coverage, manifest.expected_int8),
        accuracy.check(found, held.values),
        latency.check(timed, held.values),
    ]
    answers = {name: metrics.answers(found_NK) for name, found_NK in {"int8": logits_NK, **floats_NK}.items()}
    measured: dict[str, Any] = {
        "parity": parity, "coverage": coverage, "accuracy": found, "latency": timed,
        "answers": regression.packed(images.names, answers["int8"], manifest.classes),
    }  # fmt: skip
    if before is not None:
        against = regression.measured(
            before, images.labels_N, answers["int8"], timed, machine.machine(), _runtime(described), held.values
        )
        measured["regression"] = against
        checks.append(regression.check(against, held.values))
    checks = gate.settled(checks, held.values)
    return Gated(_report(opened, images, held, checks, described, measured), answers)


def _without_device(
    opened: Bundle, images: Evaluation, held: gate.HeldLimits, runtime: Runtime, probe: Probe, before: Baseline | None
) -> Gated:
    """Nothing can be run here: the files are proved as far as they can be, the rest is unmeasured."""
    proof = f"{runtime.name} {probe.version}"
    if isinstance(runtime, Provable):
        proof, *_ = [runtime.prove(files, opened.manifest.target) for files in (opened.int8, *opened.floats.values())]
    checks = [_integrity(opened, images, proof)]
    checks += gate.unmeasured(f"{probe.problem}; {probe.fix}", regression=before is not None)
    described = {"runtime": runtime.name, "version": probe.version}
    measured = dict.fromkeys(("parity", "coverage", "accuracy", "latency"))
    return Gated(_report(opened, images, held, checks, described, measured), {})


def evaluation_of(opened: Bundle, reference: Path | None) -> tuple[Path, str | None]:
    """The folder of the bundle's evaluation, or of the one that was given, and the digest that it must have.

    One that was given may be another than the bundle's, taken later or on a GPU, if its images, labels and classes are
    the very same; whether it is the same student's, parity tells. reference: the evaluation's folder or its
    evaluation.json, or a run.
    """
    own, expected = opened.evaluation_folder, opened.manifest.evaluation_sha256
    if reference is None and not own.is_dir():
        raise UserError(
            f"{opened.folder} holds no evaluation: its images travel apart",
            "give the evaluation folder of the student's reference with --reference",
        )
    if reference is None:
        return own, expected
    folder = evaluation.find(reference)
    same = (own / evaluation.MANIFEST).is_file() and evaluation.of_same_images(folder, own, expected)
    return folder, None if same else expected


def _evaluation(stack: ExitStack, opened: Bundle, reference: Path | None, images: Path | None) -> Evaluation:
    """The bundle's evaluation, its images made from the files in `images` for as long as the stack lives."""
    folder, expected = evaluation_of(opened, reference)
    if images is None:
        return evaluation.read(folder, expected)
    rebuilt = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vit-edge-"))) / "images.npy"
    evaluation.rebuild_images(folder, images, opened.manifest.preprocessing, rebuilt, expected)
    return evaluation.read(folder, expected, rebuilt)


def _check_fit(opened: Bundle, images: Evaluation) -> None:
    """The evaluation must be of the bundle's classes and image size."""
    manifest, size = opened.manifest, opened.manifest.preprocessing.image_size
    if images.manifest.classes != manifest.classes:
        raise UserError(
            f"the evaluation has other classes ({len(images.manifest.classes)}) than the bundle ({len(manifest.classes)})",
            "give the evaluation that was written for this student",
        )
    if images.images_NHWC.shape[1:3] != (size, size):
        height, width = images.images_NHWC.shape[1:3]
        raise UserError(
            f"the evaluation's images are {width}×{height}, the bundle takes {size}×{size}",
            "give the evaluation that was written for this student",
        )


def _parity(opened: Bundle, images: Evaluation, floats: Sequence[Opened]) -> tuple[Parity, dict[str, np.ndarray]]:
    """Every float artefact on the first images, which are a random sample; and their logits."""
    n = min(PARITY_IMAGES, len(images.labels_N))
    logits_NK = {one.name: _logits(one, opened, images, n) for one in floats}
    entries = [
        gate.float_parity(name, images.labels_N[:n], images.logits_NK[:n], found) for name, found in logits_NK.items()
    ]
    return Parity(floats=entries), logits_NK


def _with_int8(parity: Parity, floats_NK: Mapping[str, np.ndarray], int8_NK: np.ndarray) -> Parity:
    """Adds how int8 compares with the float artefact on this target."""
    if not floats_NK:
        return parity
    float_NK = next(iter(floats_NK.values()))
    same_NK = int8_NK[: len(float_NK)]
    noise_db = metrics.sqnr_db(float_NK, same_NK)
    return parity.model_copy(
        update={
            "int8_sqnr_db": noise_db if np.isfinite(noise_db) else None,
            "int8_agreement": metrics.agreement(metrics.answers(float_NK), metrics.answers(same_NK)),
        }
    )


def _logits(artefact: Opened, opened: Bundle, images: Evaluation, n: int) -> np.ndarray:
    """float32 logits (n, K) of the first n images."""
    feed = graph_input(opened)
    logits = []
    with progress(f"{artefact.name} on {opened.manifest.target.name}", n, unit="images") as advance:
        for start, stop in _pieces(n, opened.manifest.target.batch):
            logits.append(artefact.session.run(feed(images.images_NHWC[start:stop])))
            check_logits(logits[-1], (stop - start, len(opened.manifest.classes)), artefact.name)
            advance(stop - start)
    return np.concatenate(logits)


def _pieces(n: int, batch: int) -> Iterator[tuple[int, int]]:
    """Ranges of some dozens of images that are whole batches, but for the last."""
    step = batch * max(1, 64 // batch)
    return ((start, min(start + step, n)) for start in range(0, n, step))


def _reference_ms(images: Evaluation) -> metrics.Percentiles | None:
    found = images.manifest.reference.latency_ms
    if found is None:
        return None
    return metrics.Percentiles(p50=found["p50"], p90=found["p90"], p99=found["p99"], n=int(found["n"]))


def _integrity(opened: Bundle, images: Evaluation, runs_on: str) -> Check:
    signed = f", signed by the owner of {opened.signed_by}" if opened.signed_by else ""
    detail = (
        f"{len(opened.manifest.files)} files and {images.manifest.n} images as they were written{signed}; {runs_on}"
    )
    return Check(name="integrity", verdict="pass", detail=detail)


def _report(
    opened: Bundle, images: Evaluation, held: gate.HeldLimits, checks: list[Check], described: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> Report:  # fmt: skip
    verdict, blame = gate.overall(checks)
    return Report.model_validate(
        {
            "schema": "vit-edge/gate/1",
            "verdict": verdict,
            "blame": blame,
            "target": opened.manifest.target.name,
            "model": opened.manifest.model.name,
            "bundle_sha256": opened.digest,
            "checks": checks,
            "limits": held.listed(),
            **measured,
            "reference": {**images.manifest.reference.model_dump(), "data": images.manifest.data},
            "device": machine.machine(),
            "runtime": _runtime(described),
            "provenance": opened.manifest.provenance,
        }
    )


def _runtime(described: Mapping[str, Any]) -> dict[str, Any]:
    """What a session says of itself, as a report has it."""
    return {"name": described["runtime"], **{key: value for key, value in described.items() if key != "runtime"}}

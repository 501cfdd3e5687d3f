"""What int8 costs: ours against NNCF, ONNX Runtime's quantizers and plain PT2E, each gated in its own runtime.

    export PYTHONPATH=.                                                     # tests/planted.py spoils one of the models
    python benchmarks/int8_accuracy.py --out runs/benchmark-int8            # pip install nncf; for Lite0 see int8_subjects/
    python benchmarks/int8_accuracy.py --only ViT --methods vit-edge NNCF   # a part of it
    python benchmarks/int8_accuracy.py --cost                               # seconds and memory, ViT-Ti/16 at 224 px

The same float models, the same calibration images, the same images to judge on, all through `vit-edge gate`. Every
quantization is a process of its own, whose seconds and peak memory are told; a finished one is not made again.
N images.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from int8_subjects import models
from int8_subjects.methods import METHODS
from int8_subjects.models import Subject
from side_by_side.peers import quiet

from vit_edge import evaluation, metrics
from vit_edge.stages.gate import gate_bundle

OURS = "vit-edge"
SECONDS = 0.1  # of latency: nothing is told of it here


@dataclass(frozen=True)
class Result:
    """One method on one model in one runtime. drops are points; lower and upper: one-sided 95 % bounds."""

    method: str
    runtime: str
    top1: float
    drop: float
    lower: float
    upper: float
    agreement: float
    kl: float
    seconds: float
    cpu_seconds: float
    peak_mb: float
    answers_N: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-int8"))
    parser.add_argument("--runs", type=Path, help="run folders of the trained models; default: in --out")
    parser.add_argument("--only", nargs="*", default=[], help="models")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--cost", action="store_true", help="seconds and memory alone, on ViT-Ti/16 with random weights"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return quantize(Path(arguments.one[0]), arguments.one[1])
    if arguments.cost:
        return cost(models.untrained(arguments.out))
    results = {}
    for subject in models.prepared(arguments.out, arguments.only, arguments.runs or arguments.out / "runs"):
        results[subject.name] = [one for method in arguments.methods for one in judged(subject, method)]
        print("\n".join(table(subject, results[subject.name])), flush=True)
    print("\n".join(bars(results)))
    return None


def quantize(folder: Path, method: str) -> None:
    """In a process of its own: the bundles of one method, and what they cost to make."""
    out = _place(folder, method)
    out.mkdir(parents=True, exist_ok=True)
    started, imports_seconds = time.monotonic(), time.process_time()
    with quiet():
        METHODS[method](Subject(folder.name, folder, (folder / "tune.npz").exists()), out)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": used.ru_utime + used.ru_stime - imports_seconds,
        "peak_mb": used.ru_maxrss / 1024,
    }
    (out / "spent.json").write_text(json.dumps(spent))


def made(subject: Subject, method: str) -> dict[str, float]:
    """Seconds and peak memory of a quantization, which is run where it has not been."""
    told = _place(subject.folder, method) / "spent.json"
    if not told.exists():
        command = [sys.executable, __file__, "--one", str(subject.folder), method]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(told.read_text()))


def judged(subject: Subject, method: str) -> list[Result]:
    """The method's bundles through the gate."""
    try:
        spent = made(subject, method)
    except subprocess.CalledProcessError:
        print(f"{subject.name}: {method} failed", file=sys.stderr)
        return []
    found = []
    for bundle in sorted(_place(subject.folder, method).glob("*/bundle")):
        gated = gate_bundle(bundle, seconds=SECONDS)
        accuracy = gated.report.accuracy
        assert accuracy is not None
        assert accuracy.mean_kl is not None
        found.append(
            Result(
                method, bundle.parent.name, accuracy.target_top1, accuracy.drop_points, accuracy.drop_lower95_one_sided,
                accuracy.drop_upper95_one_sided, accuracy.agreement, accuracy.mean_kl, answers_N=gated.answers["int8"],
                **spent,
            )
        )  # fmt: skip
    return found


def table(subject: Subject, results: list[Result]) -> list[str]:
    reference = evaluation.read(subject.evaluation)
    n, top1 = len(reference.labels_N), reference.manifest.reference.top1
    said = f"float top-1 {top1:.2%} of {n} images" if subject.labelled else f"{n} images, judged by agreement alone"
    lines = [
        f"\n**{subject.name}**: {said}\n",
        "| method | runtime | top-1 | drop, points (95 %) | agreement | KL | seconds | peak MB |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for one in results:
        drop = f"{one.drop:.2f} ({one.lower:.2f} to {one.upper:.2f})"
        accuracy = f"{one.top1:.2%} | {drop}" if subject.labelled else "–  | –"
        lines.append(
            f"| {one.method} | {one.runtime} | {accuracy} | {one.agreement:.2%} | {one.kl:.3g} | {one.seconds:.0f} | {one.peak_mb:.0f} |"
        )
    if subject.labelled:
        lines += [_against_best(reference.labels_N, results)]
    return lines


def _against_best(labels_N: np.ndarray, results: list[Result]) -> str:
    """Our loss against the peer with the best top-1, paired on the same images."""
    peers = [one for one in results if one.method != OURS]
    if not peers:
        return ""
    best = max(peers, key=lambda one: one.top1)
    told = []
    for one in results:
        if one.method == OURS:
            drop = metrics.paired_drop(best.answers_N == labels_N, one.answers_N == labels_N)
            told.append(f"{one.runtime} {drop.points:+.2f} points (at most {drop.upper95:.2f})")
    return f"\nOurs less than the best peer ({best.method}): {', '.join(told)}."


def bars(results: dict[str, list[Result]]) -> list[str]:
    """KL over the models: geometric means, and how far each model's best peer is undercut or missed."""
    entries = {(one.method, one.runtime) for found in results.values() for one in found}
    lines = [
        f"\n| method | runtime | geometric mean of KL | KL, times the best peer's: {', '.join(results)} |",
        "| --- | --- | --: | --- |",
    ]
    for method, runtime in sorted(entries):
        kls = {
            name: one.kl
            for name, found in results.items()
            for one in found
            if (one.method, one.runtime) == (method, runtime)
        }
        if len(kls) < len(results):
            lines.append(f"| {method} | {runtime} | failed on a model | |")
            continue
        best = {name: min((one.kl for one in results[name] if one.method != OURS), default=np.nan) for name in kls}
        mean = float(np.exp(np.mean(np.log(list(kls.values())))))
        ratios = ", ".join(f"{kls[name] / best[name]:.2f}" for name in results)
        lines.append(f"| {method} | {runtime} | {mean:.3g} | {ratios} |")
    return lines


def cost(subject: Subject) -> None:
    """Ours and NNCF's, twice each in turn; the smaller counts. Calibration images and model as the bar says."""
    spent: dict[str, list[dict[str, float]]] = {}
    for _ in range(2):
        for method in (OURS, "NNCF", "NNCF, TRANSFORMER"):
            shutil.rmtree(_place(subject.folder, method), ignore_errors=True)
            spent.setdefault(method, []).append(made(subject, method))
    weights_mb = (subject.student / "model.safetensors").stat().st_size / 2**20
    print(
        f"\nfloat model {weights_mb:.1f} MB\n\n| method | seconds | of all cores | peak MB |\n| --- | --: | --: | --: |"
    )
    for method, found in spent.items():
        seconds, cpu_seconds, peak_mb = (
            min(one[key] for one in found) for key in ("seconds", "cpu_seconds", "peak_mb")
        )
        print(f"| {method} | {seconds:.1f} | {cpu_seconds:.1f} | {peak_mb:.0f} |")


def _place(folder: Path, method: str) -> Path:
    return folder / method.replace(" ", "-").replace(",", "").lower()


if __name__ == "__main__":
    main()

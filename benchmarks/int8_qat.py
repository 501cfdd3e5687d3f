"""What quantization-aware distillation leaves of the float students' accuracy, in ONNX Runtime and OpenVINO.

    python benchmarks/int8_qat.py --students runs/benchmark-distillation --teacher runs/TEACHER/teacher [--epochs 3]

Students: those that benchmarks/distillation.py confirms on fresh seeds, a ViT and a CNN, three seeds each, which learned
from 10,000 images of Fashion-MNIST. Each is quantized by the stage `int8` with --qat on the same images, and its int8
graph, lowered for each runtime, answers the 10,000 test images. The drop against the float student in PyTorch is paired
on them, and pooled over the seeds. What was finished in --out is not done again.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from distillation import FRESH_SEEDS

from vit_edge import evaluation, metrics
from vit_edge import recipe as recipes
from vit_edge.data import material
from vit_edge.export import onnx
from vit_edge.export.lower import lowered
from vit_edge.metrics import PairedDrop
from vit_edge.models.card import read_card
from vit_edge.quantization import ranges
from vit_edge.quantization.lessons import lessons
from vit_edge.recipe import Int8Config, Limits, QatConfig
from vit_edge.runtimes import registry
from vit_edge.stages import int8
from vit_edge.stages.search import Ground
from vit_edge.target import Target

STUDENTS = {"ViT": "vit-default-0.0015", "CNN": "cnn-default-0.01"}
"""Of what benchmarks/distillation.py calls its runs: student, loss, and the rate that it found best."""
RUNTIMES = ("onnxruntime", "openvino")
BATCH = 100
MARGIN_POINTS = 0.3
SEEDS = 3


@dataclass(frozen=True)
class Bench:
    students: Path
    teacher: Path
    out: Path
    epochs: int

    def quantized(self, run: str) -> Path:
        """The finished stage of a student's run, with quantization-aware training."""
        folder, student = self.out / run, self.students / run / "student"
        if (folder / "told.json").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        recipe = recipes.load(self.students / run / "recipe.yaml")
        images = material.load(recipe.data, read_card(student).preprocessing.image_size, None)
        config = Int8Config(qat=QatConfig(epochs=self.epochs), search=None)
        targets = [Target(name=name, runtime=name) for name in RUNTIMES]
        ground = Ground(lambda most: iter([images.tune(read_card(student).preprocessing)]), Limits(), targets)
        cache, key = (
            self.out / f"teacher-logits-{recipe.seed}",
            {"teacher": self.teacher.as_posix(), "seed": recipe.seed},
        )
        told = int8.run(
            folder,
            student=student,
            calibration_NHWC=images.calibration(read_card(student).preprocessing),
            config=config,
            ground=ground,
            lessons=lessons(recipe, images, student, self.teacher, "cpu", cache, key),
        )
        (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
        return folder

    def drops(self, run: str) -> dict[str, PairedDrop]:
        """By runtime, on the test images; says a student's row of the table."""
        folder = self.quantized(run)
        gate = evaluation.read(self.students / run / "reference" / "evaluation")
        float_N = metrics.answers(gate.logits_NK)
        found, cells = {}, []
        for name in RUNTIMES:
            int8_N = metrics.answers(answered(folder, name, gate.images_NHWC))
            found[name] = metrics.paired_drop(float_N == gate.labels_N, int8_N == gate.labels_N)
            cells.append(f"{metrics.top1(int8_N, gate.labels_N):.2%} | {found[name].points:+.2f}")
        told = json.loads((folder / "told.json").read_text(encoding="utf-8"))["qat"]
        tune = f"{told['before']['tune_top1']:.2%} → {told['tune_top1']:.2%}{'' if told['kept'] else ', not kept'}"
        print(f"| {run} | {metrics.top1(float_N, gate.labels_N):.2%} | {tune} | {' | '.join(cells)} |", flush=True)
        return found


def answered(folder: Path, name: str, images_NHWC: np.ndarray) -> np.ndarray:
    """Logits (N, K) of the stage's int8 graph in a runtime, with its default options."""
    target = Target(name="benchmark", runtime=name, batch=BATCH, threads=torch.get_num_threads())
    canonical = onnx.with_batch(onnx.load(folder / "int8.onnx"), BATCH)
    onnx.save(lowered(canonical, ranges.read(folder / "ranges.json"), name), folder / f"{name}.onnx")
    runtime = registry.load(name)
    with runtime.open(runtime.build(folder / f"{name}.onnx", target, folder / name), target) as session:
        return session.run(images_NHWC)


def pooled(drops: list[PairedDrop]) -> PairedDrop:
    """Of several students, each on its images."""
    return PairedDrop(*(sum(getattr(drop, field) for drop in drops) for field in ("n", "lost", "won")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", type=Path, default=Path("runs/benchmark-distillation"))
    parser.add_argument("--teacher", type=Path, default=Path("runs/benchmark-distillation/teacher/teacher"))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-int8-qat"))
    parser.add_argument("--epochs", type=int, default=QatConfig().epochs)
    parser.add_argument("--only", nargs="*", choices=list(STUDENTS), default=list(STUDENTS), help="students")
    options = parser.parse_args()
    bench = Bench(options.students, options.teacher, options.out, options.epochs)
    print(f"| student | float | tune split | {' | '.join(f'{name} | drop, points' for name in RUNTIMES)} |")
    print(f"| --- | --: | --: |{' --: | --: |' * len(RUNTIMES)}")
    found: dict[str, list[dict[str, PairedDrop]]] = {
        kind: [bench.drops(f"{STUDENTS[kind]}-{seed}") for seed in FRESH_SEEDS[:SEEDS]] for kind in options.only
    }
    found["all"] = [drops for kind in options.only for drops in found[kind]]
    print("\n| students, pooled | runtime | drop, points | 95 %, one-sided: at most | within 0.3 |")
    print("| --- | --- | --: | --: | --- |")
    for kind, drops in found.items():
        for name in RUNTIMES:
            drop = pooled([one[name] for one in drops])
            kept = "yes" if drop.upper95 <= MARGIN_POINTS else "no"
            print(f"| {kind} | {name} | {drop.points:+.2f} | {drop.upper95:+.2f} | {kept} |")


if __name__ == "__main__":
    main()

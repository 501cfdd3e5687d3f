"""Which distillation loss is worth it: plain training against each, for a ViT and a CNN student on Fashion-MNIST.

    python benchmarks/distillation.py --out runs/benchmark-distillation [--jobs 2]

The teacher is that of pipelines/fashion_mnist.yaml, trained on all 57,000 training images. The students see 10,000 of
them, with the same augmentation and the same number of epochs in every row. Plain training has the best of three rates
on the tune split, and each loss is given that rate. The loss is chosen on the tune split with seed 0; what was chosen
(the product's default) is then held against plain training on the 10,000 test images with five fresh seeds.

Every training is a run folder below --out, so an interrupted benchmark goes on where it was.
"""

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

from vit_edge import recipe as recipes
from vit_edge.pipeline import Pipeline
from vit_edge.recipe import Recipe
from vit_edge.settings import parse
from vit_edge.shipped import shipped

FASHION = shipped("pipelines")["fashion_mnist"]
TRAIN_IMAGES = 10_000
EPOCHS = {"ViT": 10, "CNN": 30}  # at 28 px the CNN's last map is a single place: it learns slowly
RATES = {"ViT": (5e-4, 1.5e-3, 4e-3), "CNN": (4e-3, 1e-2, 2.5e-2)}
FRESH_SEEDS = (301, 302, 303, 304, 305)  # of both students; written down before the first of them was trained
STUDENTS = {
    "ViT": {"name": "vit_ti16", "stem": [32, 64, 96], "patch_size": 1, "width": 96, "depth": 3, "heads": 3},
    "CNN": {"name": "mobilenetv3_small_050"},
}
DEFAULT = "default"
LOSSES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "KL, T = 1": {"labels": 0.1, "kl": 0.9, "dist": 0.0},
    "KL, T = 2": {"labels": 0.1, "kl": 0.9, "dist": 0.0, "temperature": 2.0},
    "KL, T = 4": {"labels": 0.1, "kl": 0.9, "dist": 0.0, "temperature": 4.0},
    "KL, T = 2, no labels": {"labels": 0.0, "kl": 1.0, "dist": 0.0, "temperature": 2.0},
    "standardised, T = 2": {"labels": 0.1, "kl": 0.0, "standardised": 0.9, "dist": 0.0, "temperature": 2.0},
    "DIST": {"labels": 1.0, "kl": 0.0, "dist": 2.0},
    "KL and DIST, T = 1": {"labels": 0.1, "kl": 1.0, "dist": 1.0},
    "KL and DIST, T = 1, no labels": {"labels": 0.0, "kl": 1.0, "dist": 1.0},
    "KL and DIST, T = 2": {"labels": 0.1, "kl": 0.9, "dist": 1.0, "temperature": 2.0},
    "hard answers": {"labels": 0.5, "kl": 0.0, "hard": 0.5, "dist": 0.0},
    "KL, T = 2, and features": {"labels": 0.1, "kl": 0.9, "features": 1.0, "dist": 0.0, "temperature": 2.0},
    "token, KL, T = 2": {"labels": 0.5, "kl": 0.5, "dist": 0.0, "temperature": 2.0},
    "token, hard answers": {"labels": 0.5, "kl": 0.0, "hard": 0.5, "dist": 0.0},
}


@dataclass(frozen=True)
class Run:
    """One training. loss: a name of LOSSES, or None for plain training."""

    student: str
    loss: str | None
    rate: float
    seed: int
    gated: bool = False

    @property
    def name(self) -> str:
        words = f"{self.student} {self.loss or 'plain'} {self.rate:g} {self.seed}"
        return "-".join(words.lower().replace(",", "").replace("=", "").split())

    def recipe(self, teacher: Path) -> Recipe:
        fashion = recipes.load(FASHION)
        model = dict(STUDENTS[self.student])
        if self.loss is not None and self.loss.startswith("token"):
            model["name"] = model["name"].replace("vit_", "deit_")
        values = {
            "name": self.name,
            "seed": self.seed,
            "data": fashion.data.model_dump() | {"train_images": TRAIN_IMAGES},
            "augment": fashion.augment.model_dump(),
            "teacher": None,
            "student": {
                "model": model,
                "training": {
                    "epochs": EPOCHS[self.student],
                    "learning_rate": self.rate,
                    "warmup_epochs": 0.5,
                    "precision": "f32",
                },
                "distillation": None,
            },
        }
        if self.loss is not None:
            weights = {"weights": str(teacher / "model.safetensors")}
            values["teacher"] = {"model": fashion.teacher.model.model_dump() | weights, "training": None}
            values["student"]["distillation"] = LOSSES[self.loss]
        return parse(Recipe, values, self.name)


def trained(run: Run, out: Path, teacher: Path) -> dict[str, float]:
    """Top-1 on the tune split, and on the gate's where the run is a confirmation."""
    pipeline = Pipeline(run.recipe(teacher), out / run.name, "cpu", teacher_cache=out / f"teacher-logits-{run.seed}")
    pipeline.run("reference" if run.gated else "student")
    found = {"tune": pipeline.metrics("student")["tune_top1"]}
    return found | ({"gate": pipeline.metrics("reference")["student"]["top1"]} if run.gated else {})


@dataclass(frozen=True)
class Bench:
    out: Path
    jobs: int
    teacher: Path

    def train_all(self, runs: list[Run]) -> list[dict[str, float]]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.jobs, context, initializer=_one_thread) as pool:
            return list(pool.map(trained, runs, [self.out] * len(runs), [self.teacher] * len(runs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-distillation"))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--teacher", type=Path, help="finished stage `teacher` of the recipe; default: trained here")
    parser.add_argument("--confirm-only", action="store_true", help="the default against plain, fresh seeds alone")
    arguments = parser.parse_args()
    if arguments.teacher is None:
        Pipeline(recipes.load(FASHION), arguments.out / "teacher", "cpu").run("teacher")
    bench = Bench(arguments.out, arguments.jobs, arguments.teacher or arguments.out / "teacher" / "teacher")
    teacher = json.loads((bench.teacher / "stage.json").read_text(encoding="utf-8"))["metrics"]
    print(f"teacher: {teacher['images']['train']} training images, top-1 {teacher['tune_top1']:.2%} on the tune split")
    plain = [Run(student, None, rate, 0) for student in STUDENTS for rate in RATES[student]]
    best: dict[str, tuple[float, float]] = {}
    for run, found in zip(plain, bench.train_all(plain), strict=True):
        print(f"{run.student}, plain, rate {run.rate:g}: {found['tune']:.2%}", flush=True)
        best[run.student] = max(best.get(run.student, (0.0, 0.0)), (found["tune"], run.rate))
    if not arguments.confirm_only:
        select(bench, best)
    confirm(bench, best)


def select(bench: Bench, best: dict[str, tuple[float, float]]) -> None:
    runs = [
        Run(student, loss, best[student][1], 0)
        for loss in LOSSES
        for student in STUDENTS
        if loss != DEFAULT and (student == "ViT" or not loss.startswith("token"))
    ]
    found = {(run.loss, run.student): result["tune"] for run, result in zip(runs, bench.train_all(runs), strict=True)}
    print(f"\n| loss (tune split, seed 0) | {' | '.join(f'{s}: top-1 | gain' for s in STUDENTS)} |")
    print(f"| --- |{' --: | --: |' * len(STUDENTS)}")
    print(f"| plain, best of three rates | {' | '.join(f'{best[s][0]:.2%} | ' for s in STUDENTS)} |")
    for loss in [name for name in LOSSES if name != DEFAULT]:
        cells = [
            f"{top1:.2%} | {100 * (top1 - best[student][0]):+.2f}"
            for student in STUDENTS
            if (top1 := found.get((loss, student))) is not None
        ]
        print(f"| {loss} | {' | '.join(cells)} |", flush=True)


def confirm(bench: Bench, best: dict[str, tuple[float, float]]) -> None:
    pairs = [(student, seed) for student in STUDENTS for seed in FRESH_SEEDS]
    runs = [Run(s, loss, best[s][1], seed, gated=True) for s, seed in pairs for loss in (None, DEFAULT)]
    top1 = [result["gate"] for result in bench.train_all(runs)]
    print("\n| student (test images, fresh seeds) | plain | distilled | gain, points | mean | at least (95 %) |")
    print("| --- | --: | --: | --: | --: | --: |")
    count = 2 * len(FRESH_SEEDS)
    for i, student in enumerate(STUDENTS):
        mine = top1[count * i : count * (i + 1)]
        plain, distilled = mine[::2], mine[1::2]
        gains = [100 * (d - p) for p, d in zip(plain, distilled, strict=True)]
        mean = statistics.mean(gains)
        bound = mean - student_t.ppf(0.95, len(gains) - 1) * statistics.stdev(gains) / len(gains) ** 0.5
        columns = [" ".join(f"{value:.2%}" for value in values) for values in (plain, distilled)]
        each = " ".join(f"{gain:+.2f}" for gain in gains)
        print(f"| {student} | {columns[0]} | {columns[1]} | {each} | {mean:.2f} | {bound:.2f} |")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()

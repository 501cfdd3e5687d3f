"""What a recipe works on: its images, their fingerprints, and the side in pixels at which each model sees them."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import Any

from vit_edge.data import datasets
from vit_edge.errors import UserError
from vit_edge.metrics import images_needed
from vit_edge.progress import say
from vit_edge.recipe import ModelConfig, Recipe, StudentConfig, TeacherConfig, reduction

TOKENS_PER_SIDE = 4
USUAL_DISCORDANCE = 0.01
"""Share of images that a good int8 model and its reference answer differently, one right and one wrong."""


@dataclass
class Inputs:
    """Of a recipe; data_dir: where named data sets are looked for first."""

    recipe: Recipe
    data_dir: Path | None

    @cached_property
    def source(self) -> datasets.Source:
        data = self.recipe.data
        return datasets.find(data.spec, self.data_dir, split_seed=data.split_seed, skip_bad_images=data.skip_bad_images)

    @cached_property
    def train_fingerprint(self) -> str:
        return self.source.train_fingerprint()

    @cached_property
    def student_fingerprint(self) -> str:
        unlabelled = self.recipe.data.unlabelled
        if unlabelled is None:
            return self.train_fingerprint
        return f"{self.train_fingerprint} {datasets.unlabelled_fingerprint(Path(unlabelled).expanduser())}"

    @cached_property
    def gate_fingerprint(self) -> str:
        return self.source.gate_fingerprint()

    @property
    def splits(self) -> dict[str, Any]:
        """The settings that decide the splits."""
        data = self.recipe.data
        shares = {"split_seed": data.split_seed, "tune_fraction": data.tune_fraction, "train_images": data.train_images}
        return shares | {"skip_bad_images": data.skip_bad_images}

    @property
    def _parts(self) -> dict[str, TeacherConfig | StudentConfig]:
        teacher = {} if self.recipe.teacher is None else {"teacher": self.recipe.teacher}
        return {**teacher, "student": self.recipe.student}

    def side(self, model: ModelConfig) -> int:
        """Of the input of a model of the recipe, in pixels."""
        return model.image_size or self.image_size

    @property
    def view_size(self) -> int:
        """Side of the view that teacher and student share: the larger of theirs."""
        return max(self.side(part.model) for part in self._parts.values())

    @cached_property
    def image_size(self) -> int:
        """Side of the input of the models that have none of their own: the recipe's, or the data set's own side,
        enlarged to what the patches divide and to 4×4 tokens at least."""
        if self.recipe.data.image_size is not None:
            return self.recipe.data.image_size
        step = lcm(*(reduction(part.model) for part in self._parts.values() if part.model.image_size is None))
        return step * max(TOKENS_PER_SIDE, -(-self.source.native_size // step))

    def read(self, *, trains: bool, quantizes: bool) -> Any:
        """The images and their splits. Raises UserError for what a later stage would refuse, before a training."""
        from vit_edge.data import material
        from vit_edge.stages import preflight

        found = material.load(self.recipe.data, self.image_size, self.data_dir)
        counts = ", ".join(f"{count} {name}" for name, count in found.summary().items())
        say(f"data: {self.recipe.data.spec}, {len(found.classes)} classes: {counts}")
        self._warn_of_margin(len(found.splits.gate))
        if len(found.splits.calibration) < self.recipe.int8.minimum_images:
            self._refuse_to_quantize(len(found.splits.calibration), quantizes)
        if trains:
            for role, part in self._parts.items():
                preflight.check(role, part, found.classes, self.side(part.model))
        return found

    def _refuse_to_quantize(self, calibration_images: int, quantizes: bool) -> None:
        """Where the run goes on to int8; else a warning: the images may yet be given."""
        problem = (
            f"{calibration_images} calibration images: quantizing needs {self.recipe.int8.minimum_images} at least"
        )
        fix = "give more training images, raise data.calibration_images, or lower int8.minimum_images"
        if quantizes:
            raise UserError(problem, fix)
        say(f"warning: {problem} and will be refused; {fix}")

    def _warn_of_margin(self, gate_images: int) -> None:
        """A margin that so many images cannot decide is better known before the training than after it."""
        margin_points = self.recipe.gate.max_drop_points
        if not margin_points:
            return
        needed = images_needed(USUAL_DISCORDANCE, margin_points)
        assert needed is not None
        if gate_images < needed:
            say(
                f"warning: {gate_images} gate images cannot decide a drop of {margin_points:g} points: about {needed} are "
                f"needed even if int8 and the reference differ on {USUAL_DISCORDANCE:.0%} of them; expect `undecided`"
            )

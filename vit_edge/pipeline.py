"""The stages in order: what each reads, what decides its result, and which of them have to run."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from vit_edge import evaluation, processes
from vit_edge import recipe as recipes
from vit_edge import target as targets
from vit_edge.errors import UserError, unknown
from vit_edge.inputs import Inputs
from vit_edge.models.card import read_card
from vit_edge.progress import say
from vit_edge.recipe import Recipe
from vit_edge.runtimes import registry
from vit_edge.store import RECIPE, Plan, RunFolder, digest_and_size, nvidia_driver, processor_name, verify, versions
from vit_edge.target import Roundings, Target

STAGES = ("teacher", "student", "reference", "int8", "export", "gate")
TRAINED = ("teacher", "student")
"""Stages that every process of a launch works on."""
STAGE_VERSIONS = {"teacher": 3, "student": 3, "reference": 2, "int8": 6, "export": 4, "gate": 3}
"""Raise a number when the stage's code changes what it writes: finished stages of the old kind are then redone."""

RUNTIME_PACKAGES = {
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "tensorrt-rtx-cu13-bindings"),
}


@dataclass(frozen=True)
class Step:
    """One stage of one run: its plan, and how to run it into a folder."""

    plan: Plan
    run: Callable[[Path], dict[str, Any]]


@dataclass
class Pipeline:
    """A recipe in a run folder.

    device: where torch computes, None: Accelerate's choice. only: names of the targets to export
    and gate, None: all of the recipe's. teacher_cache: where the teacher's logits are kept for this student and later
    ones, None: in the run folder. tensorboard: write the metrics of the trainings there too.
    until: the last stage of `run`.
    """

    recipe: Recipe
    folder: Path
    device: str | None = None
    data_dir: Path | None = None
    only: tuple[str, ...] | None = None
    tensorboard: bool = False
    teacher_cache: Path | None = None
    until: str = "gate"
    done: dict[str, Path] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def run(self, until: str = "gate", *, start: str | None = None) -> None:
        """Runs the stages up to `until` that are not finished yet; those from `start` on are redone in any case.

        Of several processes all train; the one that leads does the rest alone.
        """
        for name in (until, start or until):
            if name not in STAGES:
                raise unknown("stage", name, STAGES)
        self.until = until
        if self.recipe.int8.qat is not None and self.quantizes:
            processes.refuse_many("quantization-aware training", "use more with --until student, then go on in one")
        store = RunFolder(self.folder)
        if until in ("export", "gate"):
            self._leave_out_missing_runtimes()
        if processes.leads():
            store.claim(self.recipe.name)
        with store.locked() if processes.leads() else nullcontext():
            if processes.leads():
                self._write_recipe()
            for stage in STAGES[: STAGES.index(until) + 1]:
                if stage not in TRAINED and not processes.leads():
                    return
                redo = start is not None and STAGES.index(stage) >= STAGES.index(start)
                for step in self._steps(stage):
                    self._do(store, step, redo)

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs(self.recipe, self.data_dir)

    @cached_property
    def material(self) -> Any:
        """The images and their splits, read when the first stage needs them."""
        return self.inputs.read(trains="student" not in self.done, quantizes=self.quantizes)

    @property
    def quantizes(self) -> bool:
        """Whether the run goes on to int8."""
        return STAGES.index(self.until) >= STAGES.index("int8")

    @cached_property
    def _profiles(self) -> dict[str, tuple[Target, recipes.TargetRequest]]:
        """Each target's profile, from wherever the recipe says, with what the recipe asks of it; by the profile's name."""
        profiles: dict[str, tuple[Target, recipes.TargetRequest]] = {}
        for request in self.recipe.targets:
            target = targets.load(request.name)
            if request.dynamic_batch is not None:
                target = target.model_copy(update={"dynamic_batch": request.dynamic_batch})
            if target.name in profiles:
                also = profiles[target.name][1].name
                raise UserError(
                    f"two targets are called {target.name!r}: {also!r} and {request.name!r}",
                    "name each once, or give the profile of one another file name",
                )
            profiles[target.name] = target, request
        return profiles

    @property
    def target_names(self) -> list[str]:
        """Names of the profiles that are exported to and gated, in the recipe's order."""
        return [name for name in self._profiles if self.only is None or name in self.only]

    @property
    def required_names(self) -> list[str]:
        """Those whose verdicts count."""
        return [name for name in self.target_names if self._profiles[name][1].required]

    def metrics(self, stage: str) -> dict[str, Any]:
        """What a finished stage measured."""
        return RunFolder(self.folder).record(stage).get("metrics", {})

    def _leave_out_missing_runtimes(self) -> None:
        """A target without its runtime is left out, or refused where the recipe requires it: before any training."""
        usable = []
        for name in self.target_names:
            probe = registry.load(self._profiles[name][0].runtime).probe()
            if probe.version is not None:
                usable.append(name)
            elif name in self.required_names:
                raise UserError(f"the target {name!r} needs a runtime: {probe.problem}", probe.fix or "install it")
            else:
                say(f"{name}: left out, {probe.problem} ({probe.fix})")
        self.only = tuple(usable)

    def _do(self, store: RunFolder, step: Step, redo: bool) -> None:
        name = step.plan.stage
        found, partial = self._told(name, lambda: self._found_or_begun(store, step.plan, redo))
        if found is None:
            say(f"{name}: running")
            started = time.monotonic()
            metrics = step.run(partial)
            seconds = time.monotonic() - started
            found = self._told(name, lambda: store.finish(step.plan, metrics, seconds))
            self.ran.append(name)
            say(f"{name}: done in {seconds:.0f} s")
        self.done[name] = found
        self.plans[name] = step.plan

    def _found_or_begun(self, store: RunFolder, plan: Plan, redo: bool) -> tuple[Path | None, Path | None]:
        """The finished stage, or the folder to write it into."""
        found = None if redo else store.find(plan)
        if found is not None:
            return found, None
        for source in plan.inputs:
            verify(self.done[source])
        return None, store.begin(plan)

    def _told(self, stage: str, find: Callable[[], Any]) -> Any:
        """What the leading process finds, in every process that works on the stage."""
        value = find() if processes.leads() else None
        if processes.count() == 1 or stage not in TRAINED:
            return value
        from vit_edge.training.setup import told

        return told(value, self.device)

    def _steps(self, stage: str) -> list[Step]:
        if stage == "teacher":
            return [self._teacher()] if self.recipe.teacher is not None else []
        if stage in ("export", "gate"):
            make = self._export if stage == "export" else self._gate
            return [make(*self._profiles[name]) for name in self.target_names]
        return [{"student": self._student, "reference": self._reference, "int8": self._int8}[stage]()]

    def _teacher(self) -> Step:
        config = self.recipe.teacher
        assert config is not None

        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.stages import teacher

            return teacher.run(
                folder,
                recipe=self.recipe,
                material=self.material.seen_at(side),
                device=self.device,
                tensorboard=self.tensorboard,
            )

        side = self.inputs.side(config.model)
        settings = self._training_settings(config.model, side) | {"teacher": _plain(config)}
        return Step(self._plan("teacher", settings, data=self.inputs.train_fingerprint), run)

    def _student(self) -> Step:
        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.stages import student

            return student.run(
                folder,
                recipe=self.recipe,
                material=self.material.seen_at(self.inputs.view_size),
                teacher=self.done.get("teacher"),
                device=self.device,
                cache=self._teacher_cache,
                cache_key=self._teacher_cache_key(),
                tensorboard=self.tensorboard,
            )

        settings = self._training_settings(self.recipe.student.model, self.inputs.view_size) | {
            "student": _plain(self.recipe.student)
        }
        return Step(
            self._plan("student", settings, inputs=self._present("teacher"), data=self.inputs.student_fingerprint), run
        )

    def _reference(self) -> Step:
        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.stages import reference

            return reference.run(
                folder,
                student=self.done["student"],
                teacher=self.done.get("teacher"),
                material=self.material,
                device=self.device,
            )

        settings = {"split_seed": self.recipe.data.split_seed, "device": self.device}
        inputs = ("student", *self._present("teacher"))
        return Step(self._plan("reference", settings, inputs=inputs, data=self.inputs.gate_fingerprint), run)

    def _int8(self) -> Step:
        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.quantization import calibration
            from vit_edge.stages import int8

            student = self.done["student"]
            preprocessing = read_card(student).preprocessing
            calibration.check_labels(self.material.calibration_labels(), self.material.classes)
            images_NHWC = self.material.calibration(preprocessing)
            gate_NHWC = evaluation.read(self.done["reference"] / "evaluation").images_NHWC
            calibration.refuse_gate_images(images_NHWC, gate_NHWC)
            return int8.run(
                folder, student=student, calibration_NHWC=images_NHWC, config=config, ground=self._ground(preprocessing),
                lessons=None if config.qat is None else self._lessons(),
            )  # fmt: skip

        data, config = self.recipe.data, self.recipe.int8
        settings = {"int8": _plain(config), "images": data.calibration_images, "splits": self.inputs.splits}
        outputs, symmetric = Roundings.of(self._targets())
        settings["roundings"] = {"outputs": outputs if config.qat else outputs > 0, "symmetric": symmetric == 1}
        inputs: tuple[str, ...] = ("student",)
        fingerprint = self.inputs.train_fingerprint
        if config.qat is not None:
            settings |= self._training_settings(self.recipe.student.model, self.inputs.view_size)
            inputs, fingerprint = (*inputs, *self._present("teacher")), self.inputs.student_fingerprint
        if config.search is not None:
            limits = self.recipe.gate
            settings["limits"] = {"max_drop_points": limits.max_drop_points, "min_relative": limits.min_relative_top1}
        decisive = versions("torch", "torchao", "onnx", "onnxscript")
        return Step(self._plan("int8", settings, inputs=inputs, data=fingerprint, versions=decisive), run)

    def _lessons(self) -> Any:
        """What quantization-aware training learns from."""
        from vit_edge.quantization.lessons import lessons

        images, key = self.material.seen_at(self.inputs.view_size), self._teacher_cache_key()
        done = self.done["student"], self.done.get("teacher")
        return lessons(self.recipe, images, *done, self.device, self._teacher_cache, key)

    def _targets(self) -> list[Target]:
        return [target for target, _ in self._profiles.values()]

    def _ground(self, preprocessing: Any) -> Any:
        """What the int8 model is held against (stages/search.py); None where the tune split is empty."""
        from vit_edge.stages.search import Ground

        if not len(self.material.splits.tune):
            say("int8: data.tune_fraction leaves no images to hold it against: nothing is searched for")
            return None
        return Ground(partial(self.material.tune_pieces, preprocessing), self.recipe.gate, self._targets())

    def _export(self, target: Target, request: recipes.TargetRequest) -> Step:
        limits = self._limits(request)

        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.stages import export

            student = self.done["student"]
            return export.run(
                folder,
                student=student,
                int8=self.done["int8"],
                evaluation=self.done["reference"] / "evaluation",
                target=target,
                limits=limits,
                provenance=self._provenance(),
                tuning_NHWC=self.material.calibration(read_card(student).preprocessing) if request.tune else None,
            )

        settings = {"target": _plain(target), "limits": _plain(limits), "tune": request.tune}
        decisive = versions("torch", "onnx", *RUNTIME_PACKAGES[target.runtime])
        if request.tune:
            decisive |= {"device": processor_name()}
        inputs = ("student", "reference", "int8")
        return Step(self._plan(f"export/{target.name}", settings, inputs=inputs, versions=decisive), run)

    def _gate(self, target: Target, request: recipes.TargetRequest) -> Step:
        def run(folder: Path) -> dict[str, Any]:
            from vit_edge.stages import gate

            return gate.run(folder, bundle=self.done[f"export/{target.name}"] / "bundle", limits=self._limits(request))

        decisive = versions(*RUNTIME_PACKAGES[target.runtime]) | {
            "device": processor_name(),
            "driver": nvidia_driver(),
        }
        settings = {"limits": _plain(self._limits(request))}
        return Step(
            self._plan(f"gate/{target.name}", settings, inputs=(f"export/{target.name}",), versions=decisive), run
        )

    def _plan(
        self, stage: str, config: dict[str, Any], *, inputs: tuple[str, ...] = (), data: str | None = None,
        versions: dict[str, str] | None = None,
    ) -> Plan:  # fmt: skip
        version = STAGE_VERSIONS[stage.partition("/")[0]]
        fingerprints = {name: self.plans[name].fingerprint for name in inputs}
        return Plan(stage, version, config, fingerprints, data, versions or {})

    def _present(self, stage: str) -> tuple[str, ...]:
        return (stage,) if stage in self.plans else ()

    def _training_settings(self, model: recipes.ModelConfig, view_size: int) -> dict[str, Any]:
        common = {"seed": self.recipe.seed, "augment": _plain(self.recipe.augment), "splits": self.inputs.splits}
        sides = {"image_size": self.inputs.side(model), "view_size": view_size}
        return common | sides | {"weights": _weights_digest(Path(model.weights))}

    @property
    def _teacher_cache(self) -> Path:
        return self.teacher_cache or self.folder / "teacher_cache"

    def _teacher_cache_key(self) -> dict[str, Any]:
        """All that decides the student's training views and what the teacher says of them; batches only where they mix."""
        augment, training = self.recipe.augment, self.recipe.student.training
        key: dict[str, Any] = {
            "teacher": self.plans["teacher"].fingerprint if "teacher" in self.plans else None,
            "data set": self.inputs.student_fingerprint,
            "splits": self.inputs.splits,
            "view_size": self.inputs.view_size,
            "augmentation": _plain(augment),
            "seed": self.recipe.seed,
            "library": versions("numpy", "pillow", "timm", "torchvision"),
        }
        if training is not None and (augment.mixup or augment.cutmix):
            key["batch"] = [training.batch_size, training.accumulate, processes.count()]
        return key

    def _limits(self, request: recipes.TargetRequest) -> recipes.Limits:
        """The recipe's limits with the target's own latency limits laid over them."""
        return self.recipe.gate.model_copy(update=request.limits.model_dump(exclude_none=True))

    def _provenance(self) -> dict[str, Any]:
        plans = {name: plan.fingerprint for name, plan in self.plans.items() if "/" not in name}
        return {"recipe": self.recipe.model_dump(mode="json"), "data": self.recipe.data.spec, "stages": plans}

    def _write_recipe(self) -> None:
        text = yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        (self.folder / RECIPE).write_text(text, encoding="utf-8")


def _plain(settings: Any) -> dict[str, Any]:
    """For a plan: without what is not set, so that a new setting leaves finished stages as they are."""
    return settings.model_dump(mode="json", exclude_none=True)


def _weights_digest(weights: Path) -> Any:
    """Of a weight file, or of what a folder of weights holds."""
    if weights.is_dir():
        return {path.name: digest_and_size(path) for path in sorted(weights.iterdir()) if path.is_file()}
    return digest_and_size(weights) if weights.is_file() else None

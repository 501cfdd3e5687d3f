"""Where a student's loss gets the teacher's answers from: the teacher itself, or what it once said of the same views."""

from collections.abc import Callable
from functools import cached_property

import torch

from vit_edge.models.classifier import Classifier
from vit_edge.training.distillation import Answer
from vit_edge.training.features import last_features, places
from vit_edge.training.loop import Batch
from vit_edge.training.teacher_cache import TeacherCache

Teacher = Callable[[Batch], Answer]


class LiveTeacher:
    """Runs the teacher on the very pixels that the student sees; each normalises them its own way."""

    def __init__(self, classifier: Classifier, *, features: bool = False, grid: int | None = None):
        """features: whether the loss compares them, on grid × grid places; None: their mean."""
        self.classifier = classifier.eval().requires_grad_(False)
        self.features, self.grid = features, grid

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Answer:
        if not self.features:
            return Answer(self.classifier(batch.pixels_BCHW).float())
        logits_BK, map_BDhw = last_features(self.classifier, batch.pixels_BCHW)
        assert isinstance(logits_BK, torch.Tensor)
        return Answer(logits_BK.float(), places(map_BDhw, self.grid))


class CachedTeacher:
    """Answers from the cache; the teacher is loaded when the first view is asked for that the cache lacks.

    What it says then is kept first and taken from the cache like all the rest, so that the run that fills the cache and
    one that finds it filled end with the same weights.
    """

    def __init__(self, load: Callable[[], LiveTeacher], cache: TeacherCache):
        self.load, self.cache = load, cache

    @cached_property
    def live(self) -> LiveTeacher:
        return self.load()

    def __call__(self, batch: Batch) -> Answer:
        positions_B = batch.positions_B.cpu().numpy()
        logits_BK = self.cache.read(batch.epoch, positions_B)
        if logits_BK is None:
            said_BK = self.live(batch).logits_BK.cpu().numpy()
            logits_BK = said_BK if batch.trial else self.cache.keep(batch.epoch, positions_B, said_BK)
        return Answer(torch.from_numpy(logits_BK).to(batch.pixels_BCHW.device))

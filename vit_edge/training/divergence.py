"""When a training is to be stopped: its loss is no number, or has grown beyond what guessing costs."""

import math
from collections import deque
from typing import Any

from vit_edge.errors import UserError

WINDOW = 20
"""Steps that the mean is taken over."""
BEYOND = 2.0
"""Times the loss of the first steps, or of guessing among the classes where that is more."""


class Watch:
    """Sees the loss of every step. `state` goes into the checkpoint."""

    def __init__(self, classes: int, learning_rate: float):
        self.guessing, self.learning_rate = math.log(classes), learning_rate
        self.first: list[float] = []
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def see(self, loss: float, epoch: int) -> None:
        """Raises UserError when the loss is NaN or infinite, or its mean over WINDOW steps says that it diverges."""
        if not math.isfinite(loss):
            raise self._stop(f"the loss became {loss}", epoch)
        if len(self.first) < WINDOW:
            self.first.append(loss)
            return
        self.recent.append(loss)
        mean, usual = sum(self.recent) / WINDOW, max(sum(self.first) / WINDOW, self.guessing)
        if len(self.recent) == WINDOW and mean > BEYOND * usual:
            raise self._stop(f"the loss grew to {mean:.3g}, from {sum(self.first) / WINDOW:.3g} at the start", epoch)

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "recent": list(self.recent)}

    def load(self, state: dict[str, Any]) -> None:
        self.first, self.recent = list(state["first"]), deque(state["recent"], maxlen=WINDOW)

    def _stop(self, what: str, epoch: int) -> UserError:
        return UserError(
            f"{what} in epoch {epoch + 1}: the rate {self.learning_rate:g} is too high, or there is a bad input",
            "lower learning_rate or lengthen warmup_epochs; the last good checkpoint is kept",
        )

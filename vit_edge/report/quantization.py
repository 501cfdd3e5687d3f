"""What the int8 stage wrote of its work: layers.json, a row for every matrix product, and vit-edge/search/1, a row for
every model that was tried on the tune split.

Drops are percentage points, positive when int8 is worse; *_ms are of the middle query; KL divergences are nats.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vit_edge.report.schema import Part

LAYERS, SEARCH = "layers.json", "search.json"


class Layer(Part):
    """A matrix product: `reason` says why it is float, and is null when it is int8."""

    name: str
    kind: str
    reason: str | None
    weight_sqnr_db: float | None = Field(None, description="of the weight in int8, or what it would be; null: no loss")
    input_sqnr_db: float | None = Field(None, description="of its input in int8, or what it would be; null: no loss")
    range_method: str | None = None
    equalization: float | None = Field(None, description="α; null: none")
    compensated_rounding: bool = False
    bias_corrected: bool = False
    kl_alone: float | None = Field(None, description="with it alone in int8; null: nothing was searched for")


class Timed(Part):
    """A candidate on a target of this machine, in turn with the float artefact; float in the precision that is fastest."""

    target: str
    p50_ms: float
    float_p50_ms: float
    float_precision: str

    @property
    def speedup(self) -> float:
        return self.float_p50_ms / self.p50_ms


class Trial(Part):
    """An int8 model with the products `given_back` in float, against float on the tune split."""

    given_back: list[str]
    kl: float = Field(description="from float, on calibration images that nothing was fitted to")
    lost: int = Field(description="images that only float gets right")
    won: int = Field(description="images that only int8 gets right")
    drop_points: float
    drop_lower95_one_sided: float
    drop_upper95_one_sided: float
    holds: bool
    timed: list[Timed] = Field(description="empty where nothing was timed")
    seconds: float

    @property
    def time_ratio(self) -> float | None:
        """Geometric mean over the targets of int8's time as a share of float's."""
        if not self.timed:
            return None
        product = 1.0
        for one in self.timed:
            product *= 1 / one.speedup
        return float(product ** (1 / len(self.timed)))


class Cost(Part):
    name: str
    kl_alone: float
    multiply_adds: int


class Search(Part):
    """vit-edge/search/1. trials are in the order in which they were made, the plain int8 model first."""

    schema_name: Literal["vit-edge/search/1"] = Field("vit-edge/search/1", alias="schema")
    outcome: str = Field(description="how it ended, in words")
    n: int = Field(description="images of the tune split")
    float_top1: float
    margin_points: float
    held_by: Literal["upper95", "drop"] = Field(
        description="what must be within the margin; where so few images decide no bound, the drop itself, if it is no chance"
    )
    budget_seconds: float
    budget_trials: int
    seconds: float = Field(description="that the search took")
    costs: list[Cost] = Field(description="of every product; empty where nothing had to be given back")
    trials: list[Trial] = Field(min_length=1)
    chosen: int = Field(ge=0, description="index of the trial that was taken")
    device: dict[str, Any]


def layers(folder: Path) -> list[Layer]:
    """Of a finished int8 stage."""
    return [Layer.model_validate(row) for row in json.loads((folder / LAYERS).read_text(encoding="utf-8"))]


def search(folder: Path) -> Search | None:
    """Of a finished int8 stage; None where nothing was held against the tune split."""
    path = folder / SEARCH
    return Search.model_validate_json(path.read_bytes()) if path.exists() else None

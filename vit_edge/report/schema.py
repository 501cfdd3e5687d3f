"""vit-edge/gate/1: what a gate found, as pydantic models whose JSON is the report that others rely on.

top1 is a fraction; drops and margins are percentage points, positive when the target is worse; *_ms are percentiles.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from vit_edge.metrics import Percentiles

Verdict = Literal["pass", "fail", "undecided", "unmeasured"]
CheckVerdict = Literal["pass", "fail", "undecided", "unmeasured", "skipped"]
EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "undecided": 3, "unmeasured": 3}


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Check(Part):
    name: Literal["integrity", "parity", "coverage", "accuracy", "latency", "regression"]
    verdict: CheckVerdict
    detail: str


class Limit(Part):
    """A limit that was held against the measurements, and who set it."""

    name: str
    value: float | str | None
    origin: str = Field(description="default, bundle, recipe, preset NAME or command line")


class FloatParity(Part):
    """A float artefact against the reference's logits."""

    precision: str
    n: int
    logit_error: float | None = Field(
        description="largest difference in standard deviations of the reference's logits; null when not finite"
    )
    agreement: float
    top1: float = Field(description="on the same n images")
    holds: bool


class Parity(Part):
    floats: list[FloatParity]
    int8_sqnr_db: float | None = Field(None, description="int8 against float on this target; for information")
    int8_agreement: float | None = None


class ClassDrop(Part):
    """A class whose top-1 fell."""

    name: str
    n: int
    reference_top1: float
    target_top1: float
    lost: int = Field(description="its images that only the reference gets right")
    won: int = Field(description="its images that only the target gets right")
    p_holm: float = Field(description="exact one-sided McNemar test, corrected for the number of classes (Holm)")
    significant: bool = Field(description="p_holm is at most 0.05")


class Flip(Part):
    """An image that the target answers otherwise than the reference; an answer is null where a logit is not finite."""

    name: str
    label: str
    reference: str | None
    target: str | None
    effect: Literal["lost", "won", "wrong"]


class Accuracy(Part):
    n: int
    reference_top1: float
    target_top1: float
    drop_points: float
    drop_lower95_one_sided: float
    drop_upper95_one_sided: float
    agreement: float
    images_needed: int | None = Field(description="what would decide an undecided accuracy; null: nothing, or decided")
    mean_kl: float | None = Field(description="nats; null when the target's logits are not finite")
    lost: int = Field(description="images that only the reference gets right")
    won: int = Field(description="images that only the target gets right")
    margin_points: float | None = Field(description="the drop that the limits allow, the tighter of the two")
    worst_classes: list[ClassDrop] = Field(description="the five that fell most, and all that fell significantly")
    flipped: int = Field(description="images that the target answers otherwise than the reference")
    flips: list[Flip] = Field(description="up to 100 of them, those that were right first")


class Throughput(Part):
    """What one way to run many images gives."""

    images_per_second: float
    noise: float = Field(description="half the width of its 95 % interval, as a share of it")
    batch: int = Field(description="images of one query")
    streams: int = Field(description="sessions side by side, which share the target's threads")


class Offline(Throughput):
    """Throughput with as many images at hand as it takes: the best of a few ways to run them."""

    open_batch: bool = Field(False, description="whether the file takes other batches, so that larger ones were tried")
    tried: list[Throughput] = Field([], description="every way that was tried, the best among them")


class Artefact(Part):
    """One of the target's files, timed. A noise is half the width of a 95 % interval, as a share of the value."""

    name: str
    precision: str
    ms: Percentiles = Field(description="single stream: one query after the other")
    noise: float = Field(description="of p50")
    p90_noise: float
    drift: float = Field(description="p50 of the last quarter of the queries over that of the first, minus 1")
    histogram: list[int] = Field(
        min_length=1, description="of the latencies, from Latency.low_ms to high_ms in equal steps"
    )
    offline: Offline
    load_ms: float
    first_ms: float = Field(description="the first query, which may still prepare something")
    warmup: int = Field(description="queries before the timed ones")
    steady: bool = Field(description="whether the latency had settled by then")
    memory_bytes: int | None = Field(
        description="the most that opening and the first query took, the runtime's own start included for int8, which is "
        "opened first; null: not told here"
    )
    size_bytes: int


class Latency(Part):
    target_ms: Percentiles | None
    float_ms: Percentiles | None
    float_precision: str | None
    reference_ms: Percentiles | None
    speedup_vs_float: float | None = Field(description="p50 of the best float precision over p50 of int8")
    speedup_noise: float | None = Field(description="half the width of its 95 % interval, as a share of it")
    speedup_vs_f32: float | None
    ratio_vs_reference: float | None = Field(description="p50 of int8 over the reference's")
    recommended: Literal["int8", "float"] | None
    batch: int
    low_ms: float = Field(description="where the histograms begin")
    high_ms: float = Field(description="where they end; what is above is in no bin")
    disturbed: float = Field(description="share of the rounds in which every artefact was slower than it is")
    elsewhere: float = Field(description="share of all processors' time that other programs took meanwhile")
    peak_memory_bytes: int | None = Field(description="of the whole gate, its images included")
    artefacts: list[Artefact]


class Answers(Part):
    """int8's answers, for a later gate to be compared with: base64 of zlib-compressed bytes."""

    classes: list[str]
    names: str = Field(description="of the images, UTF-8, one a line")
    int8: str = Field(description="class indices, little-endian int32, -1 for none; in the names' order")


class Regression(Part):
    """Against the gate whose report was given as baseline, on the n images that both have."""

    bundle_sha256: str
    n: int
    baseline_top1: float
    top1: float
    drop_points: float
    drop_lower95_one_sided: float
    drop_upper95_one_sided: float
    lost: int
    won: int
    margin_points: float | None
    other_device: str | None = Field(description="why the latencies cannot be compared")
    p50_ratio: float | None = Field(description="int8's p50 over what it was")
    p50_noise: float | None = Field(description="half the width of the ratio's 95 % interval, as a share of it")
    float_p50_ratio: float | None = Field(description="the same of the f32 artefact: has the machine changed?")
    runtime_was: str


class CoverageReport(Part):
    int8: int
    floats: int = Field(alias="float")
    float_nodes: list[str] = Field(description="products that run in float, by the names that the runtime keeps")
    missing: list[str] = Field(description="nodes that must run in int8 and do not")
    unknown: int = Field(description="products whose precision the runtime does not tell")
    int8_share: float | None = Field(description="share of multiply-adds in int8; null when not every shape is known")


class LowPrecisionReport(TypedDict):
    """The student in PyTorch in a lower precision than the reference's, on its first n images."""

    n: int
    top1: float
    agreement: float
    latency_ms: Percentiles


class ReferenceReport(TypedDict):
    """The float student in PyTorch, what the target is held against; and all else that its evaluation says of it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    device: str
    kind: str
    precision: str
    data: str
    beside: NotRequired[dict[str, LowPrecisionReport]]


class DeviceReport(TypedDict):
    """The machine; and all else that it says of itself."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    processor: str
    instruction_sets: list[str]


class RuntimeReport(TypedDict):
    """The runtime; and all that its session says of itself."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    name: str
    version: str | None
    threads: NotRequired[int | None]
    batch: NotRequired[int]
    precision: NotRequired[str]


class Report(Part):
    """vit-edge/gate/1: all that a gate found."""

    schema_name: Literal["vit-edge/gate/1"] = Field("vit-edge/gate/1", alias="schema")
    verdict: Verdict
    blame: str | None = Field(description="the first part that failed")
    target: str
    model: str
    bundle_sha256: str
    checks: list[Check]
    limits: list[Limit]
    parity: Parity | None
    coverage: CoverageReport | None
    accuracy: Accuracy | None
    latency: Latency | None
    regression: Regression | None = None
    answers: Answers | None = None
    reference: ReferenceReport | None
    device: DeviceReport
    runtime: RuntimeReport
    provenance: dict[str, Any] = {}

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


class BenchRow(Part):
    """One artefact of one bundle in `vit-edge bench`."""

    bundle: str
    target: str
    artefact: str
    batch: int
    ms: Percentiles
    load_ms: float
    size_bytes: int

"""What is compared in which table, the bars that this project sets itself, and both in Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from side_by_side import makers
from side_by_side.images import as_planes
from side_by_side.makers import Maker
from side_by_side.models import VITS

OURS, TUNED = "vit-edge int8", "vit-edge int8, --tune"
INT8_ATTENTION = "vit-edge int8, attention too"
BEST_FLOAT, F32 = "vit-edge float, best hint", "vit-edge float, f32"
NNCF, NNCF_OF_OURS = "NNCF int8", "NNCF int8 of our float graph"
CNNS = ("mobilenetv3_large", "efficientnet_lite0")


@dataclass(frozen=True)
class Peer:
    """make: its file; needs: the library without which it is left out; planes: it takes float planes, not pixels."""

    make: Maker
    file: str
    precision: str = "default"
    engine: str | None = None
    planes: bool = True
    needs: str | None = None


@dataclass(frozen=True)
class Table:
    engine: str
    peers: Mapping[str, Peer]
    isa: str | None = None
    precision: str = "default"
    """Of every peer that names none."""


_STATIC, _DYNAMIC = "quantize_static", "quantize_dynamic"
OPENVINO = {
    OURS: Peer(makers.ours("openvino", "int8"), "ours_int8.xml", planes=False),
    TUNED: Peer(makers.ours("openvino", "int8", tune=True), "ours_tuned.xml", planes=False),
    INT8_ATTENTION: Peer(makers.ours_lowered("openvino", "int8 attention"), "ours_int8_attention.xml", planes=False),
    BEST_FLOAT: Peer(makers.ours("openvino", "float"), "ours_float.xml", planes=False),
    F32: Peer(makers.ours("openvino", "float"), "ours_float.xml", "f32", planes=False),
    NNCF: Peer(makers.nncf_of_timm, "nncf.xml", needs="nncf"),
    NNCF_OF_OURS: Peer(makers.nncf_of_ours, "nncf_of_ours.xml", planes=False, needs="nncf"),
    "torchao PT2E": Peer(makers.torchao_onnx, "torchao.onnx"),
    "timm's ONNX, float": Peer(makers.timm_onnx, "timm.onnx"),
}
TABLES = {
    "openvino": Table("openvino", OPENVINO),
    # What --tune took was measured without this limit.
    "openvino-avx2": Table(
        "openvino",
        {name: peer for name, peer in OPENVINO.items() if name not in (TUNED, BEST_FLOAT)},
        "AVX2_VNNI",
        "f32",
    ),
    "onnxruntime": Table(
        "onnxruntime",
        {
            OURS: Peer(makers.ours("onnxruntime", "int8"), "ours_int8.onnx", planes=False),
            TUNED: Peer(makers.ours("onnxruntime", "int8", tune=True), "ours_tuned.onnx", planes=False),
            F32: Peer(makers.ours("onnxruntime", "float"), "ours_float.onnx", planes=False),
            _STATIC: Peer(makers.static_of(makers.timm_onnx, as_planes), "static.onnx"),
            _DYNAMIC: Peer(makers.dynamic_of(makers.timm_onnx), "dynamic.onnx"),
            f"{_STATIC} of our float graph": Peer(
                makers.static_of(makers.our_float_onnx, lambda images: images), "static_of_ours.onnx", planes=False
            ),
            f"{_DYNAMIC} of our float graph": Peer(
                makers.dynamic_of(makers.our_float_onnx), "dynamic_of_ours.onnx", planes=False
            ),
            "torchao PT2E": Peer(makers.torchao_onnx, "torchao.onnx"),
            "timm's ONNX, float": Peer(makers.timm_onnx, "timm.onnx"),
        },
    ),
    "torch": Table(
        "torch",
        {
            OURS: Peer(makers.ours("openvino", "int8"), "ours_int8.xml", engine="openvino", planes=False),
            "PyTorch eager, f32": Peer(makers.nothing, "torch", "f32"),
            "PyTorch eager, bf16": Peer(makers.nothing, "torch", "bf16"),
            "torch.compile, f32": Peer(makers.nothing, "torch", "f32", "torch.compile"),
            "torch.compile, bf16": Peer(makers.nothing, "torch", "bf16", "torch.compile"),
        },
    ),
}


@dataclass(frozen=True)
class Bar:
    """The best of our int8s' p50s at batch 1 and 2 threads is at most so many times that of the best of `than`."""

    table: str
    models: tuple[str, ...]
    than: tuple[str, ...]
    most: float


BARS = (
    Bar("openvino", ("vit_ti16",), (NNCF,), 0.75),
    Bar("openvino", ("vit_s16", "swin_t"), (NNCF,), 0.85),
    Bar("openvino", CNNS, (NNCF,), 1.0),
    Bar("openvino", ("vit_s16",), (BEST_FLOAT,), 1 / 1.25),
    Bar("openvino-avx2", ("vit_ti16", "vit_s16"), (NNCF,), 0.92),
    Bar("openvino-avx2", ("deit_s16", "swin_t", *CNNS), (NNCF,), 1.0),
    Bar("openvino-avx2", ("vit_s16",), (F32,), 1 / 1.6),
    Bar("onnxruntime", VITS, (_STATIC, _DYNAMIC), 0.85),
    Bar("onnxruntime", CNNS, (_STATIC, _DYNAMIC), 1.0),
)
BAR_SETTING = (1, 2)


def markdown(measured: Mapping[str, Any]) -> str:
    """measured: table → model → "batch/threads" → artefact → {p50, p90, n} or {reason}."""
    parts = [
        "\n".join(_table(name, model, settings))
        for name, models in measured.items()
        for model, settings in models.items()
    ]
    return "\n\n".join([*parts, "\n".join(_bars(measured))]) + "\n"


def _table(name: str, model: str, settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}: {model}"
    yield ""
    heads = [setting.split("/") for setting in settings]
    yield (
        "| p50 / p90 ms (ours ÷ it) | "
        + " | ".join(f"batch {batch}, {threads} threads" for batch, threads in heads)
        + " |"
    )
    yield "| --- |" + " --: |" * len(heads)
    for artefact in TABLES[name].peers:
        cells = [_cell(found.get(artefact), found.get(OURS)) for found in settings.values()]
        if any(cells):
            yield f"| {artefact} | " + " | ".join(cells) + " |"


def _cell(found: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    if "reason" in found:
        return str(found["reason"]).replace("|", "/")[:80]
    ratio = f" ({ours['p50'] / found['p50']:.2f})" if ours and "p50" in ours else ""
    return f"{found['p50']:.2f} / {found['p90']:.2f}{ratio}"


def _bars(measured: Mapping[str, Any]) -> Iterator[str]:
    yield "### Bars (p50, batch {}, {} threads)".format(*BAR_SETTING)
    yield ""
    yield "| table | model | | found | at most | |"
    yield "| --- | --- | --- | --: | --: | --- |"
    for bar in BARS:
        for model in bar.models:
            setting = measured.get(bar.table, {}).get(model, {}).get("{}/{}".format(*BAR_SETTING), {})
            p50s = {name: found["p50"] for name, found in setting.items() if "p50" in found}
            ours, others = [n for n in (OURS, TUNED, INT8_ATTENTION) if n in p50s], [n for n in bar.than if n in p50s]
            if ours and others:
                mine, best = (min(names, key=p50s.__getitem__) for names in (ours, others))
                ratio = p50s[mine] / p50s[best]
                kept = "kept" if ratio <= bar.most else "missed"
                yield f"| {bar.table} | {model} | {mine} ÷ {best} | {ratio:.2f} | {bar.most:.2f} | {kept} |"

"""The peers' quantizers, each the way its own documentation says: from a float model's file to an int8 one's."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np


def nncf(model: object, feeds: Sequence[np.ndarray], path: Path, *, transformer: bool) -> None:
    """NNCF's post-training quantization of an OpenVINO model, as OpenVINO's files; feeds: inputs of the model."""
    import nncf
    import openvino

    kind = nncf.ModelType.TRANSFORMER if transformer else None
    with quiet():
        quantized = nncf.quantize(model, nncf.Dataset(feeds), subset_size=len(feeds), model_type=kind)
    openvino.save_model(quantized, str(path), compress_to_fp16=False)


def prepared(plain: Path, ready: Path) -> Path:
    """A float graph after ONNX Runtime's own preparation for quantizing."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with quiet():
        quant_pre_process(str(plain), str(ready))
    return ready


def static(ready: Path, feeds: Sequence[np.ndarray], path: Path) -> None:
    """ONNX Runtime's quantize_static of a prepared graph: Q/DQ, one scale for each channel of a weight."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    name = str(onnx.load(ready).graph.input[0].name)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter([{name: feed} for feed in feeds])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    with quiet():
        quantize_static(str(ready), str(path), Reader(), per_channel=True)


def dynamic(ready: Path, path: Path, operators: Sequence[str] | None = None) -> None:
    """ONNX Runtime's quantize_dynamic of a prepared graph; ranges are taken anew from each input.

    operators: those that become int8; None: all that it knows, convolutions among them.
    """
    from onnxruntime.quantization import quantize_dynamic

    with quiet():
        quantize_dynamic(str(ready), str(path), per_channel=True, op_types_to_quantize=operators)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Peers warn of much that is of no concern here."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), Path(os.devnull).open("w") as sink, contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)

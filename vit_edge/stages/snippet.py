"""A program of a few lines that runs a bundle's int8 model without vit-edge, to start an application from."""

import inspect
from pathlib import Path
from string import Template

from vit_edge import bundle
from vit_edge.bundle import Manifest, Trust
from vit_edge.errors import UserError

PROGRAM = Template("""\
# $model in int8 for $runtime. Needs: pip install $runtime numpy pillow
import sys

import numpy as np
import $runtime
from PIL import Image, ImageOps

CLASSES = $classes


$functions
$opening
with Image.open(sys.argv[1]) as image:
    image = resize_and_cut(to_rgb(image), $shorter, $size, Image.Resampling.$resampling)
images = np.asarray(image)[None]
${normalise}logits = $running
print(CLASSES[int(logits[0].argmax())])
""")

NORMALISE = """\
images = (images.astype(np.float32) / 255 - np.float32({mean})) / np.float32({std})
images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
"""


def preparing() -> str:
    """The functions that make the model's input of an image file: those of vit_edge/pixels.py, to the letter."""
    from vit_edge.pixels import resize_and_cut, to_rgb

    return "\n\n".join(inspect.getsource(function) for function in (to_rgb, resize_and_cut))


def program(bundle_path: Path, trust: Trust = Trust()) -> str:
    """The program's text; it takes one image file as its argument. Run it where the bundle's files are."""
    with bundle.opened(bundle_path, trust) as opened:
        manifest = opened.manifest
    if manifest.target.batch != 1:
        raise UserError(
            f"the bundle takes {manifest.target.batch} images at once, the program is for one",
            "export for a target with batch: 1",
        )
    opening, running = _session(manifest)
    preprocessing = manifest.preprocessing
    return PROGRAM.substitute(
        model=manifest.model.name,
        runtime=manifest.target.runtime,
        classes=manifest.classes,
        functions=preparing(),
        size=preprocessing.image_size,
        shorter=round(preprocessing.image_size / preprocessing.crop),
        resampling=preprocessing.interpolation.upper(),
        opening=opening,
        running=running,
        normalise=""
        if manifest.input_layout == "uint8-nhwc"
        else NORMALISE.format(mean=list(preprocessing.mean), std=list(preprocessing.std)),
    )


def _session(manifest: Manifest) -> tuple[str, str]:
    """The lines that open the model, and the expression that runs it."""
    model, threads = manifest.int8_files[0], manifest.target.threads
    if manifest.target.runtime == "onnxruntime":
        lines = ["options = onnxruntime.SessionOptions()"]
        lines += [f"options.intra_op_num_threads = {threads}"] if threads else []
        lines += [f"options.add_session_config_entry({k!r}, {v!r})" for k, v in manifest.session_options.items()]
        lines += [f'session = onnxruntime.InferenceSession({model!r}, options, providers=["CPUExecutionProvider"])']
        return "\n".join(lines), "session.run(None, {session.get_inputs()[0].name: images})[0]"
    if manifest.target.runtime == "openvino":
        settings = {"PERFORMANCE_HINT": "LATENCY", **manifest.session_options}
        settings |= {"INFERENCE_NUM_THREADS": str(threads)} if threads else {}
        line = f"model = openvino.Core().compile_model({model!r}, {manifest.target.device!r}, {settings})"
        return line, "model(images)[0]"
    raise UserError(
        f"there is no short program for {manifest.target.runtime}: its engine is built on the device",
        f"build the engine from {model} there, for example with trtexec --onnx={model}",
    )

"""A program of a few lines that runs a bundle's int8 model without vit-edge, to start an application from."""

from pathlib import Path
from string import Template

from vit_edge import bundle
from vit_edge.bundle import Manifest
from vit_edge.errors import UserError

PROGRAM = Template('''\
# $model in int8 for $runtime. Needs: pip install $runtime numpy pillow
import sys

import numpy as np
import $runtime
from PIL import Image, ImageOps

CLASSES = $classes


def prepare(path):
    """An image file as uint8 (1, $size, $size, 3), as the model was trained and gated on."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    if image.size != ($size, $size) or $crop != 1:
        scale = $shorter / min(image.size)
        image = image.resize([max($shorter, round(side * scale)) for side in image.size], Image.Resampling.$resampling)
    left, top = (image.width - $size) // 2, (image.height - $size) // 2
    return np.asarray(image.crop((left, top, left + $size, top + $size)))[None]


$opening
images = prepare(sys.argv[1])
${normalise}logits = $running
print(CLASSES[int(logits[0].argmax())])
''')

NORMALISE = """\
images = (images.astype(np.float32) / 255 - np.float32({mean})) / np.float32({std})
images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
"""


def program(bundle_path: Path) -> str:
    """The program's text; it takes one image file as its argument. Run it where the bundle's files are."""
    with bundle.opened(bundle_path) as opened:
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
        size=preprocessing.image_size,
        crop=preprocessing.crop,
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

"""C++ programs of a few lines that run a bundle's int8 model with the runtime alone.

They take the prepared image as a file of raw bytes, H·W·3: reading image files is the application's own matter.
"""

import json
from collections.abc import Mapping
from string import Template

from vit_edge.bundle import Manifest
from vit_edge.errors import UserError

PROGRAM = Template("""\
// $model in int8 for $runtime, C++17. $build
// Run where the bundle's files are, on an image of $size×$size pixels, resized and cut as in training: $size·$size·3 bytes, RGB.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>
$includes
const std::vector<std::string> CLASSES = {$classes};

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  std::vector<uint8_t> image{std::istreambuf_iterator<char>(file), {}};
  if (image.size() != $bytes) return std::cerr << "expected $bytes bytes\\n", 1;
$lines
  std::cout << CLASSES[std::max_element(logits, logits + CLASSES.size()) - logits] << "\\n";
}
""")

ONNXRUNTIME = Template("""\
  Ort::Env environment;
  Ort::SessionOptions options;
$options  Ort::Session session(environment, $file, options);
  const int64_t shape[] = {1, $size, $size, 3};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  auto input = Ort::Value::CreateTensor<uint8_t>(memory, image.data(), image.size(), shape, 4);
  Ort::AllocatorWithDefaultOptions allocator;
  auto given = session.GetInputNameAllocated(0, allocator), result = session.GetOutputNameAllocated(0, allocator);
  const char *inputs[] = {given.get()}, *outputs[] = {result.get()};
  auto results = session.Run(Ort::RunOptions{}, inputs, &input, 1, outputs, 1);
  const float* logits = results[0].GetTensorData<float>();""")

OPENVINO = Template("""\
  ov::Core core;
  auto model = core.read_model($file);
$reshape  auto request = core.compile_model(model, $device, {$options}).create_infer_request();
  request.set_input_tensor(ov::Tensor(ov::element::u8, {1, $size, $size, 3}, image.data()));
  request.infer();
  const auto result = request.get_output_tensor();
  const float* logits = result.data<const float>();""")

TENSORRT = Template("""\
  Log log;
  std::ifstream built("model.plan", std::ios::binary);
  std::vector<char> plan{std::istreambuf_iterator<char>(built), {}};
  std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(log));
  std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime->deserializeCudaEngine(plan.data(), plan.size()));
  std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());
  const char *given = engine->getIOTensorName(0), *result = engine->getIOTensorName(1);
  void *input, *output;
  std::vector<float> values(CLASSES.size());
  cudaMalloc(&input, image.size()), cudaMalloc(&output, values.size() * sizeof(float));
  cudaMemcpy(input, image.data(), image.size(), cudaMemcpyHostToDevice);
$reshape  context->setTensorAddress(given, input), context->setTensorAddress(result, output);
  context->enqueueV3(nullptr);
  cudaMemcpy(values.data(), output, values.size() * sizeof(float), cudaMemcpyDeviceToHost);
  const float* logits = values.data();""")

TENSORRT_LOG = """\
#include <memory>

#include <NvInfer.h>
#include <cuda_runtime_api.h>

struct Log : nvinfer1::ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kWARNING) std::cerr << text << "\\n";
  }
};
"""
INCLUDES = {
    "onnxruntime": "\n#include <onnxruntime_cxx_api.h>\n",
    "openvino": "\n#include <openvino/openvino.hpp>\n",
    "tensorrt": TENSORRT_LOG,
}
BUILD = {
    "onnxruntime": "g++ -std=c++17 main.cpp -lonnxruntime",
    "openvino": "g++ -std=c++17 main.cpp -lopenvino",
    "tensorrt": "g++ -std=c++17 main.cpp -lnvinfer -lcudart",
}


def program(manifest: Manifest) -> str:
    """The program's text. Raises UserError for a graph that does not take the pixels as they are."""
    if manifest.input_layout != "uint8-nhwc":
        raise UserError(
            f"the bundle's graph takes {manifest.input_layout}: there is no short C++ program for it",
            "give --language python, or export with uint8-nhwc",
        )
    size, runtime = manifest.preprocessing.image_size, manifest.target.runtime
    fields = {"size": size, "file": _text(manifest.int8_files[0])}
    make = {"onnxruntime": _onnxruntime, "openvino": _openvino, "tensorrt": _tensorrt}[runtime]
    return PROGRAM.substitute(
        fields, model=manifest.model.name, runtime=runtime, bytes=size * size * 3, includes=INCLUDES[runtime],
        build=f"{_before(manifest)}{BUILD[runtime]}", classes=", ".join(map(_text, manifest.classes)),
        lines=make(manifest, fields),
    )  # fmt: skip


def _onnxruntime(manifest: Manifest, fields: Mapping[str, object]) -> str:
    target = manifest.target
    lines = [f"  options.SetIntraOpNumThreads({target.threads});\n"] if target.threads else []
    if target.dynamic_batch:
        lines.append('  Ort::ThrowOnError(Ort::GetApi().AddFreeDimensionOverrideByName(options, "batch", 1));\n')
    lines += [f"  options.AddConfigEntry({_text(k)}, {_text(v)});\n" for k, v in manifest.session_options.items()]
    return ONNXRUNTIME.substitute(fields, options="".join(lines))


def _openvino(manifest: Manifest, fields: Mapping[str, object]) -> str:
    target = manifest.target
    options = {"PERFORMANCE_HINT": _text("LATENCY")}
    options |= {key: _text(value) for key, value in manifest.session_options.items()}
    options |= {"INFERENCE_NUM_THREADS": str(target.threads)} if target.threads else {}
    return OPENVINO.substitute(
        fields, device=_text(target.device), options=", ".join(f"{{{_text(k)}, {v}}}" for k, v in options.items()),
        reshape=f"  model->reshape({{1, {fields['size']}, {fields['size']}, 3}});\n" if target.dynamic_batch else "",
    )  # fmt: skip


def _tensorrt(manifest: Manifest, fields: Mapping[str, object]) -> str:
    size = fields["size"]
    reshape = f"  context->setInputShape(given, nvinfer1::Dims4{{1, {size}, {size}, 3}});\n"
    return TENSORRT.substitute(fields, reshape=reshape if manifest.target.dynamic_batch else "")


def _before(manifest: Manifest) -> str:
    """How the engine is built, on the device."""
    if manifest.target.runtime != "tensorrt":
        return ""
    return f"trtexec --onnx={manifest.int8_files[0]} --stronglyTyped --saveEngine=model.plan && "


def _text(value: str) -> str:
    """A string as C++ spells it: JSON's escapes are C++'s too."""
    return json.dumps(value, ensure_ascii=False)

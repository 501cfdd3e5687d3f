"""Seeded changes of a bundle, as an accident or an attacker makes them: in any byte, or in any value of its JSON."""

import hashlib
import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx

HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", " ", "x", "0" * 64,
    "../../etc/passwd", "/etc/passwd", "C:\\x", "\\\\host\\x", "int8/../x", "a" * 5000, "\x1b[31m\x07", "\ud800", "\0",
    "é\u202e", "<script>|`*", "{{7*7}}", "[/red]", "[link=x]", "cuda:x", "GPU.9", "fp16", "bf16", "openvino", "tensorrt", [], {}, [[]], [None],
    ["x", 1], {"x": 1}, {"": {}}, [1] * 2000, ["int8/model.onnx"] * 70,
]  # fmt: skip
ATTRIBUTES = [
    "", "-1", "0", "1", "7", "4294967296", "18446744073709551615", "99999999999999999999", "1e308", "x", "u8", "i64", "f16",
    "boolean", "undefined", "string", "dynamic", "1,2,3", "-1,-1", "2147483647,2147483647,4", "opset1", "opset99",
    "extension", "../x.so", "Result", "Parameter", "MatMul", "Convolution", "Const", "Loop", "&", "true", "a" * 5000,
]  # fmt: skip
EDGES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"9",
    b"-",
    b'"',
    b"<",
    b"\n",
    b"\xff" * 9 + b"\x01",
    b"99999999999999999999",
)


def of_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits flipped, bytes put in, left out, repeated, moved, or cut off."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 16, 200))
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            edge = rng.choice(EDGES)
            changed[at : at + len(edge)] = edge
        elif kind == 2:
            changed[at:at] = rng.choice(EDGES)
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length] * rng.choice((1, 3, 50))
        elif rng.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def of_json(content: bytes, rng: random.Random) -> bytes:
    """One or two values replaced by hostile ones, left out, or given another name."""
    value = json.loads(content)
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(_places(value))
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "../x", "INT8/model.onnx", "__proto__", "a" * 300, "\x1b[2J"])] = holder.pop(
                key
            )
        elif kind == 2 and isinstance(holder[key], (dict, list)):
            for _ in range(rng.choice((10, 300))):
                holder[key] = [holder[key]]
        else:
            holder[key] = deepcopy(rng.choice(HOSTILE))
    text = json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def of_onnx(content: bytes, rng: random.Random) -> bytes:
    """One or two fields of the model's messages changed, the rest a sound model: dimensions, types, names, attributes."""
    model = onnx.ModelProto.FromString(content)
    for _ in range(rng.randint(1, 2)):
        message, field = rng.choice(list(_fields(model)))
        found = getattr(message, field.name)
        if field.is_repeated:
            _change_repeated(found, field, rng)
        elif field.type == field.TYPE_MESSAGE or rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _other(field, found, rng))
    return bytes(model.SerializeToString())


def of_xml(content: bytes, rng: random.Random) -> bytes:
    """One or two attributes or elements changed, the rest a sound model."""
    root = ET.fromstring(content)
    for _ in range(rng.randint(1, 2)):
        parent = rng.choice([element for element in root.iter() if len(element) or element.attrib or element.text])
        kind = rng.randrange(4)
        if kind == 0 and len(parent):
            parent.remove(rng.choice(list(parent)))
        elif kind == 1 and len(parent):
            parent.append(rng.choice(list(root.iter())) if rng.random() < 0.2 else rng.choice(list(parent)))
        elif parent.attrib:
            parent.set(rng.choice(list(parent.attrib)), rng.choice(ATTRIBUTES))
        else:
            parent.text = rng.choice(ATTRIBUTES)
    try:
        return ET.tostring(root)
    except RecursionError:  # an element that holds itself
        return content


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Makes the folder hold exactly these files, each with the content that it is given."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def sealed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with every size and digest made to match, as someone does who changes a bundle on purpose."""
    evaluation = json.loads(files["evaluation/evaluation.json"])
    for name in evaluation["files"]:
        evaluation["files"][name] = _entry(files[f"evaluation/{name}"])
    files = files | {"evaluation/evaluation.json": json.dumps(evaluation).encode()}
    manifest = json.loads(files["bundle.json"])
    manifest["files"] = {name: _entry(files[name]) for name in manifest["files"]}
    manifest["evaluation_sha256"] = _entry(files["evaluation/evaluation.json"])["sha256"]
    return files | {"bundle.json": json.dumps(manifest).encode()}


def changed(files: dict[str, bytes], name: str, change: Callable[[bytes], bytes], seal: bool) -> dict[str, bytes]:
    """The files with one of them changed. seal: with digests that match."""
    files = files | {name: change(files[name])}
    return sealed(files) if seal else files


def _entry(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every (message, field that is set) in the tree."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _fields(inner)


def _change_repeated(found: Any, field: Any, rng: random.Random) -> None:
    at = rng.randrange(len(found))
    kind = rng.randrange(4)
    if kind == 0:
        del found[at]
    elif kind == 1 and field.type != field.TYPE_MESSAGE:
        found.append(_other(field, found[at], rng))
    elif kind == 2 or field.type == field.TYPE_MESSAGE:
        found.append(found[rng.randrange(len(found))])
    else:
        found[at] = _other(field, found[at], rng)


def _other(field: Any, found: Any, rng: random.Random) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice(
            ["", "x", "conv", "head_out", "images", "com.microsoft", "Loop", "Gather", "Expand", '"', "\n", "a" * 300]
        )
    if field.type == field.TYPE_BYTES:
        return of_bytes(found, rng)
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    if field.type == field.TYPE_ENUM:
        return rng.choice(list(field.enum_type.values_by_number))
    small = field.type not in (field.TYPE_INT64, field.TYPE_UINT64)
    return rng.choice([0, 1, -1, 2, 3, 7, 255, 2**20, 2**31 - 1] + ([] if small else [2**40, 2**62, -(2**63)]))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in the tree."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]

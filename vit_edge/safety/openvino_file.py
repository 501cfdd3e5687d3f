"""An OpenVINO model from outside: its .xml holds known layers only, and its constants lie within its .bin."""

import re
from pathlib import Path
from typing import Any
from xml.parsers import expat

from vit_edge.errors import UserError

MAX_XML_BYTES = 256 << 20
MAX_ELEMENTS = 2_000_000
MAX_DEPTH = 64
KNOWN_OPSET = re.compile(r"opset([1-9]|1[0-9]|2[0-9])")
# Bodies of TensorIterator, Loop and If.
BODIES = {"body", "then_body", "else_body"}
AGAIN = "export again for openvino"


def check(graph: Path, weights: Path) -> None:
    """Refuses entities, document types, layers of extensions, bodies of loops, and constants outside the .bin.

    Raises UserError.
    """
    if graph.stat().st_size > MAX_XML_BYTES:
        raise UserError(f"{graph} is longer than {MAX_XML_BYTES} bytes", AGAIN)
    reader = _Reader(graph, weights.stat().st_size)
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = reader.refuse_declaration
    parser.ProcessingInstructionHandler = reader.refuse_declaration
    try:
        with graph.open("rb") as file:
            parser.ParseFile(file)
    except expat.ExpatError as err:
        raise UserError(f"{graph} is no XML: {err}", AGAIN) from err


class _Reader:
    def __init__(self, path: Path, weights_bytes: int):
        self._path, self._weights_bytes, self._depth, self._elements = path, weights_bytes, 0, 0

    def start(self, element: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self._elements += 1
        if self._depth > MAX_DEPTH or self._elements > MAX_ELEMENTS:
            raise self._refused("more, or deeper, elements than any model")
        if self._elements == 1 and element != "net":
            raise self._refused(f"the root {element!r}, expected 'net'")
        if element in BODIES:
            raise self._refused(f"the body of a loop or branch ({element})")
        if element == "layer" and not KNOWN_OPSET.fullmatch(attributes.get("version", "")):
            kind, version = attributes.get("type"), attributes.get("version")
            raise self._refused(f"a layer {kind!r} of {version!r}, which is none of OpenVINO's own sets")
        if element == "data" and "size" in attributes:
            self._constant(attributes)

    def end(self, _: str) -> None:
        self._depth -= 1

    def refuse_declaration(self, *_: Any) -> None:
        raise self._refused("a document type, an entity or a processing instruction")

    def _constant(self, attributes: dict[str, str]) -> None:
        offset, size = (attributes.get(key, "0") for key in ("offset", "size"))
        if not re.fullmatch(r"[0-9]{1,15}", offset) or not re.fullmatch(r"[0-9]{1,15}", size):
            raise self._refused(f"a constant at {offset!r} of {size!r} bytes")
        if int(offset) + int(size) > self._weights_bytes:
            raise self._refused(f"a constant that ends after its weights' {self._weights_bytes} bytes")

    def _refused(self, what: str) -> UserError:
        return UserError(f"{self._path} holds {what}", AGAIN)

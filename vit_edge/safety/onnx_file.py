"""An ONNX file from outside, read without any ONNX library: what it would load, run or call, before a runtime opens it.

Field numbers are those of onnx/onnx.proto.
"""

import mmap
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from vit_edge.errors import UserError
from vit_edge.safety.wire import BYTES, Walk, WireError

MAX_FIELDS = 2_000_000
STANDARD = frozenset({"", "ai.onnx"})
# Operators of ONNX Runtime's own domain that load compiled code.
EXECUTABLE = frozenset({"EPContext"})
# Fields, by message.
MODEL_GRAPH, MODEL_TRAINING, MODEL_FUNCTIONS = 7, 20, 25
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_SPARSE = 1, 5, 15
NODE_OPERATOR, NODE_ATTRIBUTE, NODE_DOMAIN = 4, 5, 7
ATTRIBUTE_TENSOR, ATTRIBUTE_GRAPH, ATTRIBUTE_TENSORS, ATTRIBUTE_GRAPHS, ATTRIBUTE_SPARSE = 5, 6, 10, 11, (22, 23)
TENSOR_EXTERNAL, ENTRY_KEY, ENTRY_VALUE = 13, 1, 2
EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}
SELF_CONTAINED = "export it again as one self-contained file of standard operators"


def check(path: Path, name: str, domains: Collection[str], files: Collection[str]) -> None:
    """Refuses a model with operators of foreign domains, functions or subgraphs of its own, or weights outside the bundle.

    name: its path in the bundle; domains: what the runtime has built in; files: the bundle's files, whose digests have
    been checked. Raises UserError.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty", SELF_CONTAINED)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        try:
            _Model(path, name, domains, files, Walk(buffer, MAX_FIELDS)).check(len(buffer))
        except WireError as err:
            raise UserError(f"{path} is no ONNX model: {err}", SELF_CONTAINED) from err


class _Model:
    def __init__(self, path: Path, name: str, domains: Collection[str], files: Collection[str], walk: Walk):
        self._path, self._folder, self._domains, self._files, self._walk = (
            path, PurePosixPath(name).parent, domains, files, walk,
        )  # fmt: skip

    def check(self, size_bytes: int) -> None:
        graphs = 0
        for number, kind, start, end in self._walk.fields(0, size_bytes):
            if kind != BYTES:
                continue
            if number in (MODEL_FUNCTIONS, MODEL_TRAINING):
                raise self._refused("functions or a training graph of its own")
            if number == MODEL_GRAPH:
                graphs += 1
                self._graph(start, end)
        if not graphs:
            raise WireError("it holds no graph")

    def _graph(self, start: int, end: int) -> None:
        for number, kind, first, last in self._walk.fields(start, end):
            if kind != BYTES:
                continue
            if number == GRAPH_NODE:
                self._node(first, last)
            elif number == GRAPH_INITIALIZER:
                self._tensor(first, last)
            elif number == GRAPH_SPARSE:
                self._sparse(first, last)

    def _node(self, start: int, end: int) -> None:
        for number, kind, first, last in self._walk.fields(start, end):
            if kind != BYTES:
                continue
            if number == NODE_DOMAIN and (domain := self._walk.text(first, last)) not in self._domains:
                raise self._refused(f"an operator of the domain {domain!r}")
            if number == NODE_OPERATOR and (operator := self._walk.text(first, last)) in EXECUTABLE:
                raise self._refused(f"the operator {operator}, which loads compiled code")
            if number == NODE_ATTRIBUTE:
                self._attribute(first, last)

    def _attribute(self, start: int, end: int) -> None:
        for number, kind, first, last in self._walk.fields(start, end):
            if kind != BYTES:
                continue
            if number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                raise self._refused("a subgraph (If, Loop, Scan)")
            if number in (ATTRIBUTE_TENSOR, ATTRIBUTE_TENSORS):
                self._tensor(first, last)
            elif number in ATTRIBUTE_SPARSE:
                self._sparse(first, last)

    def _sparse(self, start: int, end: int) -> None:
        """Its values and indices are tensors, fields 1 and 2."""
        for number, kind, first, last in self._walk.fields(start, end):
            if kind == BYTES and number in (1, 2):
                self._tensor(first, last)

    def _tensor(self, start: int, end: int) -> None:
        for first, last in self._walk.messages(start, end, TENSOR_EXTERNAL):
            keys, values = (
                [self._walk.text(*span) for span in self._walk.messages(first, last, number)]
                for number in (ENTRY_KEY, ENTRY_VALUE)
            )
            if len(keys) != 1 or keys[0] not in EXTERNAL_KEYS or len(values) > 1:
                raise self._refused("external data in an unknown form")
            if keys == ["location"]:
                self._location(values[0] if values else "")

    def _location(self, location: str) -> None:
        """Relative to the model's folder, and one of the bundle's own files by the very same name."""
        if (self._folder / location).as_posix() not in self._files or ".." in PurePosixPath(location).parts:
            raise self._refused(f"weights in {location!r}, which is no file of the bundle")

    def _refused(self, what: str) -> UserError:
        return UserError(f"{self._path} holds {what}", SELF_CONTAINED)

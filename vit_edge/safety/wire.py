"""The protocol buffers' wire format, as far as it takes to walk a file that nobody vouches for.

https://protobuf.dev/programming-guides/encoding: a message is a row of fields, each a tag (number, wire type) and a value.
"""

import mmap
from collections.abc import Iterator

# Wire types: varint, 8 bytes, length and bytes, 4 bytes.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Buffer = bytes | mmap.mmap


class WireError(ValueError):
    """Bytes that are no message."""


class Walk:
    """Walks messages within one buffer, at most `budget` fields of them altogether."""

    def __init__(self, buffer: Buffer, budget: int):
        self._buffer, self._budget = buffer, budget

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire type, start, end) of every field of the message in buffer[start:end]; the range is the value's.

        Raises WireError where the bytes are no message, or too many fields have been walked.
        """
        while start < end:
            self._budget -= 1
            if self._budget < 0:
                raise WireError("it holds more fields than any model")
            tag, start = self.varint(start, end)
            number, kind = tag >> 3, tag & 7
            if tag >= 1 << 32 or number == 0:
                raise WireError(f"a field's tag is {tag}")
            value = start
            if kind == VARINT:
                _, start = self.varint(start, end)
            elif kind == BYTES:
                length, value = self.varint(start, end)
                start = value + length
            elif kind in (FIXED64, FIXED32):
                start += 8 if kind == FIXED64 else 4
            else:
                raise WireError(f"a field has the wire type {kind}")
            if start > end:
                raise WireError("a field is longer than the message that holds it")
            yield number, kind, value, start

    def messages(self, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
        """The ranges of the fields with that number that may be messages, strings or bytes."""
        for found, kind, first, last in self.fields(start, end):
            if found == number and kind == BYTES:
                yield first, last

    def text(self, start: int, end: int) -> str:
        """A short string; WireError when it is not short or no UTF-8."""
        if end - start > 4096:
            raise WireError("a name has more than 4096 bytes")
        try:
            return self._buffer[start:end].decode("utf-8")
        except UnicodeDecodeError as err:
            raise WireError("a name is no UTF-8") from err

    def varint(self, start: int, end: int) -> tuple[int, int]:
        """A number of up to 64 bits, and where the next byte lies."""
        value = 0
        for index in range(start, min(end, start + 10)):
            byte = self._buffer[index]
            value |= (byte & 0x7F) << (7 * (index - start))
            if byte < 0x80:
                return value, index + 1
        raise WireError("a number has no end")

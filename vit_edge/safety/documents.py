"""JSON and text from outside: bounded before they are parsed, printable wherever a person will read them."""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from vit_edge.errors import UserError

T = TypeVar("T", bound=BaseModel)

MAX_JSON_BYTES = 16 << 20
# Control characters, which a terminal obeys; halves of surrogate pairs, which no file can hold; line and paragraph
# separators; marks that turn the direction of writing.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069\ufffe\uffff]")


def _printable(text: str) -> str:
    if UNPRINTABLE.search(text):
        raise ValueError("holds characters that cannot be printed")
    return text


Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=10**15)]
TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[Text])


def bounded(path: Path, shown: Path, fix: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes; `shown` names it in the error."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{shown} is longer than {limit} bytes", fix)
    return content


def parsed(model: type[T], content: bytes, shown: Path, fix: str) -> T:
    """JSON as a `model`; UserError that says where it is wrong."""
    try:
        return model.model_validate_json(content)
    except ValidationError as err:
        raise _explained(err, shown, fix) from err


def texts(content: bytes, shown: Path, fix: str) -> list[str]:
    """JSON as a list of short printable strings."""
    try:
        return TEXTS.validate_json(content, strict=True)
    except ValidationError as err:
        raise _explained(err, shown, fix) from err


def printable(text: str, limit: int = 2000) -> str:
    """Anything as one line of printable characters of bounded length."""
    line = UNPRINTABLE.sub("?", " ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}…"


def _explained(err: ValidationError, shown: Path, fix: str) -> UserError:
    first: Any = err.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "JSON"
    return UserError(f"{shown} is not valid: {where}: {first['msg']}", fix)

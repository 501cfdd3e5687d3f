"""The base of every typed setting: strict, frozen, and an unknown key is refused with its nearest spelling."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from vit_edge.errors import UserError

M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """Settings that a person writes: no unknown keys, no silent conversion, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def parse(model: type[M], values: Any, origin: str) -> M:
    """`values` (plain data, as YAML or JSON gives it) as a `model`; `origin` names the source in the error.

    Raises UserError for the first mistake: which key, what was found, what was expected.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"{origin}: expected a mapping of settings, found {type(values).__name__}",
            "see an example with `vit-edge pipelines`",
        )
    try:
        return model.model_validate(values)
    except ValidationError as err:
        raise _explained(model, err, origin) from err


def _explained(model: type[BaseModel], err: ValidationError, origin: str) -> UserError:
    first = err.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = list(_fields_at(model, first["loc"][:-1]))
        close = get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        fix = f"did you mean {close[0]!r}?" if close else f"known keys there: {', '.join(known)}"
        return UserError(f"{origin}: unknown key {key!r}", fix)
    if first["type"] == "missing":
        return UserError(f"{origin}: {key!r} is missing", "add it")
    if isinstance(first["input"], Mapping):
        return UserError(f"{origin}: {key + ': ' if key else ''}{_plain(first['msg'])}", "correct these settings")
    return UserError(f"{origin}: {key} = {first['input']!r}: {_plain(first['msg'])}", f"correct {key!r}")


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[str]:
    """The names of the fields of the model that `location` leads to."""
    for part in location:
        if isinstance(part, int):
            continue
        model = next(_models_in(model.model_fields[part].annotation), model)
    yield from model.model_fields


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)

"""The processes of one `accelerate launch`: one leads, which alone prints and finishes stages."""

import os

from vit_edge.errors import UserError


def count() -> int:
    """How many there are, over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this is the one."""
    return int(os.environ.get("RANK", "0")) == 0


def refuse_many(what: str, fix: str) -> None:
    """Raises UserError where there is more than one."""
    if count() > 1:
        raise UserError(f"{what} runs in one process, found {count()}", fix)

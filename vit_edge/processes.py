"""The processes of one `accelerate launch`: one leads, which alone prints and finishes stages."""

import os


def count() -> int:
    """How many there are, over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this is the one."""
    return int(os.environ.get("RANK", "0")) == 0

"""The processes of one `accelerate launch`: one leads, which alone prints and finishes stages. No torch is imported here
until there is more than one."""

import os
from typing import Any


def count() -> int:
    """How many there are, over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this is the one."""
    return int(os.environ.get("RANK", "0")) == 0


def told(value: Any, device: str | None) -> Any:
    """The leading process's value, in every process, when all have come here. device: as for training."""
    if count() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    from vit_edge.training.setup import accelerator_on

    accelerator_on(device)
    return broadcast_object_list([value])[0]

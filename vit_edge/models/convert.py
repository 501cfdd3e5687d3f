"""A weight file of any format as safetensors: the same tensors under the same names, and nothing else of the file."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vit_edge.errors import UserError
from vit_edge.models import layouts, weight_files
from vit_edge.models.checkpoints import check_finite

SUFFIX = ".safetensors"


def convert(source: Path, out: Path, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Writes the tensors of `source` to `out`, whole or not at all, and returns them.

    Names, shapes and types stay, so that `--weights` recognises the layout, and the normalisation that goes with it,
    as in the original. Raises UserError for a source that is no weights, not whole, needs code to be run or holds NaN,
    and for an `out` that exists or cannot be written.
    """
    if out.suffix != SUFFIX:
        raise UserError(f"{out} does not end with {SUFFIX}, which is what is written", f"call it {out.stem}{SUFFIX}")
    if out.exists():
        raise UserError(f"{out} exists already", "give another name, or delete it")
    tensors = weight_files.read(source, say)
    check_finite(tensors, source)
    say(f"{source}: {layouts.canonical(tensors).name}'s layout")
    partial = out.with_name(f"{out.name}.partial")
    try:
        save_file(_apart(tensors), partial, metadata={"format": "pt"})
        os.replace(partial, out)
    except (OSError, SafetensorError) as err:
        raise UserError(f"cannot write {out}: {err}", "give a path in a folder that can be written") from err
    finally:
        partial.unlink(missing_ok=True)
    return tensors


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Dense tensors that share no memory: tied weights are written twice."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if address in seen else tensor.contiguous()
        seen.add(address)
    return apart

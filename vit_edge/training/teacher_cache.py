"""The teacher's logits of every view, on disk: written once, read by every later student.

cache.json          what the views and the answers depend on; a cache of something else is dropped, and said
epoch_0000.npy      float16 (N, K), row by position in the split; NaN: not asked yet. Above 100 classes uint16
                    (N, 2·TOP + 1): the TOP largest logits' classes, their float16 bits, and the log of the rest's mass

N images, B batch, K classes. A row is written after a view is asked for and survives a kill; half a row reads as none.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from vit_edge.errors import UserError
from vit_edge.progress import say
from vit_edge.store import write_json

MANIFEST = "cache.json"
SCHEMA = "vit-edge/teacher-cache/1"
WHOLE = 100
"""Up to so many classes every logit is kept."""
TOP = 16
MOST_CLASSES = 2**16
NAN = np.float16(np.nan).view(np.uint16)


class TeacherCache:
    """Logits by (epoch, position)."""

    def __init__(self, folder: Path, key: Mapping[str, Any], images: int, classes: int):
        """key: name → all that decides the views and the answers, as plain JSON data."""
        if classes > MOST_CLASSES:
            raise UserError(
                f"the teacher's cache holds up to {MOST_CLASSES} classes, found {classes}",
                "set student.distillation.cache to false",
            )
        self.folder, self.images, self.classes = folder, images, classes
        self.opened: tuple[int, np.ndarray] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            self._claim({**key, "images": images, "classes": classes})

    @property
    def whole(self) -> bool:
        """Whether every logit is kept, not just the largest."""
        return self.classes <= WHOLE

    @property
    def bytes_per_epoch(self) -> int:
        return self.images * 2 * (self.classes if self.whole else 2 * TOP + 1)

    def check_space(self, epochs: int) -> None:
        """UserError when the disk has no room for what `epochs` epochs will still write."""
        missing = sum(not self._path(epoch).exists() for epoch in range(epochs))
        needed, free = missing * self.bytes_per_epoch, shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"the teacher's cache needs {needed / 1e9:.1f} GB in {self.folder}, and {free / 1e9:.1f} GB are free",
                "free some, or set student.distillation.cache to false",
            )
        if missing:
            say(f"teacher's logits are kept in {self.folder}: {self.bytes_per_epoch / 1e6:.2f} MB an epoch")
        else:
            say(f"teacher's logits come from {self.folder}")

    def read(self, epoch: int, positions_B: np.ndarray) -> np.ndarray | None:
        """float32 (B, K), or None when one of them has not been asked for yet."""
        if not self._path(epoch).exists():
            return None
        rows = self._rows(epoch)[positions_B]
        return None if np.isnan(self._floats(rows)).any() else self._expand(rows)

    def keep(self, epoch: int, positions_B: np.ndarray, logits_BK: np.ndarray) -> np.ndarray:
        """Writes float32 (B, K) and returns it as `read` will."""
        compact = self._compact(logits_BK)
        self._rows(epoch)[positions_B] = compact
        return self._expand(compact)

    def _compact(self, logits_BK: np.ndarray) -> np.ndarray:
        limit = float(np.finfo(np.float16).max)
        logits_BK = np.clip(logits_BK, -limit, limit)
        if self.whole:
            return logits_BK.astype(np.float16)
        top_BT = np.argpartition(-logits_BK, TOP, axis=1)[:, :TOP]
        rest_BK = logits_BK.astype(np.float64)
        np.put_along_axis(rest_BK, top_BT, -np.inf, axis=1)
        peak_B1 = rest_BK.max(axis=1, keepdims=True)
        rest_B1 = peak_B1 + np.log(np.exp(rest_BK - peak_B1).sum(axis=1, keepdims=True))
        floats = np.concatenate([np.take_along_axis(logits_BK, top_BT, axis=1), rest_B1], axis=1).astype(np.float16)
        return np.concatenate([top_BT.astype(np.uint16), floats.view(np.uint16)], axis=1)

    def _expand(self, rows: np.ndarray) -> np.ndarray:
        """Every logit; of those that were not kept each has an equal part of the rest's mass (Shen and Xing 2022, "A Fast
        Knowledge Distillation Framework for Visual Recognition", §3.2)."""
        if self.whole:
            return rows.astype(np.float32)
        floats = self._floats(rows).astype(np.float32)
        logits_BK = np.repeat(floats[:, -1:] - np.log(self.classes - TOP, dtype=np.float32), self.classes, axis=1)
        np.put_along_axis(logits_BK, rows[:, :TOP].astype(np.int64), floats[:, :-1], axis=1)
        return logits_BK

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.whole else np.ascontiguousarray(rows[:, TOP:]).view(np.float16)

    def _rows(self, epoch: int) -> np.ndarray:
        """The epoch's file, mapped into memory."""
        if self.opened is None or self.opened[0] != epoch:
            path = self._path(epoch)
            with FileLock(self.folder / ".lock"):
                if not path.exists():
                    self._create(path)
            self.opened = epoch, np.load(path, mmap_mode="r+")
        return self.opened[1]

    def _create(self, path: Path) -> None:
        """A file of NaN, whole or not at all."""
        temporary = path.with_suffix(".tmp.npy")
        width = self.classes if self.whole else 2 * TOP + 1
        empty = np.full((self.images, width), np.float16(np.nan) if self.whole else NAN)
        np.save(temporary, empty)
        os.replace(temporary, path)

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch_{epoch:04d}.npy"

    def _claim(self, key: dict[str, Any]) -> None:
        """Takes over what is there when it is of the same key; else says what differs and begins anew."""
        manifest = self.folder / MANIFEST
        files = list(self.folder.glob("epoch_*.npy"))
        found = _read(manifest)
        if files and found != key:
            differing = [name for name in key if name not in found or found[name] != key[name]]
            say(f"teacher's logits in {self.folder} are of another {', '.join(differing) or 'kind'}: they are asked for anew")  # fmt: skip
            for file in files:
                file.unlink()
        if found != key:
            write_json(manifest, {"schema": SCHEMA, "key": key})


def _read(manifest: Path) -> dict[str, Any]:
    try:
        value = json.loads(manifest.read_text(encoding="utf-8"))
        return value["key"] if value["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

"""Names of files that travel: plain, relative, and the same file on every system; and what really lies in a folder."""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

from vit_edge.errors import UserError

MAX_FILES = 10_000
MAX_DEPTH = 8
# One part of a path: ASCII, no separator, no colon, no blank, no dot at either end.
PART = re.compile(r"[A-Za-z0-9_+-]([A-Za-z0-9_.+-]{0,126}[A-Za-z0-9_+-])?")
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
# What file managers leave behind; never read, never in the way.
JUNK = {".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX"}


def is_plain(name: str) -> bool:
    """Whether a file's path in a bundle, with slashes, names a file below it on Linux, Windows and macOS alike."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(PART.fullmatch(part) and not RESERVED.fullmatch(part) for part in parts)


def stays_below(name: str) -> bool:
    """Whether any other file's path, blanks and all alphabets allowed, stays below the folder that it is relative to."""
    windows = PureWindowsPath(name)
    return bool(windows.parts) and not windows.anchor and ".." not in windows.parts and "\0" not in name


def colliding(names: Iterable[str]) -> str | None:
    """A name that is another's twice, or differs from it in upper and lower case alone; null when there is none."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


def is_junk(name: str) -> bool:
    return not JUNK.isdisjoint(name.split("/"))


def contents(folder: Path) -> list[str]:
    """Paths, with slashes, of everything below `folder` that is no folder; links are listed, never followed."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.name in JUNK:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{below}{entry.name}/")
                else:
                    found.append(f"{below}{entry.name}")
                if len(found) + len(waiting) > MAX_FILES:
                    raise UserError(f"{folder} holds more than {MAX_FILES} files", "give the folder of one bundle")
    return sorted(found)

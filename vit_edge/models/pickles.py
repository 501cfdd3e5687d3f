"""What a pickle calls for when it is loaded, read from its opcodes alone: nothing of it is ever run."""

import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

USUAL = re.compile(r"(?:torch(?!\.nn\.modules)|collections|argparse|numpy|_codecs)\.|(?:__builtin__|builtins)\.set$")
"""Names that saved tensors call for, and what their programs keep beside them."""
MOST_PICKLES = 8


def calls(path: Path) -> list[str]:
    """Full names, such as posix.system, of what the whole pickles in a file call for: those that no state dict needs,
    or, where there are none, all. None of a file that is no whole pickle."""
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                members = [name for name in archive.namelist() if name.endswith(".pkl")]
                found = [call for name in members for call in _calls_of_member(archive, name)]
        else:
            file.seek(0)
            found = _calls_in(file)
    found = list(dict.fromkeys(found))
    return [call for call in found if not USUAL.match(call)] or found


def _calls_of_member(archive: zipfile.ZipFile, name: str) -> list[str]:
    try:
        with archive.open(name) as stream:
            return _calls_in(stream)
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return []


def _calls_in(stream: IO[bytes]) -> list[str]:
    """Of the pickles that stand one after another at the start of a stream: torch's old format has several."""
    found: list[str] = []
    for _ in range(MOST_PICKLES):
        one: list[str] = []
        try:
            one.extend(_calls_of_one(stream))
        except (ValueError, UnicodeDecodeError, MemoryError, OverflowError):
            return found
        found += one
    return found


def _calls_of_one(stream: IO[bytes]) -> Iterator[str]:
    """The names of GLOBAL, INST and STACK_GLOBAL, whose two strings are followed through the pickle's memo."""
    strings: list[str] = []
    memo: dict[int, str] = {}
    last: str | None = None
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = last or ""
        elif "PUT" in opcode.name:
            memo[int(str(argument))] = last or ""
        else:
            last = (
                memo.get(int(str(argument)))
                if "GET" in opcode.name
                else argument
                if isinstance(argument, str)
                else None
            )
            if last:
                strings.append(last)

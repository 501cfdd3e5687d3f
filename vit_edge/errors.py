"""The user's mistakes: one exception, two lines, exit code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something that the user can mend.

    `problem` says what is wrong, with what was found and what was expected; `fix` says how to mend it.
    Each is printed as one line.
    """

    def __init__(self, problem: str, fix: str):
        super().__init__(f"{problem}\n{fix}")
        self.problem = problem
        self.fix = fix


def unknown(kind: str, name: str, choices: Iterable[str], fix: str | None = None) -> UserError:
    """The error for a name that is none of `choices`: the fix names the nearest spelling, or lists them."""
    names = sorted(set(choices))
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    advice = f"did you mean {close[0]!r}?" if close else f"expected one of: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}", fix or advice)

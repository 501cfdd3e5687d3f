"""Progress on stderr: a bar with rate and time left on a terminal, a line every 30 s elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vit_edge.processes import leads

LINE_EVERY_SECONDS = 30.0


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "") -> None:
        """Counts `steps` as done; `note` is shown beside the bar."""


def say(line: str) -> None:
    """One message to the user, from the process that leads."""
    if leads():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, done: int = 0, unit: str = "it") -> Iterator[Advance]:
    """Shows the way from `done` to `total` steps for as long as the context lasts."""
    if leads() and sys.stderr.isatty():
        with _bar(label, total, done, unit) as advance:
            yield advance
    else:
        yield _Lines(label, total, done, unit)


@contextmanager
def _bar(label: str, total: int, done: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done, note="", rate="")

        def advance(steps: int = 1, note: str = "") -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:.0f} {unit}/s" if speed else ""
            bar.update(task, advance=steps, rate=rate, note=note or bar.tasks[task].fields["note"])

        yield advance


class _Lines:
    def __init__(self, label: str, total: int, done: int, unit: str):
        self.label, self.total, self.done, self.unit = label, total, done, unit
        self.first = done
        self.note = ""
        self.started = self.said = time.monotonic()

    def __call__(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        self.note = note or self.note
        now = time.monotonic()
        if now - self.said < LINE_EVERY_SECONDS:
            return
        self.said = now
        rate = (self.done - self.first) / (now - self.started)
        left = (self.total - self.done) / rate if rate else 0
        say(f"{self.label}: {self.done}/{self.total}, {rate:.0f} {self.unit}/s, {left:.0f} s left {self.note}".rstrip())

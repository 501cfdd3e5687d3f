"""The `vit-edge` command: parse, call one function, print, exit code.

Exit codes: 0 pass · 1 the gate failed · 2 the user's mistake or a missing runtime · 3 undecided · 70 a bug of ours ·
130 interrupted · 141 nobody reads our output.
"""

import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import typer

from vit_edge import __version__
from vit_edge.cli import build, device, fit, inside
from vit_edge.errors import UserError
from vit_edge.safety.documents import printable

PASS, MISTAKE, BUG, INTERRUPTED, BROKEN_PIPE = 0, 2, 70, 130, 141
USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What Typer raises for an option that is missing or unknown; releases import it from different places."""

app = typer.Typer(
    help="Distil a Vision Transformer, quantize it to int8, export it, and prove on each target that it holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(build.run)
app.command()(build.train)
app.command()(build.distill)
app.command()(fit.fit)
app.command()(build.quantize)
app.command()(build.reference)
app.command()(build.export)
app.command()(device.bundle)
app.command()(device.gate)
app.command()(device.bench)
app.command()(device.predict)
app.command()(device.sign)
app.command()(device.report)
app.command()(device.doctor)
app.command()(inside.inspect)
app.command()(inside.probe)
app.command()(inside.convert)
app.command()(build.models)
app.command()(device.targets)
app.command()(build.pipelines)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


class Interrupted(BaseException):
    """Ctrl-C or a request to end, as an exception of our own: Typer would turn KeyboardInterrupt into a bare exit."""


def main() -> None:
    """Runs the command line and turns every way to end into its exit code."""
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, _interrupt)
    try:
        sys.exit(app(standalone_mode=False) or PASS)
    except UserError as err:
        _end(MISTAKE, f"error: {err.problem}", f"fix: {err.fix}")
    except Interrupted:
        _end(INTERRUPTED, "interrupted: nothing is half-written", "continue with the same command")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except ModuleNotFoundError as err:
        missing = (err.name or "").partition(".")[0]
        if missing in ("", "vit_edge"):
            _bug()
        _end(MISTAKE, f"error: this needs {missing}, which is not installed", f"fix: pip install {_brings(missing)}")
    except Exception as err:
        if isinstance(err, USAGE_ERROR) and not err.format_message():
            sys.exit(MISTAKE)  # the help has been printed, since no command was given
        if isinstance(err, USAGE_ERROR):
            _end(MISTAKE, f"error: {err.format_message()}", f"fix: see `{_command_path(err)} --help`")
        if isinstance(err, OSError) and err.filename is not None:
            _end(MISTAKE, f"error: {err.filename}: {err.strerror}", "fix: give a path that can be read and written")
        _bug()


def _bug() -> NoReturn:
    traceback.print_exc()
    _end(BUG, "this is a bug in vit-edge", "report it with the lines above and the output of `vit-edge doctor`")


def _brings(module: str) -> str:
    """What to give pip for a module that a device does without."""
    return {"PIL": '"vit-edge[images]"', "yaml": "pyyaml"}.get(module, '"vit-edge[train]"')


def _interrupt(*_: object) -> None:
    raise Interrupted


def _command_path(err: Any) -> str:
    return err.ctx.command_path if getattr(err, "ctx", None) else "vit-edge"


def _end(code: int, *lines: str) -> NoReturn:
    for line in lines:
        print(printable(line), file=sys.stderr)
    sys.exit(code)

"""The `vit-edge` command: parse, call one function, print, exit code.

Exit codes: 0 pass · 1 the gate failed · 2 the user's mistake or a missing runtime · 3 undecided · 70 a bug of ours ·
130 interrupted.
"""

import os
import sys
import traceback

import typer

from vit_edge import __version__
from vit_edge.cli import build, device
from vit_edge.errors import UserError

PASS, FAIL, MISTAKE, UNDECIDED, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130

app = typer.Typer(
    help="Distil a Vision Transformer, quantize it to int8, export it, and prove on each target that it holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(build.run)
app.command()(build.train)
app.command()(build.distill)
app.command()(build.quantize)
app.command()(build.reference)
app.command()(build.export)
app.command()(device.gate)
app.command()(device.bench)
app.command()(device.predict)
app.command()(device.doctor)
app.command()(build.models)
app.command()(device.targets)
app.command()(build.pipelines)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line and turns every way to end into its exit code."""
    try:
        app()
    except UserError as err:
        _say(f"error: {err.problem}", f"fix: {err.fix}")
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        _say("interrupted: nothing is half-written", "continue with the same command")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PASS)
    except Exception:
        traceback.print_exc()
        _say("this is a bug in vit-edge", "please report it with the lines above and the output of `vit-edge doctor`")
        sys.exit(BUG)


def _say(*lines: str) -> None:
    for line in lines:
        print(" ".join(line.split()), file=sys.stderr)

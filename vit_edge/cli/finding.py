"""Runs and recipes on disk, as the command line names them or leaves them out."""

from pathlib import Path

RUNS = Path("runs")


def newest_run() -> Path:
    """The run whose student was finished last. UserError when there is none."""
    from vit_edge.errors import UserError

    found = sorted(RUNS.glob("*/student/stage.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"there is no run in {RUNS}/ to go on from",
            "make one with `vit-edge distill`, or name a model with --model",
        )
    return found[-1].parents[1]


def recipe_path(name: str) -> Path:
    """Of a recipe by path, or by a name that is shipped. UserError for neither."""
    from vit_edge.errors import unknown
    from vit_edge.shipped import shipped

    if name.endswith((".yaml", ".yml")) and Path(name).exists():
        return Path(name)
    known = shipped("pipelines")
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    if stem not in known:
        raise unknown("recipe", name, known)
    return known[stem]

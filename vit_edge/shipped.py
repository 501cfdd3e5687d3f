"""Finds the recipes and device profiles that come with the package, in a wheel or in a checkout."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(kind: str) -> dict[str, Path]:
    """Name → path of the YAML files in `kind` ("pipelines" or "targets")."""
    for folder in (PACKAGE / "_shipped" / kind, PACKAGE.parent / kind):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}

"""YAML as a person writes it. Of the base, only this needs PyYAML, which no gate does."""

import re
from pathlib import Path
from typing import Any

import yaml

from vit_edge.errors import UserError


def read(path: Path) -> Any:
    """The plain data in a YAML file; UserError when it cannot be read."""
    try:
        return value(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read {path}: {err}", "give the path of a readable YAML file") from err
    except yaml.YAMLError as err:
        where = getattr(err, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise UserError(f"{path} is not valid YAML{line}: {getattr(err, 'problem', err)}", "mend the line") from err


def value(text: str) -> Any:
    """The plain data of a YAML text. Raises yaml.YAMLError, for a key that is given twice too."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where SafeLoader takes the last, and reads 1e-3 as the number it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)

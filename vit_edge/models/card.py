"""model.json: what a saved model is, readable without torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig
from vit_edge.settings import Settings
from vit_edge.store import write_json

CARD = "model.json"
WEIGHTS = "model.safetensors"
SAVE_AGAIN = "give a folder that vit-edge wrote, such as runs/NAME/student"


class Card(Settings):
    """The model by name and geometry, its classes in the order of its logits, and its preprocessing."""

    schema_name: Literal["vit-edge/model/1"] = Field("vit-edge/model/1", alias="schema")
    model: ModelConfig = Field(description="weights is always none here: they lie beside the card")
    classes: list[str]
    preprocessing: Preprocessing


def write_card(folder: Path, config: ModelConfig, classes: list[str], preprocessing: Preprocessing) -> None:
    """Writes model.json into `folder`."""
    model = config.model_copy(update={"weights": "none"})
    card = Card(schema="vit-edge/model/1", model=model, classes=classes, preprocessing=preprocessing)
    write_json(folder / CARD, card.model_dump(mode="json", by_alias=True))


def read_card(folder: Path) -> Card:
    """The card of the model in `folder`; UserError when there is none or it is not valid."""
    path = folder / CARD
    if not path.is_file():
        raise UserError(f"{folder} is not a saved model: it holds no {CARD}", SAVE_AGAIN)
    try:
        return Card.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as err:
        raise UserError(f"{path} is not valid: {_first_mistake(err)}", SAVE_AGAIN) from err


def saved_in(path: Path) -> Path | None:
    """The folder with a card that `path` means: itself, or a run's student, else its teacher."""
    folders = (path, path / "student", path / "teacher")
    return next((folder for folder in folders if (folder / CARD).is_file()), None)


def _first_mistake(err: OSError | ValidationError) -> str:
    if isinstance(err, OSError):
        return str(err)
    first = err.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"

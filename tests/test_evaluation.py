import shutil
from pathlib import Path

import numpy as np
import pytest

from vit_edge import evaluation
from vit_edge.errors import UserError


@pytest.fixture
def copy(tiny_evaluation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_evaluation, tmp_path / "evaluation"))


def test_reads_what_was_written(tiny_evaluation: Path) -> None:
    found = evaluation.read(tiny_evaluation)
    assert found.images_NHWC.shape == (597, 8, 8, 3)
    assert isinstance(found.images_NHWC, np.memmap)
    assert found.manifest.reference.top1 == np.mean(found.logits_NK.argmax(1) == found.labels_N)
    assert evaluation.read(tiny_evaluation, found.digest).digest == found.digest


@pytest.mark.parametrize("name", [*evaluation.ARRAYS, evaluation.NAMES])
def test_a_changed_file_is_named(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        evaluation.read(copy)


def test_another_evaluation_than_the_bundles_is_refused(tiny_evaluation: Path) -> None:
    with pytest.raises(UserError, match="another evaluation"):
        evaluation.read(tiny_evaluation, "0" * 64)


def test_an_empty_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no evaluation\.json"):
        evaluation.read(tmp_path)

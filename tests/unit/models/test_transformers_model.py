"""config.json of a folder: what is no config is one line."""

from pathlib import Path

import pytest

from shardwise.base.errors import InvalidModel
from shardwise.models.specs.architecture import architecture_of
from shardwise.models.transformers_model import config_of_folder

pytest.importorskip("transformers")


def test_a_config_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert architecture_of(tmp_path, seq=None) is None
    with pytest.raises(InvalidModel, match="is not JSON .nested too deeply"):
        config_of_folder(tmp_path)

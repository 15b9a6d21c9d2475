import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwise.base.errors import InvalidData, ShardwiseError, UnknownName
from shardwise.models.data.source import image_splits, token_splits
from shardwise.models.data.tokens import write_tokens


def test_the_standard_library_is_split_into_training_and_evaluation() -> None:
    splits = token_splits("stdlib", seq=128, vocab_size=256)
    assert len(splits.training) > 8 * len(splits.evaluation) > 0


def test_a_token_file_is_split_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [(np.arange(100), True)], vocab_size=100, tokenizer="mine")
    splits = token_splits(f"tokens:{tmp_path / 't'}", seq=8, vocab_size=128)
    last = splits.training[len(splits.training) - 1][1][-1].item()
    assert splits.evaluation[0][0][0].item() > last
    with pytest.raises(InvalidData, match="vocabulary of 100, the model one of 64"):
        token_splits(f"tokens:{tmp_path / 't'}", seq=8, vocab_size=64)
    with pytest.raises(InvalidData, match="two samples of 60 need 122"):
        token_splits(f"tokens:{tmp_path / 't'}", seq=60, vocab_size=128)


def test_random_samples_are_there_for_both_kinds() -> None:
    tokens = token_splits("random", seq=4, vocab_size=10)
    images = image_splits("random", image_size=4, num_channels=1, num_classes=3)
    assert len(tokens.training) == len(images.training) == 9000
    assert len(tokens.evaluation) == len(images.evaluation) == 1000


def test_digits_fit_models_for_digits_only() -> None:
    assert len(image_splits("digits", image_size=8, num_channels=1, num_classes=10).training) == 1437
    with pytest.raises(InvalidData, match="vit-digits"):
        image_splits("digits", image_size=224, num_channels=3, num_classes=1000)


def fill(folder: Path, *classes: str, count: int = 10) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (4, 4)).save(folder / name / f"{index}.png")


def test_a_folder_may_bring_its_own_split(tmp_path: Path) -> None:
    fill(tmp_path / "train", "a", "b")
    fill(tmp_path / "val", "a", "b", count=3)
    splits = image_splits(f"images:{tmp_path}", image_size=4, num_channels=3, num_classes=2)
    assert (len(splits.training), len(splits.evaluation)) == (20, 6)
    with pytest.raises(InvalidData, match="has 2 classes, the model 1"):
        image_splits(f"images:{tmp_path}", image_size=4, num_channels=3, num_classes=1)
    (tmp_path / "val" / "b").rename(tmp_path / "val" / "c")
    with pytest.raises(InvalidData, match="same classes"):
        image_splits(f"images:{tmp_path}", image_size=4, num_channels=3, num_classes=2)


def test_a_plain_folder_keeps_every_tenth_for_evaluation(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    splits = image_splits(f"images:{tmp_path}", image_size=4, num_channels=3, num_classes=2)
    assert (len(splits.training), len(splits.evaluation)) == (18, 2)


def test_an_unknown_dataset_says_what_is_known() -> None:
    with pytest.raises(UnknownName, match="unknown dataset of tokens 'digits'; known: stdlib, text:PATH, tokens:PATH"):
        token_splits("digits", seq=8, vocab_size=256)
    with pytest.raises(UnknownName, match="unknown dataset of images 'stdlib'"):
        image_splits("stdlib", image_size=8, num_channels=1, num_classes=10)


def test_a_dataset_that_hugging_face_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[2, 3, 4], [5, 6, 7]]}
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)})
    whole.save_to_disk(str(tmp_path / "saved"))
    splits = token_splits(f"hf:{tmp_path / 'saved'}", seq=3, vocab_size=10)
    inputs, targets = splits.training[1]
    assert (inputs.tolist(), targets.tolist()) == ([4, 5, 6], [5, 6, 7])
    with pytest.raises(ShardwiseError, match="has no column image; its columns are input_ids, labels"):
        image_splits(f"hf:{tmp_path / 'saved'}", image_size=8, num_channels=1, num_classes=10)


def test_a_folder_that_hugging_face_did_not_save_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InvalidData, match="has no split") as caught:
        token_splits(f"hf:{tmp_path}", seq=3, vocab_size=10)
    assert len(str(caught.value).splitlines()) == 1


def test_text_is_encoded_by_bytes_or_by_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to shard or not to shard " * 8)
    splits = token_splits(f"text:{tmp_path / 'notes.txt'}", seq=8, vocab_size=256)
    first, target = splits.training[0]
    assert bytes(first.tolist()) == b"to shard"
    assert bytes(target.tolist()) == b"o shard "
    with pytest.raises(InvalidData, match="nowhere.txt: cannot be read"):
        token_splits(f"text:{tmp_path / 'nowhere.txt'}", seq=8, vocab_size=256)
    with pytest.raises(InvalidData, match="there is no such tokenizer.json"):
        token_splits(f"text:{tmp_path / 'notes.txt'}", seq=8, vocab_size=256, tokenizer=tmp_path / "tokenizer.json")


@pytest.mark.parametrize("reference", ["text:data/none", "tokens:data/none", "images:data/none"])
def test_a_path_is_looked_up_from_the_working_directory_and_the_error_shows_where(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidData, match=f"^{tmp_path}/data/none"):
        if reference.startswith("images"):
            image_splits(reference, image_size=8, num_channels=1, num_classes=10)
        else:
            token_splits(reference, seq=8, vocab_size=256)


@pytest.mark.timeout(20)
def test_text_that_is_no_regular_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", Path("/dev/zero")):
        with pytest.raises(InvalidData, match=f"{path}: cannot be read .is not a regular file"):
            token_splits(f"text:{path}", seq=8, vocab_size=256)

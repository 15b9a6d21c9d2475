import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shardwise.base.errors import InvalidData
from shardwise.models.data.images import Digits, ImageFolder, RandomImages


def test_digits_are_split_without_overlap() -> None:
    training, evaluation = Digits(), Digits(evaluation=True)
    assert (len(training), len(evaluation)) == (1437, 360)
    assert training.images.shape[1:] == (1, 8, 8)
    assert (training.images.min(), training.images.max()) == (-1, 1)
    assert set(evaluation.labels.tolist()) == set(range(10))


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_a_folder_of_images_by_class(tmp_path: Path) -> None:
    red = np.zeros((10, 20, 3), dtype=np.uint8)
    red[..., 0] = 255
    save(tmp_path / "red" / "a.png", red)
    save(tmp_path / "black" / "b.png", np.zeros((20, 10), dtype=np.uint8))
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    data = ImageFolder(tmp_path, image_size=8)
    assert (len(data), data.classes) == (2, ["black", "red"])
    image, label = data[1]
    assert (image.shape, label.item()) == ((3, 8, 8), 1)
    assert torch.allclose(image[0], torch.full((8, 8), (1 - 0.485) / 0.229))
    assert ImageFolder(tmp_path, image_size=8, num_channels=1)[0][0].shape == (1, 8, 8)


def test_the_middle_of_an_image_is_taken(tmp_path: Path) -> None:
    pixels = np.zeros((4, 12), dtype=np.uint8)
    pixels[:, 4:8] = 255
    save(tmp_path / "a" / "x.png", pixels)
    image, _ = ImageFolder(tmp_path, image_size=4, num_channels=1)[0]
    assert torch.allclose(image, torch.full((1, 4, 4), (1 - 0.485) / 0.229))


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no such folder"):
        ImageFolder(tmp_path / "none", image_size=8)
    (tmp_path / "class").mkdir()
    with pytest.raises(InvalidData, match="has no images"):
        ImageFolder(tmp_path, image_size=8)


@pytest.mark.parametrize("keep", [0, 20, 60])
def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path, keep: int) -> None:
    save(tmp_path / "a" / "x.png", np.random.default_rng(0).integers(255, size=(32, 32), dtype=np.uint8))
    path = tmp_path / "a" / "x.png"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidData, match=r"x\.png: is not a complete image") as caught:
        ImageFolder(tmp_path, image_size=8)[0]
    assert len(str(caught.value).splitlines()) == 1


def test_random_images_are_a_function_of_the_index() -> None:
    data = RandomImages(10, image_size=4, num_channels=2, num_classes=3)
    again = RandomImages(10, image_size=4, num_channels=2, num_classes=3)
    for index in range(10):
        image, label = data[index]
        assert image.shape == (2, 4, 4)
        assert 0 <= label < 3
        assert torch.equal(image, again[index][0])
        assert label == again[index][1]
    assert len({tuple(data[index][0].flatten().tolist()) for index in range(10)}) == 10
    with pytest.raises(IndexError):
        data[10]


def test_a_large_image_is_read_and_a_huge_one_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    path = tmp_path / "cat" / "0.png"
    Image.new("L", (64, 48)).save(path)
    # Pillow raises an error from twice its own limit on.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    folder = ImageFolder(tmp_path, image_size=8)
    assert folder[0][0].shape == (3, 8, 8)
    assert Image.MAX_IMAGE_PIXELS == 1_000
    monkeypatch.setattr("shardwise.models.data.images._MOST_PIXELS", 3_000)
    with pytest.raises(InvalidData, match=r"0\.png: has 64 × 48 pixels, and at most 3,000 are read: scale it down"):
        folder[0]


@pytest.mark.timeout(20)
def test_an_image_that_is_no_regular_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "0.png")
    with pytest.raises(InvalidData, match=r"0\.png: is not a complete image .*is not a regular file"):
        ImageFolder(tmp_path, image_size=8)[0]

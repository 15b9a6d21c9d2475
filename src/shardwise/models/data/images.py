"""Image datasets: the handwritten digits of scikit-learn, folders of image files, and random images for benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.base.errors import InvalidData, MissingExtra
from shardwise.base.files.data_file import open_to_read

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
# 1.5 GiB as RGB.
_MOST_PIXELS = 2**29
# Mean and standard deviation of ImageNet's channels; published vision models are trained on images normalised by them.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """1,797 handwritten digits of 8 × 8 pixels; every fifth one is held out for evaluation."""

    num_classes = 10

    def __init__(self, *, evaluation: bool = False) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtra.of("scikit-learn", needed_for="the dataset digits") from None
        data = load_digits()
        held_out = np.arange(len(data.target)) % 5 == 0
        chosen = held_out if evaluation else ~held_out
        # Pixels are 0…16; they are scaled to −1…1.
        self.images = torch.from_numpy(data.images[chosen]).float().sub(8).div(8).unsqueeze(1)
        self.labels = torch.from_numpy(data.target[chosen]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """A folder that holds one folder of images per class. The central square of an image is scaled to `image_size`."""

    def __init__(self, folder: str | Path, *, image_size: int, num_channels: int = 3) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise MissingExtra.of("pillow", needed_for="a folder of images") from None
        self.folder = Path(folder)
        self.image_size = image_size
        self.num_channels = num_channels
        if not self.folder.is_dir():
            raise InvalidData(f"{self.folder}: there is no such folder")
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]
        if not self.files:
            raise InvalidData(f"{self.folder}: has no images; it must hold one folder of images per class")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, label = self.files[index]
        try:
            with _opened(path) as file:
                image = file.convert("L" if self.num_channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises all three for damaged files
            raise InvalidData(f"{path}: is not a complete image ({error})") from error
        scale = self.image_size / min(image.size)
        width, height = (max(self.image_size, round(side * scale)) for side in image.size)
        left, top = (width - self.image_size) // 2, (height - self.image_size) // 2
        image = image.resize((width, height)).crop((left, top, left + self.image_size, top + self.image_size))
        pixels = np.asarray(image, dtype=np.float32).reshape(self.image_size, self.image_size, -1) / 255
        mean, std = (np.array(values[: pixels.shape[-1]], dtype=np.float32) for values in (_MEAN, _STD))
        return torch.from_numpy(((pixels - mean) / std).transpose(2, 0, 1).copy()), torch.tensor(label)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an image of up to _MOST_PIXELS. Pillow's own limit, on which it raises an error, is a third of that."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with open(open_to_read(path), "rb") as content, Image.open(content) as file:
            if prod(file.size) > _MOST_PIXELS:
                width, height = file.size
                raise InvalidData(
                    f"{path}: has {width:,} × {height:,} pixels, and at most {_MOST_PIXELS:,} are read: scale it down"
                )
            yield file
    finally:
        Image.MAX_IMAGE_PIXELS = limit


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """Random images and labels for benchmarks; each sample depends on its index alone.

    Drawing a new image can take as long as training on it. So all images are windows of one noise buffer; they differ
    as long as there are fewer samples than an image has values.
    """

    def __init__(self, num_samples: int, *, image_size: int, num_channels: int, num_classes: int) -> None:
        self.num_samples = num_samples
        self.shape = (num_channels, image_size, image_size)
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(2 * prod(self.shape), generator=generator)
        self._labels = torch.randint(num_classes, (len(self._noise) // 2,), generator=generator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        num_values = len(self._labels)
        start = index % num_values
        return self._noise[start : start + num_values].view(self.shape), self._labels[start]

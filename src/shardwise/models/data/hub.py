"""Reads a Hugging Face dataset, by name or from a folder that `save_to_disk` wrote, as (input, target) samples."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.base.errors import InvalidData, MissingExtra


class HubDataset(Dataset[tuple[Tensor, Tensor]]):
    """Two columns of a `datasets.Dataset`: the input and the target."""

    def __init__(self, reference: str, *, split: str, input_column: str, target_column: str) -> None:
        try:
            import datasets
        except ImportError:
            raise MissingExtra.of("datasets", needed_for=f"hf:{reference}", extra="hf") from None
        try:
            if Path(reference).is_dir():
                loaded = datasets.load_from_disk(reference)
                data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                data = datasets.load_dataset(reference, split=split)
        except (OSError, ValueError, KeyError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise InvalidData(f"hf:{reference}: has no split {split} to read ({first_line})") from error
        for column in (input_column, target_column):
            if column not in data.column_names:
                columns = ", ".join(data.column_names)
                raise InvalidData(f"hf:{reference}: has no column {column}; its columns are {columns}")
        self.input_column = input_column
        self.target_column = target_column
        self.data: Any = data.with_format("torch", columns=[input_column, target_column])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.data[index]
        return torch.as_tensor(row[self.input_column]), torch.as_tensor(row[self.target_column])

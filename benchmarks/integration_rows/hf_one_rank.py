"""What two ranks have begun, one rank finishes: a Trainer's checkpoint on another number of ranks. One rank."""

import json
import shutil

import torch
from comparison import Trained, asked, distance
from hf_rows import CLIPPED, EXPECTED, RESUMED, make_trainer


def main() -> None:
    folder, strategies = asked()
    stock = torch.load(folder / EXPECTED)
    distances = {}
    for strategy in strategies:
        begun = folder / RESUMED / strategy
        for path in begun.glob("checkpoint-*"):
            if path.name != "checkpoint-3":
                shutil.rmtree(path)
        # As many samples per step as on two ranks.
        trainer, losses = make_trainer(strategy, begun, per_device_train_batch_size=4, **CLIPPED)
        trainer.train(resume_from_checkpoint=True)
        ours = Trained(numbers=[], weights={name: value.clone() for name, value in trainer.model.state_dict().items()})
        assert len(losses.numbers) == 3, losses.numbers
        distances[strategy] = distance(ours, Trained(numbers=[], weights=stock))
    row = {"bound": 1e-6, "distance": distances}
    (folder / "found.json").write_text(json.dumps({"Trainer, begun on 2 ranks and finished on 1": row}))


if __name__ == "__main__":
    main()

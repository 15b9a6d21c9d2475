"""Published trainings of BERT and GPT-2 in 2021: NVIDIA's DDP from 1 to 256 A100s, and DeepSpeed's ZeRO on 16 V100s."""

import re
from collections.abc import Iterator
from pathlib import Path

from published_rows import LeftOut, Row, cluster_text, csv_rows, own_model

from shardwise.plan import Plan


def bert(path: Path) -> Iterator[Row | LeftOut]:
    """BERT-Large's pretraining on DGX A100s: torch DDP, gradients reduced once per step, LAMB (taken for Adam).

    fp16 with autocast, or TF32. Of each sample 20 of its 128 tokens are predicted. Their fused layer norms, and gelu
    with its bias, count as torch's.
    """
    for row in csv_rows(path):
        if not row["source"].startswith("NVIDIA/DeepLearningExamples"):
            continue
        if row["seq"] != "128":
            # DATASET2 of its run scripts is phase2/bin_size_64.
            what = f"{row['gpus']} x A100, {row['seq']} tokens, {row['precision']}"
            reason = "its samples are in bins by their length, of which only the longest is given"
            yield LeftOut(table="BERT-Large", what=what, reason=reason)
            continue
        is_tf32 = row["precision"] == "tf32"
        passes = re.search(r"GA (\d+)", row["notes"])
        assert passes is not None
        yield Row(
            table="BERT-Large, DDP",
            model=own_model("bert_pretraining"),
            cluster=cluster_text("a100-80gb", num_gpus=int(row["gpus"]), fabric="ib-8x200"),
            plan=Plan(
                strategy="ddp",
                engine="torch",
                precision="fp32" if is_tf32 else "fp16",
                micro_batch=int(row["micro_batch"]),
                accumulate=int(passes[1]),
            ),
            optimizer="adam",
            per_s=float(row["value"]),
            software="2023",
            matmul="high" if is_tf32 else "highest",
        )


_MODELS = {
    "gpt2": "gpt2_124m",
    "gpt2-medium": "gpt2_medium",
    "gpt2-large": "gpt2_large",
    "gpt2-xl": "gpt2_xl",
    "bert-large-uncased": "bert_large",
    "bert-base": "bert_base",
    "distilbert": "distilbert",
}
_STRATEGIES = {"ZeRO-0": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "fsdp"}


def deepspeed(path: Path) -> Iterator[Row | LeftOut]:
    """GPT-2 and BERT on a DGX-2 (16 V100-32GB): ZeRO-0 to -3 as our engine would do them, by DeepSpeed's own timers."""
    for row in csv_rows(path):
        if not row["source"].startswith("deepspeedai"):
            continue
        if "autotuner" not in row["notes"]:
            what = f"{row['model']}, {row['strategy']}, {row['micro_batch']} of {row['seq']} tokens"
            reason = "end to end: with the loading of data, for which the same trainings take up to 46% longer"
            yield LeftOut(table="DeepSpeed", what=what, reason=reason)
            continue
        yield Row(
            table="ZeRO on 16 V100, DeepSpeed",
            model=own_model(_MODELS[row["model"]]),
            cluster="16xv100-32gb",
            plan=Plan(
                strategy=_STRATEGIES[row["strategy"]],
                precision=row["precision"],
                # DeepSpeed reduces in the dtype that computes.
                reduce_dtype=row["precision"],
                micro_batch=int(row["micro_batch"]),
            ),
            optimizer="adamw",
            per_s=float(row["value"]),
            software="2023",
            foreign="deepspeed",
        )

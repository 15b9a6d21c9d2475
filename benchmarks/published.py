"""Measured step times as rows: our own on one H200, and tables that others published.

docs/measured-planner.md names them.

Each reader says what its table's trainings are taken for; published_llama.py holds those of Llama.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from memory_predictions import AS_MEASURED
from published_llama import adapters, ibm_and_torchtitan, torchtune
from published_rows import LeftOut, Row, cluster_text, csv_rows, own_model

from shardwise.plan import Plan

MEASURED = Path(__file__).parent / "results" / "step_times_h200.json"
_TEXT_MODELS = {
    "gpt2": "gpt2_124m",
    "gpt2-medium": "gpt2_medium",
    "gpt2-large": "gpt2_large",
    "gpt2-xl": "gpt2_xl",
    "bert-large-uncased": "bert_large",
    "bert-base": "bert_base",
    "distilbert": "distilbert",
}


def measured(path: Path) -> Iterator[Row]:
    """One rank on an H200: the engines' step times."""
    for row in json.loads(path.read_text())["rows"]:
        if row["error"] is not None:
            continue
        plan = Plan(
            **{key: row[key] for key in ("strategy", "precision", "recompute", "engine")},
            capture="off",
            micro_batch=row["batch"],
            **AS_MEASURED,
        )
        engine = "ours, eager" if row["engine"] == "shardwise" else "torch"
        yield Row(
            table=f"{engine}, {row['strategy']}",
            model=row["model"],
            cluster="1xh200",
            plan=plan,
            optimizer="adamw",
            per_s=row["batch"] / row["step_seconds"],
            length=row["seq"],
            block_steps=row["steps_per_block"],
        )


def llm_foundry(path: Path) -> Iterator[Row | LeftOut]:
    """MPT under Composer's FSDP with mixed_precision PURE: gathers and reduces in bf16, every micro-batch reduces."""
    nodes = {"a100_80gb": "a100-80gb@roce-8x200", "h100_80gb": "h100-80gb@roce-8x400"}
    for row in csv_rows(path):
        if row["precision"] == "amp_fp8":
            yield LeftOut(table="MPT", what=f"{row['model']}, {row['seq_len_tokens']} tokens", reason="fp8")
            continue
        kind, _, fabric = nodes[row["gpu_type"]].partition("@")
        plan = Plan(
            strategy="fsdp",
            precision="bf16",
            reduce_dtype="bf16",
            engine="torch",
            recompute="full" if row["activation_checkpointing"] == "True" else "none",
            micro_batch=int(row["micro_batch_size_seqs_per_gpu"]),
            accumulate=int(row["grad_accum_steps"]),
            accumulate_reduced=True,
        )
        yield Row(
            table="MPT, FSDP",
            model=f"mpt-{row['model']}",
            cluster=cluster_text(kind, num_gpus=int(row["num_gpus"]), fabric=fabric),
            plan=plan,
            seq=int(row["seq_len_tokens"]),
            optimizer="adamw",
            per_s=float(row["throughput_tokens_per_s_per_gpu"]),
            software="2023",
        )


def resnet(path: Path) -> Iterator[Row | LeftOut]:
    """ResNet-50 under DDP, or DeepSpeed without ZeRO, on nodes of four; fp32 as torch has it, or autocast in fp16."""
    kinds = {"mahti": ("a100-40gb", "ib-2x200"), "puhti": ("v100-32gb", "ib-2x100")}
    for row in csv_rows(path):
        other = not row["strategy"].startswith(("DDP", "DeepSpeed")) or "resnet50" not in row["model"]
        reasons = {
            "it did not run": row["outcome"] != "ok",
            "the links of the cluster are not known, or its devices not in the table": row["cluster"] not in kinds,
            "not ResNet-50 under DDP": other,
        }
        if any(reasons.values()):
            what = f"{row['benchmark']}, {row['gpus']} x {row['gpu']} of {row['cluster']}, {row['date']}"
            reason = next(reason for reason, applies in reasons.items() if applies)
            yield LeftOut(table="ResNet-50", what=what, reason=reason)
            continue
        kind, fabric = kinds[row["cluster"]]
        gpus, nodes = int(row["gpus"]), int(row["nodes"])
        precision = "fp16" if "fp16" in row["precision"] else "fp32"
        yield Row(
            table="ResNet-50, DDP",
            model="resnet50",
            cluster=cluster_text(kind, num_gpus=gpus, fabric=fabric, per_node=gpus // nodes),
            plan=Plan(strategy="ddp", precision=precision, engine="torch", micro_batch=int(row["batch_size_per_gpu"])),
            optimizer="sgd",
            per_s=float(row["throughput"]),
            software="2023",
        )


def lightning(path: Path) -> Iterator[Row | LeftOut]:
    """A transformer of 1 B parameters on two A100-40GB in fp32; FSDP's strategies as fully_shard has them."""
    strategies = {"DDP": "ddp", "FSDP SHARD_GRAD_OP": "shard_grad_op", "FSDP FULL_SHARD": "fsdp"}
    for row in csv_rows(path):
        if row["strategy"] not in strategies:
            yield LeftOut(table="Transformer 1B", what=row["strategy"], reason="no strategy of the planner")
            continue
        yield Row(
            table=f"Transformer 1B, {row['framework'].partition(' ')[0]}",
            model=own_model("transformer_1b"),
            cluster="2xa100-40gb",
            plan=Plan(strategy=strategies[row["strategy"]], engine="torch", micro_batch=1),
            # torch.optim.Adam takes the foreach one by default.
            optimizer="adamw-foreach",
            per_s=2 * float(row["iterations_per_s"] or 1 / float(row["iteration_time_s"])),
            software="2023",
            system="torch-ddp",
            peak_bytes=float(row["memory_mb"]) * 2**20,
        )


def timm(path: Path) -> Iterator[Row]:
    """Vision models of the catalogue on one RTX 3090, with autocast in fp16."""
    sizes = (("tiny", 16), ("small", 16), ("base", 16), ("large", 16), ("huge", 14))
    names = {f"vit_{size}_patch{patch}_224": f"vit-{size}" for size, patch in sizes}
    names |= {f"resnet{number}": f"resnet{number}" for number in (18, 34, 50)}
    for row in csv_rows(path):
        if row["model"] in names and row["train_img_size_px"] == "224":
            yield Row(
                table="timm, one GPU",
                model=names[row["model"]],
                cluster="1xrtx-3090",
                plan=Plan(strategy="ddp", precision="fp16", engine="torch", micro_batch=int(row["train_batch_size"])),
                optimizer="sgd",
                per_s=float(row["train_samples_per_s"]),
                software="2023",
            )


def bert(path: Path) -> Iterator[Row | LeftOut]:
    """BERT-Large's pretraining on DGX A100s: torch DDP, gradients reduced once per step, LAMB (taken for Adam).

    fp16 with autocast, or TF32. Of each sample 20 of its 128 tokens are predicted. Their fused layer norms, and gelu
    with its bias, count as torch's.
    """
    for row in csv_rows(path, source="NVIDIA/DeepLearningExamples"):
        if row["seq"] != "128":
            # DATASET2 of its run scripts is phase2/bin_size_64.
            what = f"{row['gpus']} x A100, {row['seq']} tokens, {row['precision']}"
            reason = "its samples are in bins by their length, of which only the longest is given"
            yield LeftOut(table="BERT-Large", what=what, reason=reason)
            continue
        is_tf32 = row["precision"] == "tf32"
        plan = Plan(
            strategy="ddp",
            engine="torch",
            precision="fp32" if is_tf32 else "fp16",
            micro_batch=int(row["micro_batch"]),
            accumulate=int(re.findall(r"GA (\d+)", row["notes"])[0]),
        )
        yield Row(
            table="BERT-Large, DDP",
            model=own_model("bert_pretraining"),
            cluster=cluster_text("a100-80gb", num_gpus=int(row["gpus"]), fabric="ib-8x200"),
            plan=plan,
            optimizer="adam",
            per_s=float(row["value"]),
            software="2023",
            matmul="high" if is_tf32 else "highest",
        )


def deepspeed(path: Path) -> Iterator[Row | LeftOut]:
    """GPT-2 and BERT on a DGX-2 (16 V100-32GB): ZeRO-0 to -3 as our engine would do them, by DeepSpeed's own timers."""
    strategies = {"ZeRO-0": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "fsdp"}
    for row in csv_rows(path, source="deepspeedai"):
        if "autotuner" not in row["notes"]:
            what = f"{row['model']}, {row['strategy']}, {row['micro_batch']} of {row['seq']} tokens"
            reason = "end to end: with the loading of data, for which the same trainings take up to 46% longer"
            yield LeftOut(table="DeepSpeed", what=what, reason=reason)
            continue
        precision = row["precision"]
        yield Row(
            table="ZeRO on 16 V100, DeepSpeed",
            model=own_model(_TEXT_MODELS[row["model"]]),
            cluster="16xv100-32gb",
            # DeepSpeed reduces in the dtype that computes.
            plan=Plan(
                strategy=strategies[row["strategy"]],
                precision=precision,
                reduce_dtype=precision,
                micro_batch=int(row["micro_batch"]),
                piece_bytes=0,
            ),
            optimizer="adamw",
            per_s=float(row["value"]),
            software="2023",
            system="deepspeed",
        )


TABLES = (
    ("llm_foundry_mpt_fsdp.csv", llm_foundry),
    ("resnet50_ddp_scaling.csv", resnet),
    ("lightning_docs_memory.csv", lightning),
    ("timm_train_rtx3090.csv", timm),
    ("fsdp_ibm_torchtitan.csv", ibm_and_torchtitan),
    *(("more_ddp_zero_lora.csv", reader) for reader in (bert, deepspeed, adapters, torchtune)),
)


def read(folder: Path) -> tuple[list[Row], list[LeftOut]]:
    """Return the rows that the planner can express, and those that it cannot, with the reason."""
    found = [one for name, reader in TABLES for one in reader(folder / name)]
    return [one for one in found if isinstance(one, Row)], [one for one in found if isinstance(one, LeftOut)]

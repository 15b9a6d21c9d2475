"""Measured step times as rows: our own on one H200, and tables that others published (docs/planner.md names them).

Each reader says what its table's trainings are taken for; published_llama.py and published_text.py hold more of them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from published_llama import adapters, ibm_and_torchtitan, torchtune
from published_rows import LeftOut, Row, csv_rows, own_model
from published_text import bert, deepspeed

from shardwise.plan import Plan

MEASURED = Path(__file__).parent / "results" / "step_times_h200.json"


def measured(path: Path) -> Iterator[Row]:
    """One rank on an H200: the engines' step times."""
    for row in json.loads(path.read_text())["rows"]:
        if row["error"] is not None:
            continue
        engine, how = row["engine"], "captured" if row["captured"] else "eager"
        yield Row(
            table=f"{'ours, ' + how if engine == 'shardwise' else 'torch'}, {row['strategy']}",
            model=row["model"],
            cluster="1xh200",
            plan=Plan(
                strategy=row["strategy"],
                precision=row["precision"],
                recompute=row["recompute"],
                engine=engine,
                capture=row["captured"],
                micro_batch=row["batch"],
            ),
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
        num_gpus = int(row["num_gpus"])
        kind = nodes[row["gpu_type"]]
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
            cluster=f"{num_gpus // 8}x8x{kind}" if num_gpus > 8 else f"8x{kind.partition('@')[0]}",
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
        reason = _why_not_resnet(row, kinds)
        if reason:
            what = f"{row['benchmark']}, {row['gpus']} x {row['gpu']} of {row['cluster']}, {row['date']}"
            yield LeftOut(table="ResNet-50", what=what, reason=reason)
            continue
        kind, fabric = kinds[row["cluster"]]
        gpus, nodes = int(row["gpus"]), int(row["nodes"])
        precision = "fp16" if "fp16" in row["precision"] else "fp32"
        yield Row(
            table="ResNet-50, DDP",
            model="resnet50",
            cluster=f"{nodes}x{gpus // nodes}x{kind}@{fabric}" if nodes > 1 else f"{gpus}x{kind}",
            plan=Plan(strategy="ddp", precision=precision, engine="torch", micro_batch=int(row["batch_size_per_gpu"])),
            optimizer="sgd",
            per_s=float(row["throughput"]),
            software="2023",
        )


def _why_not_resnet(row: dict[str, str], kinds: Mapping[str, object]) -> str:
    if row["outcome"] != "ok":
        return "it did not run"
    if row["cluster"] not in kinds:
        return "the links of the cluster are not known, or its devices not in the table"
    if not row["strategy"].startswith(("DDP", "DeepSpeed")) or "resnet50" not in row["model"]:
        return "not ResNet-50 under DDP"
    return ""


def lightning(path: Path) -> Iterator[Row | LeftOut]:
    """A transformer of 1 B parameters on two A100-40GB in fp32; FSDP's strategies as fully_shard has them."""
    strategies = {"DDP": "ddp", "FSDP SHARD_GRAD_OP": "shard_grad_op", "FSDP FULL_SHARD": "fsdp"}
    for row in csv_rows(path):
        if row["strategy"] not in strategies:
            yield LeftOut(table="Transformer 1B", what=row["strategy"], reason="no strategy of the planner")
            continue
        steps_per_s = float(row["iterations_per_s"] or 1 / float(row["iteration_time_s"]))
        yield Row(
            table=f"Transformer 1B, {row['framework'].partition(' ')[0]}",
            model=own_model("transformer_1b"),
            cluster="2xa100-40gb",
            plan=Plan(strategy=strategies[row["strategy"]], engine="torch", micro_batch=1),
            optimizer="adam",
            per_s=2 * steps_per_s,
            software="2023",
        )


def timm(path: Path) -> Iterator[Row]:
    """Vision models of the catalogue on one RTX 3090, with autocast in fp16."""
    names = {f"vit_{size}_patch{patch}_224": f"vit-{size}" for size, patch in _VITS}
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


_VITS = (("tiny", 16), ("small", 16), ("base", 16), ("large", 16), ("huge", 14))


TABLES = (
    ("llm_foundry_mpt_fsdp.csv", llm_foundry),
    ("resnet50_ddp_scaling.csv", resnet),
    ("lightning_docs_memory.csv", lightning),
    ("timm_train_rtx3090.csv", timm),
    ("fsdp_ibm_torchtitan.csv", ibm_and_torchtitan),
    ("more_ddp_zero_lora.csv", bert),
    ("more_ddp_zero_lora.csv", deepspeed),
    ("more_ddp_zero_lora.csv", adapters),
    ("more_ddp_zero_lora.csv", torchtune),
)


def read(folder: Path) -> tuple[list[Row], list[LeftOut]]:
    """The rows that the planner can express, and those that it cannot, with the reason."""
    found = [one for name, reader in TABLES for one in reader(folder / name)]
    return [one for one in found if isinstance(one, Row)], [one for one in found if isinstance(one, LeftOut)]

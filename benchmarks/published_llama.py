"""Published trainings of Llama: with FSDP (IBM, torchtitan), with adapters (litgpt, NeMo Automodel), torchtune's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published_rows import LeftOut, Row, cluster_text, csv_rows, own_model

from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program.spec.losses import CHUNKED, USUAL

_KINDS = {"A100 80GB": "a100-80gb", "H100 80GB": "h100-80gb"}
_MODELS = {
    "Llama 3 8B": "llama-3.1-8b",
    "Llama 3 70B": "llama-3.1-70b",
    "Llama 2 13B": "llama-2-13b",
    "Llama 2 70B": "llama-2-70b",
    "Llama2 7b": "llama-2-7b",
    "Llama2 13b": "llama-2-13b",
    "Llama2 34b": own_model("llama_2_34b"),
    "Llama2 70b": "llama-2-70b",
}
# Gb/s of a node, as the rows have it → links.
_FABRICS = {"400": "roce-4x100", "800": "roce-8x100"}
_EVERY_SECOND = {"blocks.*[13579]": "full"}
_TORCHTITAN, _LITGPT = (Path(__file__).parent / f"{name}_models.py" for name in ("torchtitan", "litgpt"))
_LITGPT_MODELS = {
    "phi-1.5": "phi_15",
    "StableLM Alpha 3B": "stablelm_3b",
    "Llama 2 7B": "llama_2_7b",
    "Llama 2 13B": "llama_2_13b",
}
# How IBM's `selective` is taken, by the model: as few blocks as let it fit.
_SELECTIVE = {
    "Llama2 13b": {"blocks.*[05]": "full"},
    "Llama2 34b": _EVERY_SECOND,
    "Llama2 70b": {"blocks.*[!05]": "full"},
}
_NATIVE = {"strategy": "ddp", "engine": "torch", "precision": "native"}


def ibm_and_torchtitan(path: Path) -> Iterator[Row | LeftOut]:
    """fully_shard, whatever their own FSDP was."""
    for row in csv_rows(path):
        name = f"{row['model']}, {row['num_gpus']} x {row['gpu']}, {row['checkpoint'] or 'as needed'}"
        if row["outcome"] == "ok" and not row["tokens_per_s_per_gpu"]:
            yield LeftOut(table=row["set"], what=name, reason="no throughput is given")
        elif row["set"] != "ibm":
            yield _torchtitan(row)
        elif row["source"].split()[-2] not in _FABRICS:
            yield LeftOut(table=row["set"], what=name, reason="what links the nodes is not given")
        else:
            yield _ibm(row)


def _ibm(row: dict[str, str]) -> Row:
    """Reduces in bf16; HSDP shards within a node; `selective` recomputes some blocks, nobody says how many: as few as
    let it fit.
    """
    how: dict[str, Any] = {
        "full": {"recompute": "full"},
        "selective": {"recompute_overrides": _SELECTIVE.get(row["model"], {})},
        "none": {},
    }[row["checkpoint"]]
    num_gpus, model, compiled = int(row["num_gpus"]), _MODELS[row["model"]], row["compile"] == "True"
    plan = Plan(
        strategy="fsdp",
        engine="torch",
        precision="bf16",
        reduce_dtype="bf16",
        mesh=Mesh(replicate=num_gpus // 8, shard=8) if row["strategy"] == "HSDP" else None,
        micro_batch=int(row["micro_batch"]),
        compile="inductor" if compiled else "none",
        **how,
    )
    return Row(
        table="Llama, IBM",
        model=model,
        cluster=cluster_text(_KINDS[row["gpu"]], num_gpus=num_gpus, fabric=_FABRICS[row["source"].split()[-2]]),
        plan=plan,
        length=None if model.startswith("python:") else int(row["seq"]),
        optimizer="adamw",
        per_s=_samples_per_s(row),
        software="2024",
        is_compiled=compiled,
        ran=row["outcome"] == "ok",
    )


def _torchtitan(row: dict[str, str]) -> Row:
    """torchtitan's own model (torchtitan_models.py); `selective layer` recomputes every second block.

    Its AdamW was not the fused one (pull request 355). Its norms were: a kernel of its own, the default of its configs
    in April 2024 (181, 297), without which 13B that recomputes nothing would not fit. On an A100, norms are all
    that tells today's software from that of 2024 (hardware/software.toml). Its nodes are taken to have 8 × 200 Gb/s,
    which nobody says.
    """
    how: dict[str, Any] = {
        "full": {"recompute": "full"},
        "selective layer": {"recompute_overrides": _EVERY_SECOND},
        "selective op": {},
        "none": {},
    }[row["checkpoint"]]
    is_op = row["checkpoint"] == "selective op"
    model = _MODELS[row["model"]]
    function = re.sub("[-.]", "_", model.replace("-3.1", "-31")) + ("_op" if is_op else "")
    plan = Plan(strategy="fsdp", engine="torch", precision="bf16", micro_batch=int(row["micro_batch"]), **how)
    return Row(
        table="Llama, torchtitan",
        model=own_model(function, file=_TORCHTITAN),
        cluster=cluster_text(_KINDS[row["gpu"]], num_gpus=int(row["num_gpus"]), fabric="roce-8x200"),
        plan=plan,
        optimizer="adamw-foreach",
        per_s=_samples_per_s(row),
        ran=row["outcome"] == "ok",
        split_as=(model, int(row["seq"]), "selective" if is_op else plan.recompute),
    )


def _samples_per_s(row: dict[str, str]) -> float | None:
    """Of all GPUs; None where it did not run."""
    if row["outcome"] != "ok":
        return None
    return float(row["tokens_per_s_per_gpu"]) * int(row["num_gpus"]) / int(row["seq"])


def adapters(path: Path) -> Iterator[Row | LeftOut]:
    """Low-rank adapters on a frozen Llama in bf16: litgpt's peaks (its longest sample counts) and Automodel's speed."""
    readers = {
        "Lightning-AI/litgpt": ("litgpt", _why_not_litgpt, _litgpt),
        "NVIDIA-NeMo/Automodel": ("Automodel", _why_not_automodel, _automodel),
        "NVIDIA-NeMo/Megatron-Bridge": ("Megatron-Bridge", lambda row: "fp8", _automodel),
    }
    for row in csv_rows(path):
        for source, (table, why_not, read) in readers.items():
            if row["source"].startswith(source):
                what = f"{row['model']}, {row['gpus']} x {row['gpu']}, {row['precision']}, {row['micro_batch']}"
                reason = why_not(row)
                left_out = LeftOut(table=table, what=f"{what}: {row['metric']}", reason=reason)
                yield left_out if reason else read(row)


def _why_not_litgpt(row: dict[str, str]) -> str:
    reasons = {
        "a peak of more than the whole model on each GPU: its FSDP had not sharded it yet, or not all of it": (
            row["gpus"] != "1"
        ),
        "the lengths of its samples vary, and only the longest is given": row["metric"] != "peak_memory",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _litgpt(row: dict[str, str]) -> Row:
    """Its own models (litgpt_models.py), quantised where the base is."""
    _, _, quantised = row["precision"].partition("bnb.")
    name = next(name for start, name in _LITGPT_MODELS.items() if row["model"].startswith(start))
    return Row(
        table="QLoRA, litgpt" if quantised else "LoRA, litgpt",
        model=own_model("_".join(filter(None, (name, quantised.replace("-", "_")))), file=_LITGPT),
        cluster="1xa100-40gb",
        plan=Plan(**_NATIVE, micro_batch=int(row["micro_batch"])),
        optimizer="adamw",
        per_s=None,
        software="2023",
        system="torch",
        peak_bytes=float(row["value"]) * 1e9,
    )


def _why_not_automodel(row: dict[str, str]) -> str:
    for word, reason in (("tp", "tensor-parallel"), ("cp", "context-parallel")):
        if word in row["mesh"].split():
            return reason
    return "the same row as tokens per second" if row["metric"] == "step_time" else ""


def _automodel(row: dict[str, str]) -> Row:
    passes = int(re.findall(r"GA (\d+)", row["notes"])[0])
    return Row(
        table="LoRA, Automodel",
        model=own_model("qwen_25_7b_lora" if row["model"].startswith("Qwen") else "llama_31_8b_lora"),
        cluster="1xh100-80gb",
        plan=Plan(**_NATIVE, micro_batch=int(row["micro_batch"]), accumulate=passes),
        optimizer="adamw",
        per_s=float(row["value"]) / int(row["seq"]),
    )


# torchtune's table adds one flag after another; these are the last of the rows that are expressed, with their loss.
_FLAGS = {
    "+ packed": USUAL,
    "+ compile": USUAL,
    "+ chunked cross entropy": CHUNKED,
    "+ activation checkpointing": CHUNKED,
}
_NOT_EXPRESSED = {
    "baseline": "not packed: the lengths of its samples vary",
    "+ optimizer": "the optimizer steps in backward",
    "+ activation offloading": "the optimizer steps in backward",
    "+ 8-bit": "8-bit AdamW",
    "LoRA": "whether it recomputes is not given",
    "QLoRA": "quantised weights",
}


def torchtune(path: Path) -> Iterator[Row | LeftOut]:
    """Llama 3.2 3B whole in bf16 on one A100-80GB."""
    found: dict[str, dict[str, str]] = {}
    for row in csv_rows(path, source="meta-pytorch/torchtune"):
        flag = row["strategy"].removeprefix("single device: ")
        reason = "its optimizer, and whether it recomputes, are the recipe's, and not given"
        if "Optimization flags" in row["source"]:
            reason = next((why for start, why in _NOT_EXPRESSED.items() if flag.startswith(start)), "")
            if flag in _FLAGS:
                found.setdefault(flag, {})[row["metric"]] = row["value"]
                continue
        what = f"{row['model']}, {row['gpus']} x {row['gpu']}, {row['strategy']}: {row['metric']}"
        yield LeftOut(table="torchtune", what=what, reason=reason)
    for flag, values in found.items():
        compiled = flag != "+ packed"
        recompute = "full" if "checkpointing" in flag else "none"
        yield Row(
            table="Llama 3B, torchtune",
            model=own_model("llama_32_3b" if compiled else "llama_32_3b_in_operations"),
            cluster="1xa100-80gb",
            plan=Plan(**_NATIVE, recompute=recompute, micro_batch=2, compile="inductor" if compiled else "none"),
            optimizer="adamw",
            per_s=float(values["throughput"]) / 4096,
            peak_bytes=float(values["peak_active"]) * 2**30,
            is_compiled=compiled,
            loss=_FLAGS[flag],
            system="torch",
            split_as=("llama_32_3b", None, recompute),
            software="2024",
        )

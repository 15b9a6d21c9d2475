"""A plan as manifests: a plain Job with one pod per machine, and a TrainJob for Kubeflow Trainer."""

from typing import Any

import yaml

from shardwise.interchange.exported import Exported, JobShape, comment, plan_text
from shardwise.plan import Plan

_NAME = "shardwise"
_PORT = 29500
_COMMAND = "-m shardwise train /config/train.toml --plan /plan/plan.toml --run /runs/shardwise"
_NO_IMAGE = "your-registry/your-image:tag"


def to_kubernetes(plan: Plan, shape: JobShape) -> Exported:
    left_out = []
    if not shape.image:
        left_out.append(f"image: replace {_NO_IMAGE} by an image with shardwise in it (--image)")
    left_out.append("/config/train.toml and /runs: mount your config and a volume that all machines share")
    head = ["kubectl apply -f plan-configmap.yaml -f FILE", *(f"To do: {line}" for line in left_out)]
    documents = {
        "plan-configmap.yaml": [_config_map(plan)],
        "job.yaml": [_service(), _job(shape)],
        "trainjob.yaml": [_train_job(shape)],
    }
    files = {
        name: comment(head) + yaml.safe_dump_all(manifests, sort_keys=False) for name, manifests in documents.items()
    }
    return Exported(files=files, left_out=tuple(left_out))


def _config_map(plan: Plan) -> dict[str, Any]:
    data = {"plan.toml": plan_text(plan)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{_NAME}-plan"}, "data": data}


def _service() -> dict[str, Any]:
    """Without an address of its own: pods find each other by name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {"clusterIP": "None", "selector": {"job-name": _NAME}},
    }


def _job(shape: JobShape) -> dict[str, Any]:
    """One pod per machine, numbered; the first one's name is where all ranks meet."""
    torchrun = (
        f"torchrun --nnodes {shape.num_nodes} --nproc-per-node {shape.ranks_per_node} "
        f"--node-rank $JOB_COMPLETION_INDEX --master-addr {_NAME}-0.{_NAME} --master-port {_PORT} {_COMMAND}"
    )
    container = {
        "name": "train",
        "image": shape.image or _NO_IMAGE,
        "command": ["bash", "-c", torchrun],
        "resources": _resources(shape),
        "volumeMounts": _mounts(),
    }
    pod = {"subdomain": _NAME, "restartPolicy": "Never", "containers": [container], "volumes": _volumes()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {
            "completions": shape.num_nodes,
            "parallelism": shape.num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 3 * shape.num_nodes,
            "template": {"spec": pod},
        },
    }


def _train_job(shape: JobShape) -> dict[str, Any]:
    """The runtime starts torchrun on each machine."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _NAME},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": shape.image or _NO_IMAGE,
                "numNodes": shape.num_nodes,
                "numProcPerNode": shape.ranks_per_node,
                "command": ["torchrun", *_COMMAND.split()],
                "resourcesPerNode": _resources(shape),
            },
            "runtimePatches": [_with_plan()],
        },
    }


def _with_plan() -> dict[str, Any]:
    """The plan in the containers of the runtime, whose job and container are both called node."""
    pod = {"volumes": _volumes(), "containers": [{"name": "node", "volumeMounts": _mounts()}]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"manager": "shardwise.dev/export", "trainingRuntimeSpec": spec}


def _resources(shape: JobShape) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": shape.ranks_per_node}} if shape.has_gpus else {}


def _mounts() -> list[dict[str, Any]]:
    return [{"name": "plan", "mountPath": "/plan"}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


def _volumes() -> list[dict[str, Any]]:
    return [
        {"name": "plan", "configMap": {"name": f"{_NAME}-plan"}},
        # Loaders hand batches over through shared memory, of which a container has 64 MiB otherwise.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]

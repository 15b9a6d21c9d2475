"""Writes a plan as Kubernetes manifests: a plain Job with one pod per machine, and a TrainJob for Kubeflow Trainer."""

from typing import Any

import yaml

from shardwise.interchange.exported import Exported, JobShape, file_header, plan_text
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
    header = file_header("kubectl apply -f plan-configmap.yaml -f FILE", *(f"To do: {line}" for line in left_out))
    config_map = _manifest("ConfigMap", name=f"{_NAME}-plan", data={"plan.toml": plan_text(plan)})
    # A service without an address: pods find each other by name.
    service = _manifest("Service", spec={"clusterIP": "None", "selector": {"job-name": _NAME}})
    documents = {
        "plan-configmap.yaml": [config_map],
        "job.yaml": [service, _job(shape)],
        "trainjob.yaml": [_train_job(shape)],
    }
    files = {name: header + yaml.safe_dump_all(inside, sort_keys=False) for name, inside in documents.items()}
    return Exported(files=files, left_out=tuple(left_out))


def _manifest(kind: str, *, version: str = "v1", name: str = _NAME, **content: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _job(shape: JobShape) -> dict[str, Any]:
    """Return a Job with one numbered pod per machine; all ranks meet at the name of the first pod."""
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
    spec = {
        "completions": shape.num_nodes,
        "parallelism": shape.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 3 * shape.num_nodes,
        "template": {"spec": pod},
    }
    return _manifest("Job", version="batch/v1", spec=spec)


def _train_job(shape: JobShape) -> dict[str, Any]:
    """Return a TrainJob, whose runtime starts torchrun on each machine."""
    trainer = {
        "image": shape.image or _NO_IMAGE,
        "numNodes": shape.num_nodes,
        "numProcPerNode": shape.ranks_per_node,
        "command": ["torchrun", *_COMMAND.split()],
        "resourcesPerNode": _resources(shape),
    }
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [_plan_patch()]}
    return _manifest("TrainJob", version="trainer.kubeflow.org/v1alpha1", spec=spec)


def _plan_patch() -> dict[str, Any]:
    """Return the patch that mounts the plan into the runtime's container; its job and container are called "node"."""
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
        # Loader processes pass batches through shared memory, of which a container has only 64 MiB by default.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]

"""Writes a plan as scripts that start ranks: torchrun.sh, or job.sbatch for SLURM.

They run `shardwise train`, or your own script.
"""

from shardwise.doors.interchange.exported import Exported, JobShape, plan_text
from shardwise.plan import Plan

_TORCHRUN = """#!/usr/bin/env bash
# {script}                        shardwise train train.toml, with the plan next to this file
# {script} my_script.py --my-args   your own script, which calls shardwise.Plan.load("plan.toml")
{usage}set -euo pipefail
plan="$(dirname "$0")/plan.toml"
if [ $# -eq 0 ]; then
  set -- -m shardwise train "${{CONFIG:-train.toml}}" --plan "$plan"
fi
# SIGUSR1, for instance of SLURM's --signal=USR1, is passed on to the ranks too: they save and end.
exec torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 {options} "$@"
"""
_SBATCH = """#!/usr/bin/env bash
# sbatch job.sbatch                            shardwise train train.toml, with the plan next to this file
# sbatch job.sbatch python my_script.py …      your own script; each task is one rank
#SBATCH --job-name=shardwise
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
# Two minutes before the time limit, and when the job is preempted: save a checkpoint. The same job then resumes.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
if [ $# -eq 0 ]; then
  set -- python -m shardwise train "${{CONFIG:-train.toml}}" --plan plan.toml --run "${{RUN:-runs/slurm}}"
fi
exec srun --kill-on-bad-exit=1 "$@"
"""


def to_torchrun(plan: Plan, shape: JobShape) -> Exported:
    usage, options = "", f"--standalone --nproc-per-node {shape.ranks_per_node}"
    if shape.num_nodes > 1:
        usage = "# On each machine, with the address of one of them: HEAD=node0 ./torchrun.sh\n"
        options = (
            f"--nnodes {shape.num_nodes} --nproc-per-node {shape.ranks_per_node} --rdzv-backend c10d "
            '--rdzv-endpoint "${HEAD:?the address of one of the machines}:${PORT:-29500}" --rdzv-id "${JOB:-shardwise}"'
        )
    text = _TORCHRUN.format(script="./torchrun.sh", usage=usage, options=f"{options} --max-restarts 3")
    return Exported(files={"torchrun.sh": text, "plan.toml": plan_text(plan)})


def to_slurm(plan: Plan, shape: JobShape) -> Exported:
    gpus = "#SBATCH --gpus-per-task=1\n" if shape.has_gpus else ""
    text = _SBATCH.format(nodes=shape.num_nodes, tasks=shape.ranks_per_node, gpus=gpus)
    return Exported(files={"job.sbatch": text, "plan.toml": plan_text(plan)})

"""Traces the model of a config.json in a process of its own: `python -m …trace_apart FOLDER SEQ`.

The file is a stranger's: its model may take any time and memory, or end the process. The limits below hold for each.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwise.errors import InvalidModel, ShardwiseError
from shardwise.launch.rank_process import end_with
from shardwise.report.planner_page.model_laws import model_data
from shardwise.sources import Source

_MOST_SECONDS = 180.0
_MOST_BYTES = 16 * 2**30


def trace_apart(config: bytes, *, seq: int) -> dict[str, Any]:
    """Return the data of the model, for the page. Raises InvalidModel if it cannot be made within the limits."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(config)
        found = Path(folder, "found.json")
        # -P: like our own command, without the working folder on the module path.
        command = [sys.executable, "-P", "-m", __name__, folder, str(seq)]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MOST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidModel(f"tracing this model takes longer than {_MOST_SECONDS:.0f} s") from error
        if not found.exists():
            raise InvalidModel(f"tracing this model ended its process (exit code {ended.returncode})")
        answer: dict[str, Any] = json.loads(found.read_bytes())
    if "error" in answer:
        raise InvalidModel(answer["error"])
    return answer


def main() -> None:
    end_with(os.getppid())
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    folder = Path(sys.argv[1])
    try:
        answer = model_data(Source(f"hf:{folder}", seq=int(sys.argv[2])).spec_for, name="", longest=None)
    except ShardwiseError as error:
        answer = {"error": str(error)}
    except Exception as error:
        # transformers takes any value for any key, and fails somewhere in its layers.
        why = " ".join(str(error).split())[:200]
        answer = {"error": f"the model of this config.json cannot be made ({type(error).__name__}: {why})"}
    (folder / "found.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

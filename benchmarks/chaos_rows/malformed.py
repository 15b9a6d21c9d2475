"""Row 15: configs, plans and clusters that cannot be."""

import random
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from chaos_rows.commands import command
from plans import bad_plan_files
from scorecard import Asked, Tally

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.keys import reference
from shardwise.hardware import cluster_of
from shardwise.training.config.config import SECTIONS
from shardwise.training.config.config_section import ConfigSection

CONFIG = """[task]
model = "gpt-tiny"
dataset = "stdlib"
[plan]
micro_batch = 2
[train]
steps = 5
"""
CLUSTER_FILE = """num_nodes = 2
devices_per_node = 4
[device]
like = "h100"
[fabric]
like = "ib-400"
"""
CLUSTERS = ("8xh100-80gb", "16x8xa100-40gb@ib-8x200", "4xcpu", "2x8xh100@ib-8x400")
# No key of a config takes any of these.
NO_VALUES = ("[{}]", "1979-05-27", "{a = {b = 1}}", '"a\\nb"', "[[[]]]", "07:32:00")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A command that must be refused; `content` is what the file in it holds."""

    what: str
    arguments: tuple[str, ...]
    content: bytes | None = None
    may_point: bool = False
    """A cluster in words may be shown below the line, with a mark at the character that is wrong."""


def spoiled(text: str, *, chance: random.Random) -> str:
    """One to three characters removed, changed or added."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        kind = chance.choice(("remove", "change", "add"))
        letter = chance.choice(string.printable)
        text = text[:at] + (letter if kind != "remove" else "") + text[at + (kind != "add") :]
    return text


def bad_plans(path: Path) -> Iterator[Mistake]:
    for what, content in bad_plan_files(330):
        yield Mistake(what=f"plan: {what}", arguments=("doctor", str(path)), content=content)


def bad_configs(path: Path, *, chance: random.Random) -> Iterator[Mistake]:
    """Values that no key takes, keys that are not there, files that are cut in the middle of a text."""
    train = ("train", str(path), "--run", str(path.parent / "run"))
    keys = [
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        if issubclass(section, ConfigSection)
        for key, _, _ in reference(section)
    ]
    for key in keys:
        for value in NO_VALUES:
            yield Mistake(
                what=f"{key} = {value}", arguments=(*train, "--set", f"{key}={value}"), content=CONFIG.encode()
            )
        at = chance.randrange(len(key) - 1)
        typo = key[:at] + chance.choice("qxz") + key[at:]
        yield Mistake(what=f"{typo} = 1", arguments=(*train, "--set", f"{typo}=1"), content=CONFIG.encode())
    for _ in range(100):
        at = chance.randrange(len(CONFIG))
        garbage = bytes(chance.choice(b'="[]{}\\\0\xff\n') for _ in range(chance.randint(3, 40)))
        content = CONFIG[:at].encode() + b'\n"' + garbage
        yield Mistake(what=f"cut at {at}, then {garbage!r}", arguments=train, content=content)


def bad_clusters(path: Path, *, chance: random.Random) -> Iterator[Mistake]:
    """Words of a cluster that are spoiled, and files. What turns out to be another cluster is not a mistake."""
    while True:
        if chance.random() < 0.7:
            text = spoiled(chance.choice(CLUSTERS), chance=chance)
            if not _is_cluster(text) and not text.startswith("-"):
                arguments = ("plan", "gpt2-124m", "--cluster", text)
                yield Mistake(what=f"cluster {text!r}", arguments=arguments, may_point=True)
        else:
            content = spoiled(CLUSTER_FILE, chance=chance)
            path.write_text(content)
            if not _is_cluster(str(path)):
                arguments = ("plan", "gpt2-124m", "--cluster", str(path))
                yield Mistake(what=f"cluster file {content!r}", arguments=arguments, content=content.encode())


def _is_cluster(text: str) -> bool:
    try:
        cluster_of(text)
    except ShardwiseError:
        return False
    return True


def mistakes(asked: Asked) -> Tally:
    tally = Tally()
    plan, config, cluster = (asked.folder / name for name in ("plan.toml", "config.toml", "cluster.toml"))
    all_of_them = [
        *bad_plans(plan),
        *bad_configs(config, chance=asked.chance),
        *islice(bad_clusters(cluster, chance=asked.chance), 320),
    ]
    for mistake in all_of_them:
        with tally.trying(mistake.what):
            check_refused(mistake)
    for mistake in asked.chance.sample(all_of_them, asked.pick(short=6, long=40)):
        with tally.trying(f"in a process of its own: {mistake.what}"):
            check_refused(mistake, own_process=True)
    assert not (asked.folder / "run").exists(), "a refused config left a run folder"
    return tally


def check_refused(mistake: Mistake, *, own_process: bool = False) -> None:
    """Exit code 2, one line on standard error, nothing on standard output."""
    if mistake.content is not None:
        path = next(Path(word) for word in mistake.arguments if word.endswith(".toml"))
        path.write_bytes(mistake.content)
    if own_process:
        words = [sys.executable, "-m", "shardwise", *mistake.arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        answer = command(*mistake.arguments)
        code, out, err = answer.code, answer.out, answer.err
    assert code == 2, f"exit code {code}: {err}"
    assert out == "", f"written to standard output: {out}"
    assert "Traceback" not in err, err
    assert len(err.splitlines()) in ((1, 3) if mistake.may_point else (1,)), err

"""The progress of a run: a bar on a terminal, plain lines in a log file."""

from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shardwise.base.vocabulary.printable import printable_lines
from shardwise.base.vocabulary.quantities import MIB, seconds_text, significant
from shardwise.training.loop.metrics import StepMetrics, Writer


def progress_on(console: Console, *, first_step: int, num_steps: int) -> Writer:
    kind = ProgressBar if console.is_terminal else PlainLines
    return kind(console, first_step=first_step, num_steps=num_steps)


class PlainLines:
    """A line for each group of steps that were read together, and one for each evaluation."""

    def __init__(self, console: Console, *, first_step: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps

    def write(self, steps: Sequence[StepMetrics]) -> None:
        last = steps[-1]
        _say_notes(self._console, steps)
        parts = [f"loss {last.loss:.4f}"]
        parts += [] if last.grad_norm is None else [f"grad norm {last.grad_norm:.3g}"]
        parts += [f"lr {last.lr:.2e}", f"{significant(last.samples_per_s)} samples/s"]
        parts += [] if last.tokens_per_s is None else [f"{significant(last.tokens_per_s)} tokens/s"]
        heading = f"step {last.step}/{self._num_steps}"
        say(self._console, "  ".join([heading, *parts, _peak_and_rest(last, num_steps=self._num_steps)]))
        _say_evaluation(self._console, last, heading=heading)

    def close(self) -> None:
        pass


class ProgressBar:
    """One line that moves; evaluations stay above it."""

    def __init__(self, console: Console, *, first_step: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        # Short enough for 80 columns.
        bar = BarColumn(bar_width=10)
        columns = (TextColumn("step {task.completed}/{task.total}"), bar, TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("", total=num_steps, completed=first_step)
        self._progress.start()

    def write(self, steps: Sequence[StepMetrics]) -> None:
        last = steps[-1]
        _say_notes(self._console, steps)
        speed = f"{significant(last.samples_per_s)} samples/s"
        description = f"loss {last.loss:.4f}  {speed}  {_peak_and_rest(last, num_steps=self._num_steps)}"
        self._progress.update(self._bar, completed=last.step, description=description)
        _say_evaluation(self._console, last, heading=f"step {last.step}")

    def close(self) -> None:
        self._progress.stop()


def _peak_and_rest(metrics: StepMetrics, *, num_steps: int) -> str:
    left = timedelta(seconds=round(metrics.seconds * (num_steps - metrics.step)))
    return f"peak {significant(metrics.peak_bytes / MIB.size)} {MIB.name} ({metrics.peak_of})  {left} left"


def _say_notes(console: Console, steps: Sequence[StepMetrics]) -> None:
    for step in steps:
        if step.compile_seconds is not None:
            say(console, f"step {step.step}  torch.compile took {seconds_text(step.compile_seconds)} of it")


def _say_evaluation(console: Console, metrics: StepMetrics, *, heading: str) -> None:
    if metrics.evaluation:
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.evaluation.items())
        say(console, f"{heading}  evaluation: {values}")


def say(console: Console, text: str) -> None:
    """Print one line, however narrow the terminal is: programs read logs too."""
    console.print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)

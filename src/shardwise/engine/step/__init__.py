"""One step: the runner, the executor of its rows, and the first step, which finds the order."""

"""One step: hooks, the cursor in the program, the first step, capture."""

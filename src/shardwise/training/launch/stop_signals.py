"""The signals after which a job saves and ends. No torch here."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""From schedulers, from a terminal that closes, and from SLURM's `--signal=USR1`. Our launcher takes ^C as well."""

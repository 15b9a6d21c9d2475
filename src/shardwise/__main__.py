"""`python -m shardwise` is the command line."""

from shardwise.doors.cli.app import main

main()

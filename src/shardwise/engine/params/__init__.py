"""Parameters: flat buffers, units, guards, precision."""

"""Plans for a cluster: candidates, the recommended one, and its scaling. No torch."""

"""Plans for a cluster: candidates, which one to recommend, and how it scales. No torch."""

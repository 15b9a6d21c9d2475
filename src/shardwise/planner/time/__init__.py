"""Time of a plan: the program as instructions for four queues, and how long each takes. No torch."""

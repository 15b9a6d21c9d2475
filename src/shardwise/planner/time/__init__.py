"""Time of a plan: the step program as instructions for four queues, with the seconds of each. No torch."""

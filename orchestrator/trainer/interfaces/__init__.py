"""What the training loop exchanges with the code around it: the job, membership, phases, step summaries."""

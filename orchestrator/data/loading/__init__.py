"""The stream for training loops of other people: samples, batches and their state, in one process."""

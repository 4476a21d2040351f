"""The stream for external training loops: samples, batches and their state, in one process."""

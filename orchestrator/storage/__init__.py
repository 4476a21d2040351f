"""A run's storage: the few durable operations on files, and documents that show damage."""

"""Model and optimizer state of a rank: whole or sharded, and its copy from other ranks."""

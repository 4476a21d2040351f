"""Reads bytes of files: local, in buckets, on hubs, compressed."""

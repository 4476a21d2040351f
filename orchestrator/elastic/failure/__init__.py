"""Detects failures of workers, peers and storage, and counts them."""

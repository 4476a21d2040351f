"""Stored resume points: listing, opening, verifying, pinning and deleting them."""

"""Collectives between ranks, and how they end when a peer is lost."""

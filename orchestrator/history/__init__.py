"""The stored history of a run: claims, generations, lineage, journal and heartbeats."""

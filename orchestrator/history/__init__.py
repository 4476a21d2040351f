"""What happened in a run, as it is written down: claims, generations, lineage, journal, and signs of life."""

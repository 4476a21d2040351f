"""Claims of attempts, their lineage, and whether their processes live."""

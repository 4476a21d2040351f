"""Tests of claims, lineage and journal."""

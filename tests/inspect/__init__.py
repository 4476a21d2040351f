"""Tests of reading and auditing a run."""

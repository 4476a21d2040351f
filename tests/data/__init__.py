"""Tests of `orchestrator.data`."""

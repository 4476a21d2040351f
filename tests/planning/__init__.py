"""Tests of the pure plan."""

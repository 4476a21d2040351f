"""Tests of what this machine and its Ray are."""

"""Tests of what the commands print for people."""

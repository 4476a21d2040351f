"""Tests of starts, what they say and what they refuse."""

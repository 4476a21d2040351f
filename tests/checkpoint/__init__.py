"""Tests of points, claims and commits."""

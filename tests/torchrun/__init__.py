"""Tests of the static group."""

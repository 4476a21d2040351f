"""Tests of the journal and its reader."""

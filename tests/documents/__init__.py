"""Tests that run the blocks of the documents."""

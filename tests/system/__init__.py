"""Tests on real Ray processes."""

"""Tests of the launch machine and the coordinator."""

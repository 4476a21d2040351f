"""Tests of the rendezvous and of the supervisor's policy."""

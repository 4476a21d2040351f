"""Tests of the training side: real processes and gloo, a tiny Llama, and a rendezvous of their own."""

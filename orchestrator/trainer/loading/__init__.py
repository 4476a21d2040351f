"""Reads tensors of a resume point into a rank, alone or shared with other ranks."""

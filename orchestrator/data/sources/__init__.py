"""Turns paths into records: lists files, cuts them, and reads their records in windows."""

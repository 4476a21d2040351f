"""Frozen values that cross a process border or lie in storage: what the stages exchange.

They know no stage, no Ray, no torch. What is written to storage goes through `json_form`.
"""

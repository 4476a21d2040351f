"""Coordination of a launch: its attempt, the pure launch machine, and the actor around it."""

"""Optimizers: the state that each keeps of a parameter, their steps, and which parameter has which."""

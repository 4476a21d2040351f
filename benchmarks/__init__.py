"""Figures of the package, measured on real processes; each module is a command of its own."""

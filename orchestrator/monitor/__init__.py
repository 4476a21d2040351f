"""Reading a run: at a glance, its points, and the proof of what it was trained on."""

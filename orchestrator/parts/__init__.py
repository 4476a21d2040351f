"""The tensor files that ranks write at a save and read at a resume, without torch."""

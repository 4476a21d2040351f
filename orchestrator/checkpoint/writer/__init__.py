"""The process that writes a rank's part of a resume point."""

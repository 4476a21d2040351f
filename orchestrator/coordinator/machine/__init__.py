"""The pure launch machine, its actions, and the values that it keeps."""

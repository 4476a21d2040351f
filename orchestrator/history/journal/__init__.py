"""The journal of an attempt: its writer, its segments and its reader."""

"""What a run says of itself: the journal, its reader, and the declarations of its metrics."""

"""The launching process itself: its output, its log file, its signals."""

"""A second implementation of lists, mixture, windows and packing, for the audit alone."""
